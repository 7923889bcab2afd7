"""BenchmarkSuite: the benchmarks that are scored while a model trains.

evaluate.py scores a finished model by all protocols and examples; here one protocol and, without
--eval_full, a part of the examples give a curve. Benchmarks are the subject of benchmarks.py.
"""

from collections.abc import Iterator
from functools import partial

from config import TrainConfig
from evaluation.benchmarks import BENCHMARKS
from evaluation.evaluator import is_due, read_on_all
from evaluation.scoring import ItemScorer
from evaluation.tasks import Task, evenly_spread
from model.execution import uncompiled

SUBSET_EXAMPLES = 500  # of a benchmark, scored without --eval_full


class BenchmarkSuite:
    """Score the benchmarks whose option NAME_every is not 0. All processes call `scores` at the
    same steps and get the same figures."""

    def __init__(self, config: TrainConfig, scorer: ItemScorer) -> None:
        self.config = config
        self.scorer = scorer
        self.rows_of_task: list[tuple[Task, list[dict]]] = []
        """Each benchmark with the rows that are scored, the same ones each time."""
        for name in config.benchmarks:
            if getattr(config, f"{name}_every") > 0:
                task = BENCHMARKS[name]
                self.rows_of_task.append((task, self.read_rows(task)))

    def read_rows(self, task: Task) -> list[dict]:
        """Return the rows of a benchmark that are scored."""
        path = getattr(self.config, f"{task.name}_data")  # None: from the hub
        rows = read_on_all(partial(task.read, path), self.scorer.process)
        limit = None if self.config.eval_full else SUBSET_EXAMPLES
        return evenly_spread(rows, limit)

    def scores(self, step: int) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield the name and the figures of each benchmark that is due after `step` steps; they are
        those of its first protocol."""
        for task, rows in self.rows_of_task:
            every = getattr(self.config, f"{task.name}_every")
            if step < self.config.max_steps and not is_due(every, step):
                continue
            # Compiled blocks are of one shape: each length of a text would be compiled anew.
            with uncompiled(self.config.use_torch_compile):
                results, _ = task.score(rows, self.scorer.score, task.protocols[:1])
            figures: dict[str, float] = {"n": results[0].n}  # examples; then each metric
            for result in results:
                figures[result.metric] = result.value
            yield task.name, figures
