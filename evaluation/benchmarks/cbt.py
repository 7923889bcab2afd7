"""The Children's Book Test (Hill et al. 2016): choose the word for a blank in a book."""

import re

from evaluation.published import PAPER, published
from evaluation.tasks import Item, Task


class CBT(Task):
    """Words for a blank, by the mean over the full sequence, or by the log-probability from the
    blank on (Radford et al. 2019, section 3.2). File: CBTest's."""

    protocols = ("full sequence", "from the blank")
    values = {
        "full sequence": {
            "acc": lambda _, s: (s.context_logprob + s.logprob) / (s.context_tokens + s.tokens)
        }
    }
    resized = True

    def __init__(self, name: str, order: int, configuration: str, *figures: float) -> None:
        self.name, self.order = name, order  # the split is that of PAPER, section 3.2
        self.hub = {"path": "cam-cst/cbt", "name": configuration, "split": "validation"}
        self.published = published(PAPER, "from the blank", "acc", *figures)

    def parse(self, text: str) -> list[dict]:
        """Return the rows of CBTest's format: 20 numbered lines of context, then a line of question
        (XXXXX is the blank), tab, answer, two tabs, and candidates separated by bars."""
        rows = []
        for lines in re.split(r"^1 ", text, flags=re.MULTILINE)[1:]:
            *sentences, last = re.split(r"\s*\n\d+ ", lines.strip())
            question, answer, *_, options = last.split("\t")
            row = {"sentences": sentences, "question": question, "answer": answer}
            rows.append(row | {"options": options.split("|")})
        return rows

    def items(self, rows: list[dict], protocol: str) -> list[Item]:
        """Return the text up to the blank, and each candidate with the rest of the question."""
        items = []
        for row in rows:
            before, after = row["question"].split("XXXXX", 1)
            context = " ".join([*row["sentences"], before]).rstrip()
            choices = tuple(f" {option}{after}" for option in row["options"])
            items.append(Item(context, choices, row["options"].index(row["answer"])))
        return items


TASKS = [
    CBT("cbt_cn", 3, "CN", 0.8765, 0.9235, 0.9345, 0.9330),
    CBT("cbt_ne", 4, "NE", 0.834, 0.871, 0.880, 0.8905),
]
