"""What others published about OpenAI's GPT-2, to stand beside our figures."""

PAPER = "Radford et al. 2019, table 3"
NANOGPT = "build-nanogpt's hellaswag.py"
NOTEBOOK = "build-nanogpt's play.ipynb"
HARNESS = "lm-evaluation-harness, in build-nanogpt's hellaswag.py and the harness's issue 2159"

# (task, protocol, metric) -> size -> (value, source). OpenAI never released its evaluation code,
# and nobody has reproduced the paper's LAMBADA and CBT figures: they stand beside the protocol that
# comes nearest to its description.
PUBLISHED = {
    ("val", "FineWeb-Edu", "loss"): {"gpt2": (3.2924, NOTEBOOK)},  # its first shard
    ("hellaswag", "build-nanogpt", "acc"): {
        "gpt2": (0.2859, NANOGPT),
        "gpt2-xl": (0.3842, NANOGPT),
    },
    ("hellaswag", "build-nanogpt", "acc_norm"): {
        "gpt2": (0.2955, NANOGPT),
        "gpt2-medium": (0.3752, NOTEBOOK),
        "gpt2-large": (0.4320, NOTEBOOK),
        "gpt2-xl": (0.4893, NANOGPT),
    },
    ("hellaswag", "lm-eval", "acc"): {"gpt2": (0.2892, HARNESS), "gpt2-xl": (0.4004, HARNESS)},
    ("hellaswag", "lm-eval", "acc_norm"): {"gpt2": (0.3114, HARNESS), "gpt2-xl": (0.5089, HARNESS)},
    ("lambada", "lm-eval", "acc"): {"gpt2": (0.3256, HARNESS)},
    ("lambada", "lm-eval", "perplexity"): {"gpt2": (40.06, HARNESS)},
    ("lambada", "last token", "acc"): {"gpt2": (0.4667, "transformers issue 13761")},
    ("lambada", "stop words", "acc"): {
        "gpt2": (0.4599, PAPER),
        "gpt2-medium": (0.5548, PAPER),
        "gpt2-large": (0.6012, PAPER),
        "gpt2-xl": (0.6324, PAPER),
    },
    ("cbt_cn", "from the blank", "acc"): {
        "gpt2": (0.8765, PAPER),
        "gpt2-medium": (0.9235, PAPER),
        "gpt2-large": (0.9345, PAPER),
        "gpt2-xl": (0.9330, PAPER),
    },
    ("cbt_ne", "from the blank", "acc"): {
        "gpt2": (0.834, PAPER),
        "gpt2-medium": (0.871, PAPER),
        "gpt2-large": (0.880, PAPER),
        "gpt2-xl": (0.8905, PAPER),
    },
}
