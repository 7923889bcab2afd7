"""Check a trained model of an edited copy of this project. Runs in the copy:

python check_model.py CHECKPOINT {"alpha": "(x == 0).all()"}
"""

import json
import sys
from pathlib import Path

import torch

from config import SamplingConfig
from data.open_model import open_model
from data.tokenizer import load_tokenizer
from evaluation.benchmarks import BENCHMARKS
from evaluation.scoring import score_items
from evaluation.tasks import Item
from evaluation.validation import Scorer
from model.config import GPTConfig
from model.formats.checkpoint import load_checkpoint, open_weights
from model.generate import complete
from model.gpt import GPT
from model.inference import prepare_for_inference
from model.initial_weights import new_model
from utils.distributed import ALONE

path, begins, frozen = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
checkpoint = load_checkpoint(path)
config = GPTConfig(**checkpoint["model_config"])
_, initial = new_model(GPT, config, checkpoint["config"]["seed"])
_, trained = open_weights(path, checkpoint)

# each weight begins as it was written, in both ways to make a model
torch.manual_seed(0)
fresh = GPT(config)
unmet = set(begins)
for name in initial:
    for x in (initial[name][...], fresh.state_dict()[name]):
        for end, condition in begins.items():
            if name.endswith(end):
                unmet.discard(end)
                assert eval(condition), f"{name} does not begin as written: {x}"
assert not unmet, f"no parameter {unmet}"

# ... and each parameter changes
for name in dict(fresh.named_parameters()):
    is_trained = not torch.equal(initial[name][...], trained[name][...])
    assert is_trained is not name.endswith(frozen), f"{name} is trained: {is_trained}"

# samples are those of a forward pass, for prompts of several lengths
model, spec, _ = open_model(path, float32=True)
plain, _, _ = open_model(path, float32=True)
prepare_for_inference(model, torch.device("cpu"), torch.float32)
prompts = [list(b"he"), list(b"The house of a man"), list(b" " * 9)]
sampling = SamplingConfig(max_new_tokens=12, temperature=0.0)
with torch.no_grad():
    completions = complete(model, prompts, frozenset(), sampling)
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = list(prompt)
        for token in completion.tokens:
            expected = plain(torch.tensor([tokens]))[0, -1]
            assert expected[token] >= expected.max() - 1e-4, "a sample is not of the model"
            tokens.append(token)

# ... and so are scores, of choices that share a context
task = BENCHMARKS["hellaswag"]
items = [Item("The house of a man", (" who", " in the house", " of")), Item("be", (" cd", " e"))]
tokenizer = load_tokenizer(spec)
scores = score_items(Scorer(model, ALONE, 4), tokenizer, items, task)
with torch.no_grad():
    for item, predictions in zip(items, scores, strict=True):
        continuations = task.continuations(item, tokenizer, config.block_size)
        for continuation, prediction in zip(continuations, predictions, strict=True):
            tokens = torch.tensor([continuation.context_ids + continuation.ids])
            logprobs = plain(tokens)[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])
            expected = logprobs[-len(continuation.ids) :].sum().item()
            assert abs(prediction.logprob - expected) < 1e-3, "a score is not of the model"
print("as a forward pass")
