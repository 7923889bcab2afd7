#!/usr/bin/env bash
# What a GPU does with this project, in four short calls; the last line of output is JSON:
#
#   bash scripts/bench_gpu.sh correctness                                  # tests with tensors on it
#   bash scripts/bench_gpu.sh small [--peer ../nanoGPT] [--data FOLDER]    # 124M, a learning curve
#   bash scripts/bench_gpu.sh xl [FLAGS of scripts/bench.py]               # 350M to 1558M
#   bash scripts/bench_gpu.sh variants [--python OTHER/bin/python]         # kernels by change
set -euo pipefail
cd "$(dirname "$0")/.."
python -c 'import sys, utils.environment, torch
sys.exit(None if torch.cuda.is_available() else "error: PyTorch finds no CUDA GPU here")' || exit 2
call=${1:-} out=logs/bench_gpu.jsonl run=runs/bench_gpu code=0
shift "$(($# > 0))"
mkdir -p logs && : >"$out"
bench() { python scripts/bench.py --device cuda --repeats 2 "$@" | tail -n 1 >>"$out"; }
# Measure 124M with one change: a SETTING of the environment, FLAGS of scripts/bench.py, or PYTHON.
variant() {
  local setting=${1:-} flags=${2:-} python=${3:-python} name row
  name=$(echo $*) && name=${name:-baseline}
  if [ $SECONDS -ge 540 ]; then echo "left out after 540 s: $name" >&2; return; fi
  # A new cache: its key does not hold TORCH_CUDNN_SDPA_DEPRIORITIZED, so from a common one that
  # variant would take the baseline's attention.
  rm -rf "$cache"
  if row=$(env TORCHINDUCTOR_CACHE_DIR="$cache" $setting timeout $((595 - SECONDS)) "$python" \
    scripts/bench.py --device cuda --micro_batch_size 64 --use_torch_compile --seconds 2 \
    --profile $flags | tail -n 1); then
    echo "{\"variant\": \"$name\", ${row#\{}" >>"$out"
  else
    echo "failed: $name" >&2 && code=1
  fi
}
case $call in
  correctness)
    summary=$(python -m pytest -n 0 --device cuda -m "not slow" tests/model/test_gpt.py \
      tests/training/{test_optimizers,test_device,parallel/test_data_parallel}.py |
      tee /dev/stderr | tail -n 1) || code=$?
    echo "{\"ok\": $([ $code = 0 ] && echo true || echo false), \"summary\": \"$summary\"}" >"$out" ;;
  small)
    while [ $# -gt 1 ]; do declare "${1#--}=$2"; shift 2; done
    bench --micro_batch_size 32 --use_torch_compile ${peer:+--peer "$peer"}
    bench --micro_batch_size 32
    bench --micro_batch_size 32 --use_torch_compile --recipe modern
    if [ "${data:-}" ]; then
      python train.py --data_dir "$data" --device cuda --micro_batch_size 32 \
        --total_batch_size 32768 --max_steps 1500 --eval_every 150 --val_tokens 262144 \
        --save_every 0 --sample_every 0 --checkpoint_dir $run --log_dir $run/logs --overwrite
      grep '"val"' $run/logs/metrics.jsonl >>"$out"
    fi ;;
  xl)
    bench --model_type gpt2-medium --micro_batch_size 32 --use_torch_compile "$@"
    bench --model_type gpt2-large --micro_batch_size 16 --use_torch_compile "$@"
    bench --model_type gpt2-xl --micro_batch_size 8 --use_torch_compile "$@"
    bench --model_type gpt2-xl --use_torch_compile --activation_checkpointing cheap "$@" ;;
  variants)
    while [ $# -gt 1 ]; do declare "${1#--}=$2"; shift 2; done
    cache=$(mktemp -d)
    trap 'exit 130' INT # Ctrl-C does not reach what `timeout` runs: it ends after the variant
    variant
    [ -z "${python:-}" ] || variant "" "" "$python" # another version of PyTorch
    variant "" "--recipe modern"
    variant "" "--recipe modern --n_head 6" # heads of 128
    variant TORCH_CUDNN_SDPA_DEPRIORITIZED=1 # flash attention
    variant "" "--logits_bytes $((2 ** 28))" # a quarter of the default
    variant "" "--logits_bytes $((2 ** 32))"
    # last, because they change little on an H100 (docs/BENCHMARKS.md), and the last two search long
    variant TORCHINDUCTOR_MIX_ORDER_REDUCTION=0
    variant TORCHINDUCTOR_LOOP_ORDERING_AFTER_FUSION=0
    variant TORCH_BLAS_PREFER_CUBLASLT=1
    variant TORCHINDUCTOR_MAX_AUTOTUNE_POINTWISE=1
    variant TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1
    rm -rf "$cache"
    python -c "from scripts.kernels import print_tables; print_tables('$out')" ;;
  *) echo "error: give correctness, small, xl or variants" >&2; exit 2 ;;
esac
echo "[$(paste -sd, "$out")]"
exit $code
