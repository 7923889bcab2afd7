#!/usr/bin/env bash
# bash train.sh demo     a small GPT on the Python standard library's source: any machine, minutes
# bash train.sh chat_demo  teaches a small model sums, then to answer questions, by fine-tuning and by
#                        rewards: any machine, minutes
# bash train.sh [FLAGS]  FineWeb-Edu sample-10BT, sharded if it is not yet, then GPT-2 124M on the
#                        visible GPUs (four of six); FLAGS go to train.py, whose --help lists them
#                        (with another --data_dir it shards nothing). NPROC=2 chooses the number of
#                        processes.
#                        It streams 28 GB of text and keeps 20 GB of shards and 3 GB of checkpoints;
#                        without a CUDA GPU, where it would take months, it begins only with --yes.
#
# Each installs what it needs into the active environment, or into .venv: it downloads 0.3 GB on Linux
# without an NVIDIA GPU, up to 2.9 GB with one. Killed, all continue where they were; --overwrite
# begins anew (but not chat_demo). Of several processes one that dies takes the others with it: they
# restart once, by themselves, but not with --overwrite or --resume CHECKPOINT.
set -euo pipefail
called_from=$PWD
cd "$(dirname "$0")"

demo="" dry_run="" yes="" flags=()
case ${1:-} in
  chat_demo) exec bash scripts/chat_demo.sh "${@:2}" ;;
  demo) demo=yes; shift ;;
  -* | "") ;;
  *) echo "error: there is no \"$1\": type bash train.sh demo, bash train.sh chat_demo, or flags" >&2
    exit 2 ;;
esac
case " $* " in *" --help "* | *" -h "*)
  sed -n '1d; /^set/q; s/^# \{0,1\}//p' train.sh  # the comment above
  exit ;;
esac
. scripts/env.sh requirements.txt
[ . -ef "$called_from" ] || echo "note: relative paths begin at $PWD"
for flag in "$@"; do
  if [ "$flag" = --yes ]; then yes=yes; else flags+=("$flag"); fi
done
set -- ${flags[@]+"${flags[@]}"}  # bash 3 of macOS calls an empty array unset
case " $* " in *" --dry_run "* | *" --dry-run "*) dry_run=yes ;; esac
restarts=0  # those of --overwrite would begin anew, those of --resume CHECKPOINT would be refused
case " $* " in
  *" --overwrite"*) ;;
  *" --resume auto "* | *" --resume=auto "* | *" --resume --"* | *" --resume ") restarts=1 ;;
  *" --resume"*) ;;
  *) set -- --resume auto "$@"; restarts=1 ;;
esac

