"""CORE: the mean over 22 tasks of their centered accuracies (DCLM, Li et al. 2024, arXiv
2406.11794), by the protocol of nanochat (core_eval.py and base_eval.py), item by item.

The tasks come as a folder in the layout of nanochat's eval_bundle, or of the user's own tasks:

    core.yaml               for each task: label, dataset_uri, icl_task_type, and where they differ
                            from the defaults num_fewshot (0) and continuation_delimiter (" ")
    eval_data/**.jsonl      the items, one a line, at each dataset_uri
    eval_meta_data.csv      accuracy of guessing by label, in percent, as "Random baseline"

An item is shown after num_fewshot others with their answers. Three types of tasks differ in what
an item holds (FewShotTask.prompts) and in which tokens count (FewShotTask.continuations).
"""

import contextlib
import csv
import os
import random
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix  # works on lists, too
from pathlib import Path
from typing import Literal

import yaml

from data.named_tokenizer import Tokenizer
from evaluation.tasks import (
    Benchmark,
    Continuation,
    ExampleScore,
    Item,
    Prediction,
    Result,
    ScoredExample,
    ScoreItems,
    Task,
    TaskScores,
    get_field,
    get_label,
    split_ids,
)
from utils.ranges import BelowOne, Natural, check_ranges

BUNDLE_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
BUNDLE = Path("data/eval_bundle")  # the downloaded folder, in the working directory
LAYOUT = "a folder in the layout of nanochat's eval_bundle, see docs/EVALUATION.md"
NUM_TASKS = 22  # in CORE; a mean over fewer tasks is not comparable

TaskType = Literal["multiple_choice", "schema", "language_modeling"]


