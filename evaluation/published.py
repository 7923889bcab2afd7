"""Published figures of OpenAI's GPT-2, by protocol, metric and size; benchmarks hold their own."""

from model.config import SIZES

Published = dict[tuple[str, str, str], tuple[float, str]]


def published(source: str, protocol: str, metric: str, *values: float | None) -> Published:
    """Return the figures of OpenAI's four sizes: value and source by protocol, metric and size."""
    sizes = zip(SIZES, values, strict=False)
    return {(protocol, metric, size): (value, source) for size, value in sizes if value is not None}


# OpenAI did not release its evaluation code, and the paper's LAMBADA and CBT figures have not been
# reproduced: they are listed under the protocol that is closest to the paper's description.
PAPER = "Radford et al. 2019, table 3"
NOTEBOOK = "build-nanogpt's play.ipynb"
HARNESS = "lm-evaluation-harness, in build-nanogpt's hellaswag.py and the harness's issue 2159"
VALIDATION = published(NOTEBOOK, "FineWeb-Edu", "loss", 3.2924)  # on the first shard
