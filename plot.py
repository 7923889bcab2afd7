"""Draw the curves of one or more runs over each other.

python plot.py --log logs runs/other/logs --sz 124M --out plots/log_plot.png
python plot.py --log logs --x hours
"""

from config import PlotConfig
from evaluation.figure import draw
from evaluation.published import PUBLISHED
from model.config import NICKNAMES
from utils.cli import run


def main(config: PlotConfig) -> None:
    size = NICKNAMES[config.sz] if config.sz else None
    draw(list(config.log), config.out, size, config.x)
    if size is not None and size not in PUBLISHED["val", "FineWeb-Edu", "loss"]:
        print(f"nobody published the validation loss of OpenAI's {config.sz} on FineWeb-Edu")
    print(f"wrote {config.out}")


if __name__ == "__main__":
    run(main, PlotConfig)
