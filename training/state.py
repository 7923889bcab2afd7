"""TrainState: what changes from step to step, beside weights and optimizer."""

import math
import uuid
import zlib
from dataclasses import dataclass, field

import torch

from config import TrainConfig
from data.loader import Sequences
from training.guard import PATIENCE, Guard

SAVED = ("step", "tokens", "best_loss", "run_id")


def has_same_validation(config: TrainConfig, saved: dict, val: Sequences) -> bool:
    """Return whether the losses in the checkpoint `saved` are means over the same validation tokens
    as those of this run."""
    checksum, now = val.stream.checksum, config.val_tokens
    tokens = (saved["train_config"].get("val_tokens", now), now)
    sequences = {val.count_within(n) for n in tokens}
    return saved.get("val_checksum", checksum) == checksum and len(sequences) == 1


def seed_step(seed: int, step: int, rank: int) -> None:
    """Make dropout a pure function of (seed, step, rank), so that no random state is saved. The
    three are hashed, for PyTorch's generator for CPUs keeps 32 bits of a seed."""
    torch.manual_seed(zlib.crc32(f"{seed} {step} {rank}".encode()))


@dataclass
class TrainState:
    """Progress of a run; a checkpoint holds it, and a resumed run continues from it."""

    guard: Guard
    step: int = 0
    """Steps done, skipped ones included."""
    tokens: int = 0
    """Tokens of these steps."""
    best_loss: float = math.inf
    """Lowest validation loss in nats per token."""
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Identity of the run, which a resumed one keeps."""
    val_checksum: int = 0
    """Checksum of the validation tokens that best_loss is of."""

    @classmethod
    def start(
        cls, config: TrainConfig, saved: dict | None, val: Sequences | None = None
    ) -> "TrainState":
        """Return the state of a new run, or the one in the checkpoint `saved`; losses on other
        validation tokens do not count as the best."""
        val_checksum = val.stream.checksum if val else 0
        if saved is None:
            return cls(Guard(config.skip_spikes, {}), val_checksum=val_checksum)
        guard = Guard(config.skip_spikes, saved["guard"])
        state = cls(guard, **{name: saved[name] for name in SAVED})
        if val and not has_same_validation(config, saved, val):
            state.best_loss = math.inf
        state.val_checksum = val_checksum
        return state

    def to_checkpoint(self) -> dict:
        """Return plain values for a checkpoint."""
        names = (*SAVED, "val_checksum")
        return {name: getattr(self, name) for name in names} | {"guard": self.guard.state}

    def advance(self, tokens: int) -> None:
        """Count one step of `tokens` tokens."""
        self.step += 1
        self.tokens += tokens

    def rewind(self, tokens: int) -> None:
        """Go back to before the skipped steps that end a run; weights are as they were then."""
        self.step -= PATIENCE
        self.tokens -= PATIENCE * tokens
        self.guard.in_a_row = 0

    def record_validation(self, loss: float) -> bool:
        """Remember a new lowest validation loss; return whether it is one."""
        if best := loss < self.best_loss and self.step > 0:
            self.best_loss = loss
        return best
