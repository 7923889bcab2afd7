"""No process goes on past an error that it caught, or a change of its own, unless all agree."""

import ast
import re
from collections import Counter
from pathlib import Path

from conftest import ROOT

SCRIPTS = ("train.py", "finetune.py", "evaluate.py", "utils/distributed.py")
FOLDERS = ("training", "finetuning", "evaluation", "model")

# Why no process of a run waits there for another one: the file, the function, the number of places
# where it catches an error or where only some of the processes go on, and the reason. "Raised
# again" ends the process, and its end fails the collectives of the others.
PLACES = """
train.py main 1 Stopped: raised by collectives, on all
finetune.py main 2 Stopped, RewardError: raised by collectives, on all
evaluate.py main 3 open_task: on all, by raise_on_all; the others end with main's writes
utils/distributed.py Process.raise_on_all 1 all processes get the error: the rule itself
utils/distributed.py Process.read_on_all 1 within raise_on_all
utils/distributed.py Process.print 1 prints only
utils/distributed.py StopSignal.receive 2 prints only
utils/distributed.py start 1 prints only
utils/distributed.py join 2 raised again
utils/distributed.py errors_as_disconnected 1 raised again, as Disconnected
training/evaluator.py Evaluator.__init__ 1 read_on_all: on all
training/evaluator.py Evaluator.open_for_curve 1 open_benchmark: on all
training/forecast/advice.py advise 1 compare_processes compares the result
training/forecast/advice.py choose_micro_batch 1 raised again
training/forecast/blocks.py first_inputs 1 a pure function of what all have: equal on all
training/forecast/blocks.py measure_block 1 a pure function of what all have: equal on all
training/forecast/blocks.py run_forward 1 a pure function of what all have: equal on all
training/forecast/dry_run.py open_data 1 one process: before the others join, or in a script
training/forecast/dry_run.py print_forecast 1 one process: before the others join, or in a script
training/minutes.py read_data_size 1 raised again
training/minutes.py Dial.choose 1 fit_micro_batch: raised on all, by the least memory of any
training/minutes.py choose_for_minutes 1 prints only
training/options.py compile_if_all_can 1 within raise_on_all
training/options.py find_recipe 1 raised again
training/options.py find_resumed 1 prints only
training/options.py is_on_gpu 1 raised again
training/options.py newest_of_branch 1 prints only
training/options.py read_options_file 1 raised again
training/parallel/data_parallel.py refuse_wrong_division 1 all_agree, or ends at once
training/parallel/own_rows.py copy_own_rows 1 no collectives: main's copy has the rows
training/parallel/own_rows.py held_rows 1 no collectives: which rows are whose
training/run.py claim_folders 1 within raise_on_all
training/run.py remove_checkpoints 1 within raise_on_all
training/run.py Run.distribute 1 within raise_on_all
training/run.py Run.open_log 1 within raise_on_all
training/run.py Run.finish 1 no collectives follow
training/saver.py Saver.check_step 1 within raise_on_all
training/saver.py Saver.save 3 all_agree; then main writes in a thread without others
training/saver.py Saver.write 3 raise_on_all in write_together; finish asks all for errors
training/trial.py has_memory 1 all_agree; no collectives within
training/writer.py write_together 5 raise_on_all; main renames after the last collective
training/writer.py read_checksums 1 within raise_on_all
finetuning/examples.py read_examples 1 raised again
finetuning/grpo.py GroupRelativePolicy.set_rewards 1 within raise_on_all
finetuning/rewards.py load_reward_function 1 raised again
finetuning/rewards.py rewards_of_function 1 within raise_on_all
evaluation/core.py download_bundle 1 raise_on_all, of read_on_all
evaluation/figure.py read_runs 1 one process: before the others join, or in a script
evaluation/tasks.py Benchmark.read 2 raised again
model/execution.py check_compiler 1 raised again
model/formats/checkpoint.py find_checkpoint 1 prints only
model/formats/huggingface.py narrow_copy_agrees 1 raised again
model/formats/huggingface_weights.py config_from_hf 1 raised again
model/formats/huggingface_weights.py find_or_download 1 raised again
model/proof.py prove 1 all_agree in scoring.py; no other collective depends on the result
"""


def is_place(node: ast.AST) -> bool:
    """Return whether a process may go on there while the others do something else."""
    if isinstance(node, ast.withitem):
        return "suppress(" in ast.unparse(node.context_expr)
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        return re.search(r"\bis_main|\brank\b", ast.unparse(node.test)) is not None
    return isinstance(node, ast.ExceptHandler)


def count_places(path: Path) -> Counter[str]:
    """Return the number of places of each function of a file, by file and function."""
    places: Counter[str] = Counter()

    def visit(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            places[f"{path.relative_to(ROOT).as_posix()} {name}"] += is_place(child)
            inner = name
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                inner = f"{name}.{child.name}".strip(".")
            visit(child, inner)

    visit(ast.parse(path.read_text(encoding="utf-8")), "")
    return +places  # without zeros


def test_each_place_where_one_process_may_go_on_alone_has_a_reason():
    files = [ROOT / script for script in SCRIPTS]
    for folder in FOLDERS:
        files += (ROOT / folder).rglob("*.py")
    counts = sum(map(count_places, files), Counter())
    expected = {}
    for line in PLACES.strip().splitlines():
        file, function, count, reason = line.split(maxsplit=3)
        expected[f"{file} {function}"] = int(count)
    differing = sorted(dict(counts.items() ^ expected.items()))
    assert not differing, (
        f"{differing}: an `except`, `suppress` or `if is_main` is new or gone. Let all processes "
        "agree by Process.raise_on_all, or end; give the place its number and reason in PLACES"
    )
