#!/usr/bin/env bash
# What a GPU does with this project, in three calls of under nine minutes each:
#
#   bash scripts/bench_gpu.sh correctness              # results against float64, the CPU and resumed runs
#   bash scripts/bench_gpu.sh small --peer ../nanoGPT --data data/fineweb-edu   # 124M, whole and in parts
#   bash scripts/bench_gpu.sh xl                       # 350M to 1558M: MFU, memory, recomputation
#
# Each item appends a line of JSON to logs/bench_gpu.jsonl (--out) as soon as it is measured, so a
# call that is cut short keeps what it has; none is started after --seconds. --tiny runs the same
# items with small shapes on any machine. Needs torch, numpy, tqdm and tiktoken, and no network.
root=$(cd "$(dirname "$0")/.." && pwd)
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$root/logs/inductor}
export CUBLAS_WORKSPACE_CONFIG=:4096:8 # resumed runs are compared to the bit
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec python "$root/scripts/bench_gpu.py" "$@"
