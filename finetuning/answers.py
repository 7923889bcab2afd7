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
        # the encoder has the tokenizer, and says whether answers are turns of a chat
        return complete_questions(scorer.model, question_batch, encoder, sampling, scorer.process)

    # The processes share the batches, and each gets all Completions: one list per batch, in the
    # order of the questions.
    completions_of_batches = scorer.process.map_across_processes(
        answer, batched(questions, scorer.batch_size)
    )
    # part of the protocol's name, because a model answers differently in a chat and in plain text
    text_format = "chat" if encoder.chat else "plain text"
    dump_rows: list[dict] = []
    for index, completion in enumerate(chain.from_iterable(completions_of_batches)):
        dump_row = {
            "task": name,  # of the file of questions
            "index": index,
            "prompt": completion.row["prompt"],  # a text, or messages of a chat
            "answer": completion.row["answer"],
            "completion": completion.text,
            "cut": completion.is_cut,  # True: max_new_tokens came before an end
            "exact": is_exact(completion),  # False if the completion is cut
        }
        dump_rows.append(dump_row)
    are_exact = [dump_row["exact"] for dump_row in dump_rows]  # True or False each
    # a Result: the share of True, with its standard error
    return [mean_result(name, f"greedy, {text_format}", "exact match", are_exact)], dump_rows
