"""The run of Weights & Biases that --wandb opens; utils/logger.py sends rows to it."""

import os
from functools import partial
from typing import Any

from config import RunOptions
from utils.network import ask


def open_wandb(options: RunOptions, run_id: str) -> Any:
    """Open a run of Weights & Biases, or continue it. The environment variables WANDB_PROJECT and
    WANDB_NAME name project and run, WANDB_DIR another folder than the log's. Raises the errors of
    the package, for example without a login, and TimeoutError if its server does not answer.
    """
    import wandb  # an optional package

    init = partial(
        wandb.init,
        project=os.environ.get("WANDB_PROJECT", "gpt2"),
        id=run_id,  # Progress.run_id, which a resumed run keeps
        dir=os.environ.get("WANDB_DIR") or str(options.log_dir),
        config=options.to_dict(),
        resume="allow",  # continue the run of this id if it exists
    )
    # `ask` calls `init`, names the host if it is slow, and raises TimeoutError after 30 s
    wandb_run = ask(os.environ.get("WANDB_BASE_URL") or "Weights & Biases", init, limit=30)
    # The charts use the training step as their axis. The service's own step only grows: it would
    # drop the rows of steps that a resumed run repeats.
    wandb_run.define_metric("step")
    wandb_run.define_metric("*", step_metric="step")
    return wandb_run
