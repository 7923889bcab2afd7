"""Record losses and gradients of trl's trainers, which test_trl.py compares with ours.

Writes trl.json beside this file; run by hand, in an environment of its own:

    pip install torch==2.13.0 trl transformers
    python tests/finetuning/record_trl.py

trl's trainers tokenize, collate, score and compute the losses; the weights, the texts, the sampled
completions and their rewards are fixed.
"""

import json
import math
import os
import tempfile
from pathlib import Path

import torch

FILE = Path(__file__).with_name("trl.json")
MODEL_FIELDS = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 257}
BLOCK_SIZE, PAD, END = 32, 0, 256
POLICY, REFERENCE = 0.0, 1.0  # phases of the weights of the two models
KL, GROUP_SIZE = 0.04, 4  # KL is our default; that of trl is 0
GRADIENTS = ("wpe.weight", "h.0.attn.c_proj.weight", "ln_f.weight", "score.weight")

PAIRS = [
    {"prompt": "5 9 77", "chosen": " 12 200 3", "rejected": " 8 41 97 101 5"},
    {"prompt": "31 4", "chosen": " 18 18 250 6 30", "rejected": " 7"},
    {"prompt": "90 33 61 2 14", "chosen": " 140", "rejected": " 55 139"},
]
PROMPTS = ["3 1 4 1", "2 7 18 28", "100 50 25 12"]  # of equal length: GPT-2 would shift padded ones
COMPLETIONS = [  # a line for each prompt; 256 is END
    "20 21 22 256", "20 256", "23 9 7 40 41 256", "60 61 62 63 64 65",
    "17 256", "18 19 20 256", "99 98 97 96 95 256", "11 12 13 14 15 16",
    "6 5 4 256", "130 256", "131 132 256", "256",
]  # fmt: skip
REWARDS = [[1.0, 0.0, 0.5, -2.0], [0.0, 0.0, 0.0, 1.0], [0.25, 0.25, 0.25, 0.25]]


def filled(shapes, phase):
    """Return float32 weights of the given shapes that depend on names and `phase` alone: 0.1
    sin(i^2 + phase) with i counting through all of them by name, plus 1 in gains of norms."""
    weights = {}
    start = 0
    for name in sorted(shapes):
        i = torch.arange(start, start + math.prod(shapes[name]), dtype=torch.float64)
        is_gain = name.endswith(("ln_1.weight", "ln_2.weight", "ln_f.weight"))
        weights[name] = (is_gain + 0.1 * (i**2 + phase).sin()).float().reshape(*shapes[name])
        start += len(i)
    return weights


def fill(model, phase):
    """Give a model of transformers the weights of a phase."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    model.load_state_dict(filled(shapes, phase), strict=False)  # lm_head is wte


def make_model(kind, phase):
    """Return a tiny GPT-2 of transformers, of the class `kind`, with the weights of a phase."""
    from transformers import GPT2Config

    config = GPT2Config(
        **MODEL_FIELDS, n_positions=BLOCK_SIZE, num_labels=1, pad_token_id=PAD, eos_token_id=END,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    model = kind(config)
    fill(model, phase)
    return model


def make_tokenizer():
    """Return a tokenizer of numbers between spaces: "7" is the token 7."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", *map(str, range(1, END)), "<end>"]
    words = Tokenizer(models.WordLevel(dict(zip(names, range(257), strict=True)), "<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")


def options(folder):
    """Return the options of all trainers: float32 on the CPU, and nothing logged."""
    quiet = {"output_dir": folder, "report_to": "none"}
    return quiet | {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}


def rounded(x):
    """Return the content of a tensor to 9 significant digits, zeros as 0."""
    if x.dim():
        return [rounded(row) for row in x]
    return float(f"{x.item():.9g}") or 0


def measure(trainer, inputs):
    """Return trl's loss of a batch, and the gradients of some parameters."""
    model = trainer.model.train()
    model.zero_grad()
    loss = trainer.compute_loss(model, dict(inputs))
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if name.endswith(GRADIENTS):
            gradients[name] = rounded(parameter.grad)
    return {"loss": rounded(loss.detach()), "gradients": gradients}


def record_trainer(name, folder, kind, rows, **given):
    """Record trl's trainer of a method, as SFT, on one batch of all rows."""
    import trl
    from datasets import Dataset

    # max_length None: nothing is cut
    args = getattr(trl, f"{name}Config")(**options(folder), max_length=None)
    trainer = getattr(trl, f"{name}Trainer")(
        model=make_model(kind, POLICY),
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=make_tokenizer(),
        **given,
    )
    inputs = trainer.data_collator(list(trainer.train_dataset))
    input_ids = inputs["input_ids"]
    if name == "SFT":
        learned = inputs["labels"] != -100
    else:  # none of a reward model
        learned = inputs.get("completion_mask", torch.zeros_like(input_ids))
    return {
        "input_ids": input_ids.tolist(),
        "learned": learned.int().tolist(),
        **measure(trainer, inputs),
    }


def roll_out(prompts, trainer):
    """Return the given completions, in place of sampled ones."""
    prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    completion_ids = [[int(word) for word in completion.split()] for completion in COMPLETIONS]
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}


