"""HellaSwag (Zellers et al. 2019): choose the ending of a text."""

import re
from collections.abc import Callable, Sequence

from evaluation.published import HARNESS, NOTEBOOK, published
from evaluation.tasks import Item, Task, TaskScores

NANOGPT = "build-nanogpt's hellaswag.py"
LM_EVAL = {  # lengths without the space that joins an ending
    "acc_norm": lambda ending, s: s.logprob / (len(ending) - 1),
    "acc_bytes": lambda ending, s: s.logprob / (len(ending.encode()) - 1),
}


def clean(text: str) -> str:
    """Remove WikiHow's marks from a text, as lm-evaluation-harness does."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


class HellaSwag(Task):
    """Endings of texts. File: hellaswag_val.jsonl of github.com/rowanz/hellaswag."""

    name = "hellaswag"
    order = 1
    hub = {"path": "Rowan/hellaswag", "split": "validation"}
    protocols = ("build-nanogpt", "lm-eval")
    metric = "acc_norm"
    values = {
        "build-nanogpt": {"acc_norm": lambda ending, s: s.logprob / s.tokens},
        "lm-eval": LM_EVAL,
        "lm-eval, ctx alone": LM_EVAL,  # not comparable with the harness
    }
    published = (
        published(NANOGPT, "build-nanogpt", "acc", 0.2859, None, None, 0.3842)
        | published(NANOGPT, "build-nanogpt", "acc_norm", 0.2955, None, None, 0.4893)
        | published(NOTEBOOK, "build-nanogpt", "acc_norm", None, 0.3752, 0.4320)
        | published(HARNESS, "lm-eval", "acc", 0.2892, None, None, 0.4004)
        | published(HARNESS, "lm-eval", "acc_norm", 0.3114, None, None, 0.5089)
    )

    def items(self, rows: list[dict], protocol: str) -> list[Item]:
        """Return each context with its endings: raw text, as in build-nanogpt and llm.c, or that of
        lm-evaluation-harness (version 1.0 of its task): activity, colon, context, without WikiHow's
        bracketed marks. Rows that lack `ctx_a`, as in some copies, give their `ctx` alone."""
        items = []
        for row in rows:
            context, endings = row["ctx"], row["endings"]
            if protocol != "build-nanogpt":
                if "ctx_a" in row:
                    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
                context, endings = clean(context), map(clean, endings)
            items.append(Item(context, tuple(f" {end}" for end in endings), int(row["label"])))
        return items

    def score(self, rows: list[dict], score: Callable, protocols: Sequence[str]) -> TaskScores:
        if not all("ctx_a" in row for row in rows):
            protocols = [p.replace("lm-eval", "lm-eval, ctx alone") for p in protocols]
        return super().score(rows, score, protocols)


TASKS = [HellaSwag()]
