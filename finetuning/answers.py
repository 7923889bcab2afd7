"""Questions with one right answer: the share that a model answers exactly.

A question is a row of prompt and answer. The model answers with its likeliest tokens (greedy
decoding), and an answer is right if it is the row's, white space aside.
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
    """Return one result, the share of exact answers to the questions of the file `name`, and a row
    for --dump for each question. `scorer` has the model, its process and the batch size;
    processes share the questions in batches, and all of them return the same."""
    sampling = SamplingConfig(max_new_tokens, temperature=0)  # greedy

    def answer(question_batch: list[Question]) -> list[Completion]:
        return complete_questions(scorer.model, question_batch, encoder, sampling, scorer.process)

    # a list of completions for each batch, in the order of the questions
    completions_by_batch = scorer.process.map(answer, batched(questions, scorer.batch_size))
    # the protocol names the format, as a model answers differently in a chat and in plain text
    text_format = "chat" if encoder.chat else "plain text"
    dump_rows: list[dict] = []
    for index, completion in enumerate(chain.from_iterable(completions_by_batch)):
        dump_row = {
            "task": name,
            "index": index,
            "prompt": completion.row["prompt"],
            "answer": completion.row["answer"],
            "completion": completion.text,
            "cut": completion.is_cut,
            "exact": is_exact(completion),  # False if it was cut
        }
        dump_rows.append(dump_row)
    exact = [dump_row["exact"] for dump_row in dump_rows]
    return [mean_result(name, f"greedy, {text_format}", "exact match", exact)], dump_rows
