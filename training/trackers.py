"""Services that chart the metrics of a run: Weights & Biases, and trackio, a local one.

Both are optional packages, which are imported where they are asked for.
"""

import os

from config import RunOptions
from utils.logger import Tracker


class WandbTracker:
    """Run of Weights & Biases whose charts have the step of training as their axis. The service's
    own step only grows: it would drop the rows of steps that a resumed run does again."""

    def __init__(self, **options: object) -> None:
        import wandb

        self.run = wandb.init(**options)
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, values: dict[str, float], step: int) -> None:
        self.run.log(values | {"step": step})

    def finish(self) -> None:
        self.run.finish()


def open_trackers(options: RunOptions, run_id: str) -> list[Tracker]:
    """Open Weights & Biases and trackio as far as asked for. WANDB_PROJECT and TRACKIO_PROJECT in
    the environment name the project."""
    trackers: list[Tracker] = []
    values = options.to_dict()
    if getattr(options, "wandb", False):  # finetune.py has no such option; wandb reads WANDB_NAME
        project = os.environ.get("WANDB_PROJECT", "gpt2")
        trackers.append(
            WandbTracker(
                project=project,
                id=run_id,
                dir=str(options.log_dir),
                config=values,
                resume="allow",
            )
        )
    if getattr(options, "trackio", False):
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", "gpt2")
        tracker = trackio.init(project=project, name=run_id, config=values, resume="allow")
        trackers.append(tracker)
    return trackers
