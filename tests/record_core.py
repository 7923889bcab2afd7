"""Score a model on the tasks of CORE with nanochat's core_eval.py, and print which items are right.

    python -m tests.harness_model FOLDER
    python -m tests.record_core PATH/OF/core_eval.py BUNDLE FOLDER > tests/evaluation/core_hits.json

core_eval.py is nanochat/core_eval.py of github.com/karpathy/nanochat (92d63d4).
"""

import importlib.util
import json
import random
import sys
from pathlib import Path

import torch
import yaml

from data.open_model import open_model
from data.tokenizer import load_tokenizer


def main() -> None:
    source, bundle, folder = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("core_eval", source)
    core_eval = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core_eval)
    model, tokenizer_spec, _ = open_model(folder, float32=True)
    model.eval()
    tokenizer = load_tokenizer(tokenizer_spec)

    class Model:  # what nanochat calls
        max_seq_len = model.config.block_size

        def __call__(self, idx):
            return model(idx)[..., : model.config.vocab_size]

    class Encoder:
        def get_bos_token_id(self):
            return tokenizer.eot

        def __call__(self, prompts, prepend):
            return [[prepend, *tokenizer.encode(prompt).tolist()] for prompt in prompts]

    hits = {}
    for entry in yaml.safe_load(Path(bundle, "core.yaml").read_text())["icl_tasks"]:
        lines = Path(bundle, "eval_data", entry["dataset_uri"]).read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        random.Random(1337).shuffle(rows)
        meta = {
            "task_type": entry["icl_task_type"],
            "num_fewshot": entry["num_fewshot"][0],
            "continuation_delimiter": entry.get("continuation_delimiter", " "),
        }
        args = (Model(), Encoder(), rows, torch.device("cpu"), meta)
        right = [core_eval.evaluate_example(index, *args) for index in range(len(rows))]
        hits[entry["label"]] = "".join(str(int(hit)) for hit in right)
    print(json.dumps(hits, indent=1))


if __name__ == "__main__":
    main()
