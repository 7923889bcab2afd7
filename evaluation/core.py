"""CORE: the mean of the centered accuracies of 22 tasks (DCLM, Li et al. 2024, arXiv 2406.11794).
The protocol is the one of nanochat (core_eval.py and base_eval.py), item by item.

The tasks are a folder in the layout of nanochat's eval_bundle. A user may write such a folder, too:

    core.yaml               each task: label, dataset_uri and icl_task_type; optional are
                            num_fewshot (default [0]) and continuation_delimiter (default " ")
    eval_data/**.jsonl      the items of a task, one per line, at its dataset_uri
    eval_meta_data.csv      accuracy of guessing for each label, in percent, as "Random baseline"

The prompt of an item begins with num_fewshot other items and their answers. A task has one of three
types, which differ in the fields of an item (FewShotTask.prompts) and in the tokens that count
(FewShotTask.continuations):

    multiple_choice         one question, several answers: the likeliest answer is the model's
                            {"query": "2 + 2 is", "choices": ["3", "4"], "gold": 1}
    schema                  several questions, one answer: the question after which the answer is
                            likeliest is the model's (Winograd schemas)
                            {"context_options": ["Ann saw Tom. Ann", "Ann saw Tom. Tom"],
                             "continuation": "was seen", "gold": 1}
    language_modeling       one question, one answer: greedy decoding must write it
                            {"context": "2 + 2 is", "continuation": "4"}
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
from utils.network import ask
from utils.ranges import BelowOne, Natural, check_ranges

BUNDLE_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
BUNDLE = Path("data/eval_bundle")  # place of the downloaded folder, from the working directory
LAYOUT = "a folder in the layout of nanochat's eval_bundle, see docs/EVALUATION.md"
NUM_TASKS = 22  # tasks in CORE; a mean over fewer tasks is not comparable

TaskType = Literal["multiple_choice", "schema", "language_modeling"]


@dataclass
class FewShotTask(Task):
    """One task of a folder: an entry of core.yaml, such as hellaswag_zeroshot of CORE."""

    protocols = ("nanochat",)
    layout = LAYOUT

    name: str
    """Label in core.yaml."""
    type: TaskType
    """icl_task_type of core.yaml. Prompts, and the tokens that count, depend on it."""
    num_shots: Natural
    """Number of examples with answers before each item."""
    delimiter: str
    """Text between a question and its answer."""
    baseline: BelowOne = 0.0
    """Accuracy of guessing, from 0 to below 1, for the centered accuracy. FewShotTasks.load
    computes it from the rows if eval_meta_data.csv has no entry for the task."""

    def select(self, rows: list[dict], limit: int | None) -> list[dict]:
        """Shuffle the rows as nanochat does, then return the first `limit` of them, or all if it is
        None. The examples before an item come from the returned rows, too."""
        random.Random(1337).shuffle(rows)  # in place, with nanochat's seed
        return rows[:limit]

    def prompts(self, row: dict) -> list[str]:
        """Return question, delimiter and answer as one text, for each choice of a row:
        ["2 + 2 is 3", "2 + 2 is 4"] with the delimiter " "."""
        # get_field raises ValueError if a field is missing or has another type
        if self.type == "multiple_choice":  # one question, several answers
            question = f"{get_field(row, 'query', str)}{self.delimiter}"
            # "choices": ["3", "4"]
            return [f"{question}{choice}" for choice in get_field(row, "choices", list)]
        # " 4"; "continuation" is the answer without the delimiter
        answer = f"{self.delimiter}{get_field(row, 'continuation', str)}"
        if self.type == "schema":  # several questions, one answer
            return [f"{question}{answer}" for question in get_field(row, "context_options", list)]
        # some contexts end in white space, which nanochat drops
        return [f"{get_field(row, 'context', str).strip()}{answer}"]

    def items(self, rows: list[dict], protocol: str) -> list[Item]:
        """Return an Item for each row: the examples are its context, the row's prompts its choices.
        For language_modeling the context includes the question, and the answer is the only choice.
        """
        # `read` puts this text into its UserError; sample() below would raise a vaguer text
        assert self.num_shots < len(rows), f"{len(rows)} items, and {self.num_shots} before each"
        items: list[Item] = []
        for index, row in enumerate(rows):
            # indices into the list of the other rows (all but rows[index]), with nanochat's seed
            other_indices = random.Random(1234 + index).sample(range(len(rows) - 1), self.num_shots)
            context = ""
            for other_index in other_indices:
                # in the list of the other rows, the rows after `index` have moved up by one
                if other_index >= index:
                    other_index += 1
                example = rows[other_index]
                prompts = self.prompts(example)
                context += prompts[self.label(example, len(prompts))] + "\n\n"  # the right one
            choices = self.prompts(row)  # question and answer, for each choice
            if self.type == "language_modeling":
                prompt = context + choices[0]
                # white space before the answer moves to the choice: the first token of the answer
                # includes it
                context = prompt.removesuffix(row["continuation"]).rstrip()
                choices = [prompt.removeprefix(context)]
            items.append(Item(context, tuple(choices), self.label(row, len(choices))))
        return items

    def label(self, row: dict, num_prompts: int) -> int:
        """Return the index of the right prompt of a row: the field "gold". language_modeling has a
        single prompt, so the index is 0."""
        if self.type == "language_modeling":
            return 0
        # an index below num_prompts; else ValueError
        return get_label(row, "gold", num_prompts)

    def continuations(
        self, item: Item, tokenizer: Tokenizer, block_size: int
    ) -> list[Continuation]:
        """Return a Continuation for each choice. Its ids are the tokens that count, its context all
        tokens before them.

        The tokens that count depend on the type. For multiple_choice they follow the longest common
        start of all choices, for language_modeling the longest common start of question and prompt.
        For schema they are the longest common end of all choices.
        """
        # what begins each document of the shards: end of text, [50256] of GPT-2, or a LLaMA's BOS
        start_ids = list(tokenizer.start_ids)
        whole_ids: list[list[int]] = []  # for each choice start_ids, examples, question, answer
        for choice in item.choices:
            # context: the examples, and for language_modeling the question; choice: the rest.
            # `encode` itself writes no special token.
            whole_ids.append(start_ids + tokenizer.encode(item.context + choice).tolist())
        shortest_length = min(len(ids) for ids in whole_ids)  # in tokens
        # counted_starts[i] is the index in whole_ids[i] of the first id that counts
        if self.type == "schema":
            # os.path's commonprefix takes lists; of reversed ids it is the common end of prompts
            num_counted = len(commonprefix([ids[::-1] for ids in whole_ids]))
            # split_ids needs a token to score and a token before it
            num_counted = min(max(num_counted, 1), shortest_length - 1)
            counted_starts = [len(ids) - num_counted for ids in whole_ids]
        else:
            compared_ids = whole_ids  # ids of each choice, whose common start does not count
            if self.type == "language_modeling":
                # compare the prompt with item.context, the same prompt without its answer
                compared_ids = [*whole_ids, start_ids + tokenizer.encode(item.context).tolist()]
            num_common = len(commonprefix(compared_ids))
            # If one choice is the beginning of another one, it has no token after the common start,
            # and nanochat's mean loss is NaN. Here the last common token counts for all choices.
            # -1: at least the last id of the shortest choice counts
            counted_start = min(num_common, shortest_length - 1)
            counted_starts = [counted_start] * len(whole_ids)  # the same for all choices
        # A Continuation for each choice. If context and continuation have more than block_size ids,
        # the context loses its first ones. The limit is not block_size + 1, although the last id is
        # no input here, because nanochat reads it, too.
        pairs = zip(whole_ids, counted_starts, strict=True)
        return [split_ids(ids, start, block_size) for ids, start in pairs]

    def score_example(
        self, protocol: str, item: Item, predictions: list[Prediction]
    ) -> ScoredExample:
        """Return whether the model's choice is right: the choice with the lowest mean loss, or the
        first of equal ones. For language_modeling return whether greedy decoding writes the answer.
        """
        # nats per token for each choice: the negative of nanochat's mean loss
        mean_logprobs = [prediction.logprob / prediction.num_tokens for prediction in predictions]
        pick = mean_logprobs.index(max(mean_logprobs))  # index of the model's choice
        is_right = pick == item.label
        if self.type == "language_modeling":  # it has a single choice, so `pick` is always right
            is_right = predictions[0].is_greedy
        is_tie = mean_logprobs.count(max(mean_logprobs)) > 1  # for Result.ties
        details = {  # for --dump, with the task, protocol and index of the item
            "label": item.label,
            "pick": pick,
            "correct": is_right,
            "mean_logprobs": mean_logprobs,
        }
        return {"acc": ExampleScore(is_right, is_tie)}, details

    def result(self, protocol: str, metric: str, example_scores: list[ExampleScore]) -> Result:
        """Return the accuracy, and in Result.centered the accuracy on the scale of CORE."""
        # mean of the scores; the table shows the number of shots in the column of the protocol
        mean_result = super().result(f"{self.num_shots}-shot", metric, example_scores)
        # 0 for guessing (the baseline: 0.25 for four choices), 1 if all items are right, negative
        # for less than guessing
        centered = (mean_result.value - self.baseline) / (1 - self.baseline)
        return replace(mean_result, centered=centered)


LoadedTask = tuple[FewShotTask, list[dict]]  # a task, and the rows of its file, see above


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
        """Return each task of core.yaml with its rows. If no folder is given, download CORE."""
        folder = path or download_bundle()
        # {"hellaswag_zeroshot": 0.25, ...}: accuracies of guessing
        baseline_by_label: dict[str, float] = {}
        if (folder / "eval_meta_data.csv").exists():
            csv_text = (folder / "eval_meta_data.csv").read_text(encoding="utf-8-sig")
            for row in csv.DictReader(csv_text.splitlines()):
                baseline_by_label[row["Eval Task"]] = float(row["Random baseline"]) / 100  # percent
        tasks: list[LoadedTask] = []
        # {"label": "hellaswag_zeroshot", "dataset_uri": "language_understanding/hellaswag.jsonl",
        # "num_fewshot": [0], "icl_task_type": "multiple_choice"}
        for entry in yaml.safe_load((folder / "core.yaml").read_bytes())["icl_tasks"]:
            label = entry["label"]
            [num_shots] = entry.get("num_fewshot", [0])  # a list of one number
            delimiter = entry.get("continuation_delimiter", " ")
            # Without an entry, the baseline is computed below; 0 stays for language_modeling, which
            # has no choices to guess among.
            baseline = baseline_by_label.get(label, 0.0)
            task = FewShotTask(label, entry["icl_task_type"], num_shots, delimiter, baseline)
            # raises UserError for an unknown type, a negative num_fewshot, a baseline not in [0, 1)
            check_ranges(task, f"{folder}/core.yaml, {label}: ")
            file = folder / "eval_data" / entry["dataset_uri"]
            # shuffles, keeps at most `limit` rows; UserError for a row that cannot be scored
            rows = task.read(file, limit, tokenizer, block_size)  # [{"query": "2+2 is", ...}, ...]
            if label not in baseline_by_label and task.type != "language_modeling":
                # one prompt per choice; items may have different numbers of choices
                chances = [1 / len(task.prompts(row)) for row in rows]
                task.baseline = sum(chances) / len(chances)  # for FewShotTask.result and `score`
                # raises UserError if each row has a single choice: the baseline is 1
                check_ranges(task, f"{file}, with one choice: ")
            tasks.append((task, rows))
        assert tasks, "core.yaml names no task"  # `read` puts this text into its UserError
        return tasks

    def score(
        self, loaded_tasks: list[LoadedTask], score_items: ScoreItems, protocols: Sequence[str]
    ) -> TaskScores:
        """Return the accuracy of each task, then the mean of their centered accuracies, and a row
        for --dump for each item. `loaded_tasks` is the return value of `read`."""
        results: list[Result] = []
        dump_rows: list[dict] = []
        centered_sum = 0.0
        variance_sum = 0.0
        all_have_stderr = True  # False if a task has a single item, and so no standard error
        for task, rows in loaded_tasks:
            # `score_items` runs the model. One protocol with one metric: one Result.
            [result], task_dump_rows = task.score(rows, score_items, protocols)
            results.append(result)
            dump_rows += task_dump_rows
            assert result.centered is not None  # FewShotTask.result has set it
            centered_sum += result.centered
            if result.stderr is None:
                all_have_stderr = False
            else:
                # centering divides the error by 1 - baseline; variances of independent tasks add up
                variance_sum += (result.stderr / (1 - task.baseline)) ** 2
        num_tasks = len(loaded_tasks)
        protocol = self.protocols[0]
        if num_tasks != NUM_TASKS:
            # with another protocol name, the table finds no published value for this mean
            protocol = f"{num_tasks} tasks"
        mean = Result(
            self.name,  # "core", or the name of the user's folder
            protocol,
            self.metric,  # "centered"
            n=sum(result.n for result in results),
            value=centered_sum / num_tasks,
            stderr=variance_sum**0.5 / num_tasks if all_have_stderr else None,
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
        # `ask` prints the name of the host if the download takes more than ten seconds. limit=None:
        # it may take any time, but a minute without a byte is an error.
        ask(BUNDLE_URL, lambda: download_url_to_file(BUNDLE_URL, archive), limit=None)
        # A lost connection leaves a truncated file without an error. unpack_archive then raises
        # one, because a zip archive has its list of files at the end.
        shutil.unpack_archive(archive, temporary)
        # The rename comes last, so that a folder of this name is always complete. It raises OSError
        # if another process of this machine was faster.
        with contextlib.suppress(OSError):
            os.rename(Path(temporary, "eval_bundle"), BUNDLE)
    assert BUNDLE.exists(), "the archive holds no eval_bundle"
    return BUNDLE
