#!/usr/bin/env bash
# Teach a small model to add, and then to answer questions, by fine-tuning and rewards, in minutes.
#
#   bash train.sh chat_demo [SEED]
#
# Pre-training on worked sums teaches the model to add, but not to answer. Fine-tuning on 8 questions
# teaches the form of an answer, and some right answers. Rewards for right answers teach the rest. All
# files are in runs/chat_demo, or in runs/chat_demo_SEED for another seed than 1. If the demo is
# killed, the same command continues it.
set -euo pipefail
cd "$(dirname "$0")/.."
seed=${1:-1} out=runs/chat_demo
case $seed in
  -h | --help) sed -n '1d; /^set/q; s/^# \{0,1\}//p' scripts/chat_demo.sh; exit ;;
  *[!0-9]*) echo "error: $seed is no SEED, a number: bash train.sh chat_demo 2" >&2; exit 2 ;;
esac
. scripts/env.sh requirements.txt
[ "$seed" = 1 ] || out=runs/chat_demo_$seed
trap 'echo "the whole demo continues with: bash train.sh chat_demo $seed"
  [ -z "$activate" ] || echo "other commands need: $activate"' INT

export RUN_IS_PART=1  # the demo says itself what to type next
run() { printf '\n$ python %s\n' "$*"; python "$@"; }
folders() { echo "--checkpoint_dir $out/$1/checkpoints --seed $seed --resume auto"; }
score() {  # STAGE [FLAGS]: print the share of held-out questions that the model answers exactly
  run evaluate.py --checkpoint "$out/$1" --tasks "$out/data/held_out.jsonl" --max_new_tokens 32 \
    --batch_size 200 --dump "$out/$1_held_out.jsonl" "${@:2}" | tee "$out/$1_held_out.txt"
}

run -m scripts.chat_demo "$out/data" "$seed"

# 1. sums: 27+58: 7+8=15, 2+5+1=8, 85
run data/fineweb-edu.py --input "$out/data/sums.jsonl" --tokenizer bytes --local_dir "$out/shards"
run train.py --data_dir "$out/shards" $(folders sums) --recipe modern --n_layer 3 --n_head 2 \
  --n_embd 128 --block_size 96 --micro_batch_size 32 --total_batch_size 3072 --max_steps 500 \
  --warmup_steps 50 --beta2 0.99 --eval_every 100 --sample_every 0 --save_every 250 --val_tokens 49152
score sums --chat

# 2. dialogs: the question "What is 27+58?" with the worked sum as the answer
run finetune.py --method sft --init_from "$out/sums" --data "$out/data/dialogs.jsonl" $(folders sft) \
  --batch_size 4 --micro_batch_size 4 --max_steps 40 --max_lr 1e-3
score sft

# 3. rewards: 1 for a right answer, 0 for a wrong one
run finetune.py --method grpo --reward exact --init_from "$out/sft" --data "$out/data/questions.jsonl" \
  $(folders grpo) --batch_size 16 --group_size 8 --micro_batch_size 128 --kl 0.01 --max_steps 60 \
  --max_lr 3e-4 --max_new_tokens 32 --eval_data "$out/data/held_out.jsonl" --eval_every 20
score grpo

echo "
Ten held-out questions and the model's answers:"
head -n 10 "$out/grpo_held_out.jsonl"
run plot.py --log "$out/grpo" --out "$out/grpo/logs/log_plot.png"
echo "
Held-out questions that the model answers exactly, after each stage:"
for stage in sums sft grpo; do
  sed -n "/exact match/s/^held_out/$(printf %-8s $stage)/p" "$out/${stage}_held_out.txt"
done
echo "
The picture of the rewards is $out/grpo/logs/log_plot.png. What to type next:${activate:+
  $activate}
  python sample.py --checkpoint $out/grpo --chat           talk to it: What is 27+58?
  python finetune.py --method sft --init_from gpt2 --data chat.jsonl    a chat of your own"
