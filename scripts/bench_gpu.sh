#!/usr/bin/env bash
# Training on GPUs: tokens/s, MFU of the chip's peak and share of its matmul rate, for the four sizes,
# compiled, at the largest micro-batch that fits; on one GPU, beside nanoGPT with --peer, and on
# several GPUs with DDP and zero2. TORCHINDUCTOR_MAX_AUTOTUNE=1 tries the compiler's max-autotune.
#
#   bash scripts/bench_gpu.sh [--peer ../nanoGPT] [--model_types gpt2 gpt2-xl] [--out FILE]
#   bash scripts/bench_gpu.sh --tiny          # a small model on any machine, to see that it runs
#
# Needs torch, numpy, tqdm and tiktoken and no network. The last line of output is JSON.
root=$(cd "$(dirname "$0")/.." && pwd)
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec python "$root/scripts/bench_gpu.py" "$@"