if [ "$demo" ]; then
  case " $*" in *" --run"[_-]dir* | *" --checkpoint"[_-]dir* | *" --log"[_-]dir* | *" --data"[_-]dir*)
    echo "error: the demo uses runs/demo and data/stdlib; --overwrite replaces an earlier one," \
      "for other folders run train.py" >&2
    exit 2 ;;
  esac
  run=runs/demo val_tokens=131072
  export RUN_IS_PART=1  # the demo says itself what to type next
  trap 'echo "the whole demo continues with: bash train.sh demo"
    [ -z "$activate" ] || echo "other commands need: $activate"' INT
  set -- --data_dir data/stdlib --checkpoint_dir $run/checkpoints \
    --recipe modern --n_layer 2 --n_head 2 --n_embd 128 --block_size 256 --micro_batch_size 8 \
    --total_batch_size 2048 --max_steps 800 --warmup_steps 50 --beta2 0.99 \
    --eval_every 100 --val_tokens $val_tokens --save_every 400 --sample_every 0 "$@"
  plan=$(python train.py --dry_run "$@")  # wrong flags are found before any work
  if [ "$dry_run" ]; then
    echo "${plan%$'\n'next: *}"
    echo "next: the same command without --dry_run"
    exit
  fi
  # without Python's tests, some of which are no UTF-8, and pydoc_data, one large file of prose
  files=$(python -c '
import pathlib, sysconfig
root = pathlib.Path(sysconfig.get_paths()["stdlib"])
skipped = {"test", "tests", "pydoc_data", "site-packages"}
files = [x for x in root.rglob("*.py") if not skipped & {*x.relative_to(root).parts}]
print(*sorted(x for x in files if x.stat().st_size), sep="\n")')
  IFS=$'\n' read -r -d "" -a files <<<"$files" || true  # it ends without a delimiter
  # the same text gives the same tokenizer, so that a killed demo can train it again
  python data/train_tokenizer.py --vocab_size 2048 --out data/stdlib/tokenizer.json --input "${files[@]}"
  python data/fineweb-edu.py --tokenizer data/stdlib/tokenizer.json --local_dir data/stdlib \
    --val_fraction 0.05 --input "${files[@]}"
  python train.py "$@"
  python plot.py --log $run/logs --out $run/loss.png
  # no prompt ends with a space, because a token of this tokenizer begins with the space before a word
  prompt="def __init__(self"
  echo "--- what it writes after \"$prompt\":"
  python sample.py --checkpoint $run/checkpoints/model_best.pt --prompt "$prompt" --num_samples 2 \
    --max_new_tokens 120 --temperature 0.7
  echo "--- checkpoints and logs are in $run, the loss curve is $run/loss.png. What to type next:"
  [ . -ef "$called_from" ] || echo "cd $PWD"
  if [ "$activate" ]; then echo "$activate"; fi
  echo "python sample.py --checkpoint $run --prompt \"import\""
  # without --val_tokens it scores all held-out files, which have another loss than the first ones
  echo "python evaluate.py --checkpoint $run --tasks val --val_tokens $val_tokens"
  echo "python convert.py --checkpoint $run --out $run/exported --overwrite &&" \
    "python -c \"from transformers import pipeline;" \
    "print(pipeline('text-generation', '$run/exported')('import', max_new_tokens=60)[0]['generated_text'])\""
  exit
fi

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
# 524,288 tokens divide by powers of two: of six GPUs four are used, unless NPROC says otherwise
processes=1
while [ $((processes * 2)) -le "$gpus" ]; do processes=$((processes * 2)); done
processes=${NPROC:-$processes}
case $processes in *[!0-9]* | 0) echo "error: NPROC=$processes is no number of processes" >&2; exit 2 ;; esac

# wrong settings are found before hours of sharding; a line says where the shards belong
launch=()  # a dry run as the first of the processes, which waits for no others
[ "$processes" = 1 ] || launch=(RANK=0 WORLD_SIZE=$processes LOCAL_RANK=0
  LOCAL_WORLD_SIZE=$processes MASTER_ADDR=127.0.0.1 MASTER_PORT=0)
plan=$(env ${launch[@]+"${launch[@]}"} python train.py --dry_run "$@")
makes_shards=""
case $plan in *$'\n'"data_dir: data/edu_fineweb10B"$'\n'*) makes_shards=yes ;; esac
if [ "$dry_run" ]; then
  echo "${plan%$'\n'next: *}"
  if [ "$makes_shards" ] && [ "$gpus" = 0 ] && [ -z "$yes" ]; then
    echo "next: bash train.sh demo, which takes minutes; this run begins without a CUDA GPU only with --yes"
  else
    echo "next: the same command without --dry_run"
  fi
  exit
fi
if [ "$makes_shards" ]; then
  echo "FineWeb-Edu sample-10BT: 28 GB to stream once, 20 GB of shards to keep in data/edu_fineweb10B;" \
    "checkpoints: 1.5 GB each of 124M, two are kept"
  if [ "$gpus" = 0 ] && [ -z "$yes" ]; then
    hours=$(sed -n 's/.*: about \(.*\) on this processor.*/\1/p' <<<"$plan")
    echo "error: PyTorch finds no CUDA GPU here${hours:+, and this processor would train for about $hours}:" \
      "type \"bash train.sh demo\" for a run of minutes, or add --yes to begin all the same" >&2
    exit 2
  fi
fi
echo "${plan%$'\n'This was a dry run*}"
if [ "$makes_shards" ]; then python data/fineweb-edu.py; fi
if [ "$processes" -gt 1 ]; then
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else a restart reads stale addresses and hangs
  # By default torchrun handles SIGHUP also where nohup ignores it: a closed terminal ends the run.
  signals=SIGTERM,SIGINT,SIGQUIT
  [ -n "$(trap -p HUP)" ] || signals+=,SIGHUP
  exec torchrun --standalone --max_restarts=$restarts --signals_to_handle=$signals \
    --shutdown_timeout=110 --nproc_per_node="$processes" train.py "$@"
fi
exec python train.py "$@"
