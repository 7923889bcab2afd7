"""Score a Hugging Face folder with lm-evaluation-harness, offline, and print the scores as JSON.

pip install "lm_eval[hf]==0.4.13"      # in an environment of its own
python tests/record_harness.py hellaswag_val.jsonl [lambada_test.jsonl] FOLDER
"""

import json
import sys
import tempfile
from pathlib import Path


def with_all_fields(row: dict) -> dict:
    """Return a HellaSwag row with the fields that only the harness reads, made up if missing."""
    if "ctx_a" in row:
        return row
    head, _, tail = row["ctx"].rpartition(". ")
    return {**row, "activity_label": "Activity", "ctx_a": head + ".", "ctx_b": tail}


def main() -> None:
    import lm_eval  # not at the top: tests import with_all_fields without the harness
    from lm_eval.tasks._yaml_loader import load_yaml

    hellaswag, *lambada, folder = sys.argv[1:]
    lines = Path(hellaswag).read_text().split("\n")
    rows = [with_all_fields(json.loads(line)) for line in lines if line.strip()]
    full = Path(tempfile.mkdtemp()) / "hellaswag_full.jsonl"
    full.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks, results = [("hellaswag", "validation", full)], {}
    tasks += [("lambada_openai", "test", path) for path in lambada]
    for task, split, path in tasks:
        (file,) = (Path(lm_eval.__file__).parent / "tasks").rglob(f"{task}.yaml")
        local = {"dataset_path": "json", "dataset_name": None, "training_split": None}
        local["dataset_kwargs"] = {"data_files": {split: str(path)}}
        options = {"device": "cpu", "batch_size": 16, "bootstrap_iters": 0}
        options["model_args"] = {"pretrained": folder, "dtype": "float32"}
        task_config = {**load_yaml(file, resolve_func=True), **local}
        found = lm_eval.simple_evaluate(model="hf", tasks=[task_config], **options)
        results[task] = {k: v for k, v in found["results"][task].items() if k != "alias"}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
