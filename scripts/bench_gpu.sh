#!/usr/bin/env bash
# Training on GPUs: MFU against the chip's peak and against its matrix products, for the four sizes,
# compiled, at the largest micro-batch, whole and (with several GPUs) divided as zero2; the first
# size also with the compiler's max-autotune and, as for steps of one micro-batch, its CUDA graphs.
#
#   bash scripts/bench_gpu.sh [--peer ../nanoGPT] [--model_types gpt2 gpt2-xl] [--out FILE]
#   bash scripts/bench_gpu.sh --tiny          # a small model on any machine, to see that it runs
#
# Needs torch, numpy, tqdm and tiktoken and no network; with tyro it also times train.py itself.
exec python "$(dirname "$0")/bench_gpu.py" "$@"
