"""Score a Hugging Face folder with lm-evaluation-harness, offline, to compare evaluate.py with.

    pip install "lm_eval[hf]==0.4.13"      # in an environment of its own
    python scripts/bench/harness.py FOLDER hellaswag_val.jsonl [lambada_test.jsonl [LIMIT]]

Prints one line of JSON. Its field "rows" names the HellaSwag file that was scored, for
`evaluate.py --data`: the given rows, with made-up values of the fields that only the harness needs.
"""

import json
import sys
import tempfile
import time
from pathlib import Path


def with_all_fields(row: dict) -> dict:
    """Return a HellaSwag row with the activity and the two parts of the context."""
    if "ctx_a" in row:
        return row
    head, _, tail = row["ctx"].rpartition(". ")
    return {**row, "activity_label": "Activity", "ctx_a": head + ".", "ctx_b": tail}


def main() -> None:
    import lm_eval  # not at the top: bench.py imports with_all_fields without the harness
    from lm_eval.tasks._yaml_loader import load_yaml

    folder, hellaswag, *lambada = sys.argv[1:4]
    limit = int(sys.argv[4]) if len(sys.argv) > 4 else None
    rows = [json.loads(line) for line in Path(hellaswag).read_text().split("\n") if line.strip()]
    full = Path(tempfile.mkdtemp()) / "hellaswag_full.jsonl"
    full.write_text("".join(json.dumps(with_all_fields(row)) + "\n" for row in rows))
    results = {"rows": str(full)}
    tasks = [("hellaswag", "validation", full)]
    tasks += [("lambada_openai", "test", path) for path in lambada]
    for task, split, path in tasks:
        (file,) = (Path(lm_eval.__file__).parent / "tasks").rglob(f"{task}.yaml")
        local = {"dataset_path": "json", "dataset_name": None, "training_split": None}
        local["dataset_kwargs"] = {"data_files": {split: str(path)}}
        began = time.perf_counter()
        evaluated = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": folder, "dtype": "float32"},
            tasks=[{**load_yaml(file, resolve_func=True), **local}],
            batch_size=16,
            device="cpu",
            limit=limit,
            bootstrap_iters=0,
        )
        results[task] = {k: v for k, v in evaluated["results"][task].items() if k != "alias"}
        results[task]["seconds"] = time.perf_counter() - began
    print(json.dumps(results))


if __name__ == "__main__":
    main()
