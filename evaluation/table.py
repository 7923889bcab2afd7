"""The table that evaluate.py prints, with published values of OpenAI's GPT-2 beside results."""

from dataclasses import dataclass

from evaluation.tasks import Result
from model.config import GPT2_SIZES, GPTConfig

# OpenAI did not release its evaluation code, and nobody has reproduced the paper's numbers for
# LAMBADA and CBT: they are listed under the protocol that is closest to the paper's description.
PAPER = "Radford et al. 2019, table 3"
NANOGPT = "build-nanogpt's hellaswag.py and play.ipynb"
HARNESS = "lm-evaluation-harness, in build-nanogpt's hellaswag.py and the harness's issue 2159"
TRANSFORMERS = "transformers issue 13761"
NANOCHAT = "nanochat's estimate_gpt3_core.ipynb"
CORE_OF_GPT2 = {"gpt2": 0.1139, "gpt2-medium": 0.1849, "gpt2-large": 0.2146, "gpt2-xl": 0.2565}
CORE_OF_GPT3 = {"125M": 0.1484, "1.3B": 0.2914, "175B": 0.4272}  # estimated there from its tasks
ALIGNMENT = "<<<>><<"  # one sign for each column; n and value are aligned to the right


@dataclass(frozen=True)
class Published:
    """Values of one metric for the sizes of OpenAI's GPT-2."""

    citation: str
    """Where they are published, for a line below the table."""
    by_model_type: dict[str, float]
    """By model type, a key of GPT2_SIZES; those without a published value are missing."""


def from_paper(*values: float) -> Published:
    """Return a column of the paper's table, which has all four sizes, the smallest first."""
    # GPT2_SIZES is in that order, too
    return Published(PAPER, dict(zip(GPT2_SIZES, values, strict=True)))


# By task, protocol and metric; for the task "val" the protocol is the corpus.
PUBLISHED = {
    # on the first shard of build-nanogpt's FineWeb-Edu
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

# Validation loss by step of a public run of 124M with build-nanogpt's recipe, the default here, on
# FineWeb-Edu: gpt-2/log/log.txt of github.com/garg-aayush/building-from-scratch
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


def openai_model_type(config: GPTConfig) -> str:
    """Return the type of OpenAI's GPT-2, a key of GPT2_SIZES, that a model is compared with: the
    one with its layers, heads and width, else the smallest."""
    for model_type, layers_heads_width in GPT2_SIZES.items():
        if layers_heads_width == (config.n_layer, config.n_head, config.n_embd):
            return model_type
    return "gpt2"


def listed(by_model_type: dict[str, float]) -> str:
    """Return values by model type as text for one line."""
    return ", ".join(f"{model_type} {value}" for model_type, value in by_model_type.items())


def format_table(results: list[Result], model_type: str) -> str:
    """Format results as an aligned table, beside those published for a type of OpenAI's GPT-2, with
    the citations of these below it."""
    rows = [["task", "protocol", "metric", "n", "value", "", f"OpenAI's {model_type}"]]
    marks: dict[str, str] = {}  # "[1]", "[2]", ... by citation
    for result in results:
        details = []
        if result.stderr is not None:
            details.append(f"± {result.stderr:.4f}")
        if result.centered is not None:
            details.append(f"centered {result.centered:.4f}")
        published_text = ""
        published = PUBLISHED.get((result.task, result.protocol, result.metric))
        if published and model_type in published.by_model_type:
            # a citation keeps its mark; a new one gets the next number
            mark = marks.setdefault(published.citation, f"[{len(marks) + 1}]")
            published_text = f"{published.by_model_type[model_type]:.4f} {mark}"
        unit = " tokens" if result.task == "val" else ""  # n counts examples otherwise
        count = f"{result.n:,}{unit}"
        value = f"{result.value:.4f}"
        rows.append(
            [
                result.task,
                result.protocol,
                result.metric,
                count,
                value,
                ", ".join(details),
                published_text,
            ]
        )

    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # False for a column without text below the heading, which is left out
    has_content = [any(column[1:]) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, ALIGNMENT, widths, has_content, strict=True)
        # the format {cell:<12} fills a cell up to 12 characters by spaces on the right
        line = "  ".join(f"{cell:{side}{width}}" for cell, side, width, kept in cells if kept)
        lines.append(line.rstrip())
    lines += [f"{mark} {citation}" for citation, mark in marks.items()]
    if results and results[-1].task == "core":  # its mean over the tasks is the last result
        lines.append(f"CORE of GPT-2, all 22 tasks: {listed(CORE_OF_GPT2)} ({NANOCHAT})")
        lines.append(f"CORE of GPT-3, estimated there: {listed(CORE_OF_GPT3)}")
    return "\n".join(lines)
