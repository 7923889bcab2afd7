"""Files of a log folder: their names, and reading them back."""

import json
import os
from pathlib import Path

from utils.errors import UserError

METRICS, SAMPLES, CONFIG = "metrics.jsonl", "samples.txt", "config.json"
PICTURE = "log_plot.png"  # of the run, beside its log

METRIC_FILE = f"the {METRICS} of a run, or its folder"


def is_row(row: object) -> bool:
    """Return True for a row of metrics: a split, a step >= 0, and numbers or None.

    Rows of the split "skipped" may hold other values too.
    """
    if type(row) is not dict or [type(row.get(k)) for k in ("step", "split")] != [int, str]:
        return False
    values = [v for k, v in row.items() if k != "split" and v is not None]
    numbers = all(type(v) is float or (type(v) is int and abs(v) < 2**63) for v in values)
    return row["step"] >= 0 and (numbers or row["split"] == "skipped")


def read_metrics(path: Path | str) -> dict[str, list[dict]]:
    """Read a metrics.jsonl, or that of a folder, into rows by split, sorted by step.

    Rows that a resumed run has repeated or dropped are left out. Raises UserError naming a line
    that is not a row.
    """
    path = Path(path)
    if not (path / METRICS).exists() and (path / "logs").is_dir():  # of a run's folder
        path = path / "logs"
    if path.is_dir():
        path = path / METRICS
    if not path.is_file():
        runs = sorted(path.parent.glob(f"*/logs/{METRICS}"))  # of a sweep
        several = f": {path.parent}/*/logs has {len(runs)}" if runs else ""
        raise UserError(f"there is no {path}; give {METRIC_FILE}{several}")
    splits: dict[str, dict[int, dict]] = {}
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if row is None and not line.endswith("\n"):
                break  # a writer was killed, or still writes
            if number == 1 and path.name != METRICS and not is_row(row):
                raise UserError(f"{path} is not a {METRICS}; give {METRIC_FILE}")
            if not is_row(row):
                raise UserError(
                    f"{path}, line {number}, is not a row of metrics; remove that line to go on"
                )
            step, split = row["step"], row["split"]
            if split == "resume":
                for name, rows in splits.items():
                    splits[name] = {n: r for n, r in rows.items() if n <= step}
            else:
                splits.setdefault(split, {})[step] = row
    return {split: [rows[s] for s in sorted(rows)] for split, rows in splits.items()}


def logged_run(folder: Path) -> dict | None:
    """Return the config.json of the run whose metrics a log folder holds, {} if it cannot be read;
    None if there are no metrics."""
    path = folder / METRICS
    if not path.exists() or not os.path.getsize(path):
        return None
    try:
        run = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return run if type(run) is dict and type(run["train_config"]) is dict else {}
    except (OSError, ValueError, KeyError, RecursionError):
        return {}