@dataclass
class FewShotTask(Task):
    """One task of a folder."""

    protocols = ("nanochat",)
    layout = LAYOUT

    name: str
    """Label in core.yaml."""
    type: TaskType
    """icl_task_type of core.yaml, on which prompts and the tokens that count depend."""
    num_shots: Natural
    """Examples with their answers before each item."""
    delimiter: str
    """Stands between a question and its answer."""
    baseline: BelowOne = 0.0
    """Accuracy of guessing, from 0 to 1; 1 would leave nothing to score. FewShotTasks.load sets it
    from the rows where eval_meta_data.csv does not tell it."""

    def select(self, rows: list[dict], limit: int | None) -> list[dict]:
        """Return the rows in nanochat's order: shuffled, and then cut. The examples before an item
        come from the same rows."""
        random.Random(1337).shuffle(rows)  # in place, with nanochat's seed
        return rows[:limit]

    def prompts(self, row: dict) -> list[str]:
        """Return question, delimiter and answer as one text, for each choice of an item."""
        if self.type == "multiple_choice":  # one question, several answers
            question = f"{get_field(row, 'query', str)}{self.delimiter}"
            return [f"{question}{choice}" for choice in get_field(row, "choices", list)]
        answer = f"{self.delimiter}{get_field(row, 'continuation', str)}"
        if self.type == "schema":  # several questions, one answer
            return [f"{question}{answer}" for question in get_field(row, "context_options", list)]
        return [f"{get_field(row, 'context', str).strip()}{answer}"]

    def items(self, rows: list[dict], protocol: str) -> list[Item]:
        """Return an Item for each row: its context are the examples, its choices the row's prompts.
        For language_modeling, which has one prompt, the question stands in the context, too."""
        # for the message of `read`; sample() could not draw so many
        assert self.num_shots < len(rows), f"{len(rows)} items, and {self.num_shots} before each"
        items = []
        for index, row in enumerate(rows):
            # indices into a list of the other rows, with nanochat's seed
            other_indices = random.Random(1234 + index).sample(range(len(rows) - 1), self.num_shots)
            context = ""
            for other_index in other_indices:
                # that list lacks the row itself, so later rows have moved up by one
                example = rows[other_index if other_index < index else other_index + 1]
                prompts = self.prompts(example)
                context += prompts[self.label(example, len(prompts))] + "\n\n"
            choices = self.prompts(row)
            if self.type == "language_modeling":
                prompt = context + choices[0]
                # white space before the answer moves to the choice, as it belongs to the first
                # token of the answer
                context = prompt.removesuffix(row["continuation"]).rstrip()
                choices = [prompt.removeprefix(context)]
            items.append(Item(context, tuple(choices), self.label(row, len(choices))))
        return items

    def label(self, row: dict, num_prompts: int) -> int:
        """Return the index of the right one of a row's prompts: "gold", or of language_modeling 0,
        as it has only one."""
        return 0 if self.type == "language_modeling" else get_label(row, "gold", num_prompts)

    def continuations(
        self, item: Item, tokenizer: Tokenizer, block_size: int
    ) -> list[Continuation]:
        """Return a continuation for each choice, of the tokens that count: what follows the longest
        common start of all choices, for language_modeling that of question and prompt; for a schema
        the longest common end. All tokens before them are its context."""
        # documents of the shards begin with these: end of text, or BOS of a LLaMA
        start_ids = list(tokenizer.start_ids)
        wholes: list[list[int]] = []  # ids of examples and prompt, for each choice
        for choice in item.choices:
            wholes.append(start_ids + tokenizer.encode(item.context + choice).tolist())
        shortest = min(len(ids) for ids in wholes)
        # below, `starts` has for each choice the index in its ids of the first token that counts
        if self.type == "schema":
            # a common prefix of the reversed ids is the common end of the prompts
            num_counted = len(commonprefix([ids[::-1] for ids in wholes]))
            # split_ids needs a token to score, and one before it
            num_counted = min(max(num_counted, 1), shortest - 1)
            starts = [len(ids) - num_counted for ids in wholes]
        else:
            compared = wholes  # whose common start does not count
            if self.type == "language_modeling":
                # compare the prompt with the same prompt without its answer
                compared = [*wholes, start_ids + tokenizer.encode(item.context).tolist()]
            # A choice that is the beginning of another one would have no token left: its mean loss
            # is NaN in nanochat. Here the last common token counts, for all choices.
            starts = [min(len(commonprefix(compared)), shortest - 1)] * len(wholes)
        # nanochat feeds the last token, too, so block_size tokens fit, not one more
        pairs = zip(wholes, starts, strict=True)
        return [split_ids(ids, start, block_size) for ids, start in pairs]

    def score_example(
        self, protocol: str, item: Item, predictions: list[Prediction]
    ) -> ScoredExample:
        """Return whether the choice with the lowest mean loss is right, the first of equal ones, or
        the answer is what greedy decoding writes."""
        # nats per token: the negative of nanochat's mean loss
        means = [prediction.logprob / prediction.num_tokens for prediction in predictions]
        pick = means.index(max(means))
        is_right = pick == item.label
        if self.type == "language_modeling":  # one choice, so there is nothing to pick
            is_right = predictions[0].is_greedy
        score_by_metric = {"acc": ExampleScore(is_right, is_tie=means.count(max(means)) > 1)}
        details = {"label": item.label, "pick": pick, "correct": is_right, "mean_logprobs": means}
        return score_by_metric, details

    def result(self, protocol: str, metric: str, example_scores: list[ExampleScore]) -> Result:
        """Return the accuracy, and as `centered` the same on the scale of CORE."""
        # the table shows the number of examples as the protocol
        mean = super().result(f"{self.num_shots} examples", metric, example_scores)
        # 0 for guessing, 1 if all items are right
        centered = (mean.value - self.baseline) / (1 - self.baseline)
        return replace(mean, centered=centered)


LoadedTask = tuple[FewShotTask, list[dict]]  # a task, and the rows of its file


