"""TrainState: what changes from step to step, beside weights and optimizer."""

import math
import uuid
import zlib
from dataclasses import dataclass, field

import torch
from torch.amp import GradScaler

PATIENCE = 5  # steps in a row without finite loss and gradient that end a run
NO_SCALING = GradScaler("cpu", enabled=False)  # float16 alone needs it
SAVED = ("step", "tokens", "best_loss", "best_of", "run_id", "bad_steps")


def seed_step(seed: int, step: int, rank: int) -> None:
    """Make dropout a pure function of (seed, step, rank), so that no random state is saved. The
    three are hashed, for PyTorch's generator for CPUs keeps 32 bits of a seed."""
    torch.manual_seed(zlib.crc32(f"{seed} {step} {rank}".encode()))


def reason_to_skip(loss: float, grad_norm: float) -> str | None:
    """Return why an update is not applied, None for a finite loss and gradient."""
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return None
    return f"loss {loss}, gradient norm {grad_norm}"


@dataclass
class TrainState:
    """Progress of a run; a checkpoint holds it, and a resumed run continues from it."""

    step: int = 0  # steps done, skipped ones included
    tokens: int = 0  # of these steps
    best_loss: float = math.inf  # lowest validation loss in nats per token
    best_of: str | None = None  # what that is the loss of: text and tokenizer
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)  # a resumed run keeps it
    bad_steps: int = 0  # newest ones in a row without finite loss and gradient
    scaler: GradScaler = NO_SCALING  # of the loss

    @classmethod
    def start(cls, saved: dict | None, scaler: GradScaler = NO_SCALING) -> "TrainState":
        """Return the state of a new run, or that in the checkpoint `saved`."""
        saved = saved or {}
        if saved.get("scaler"):
            scaler.load_state_dict(saved["scaler"])
        progress = {name: saved[name] for name in SAVED if name in saved}
        return cls(scaler=scaler, **progress)

    def to_checkpoint(self) -> dict:
        """Return plain values for a checkpoint."""
        saved = {name: getattr(self, name) for name in SAVED}
        return saved | {"scaler": self.scaler.state_dict()}

    def advance(self, tokens: int, skip_reason: str | None) -> None:
        """Count one step of `tokens` tokens, and the steps in a row of which an update was skipped
        for a reason."""
        self.step += 1
        self.tokens += tokens
        self.bad_steps = self.bad_steps + 1 if skip_reason else 0

    def validate_on(self, text: str) -> bool:
        """Forget the lowest loss if it is that of another validation text; return whether it is."""
        is_other = self.best_of not in (None, text)
        if is_other:
            self.best_loss = math.inf
        self.best_of = text
        return is_other

    def record_validation(self, loss: float) -> bool:
        """Remember a new lowest validation loss; return whether it is one."""
        if best := loss < self.best_loss and self.step > 0:
            self.best_loss = loss
        return best
