"""The run of Weights & Biases that --wandb opens; utils/logger.py sends rows to it."""

import os
from typing import Any

from config import RunOptions


def open_wandb(options: RunOptions, run_id: str) -> Any:
    """Open a run of Weights & Biases, or go on with it. WANDB_PROJECT and WANDB_NAME in the
    environment name project and run. Raises what the package raises, as without a login."""
    import wandb  # an optional package

    wandb_run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "gpt2"),
        id=run_id,  # of TrainState, which a resumed run keeps: its charts go on
        dir=str(options.log_dir),
        config=options.to_dict(),
        resume="allow",  # go on with the run of this id if there is one
    )
    # The charts have the step of training as their axis. The service's own step only grows: it
    # would drop the rows of steps that a resumed run does again.
    wandb_run.define_metric("step")
    wandb_run.define_metric("*", step_metric="step")
    return wandb_run
