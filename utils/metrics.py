"""Reading and copying of a metrics.jsonl, which utils/logger.py writes."""

import json
from pathlib import Path

from utils.errors import UserError
from utils.files import atomic_write
from utils.logger import METRICS


def read_metrics(path: Path | str) -> dict[str, list[dict]]:
    """Read a metrics.jsonl, or that of a folder, into rows by split, sorted by step. Rows that a
    resumed run repeats or drops are left out. Raises UserError naming a line that is no row."""
    places = [Path(path), Path(path, METRICS), Path(path, "logs", METRICS)]
    found = next(filter(Path.is_file, places), None)
    if found is None:
        raise UserError(f"there is no {path}; give the {METRICS} of a run, or its folder")
    splits: dict[str, dict[int, dict]] = {}
    with open(found, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                break  # a writer was killed, or still writes
            try:
                row = json.loads(line)
                step, split = int(row["step"]), str(row["split"])
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{found}, line {number}, is not a row of metrics") from error
            if split == "resume":
                for name, rows in splits.items():
                    splits[name] = {n: r for n, r in rows.items() if n <= step}
            else:
                splits.setdefault(split, {})[step] = row
    return {split: [rows[s] for s in sorted(rows)] for split, rows in splits.items()}


def copy_log(source: Path, target: Path, step: int) -> None:
    """Write the rows of the log in a folder, up to a step, as the log in another one."""
    with open(source / METRICS, encoding="utf-8") as log, atomic_write(target / METRICS) as copy:
        for line in log:
            # a writer that was killed leaves half a row
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                copy.write(line.encode())
