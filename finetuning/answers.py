"""Exact match: the share of questions that a model answers exactly as expected.

A question is a row with a prompt and an answer. The model answers by greedy decoding. Its answer is
right if it equals the answer of the row, apart from white space at both ends.
"""

from itertools import chain

from config import SamplingConfig
from evaluation.tasks import TaskScores, batched, mean_result
from evaluation.validation import Scorer
from finetuning.completions import Completion, complete_questions, is_exact
from finetuning.examples import Question, TextEncoder


def score_questions(
    name: str,
    questions: list[Question],
    encoder: TextEncoder,
    max_new_tokens: int,
    scorer: Scorer,
) -> TaskScores:
    """Score a model on the questions of the file `name`. Return one result, the share of exact
    answers, and one row per question for --dump of evaluate.py. `scorer` has the model, the process
    and the batch size. All processes must call it: each answers some batches, and all return the
    same."""
    sampling = SamplingConfig(max_new_tokens, temperature=0)  # greedy

    def answer(question_batch: list[Question]) -> list[Completion]:
        return complete_questions(scorer.model, question_batch, encoder, sampling, scorer.process)

    # one list of Completions per batch, of all processes, in the order of the questions
    completions_of_batches = scorer.process.map(answer, batched(questions, scorer.batch_size))
    # part of the protocol's name, because a model answers differently in a chat and in plain text
    text_format = "chat" if encoder.chat else "plain text"
    dump_rows: list[dict] = []
    for index, completion in enumerate(chain.from_iterable(completions_of_batches)):
        dump_row = {
            "task": name,
            "index": index,
            "prompt": completion.row["prompt"],
            "answer": completion.row["answer"],
            "completion": completion.text,
            "cut": completion.is_cut,
            "exact": is_exact(completion),  # False if the completion was cut at max_new_tokens
        }
        dump_rows.append(dump_row)
    are_exact = [dump_row["exact"] for dump_row in dump_rows]  # their mean is the share
    return [mean_result(name, f"greedy, {text_format}", "exact match", are_exact)], dump_rows