def reward(completions, **_):
    """Return the given rewards, one per completion."""
    return sum(REWARDS, [])


def record_grpo(folder):
    """Record GRPOTrainer with the options of Shao et al. 2024 and one step on the completions. trl
    loads the reference from the folder of the policy, which then gets other weights."""
    from datasets import Dataset
    from transformers import GPT2LMHeadModel
    from trl import GRPOConfig, GRPOTrainer

    make_model(GPT2LMHeadModel, REFERENCE).save_pretrained(folder)
    batch_size = GROUP_SIZE * len(PROMPTS)
    paper = {"loss_type": "grpo", "scale_rewards": "group", "beta": KL}
    paper["use_bias_correction_kl"] = False  # else the KL term is multiplied by the ratio
    steps = {"per_device_train_batch_size": batch_size, "steps_per_generation": 1}
    trainer = GRPOTrainer(
        model=GPT2LMHeadModel.from_pretrained(folder),
        reward_funcs=reward,
        args=GRPOConfig(**options(folder), **paper, **steps, num_generations=GROUP_SIZE),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        processing_class=make_tokenizer(),
        rollout_func=roll_out,
    )
    trainer.current_gradient_accumulation_steps = 1  # which train() would set
    trainer.model.train()
    fill(trainer.model, POLICY)
    rows = [row for row in trainer.train_dataset for _ in range(GROUP_SIZE)]
    inputs = trainer._generate_and_score_completions(rows)
    prompt_ids = inputs["prompt_ids"]
    learned = [torch.zeros_like(prompt_ids), inputs["completion_mask"]]
    return {
        "input_ids": torch.cat([prompt_ids, inputs["completion_ids"]], 1).tolist(),
        "learned": torch.cat(learned, 1).tolist(),
        "rewards": REWARDS,
        "advantages": rounded(inputs["advantages"]),
        **measure(trainer, inputs),
    }


def main():
    """Write trl.json."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    import transformers
    import trl
    from transformers import GPT2ForSequenceClassification, GPT2LMHeadModel

    chosen = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in PAIRS]
    reference = make_model(GPT2LMHeadModel, REFERENCE)
    with tempfile.TemporaryDirectory() as folder:
        records = {
            "trl": trl.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "sft": record_trainer("SFT", folder, GPT2LMHeadModel, chosen),
            # batches of pairs: all chosen texts, then all rejected ones
            "dpo": record_trainer("DPO", folder, GPT2LMHeadModel, PAIRS, ref_model=reference),
            "reward": record_trainer("Reward", folder, GPT2ForSequenceClassification, PAIRS),
            "grpo": record_grpo(folder),
        }
    FILE.write_text(json.dumps(records, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
