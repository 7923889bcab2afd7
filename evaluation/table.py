"""The table that evaluate.py prints, with published values of OpenAI's GPT-2 beside results."""

from dataclasses import dataclass

from evaluation.tasks import Result
from model.config import GPT2_SIZES, GPTConfig

# OpenAI did not release its evaluation code, and nobody has reproduced the paper's numbers for
# LAMBADA and CBT. The table shows them beside the protocol closest to the paper's description.
PAPER = "Radford et al. 2019, table 3"
NANOGPT = "build-nanogpt's hellaswag.py and play.ipynb"
HARNESS = "lm-evaluation-harness, in build-nanogpt's hellaswag.py and the harness's issue 2159"
TRANSFORMERS = "transformers issue 13761"
NANOCHAT = "nanochat's estimate_gpt3_core.ipynb"
CORE_OF_GPT2 = {"gpt2": 0.1139, "gpt2-medium": 0.1849, "gpt2-large": 0.2146, "gpt2-xl": 0.2565}
CORE_OF_GPT3 = {"125M": 0.1484, "1.3B": 0.2914, "175B": 0.4272}  # estimates of the same notebook
ALIGNMENT = "<<<>><<"  # format sign of each column of the table: n and value are right-aligned


@dataclass(frozen=True)
class Published:
    """Values of one metric for the sizes of OpenAI's GPT-2."""

    citation: str
    """Source of the values, for a line below the table."""
    by_model_type: dict[str, float]
    """Value of each model type, a key of GPT2_SIZES. A size without a published value is missing.
    """


def from_paper(*values: float) -> Published:
    """Return a column of the paper's table: the values of all four sizes, the smallest first."""
    # {"gpt2": 0.4599, "gpt2-medium": 0.5548, ...}: GPT2_SIZES has the smallest first, too
    return Published(PAPER, dict(zip(GPT2_SIZES, values, strict=True)))


# (task, protocol, metric) -> published values. The task "val" has the corpus as its protocol.
PUBLISHED = {
    # validation loss on the first shard of build-nanogpt's FineWeb-Edu
    ("val", "FineWeb-Edu", "loss"): Published(NANOGPT, {"gpt2": 3.2924}),
    ("hellaswag", "build-nanogpt", "acc"): Published(NANOGPT, {"gpt2": 0.2859, "gpt2-xl": 0.3842}),
    ("hellaswag", "build-nanogpt", "acc_norm"): Published(
        NANOGPT, {"gpt2": 0.2955, "gpt2-medium": 0.3752, "gpt2-large": 0.4320, "gpt2-xl": 0.4893}
    ),
    ("hellaswag", "lm-eval", "acc"): Published(HARNESS, {"gpt2": 0.2892, "gpt2-xl": 0.4004}),
    ("hellaswag", "lm-eval", "acc_norm"): Published(HARNESS, {"gpt2": 0.3114, "gpt2-xl": 0.5089}),
    ("lambada", "lm-eval", "acc"): Published(HARNESS, {"gpt2": 0.3256}),
    ("lambada", "lm-eval", "perplexity"): Published(HARNESS, {"gpt2": 40.06}),
    ("lambada", "last token", "acc"): Published(TRANSFORMERS, {"gpt2": 0.4667}),
    ("lambada", "stop words", "acc"): from_paper(0.4599, 0.5548, 0.6012, 0.6324),
    ("cbt_cn", "from the blank", "acc"): from_paper(0.8765, 0.9235, 0.9345, 0.9330),
    ("cbt_ne", "from the blank", "acc"): from_paper(0.834, 0.871, 0.880, 0.8905),
    ("core", "nanochat", "centered"): Published(NANOCHAT, CORE_OF_GPT2),
}

# step -> validation loss of a public run of 124M on FineWeb-Edu, with build-nanogpt's recipe, which
# is the default here. Source: gpt-2/log/log.txt of github.com/garg-aayush/building-from-scratch
TOKENS_OF_PUBLIC_STEP = 524_288
PUBLIC_RUN = {
    250: 6.167,
    500: 5.313,
    1_000: 4.168,
    2_000: 3.666,
    5_000: 3.352,
    10_000: 3.185,
    15_000: 3.101,
    19_072: 3.066,
}


def openai_model_type(model_config: GPTConfig) -> str:
    """Return the size of OpenAI's GPT-2 to compare a model with, as a key of GPT2_SIZES. It is the
    size with the same layers, heads and width, or the smallest size if there is none."""
    for model_type, layers_heads_width in GPT2_SIZES.items():
        if layers_heads_width == (model_config.n_layer, model_config.n_head, model_config.n_embd):
            return model_type
    return "gpt2"


def format_values(by_model_type: dict[str, float]) -> str:
    """Return values by model type as one line of text: "gpt2 0.1139, gpt2-medium 0.1849"."""
    return ", ".join(f"{model_type} {value}" for model_type, value in by_model_type.items())


def format_table(results: list[Result], model_type: str) -> str:
    """Format results as an aligned table. The last column has the published values of `model_type`,
    a size of OpenAI's GPT-2, and the lines below the table cite their sources."""
    rows = [["task", "protocol", "metric", "n", "value", "", f"OpenAI's {model_type}"]]
    mark_by_citation: dict[str, str] = {}  # {"Radford et al. 2019, table 3": "[1]", ...}
    for result in results:
        details: list[str] = []  # ["± 0.0049", "centered 0.3100"], or fewer
        if result.stderr is not None:
            details.append(f"± {result.stderr:.4f}")
        if result.centered is not None:
            details.append(f"centered {result.centered:.4f}")
        published_text = ""
        # None, or such as Published(PAPER, {"gpt2": 0.4599, "gpt2-medium": 0.5548, ...})
        published = PUBLISHED.get((result.task, result.protocol, result.metric))
        if published and model_type in published.by_model_type:
            # a citation that is known keeps its mark, a new one gets the next number
            mark = mark_by_citation.setdefault(published.citation, f"[{len(mark_by_citation) + 1}]")
            published_text = f"{published.by_model_type[model_type]:.4f} {mark}"
        unit = " tokens" if result.task == "val" else ""  # n counts examples in other tasks
        rows.append(
            [
                result.task,
                result.protocol,
                result.metric,
                f"{result.n:,}{unit}",
                f"{result.value:.4f}",
                ", ".join(details),
                published_text,
            ]
        )

    padded_columns: list[list[str]] = []
    columns = zip(*rows, strict=True)
    for column, side in zip(columns, ALIGNMENT, strict=True):
        if any(column[1:]):  # else the column has no text below its heading, and is left out
            width = max(map(len, column))
            # {cell:<12} pads a cell with spaces on the right to 12 characters
            padded_columns.append([f"{cell:{side}{width}}" for cell in column])
    lines = ["  ".join(cells).rstrip() for cells in zip(*padded_columns, strict=True)]
    # "[1] Radford et al. 2019, table 3", ...
    lines += [f"{mark} {citation}" for citation, mark in mark_by_citation.items()]
    if results and results[-1].task == "core":  # the last result of CORE is the mean of its tasks
        # format_values returns "gpt2 0.1139, gpt2-medium 0.1849, ..."
        lines.append(f"CORE of GPT-2, all 22 tasks: {format_values(CORE_OF_GPT2)} ({NANOCHAT})")
        lines.append(f"CORE of GPT-3, estimated there: {format_values(CORE_OF_GPT3)}")
    return "\n".join(lines)
