"""LAMBADA (Paperno et al. 2016): predict the last word of a passage."""

from collections.abc import Callable, Sequence

import numpy as np

from evaluation.published import HARNESS, PAPER, published
from evaluation.tasks import Item, Task, TaskScores, mean_result

# The GPT-2 paper excludes stop words as last words of LAMBADA passages, but publishes no list. This
# is the English list of Porter et al. that NLTK distributes, without contractions.
STOP_WORDS = """i me my myself we our ours ourselves you your yours yourself yourselves he him his
himself she her hers herself it its itself they them their theirs themselves what which who whom
this that these those am is are was were be been being have has had having do does did doing a an
the and but if or because as until while of at by for with about against between into through
during before after above below to from up down in out on off over under again further then once
here there when where why how all any both each few more most other some such no nor not only own
same so than too very s t can will just don should now""".split()


class Lambada(Task):
    """Last words, all tokens greedily (lm-eval), the last one alone (last token), or greedily with
    stop words excluded as first token (stop words). File: OpenAI's lambada_test.jsonl."""

    name = "lambada"
    order = 2
    hub = {"path": "EleutherAI/lambada_openai", "name": "default", "split": "test"}
    protocols = ("lm-eval", "last token", "stop words")
    published = (
        published(HARNESS, "lm-eval", "acc", 0.3256)
        | published(HARNESS, "lm-eval", "perplexity", 40.06)
        | published("transformers issue 13761", "last token", "acc", 0.4667)
        | published(PAPER, "stop words", "acc", 0.4599, 0.5548, 0.6012, 0.6324)
    )

    def items(self, rows: list[dict], protocol: str) -> list[Item]:
        """Return each passage and its last word, as lm-evaluation-harness splits it, but without
        the white space after the word, which OpenAI's file does not have."""
        parts = [row["text"].rstrip().rpartition(" ") for row in rows]
        return [Item(context, (" " + word,)) for context, _, word in parts]

    def score(self, rows: list[dict], score: Callable, protocols: Sequence[str]) -> TaskScores:
        scores = [s for (s,) in score(self.items(rows, protocols[0]), banned=STOP_WORDS)]
        nats = mean_result(self.name, "lm-eval", "perplexity", [-s.logprob for s in scores])
        perplexity = float(np.exp(nats.value))
        results = [
            mean_result(self.name, "lm-eval", "acc", [s.greedy for s in scores]),
            nats._replace(value=perplexity, stderr=nats.stderr and perplexity * nats.stderr),
            mean_result(self.name, "last token", "acc", [s.last for s in scores]),
            mean_result(self.name, "stop words", "acc", [s.greedy_filtered for s in scores]),
        ]
        examples = [{"task": self.name, "index": i} | s._asdict() for i, s in enumerate(scores)]
        return [r for r in results if r.protocol in protocols], examples


TASKS = [Lambada()]
