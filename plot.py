"""Draw the curves of one or more runs over each other; bits per byte if their tokenizers differ.

python plot.py --log logs runs/other --sz 124M --out plots/log_plot.png
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import utils.environment  # noqa: F401 (first: it says what to type without PyTorch)

from evaluation.figure import draw
from utils.cli import start_script

# build-nanogpt's name of a size -> OpenAI's name of the model
NICKNAMES = {"124M": "gpt2", "350M": "gpt2-medium", "774M": "gpt2-large", "1558M": "gpt2-xl"}


@dataclass
class PlotOptions:
    """Draw the curves of one or more runs."""

    log: tuple[Path, ...] = (Path("logs"),)
    """Folders of runs, folders of their logs, or metrics.jsonl files."""
    sz: Literal["124M", "350M", "774M", "1558M"] | None = None
    """Size of OpenAI's GPT-2 whose published values are drawn as dashed lines, if comparable."""
    out: Path = Path("plots/log_plot.png")
    """Picture to write."""


def main(options: PlotOptions) -> None:
    model_type = NICKNAMES[options.sz] if options.sz else None  # "gpt2"; None: no dashed lines
    draw(list(options.log), options.out, model_type)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    start_script(main, PlotOptions)