class FewShotTasks(Benchmark):
    """All tasks of a folder: CORE, or the user's own."""

    protocols = ("nanochat",)
    metric = "centered"
    download = {"path": BUNDLE_URL}
    layout = LAYOUT

    def __init__(self, name: str) -> None:
        self.name = name

    def load(
        self, path: Path | None, limit: int | None, tokenizer: Tokenizer, block_size: int
    ) -> list[LoadedTask]:
        """Return each task of core.yaml with its rows."""
        folder = path or download_bundle()
        baselines = {}  # accuracy of guessing by label, from 0 to 1
        if (folder / "eval_meta_data.csv").exists():
            lines = (folder / "eval_meta_data.csv").read_text(encoding="utf-8").splitlines()
            for row in csv.DictReader(lines):
                baselines[row["Eval Task"]] = float(row["Random baseline"]) / 100  # percent
        tasks: list[LoadedTask] = []
        for entry in yaml.safe_load((folder / "core.yaml").read_bytes())["icl_tasks"]:
            label = entry["label"]
            [num_shots] = entry.get("num_fewshot", [0])  # a list of one number
            delimiter = entry.get("continuation_delimiter", " ")
            baseline = baselines.get(label, 0.0)
            task = FewShotTask(label, entry["icl_task_type"], num_shots, delimiter, baseline)
            # UserError for num_fewshot below 0, or a baseline below 0 % or not below 100 %
            check_ranges(task, f"{folder}/core.yaml, {label}: ")
            file = folder / "eval_data" / entry["dataset_uri"]
            rows = task.read(file, limit, tokenizer, block_size)
            # for language_modeling it stays at 0: a guess is never right
            if label not in baselines and task.type != "language_modeling":
                # the mean over items, as they may have different numbers of choices
                chances = [1 / len(task.prompts(row)) for row in rows]
                task.baseline = sum(chances) / len(chances)
                # UserError if each row has one choice, a baseline of 1
                check_ranges(task, f"{file}, with one choice: ")
            tasks.append((task, rows))
        assert tasks, "core.yaml names no task"  # for the message of `read`
        return tasks

    def score(
        self, loaded_tasks: list[LoadedTask], score_items: ScoreItems, protocols: Sequence[str]
    ) -> TaskScores:
        """Return the accuracy of each task, and last the mean of the centered ones; with them a row
        for --dump for each item. `loaded_tasks` is what `load` returned."""
        results: list[Result] = []
        dump_rows: list[dict] = []
        centered_sum = 0.0
        variance_sum = 0.0
        for task, rows in loaded_tasks:
            # one protocol with one metric: one Result
            [result], task_dump_rows = task.score(rows, score_items, protocols)
            results.append(result)
            dump_rows += task_dump_rows
            assert result.centered is not None  # FewShotTask.result has set it
            centered_sum += result.centered
            if result.stderr is not None:  # None for a single item
                # centering divides by 1 - baseline; variances of independent tasks add up
                variance_sum += (result.stderr / (1 - task.baseline)) ** 2
        num_tasks = len(loaded_tasks)
        protocol = self.protocols[0]
        if num_tasks != NUM_TASKS:
            # another name, so that the table puts no published value beside it
            protocol = f"{num_tasks} tasks"
        mean = Result(
            self.name,
            protocol,
            self.metric,
            n=sum(result.n for result in results),
            value=centered_sum / num_tasks,
            stderr=variance_sum**0.5 / num_tasks,
        )
        return [*results, mean], dump_rows


def download_bundle() -> Path:
    """Return the folder of CORE's 22 tasks; download it at the first call."""
    from torch.hub import download_url_to_file  # here, as plot.py imports no PyTorch

    if BUNDLE.exists():
        return BUNDLE
    BUNDLE.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUNDLE.parent) as temporary:
        archive = f"{temporary}/bundle.zip"
        download_url_to_file(BUNDLE_URL, archive)
        # A connection that breaks off leaves a truncated file without an error. Then unpack_archive
        # raises one, as a zip archive has its list of files at the end.
        shutil.unpack_archive(archive, temporary)
        # Renamed last, so that the folder is complete once it is there. OSError: another process of
        # this machine was faster.
        with contextlib.suppress(OSError):
            os.rename(Path(temporary, "eval_bundle"), BUNDLE)
    assert BUNDLE.exists(), "the archive holds no eval_bundle"
    return BUNDLE
