"""Figures that others published for OpenAI's GPT-2, for comparison with ours."""

from model.config import SIZES

PAPER = "Radford et al. 2019, table 3"
NANOGPT = "build-nanogpt's hellaswag.py"
NOTEBOOK = "build-nanogpt's play.ipynb"
HARNESS = "lm-evaluation-harness, in build-nanogpt's hellaswag.py and the harness's issue 2159"
# task, protocol, metric, source, and the values of gpt2, gpt2-medium, gpt2-large, gpt2-xl. OpenAI
# did not release its evaluation code, and the paper's LAMBADA and CBT figures have not been
# reproduced: they are listed under the protocol that is closest to the paper's description.
ROWS = (
    ("val", "FineWeb-Edu", "loss", NOTEBOOK, 3.2924),  # on its first shard
    ("hellaswag", "build-nanogpt", "acc", NANOGPT, 0.2859, None, None, 0.3842),
    ("hellaswag", "build-nanogpt", "acc_norm", NANOGPT, 0.2955, None, None, 0.4893),
    ("hellaswag", "build-nanogpt", "acc_norm", NOTEBOOK, None, 0.3752, 0.4320),
    ("hellaswag", "lm-eval", "acc", HARNESS, 0.2892, None, None, 0.4004),
    ("hellaswag", "lm-eval", "acc_norm", HARNESS, 0.3114, None, None, 0.5089),
    ("lambada", "lm-eval", "acc", HARNESS, 0.3256),
    ("lambada", "lm-eval", "perplexity", HARNESS, 40.06),
    ("lambada", "last token", "acc", "transformers issue 13761", 0.4667),
    ("lambada", "stop words", "acc", PAPER, 0.4599, 0.5548, 0.6012, 0.6324),
    ("cbt_cn", "from the blank", "acc", PAPER, 0.8765, 0.9235, 0.9345, 0.9330),
    ("cbt_ne", "from the blank", "acc", PAPER, 0.834, 0.871, 0.880, 0.8905),
)
PUBLISHED = {  # (task, protocol, metric, size): (value, source)
    (task, protocol, metric, size): (value, source)
    for task, protocol, metric, source, *values in ROWS
    for size, value in zip(SIZES, values, strict=False)
    if value is not None
}
