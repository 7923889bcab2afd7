"""The run of Weights & Biases that --wandb opens; utils/logger.py sends rows to it."""

import os

from config import RunOptions
from utils.errors import UserError


def open_wandb(options: RunOptions, run_id: str) -> object | None:
    """Open a run of Weights & Biases, or go on with it. WANDB_PROJECT and WANDB_NAME in the
    environment name project and run.

    Raises UserError if the service refuses a new run. A resumed one, which may have been started
    again at night by a scheduler, goes on without it: the result is None.
    """
    try:
        import wandb  # an optional package

        wandb_run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "gpt2"),
            id=run_id,
            dir=str(options.log_dir),
            config=options.to_dict(),
            resume="allow",
        )
        # The charts have the step of training as their axis. The service's own step only grows: it
        # would drop the rows of steps that a resumed run does again.
        wandb_run.define_metric("step")
        wandb_run.define_metric("*", step_metric="step")
    except Exception as error:  # no login, no network
        if options.resumes:
            print(f"warning: the run goes on without Weights & Biases ({error!s:.200})", flush=True)
            return None
        raise UserError(
            f"--wandb found no Weights & Biases ({error!s:.200}); set WANDB_MODE=offline to send "
            "the rows later, or leave out --wandb"
        ) from error
    return wandb_run
