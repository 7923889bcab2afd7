"""The table of evaluate.py."""

from evaluation.published import VALIDATION
from evaluation.tasks import Result, find_tasks


def format_table(results: list[Result], size: str) -> str:
    """Format results as an aligned table, beside those published for a size of OpenAI's GPT-2."""
    lines = [["task", "protocol", "metric", "n", "value", "", f"OpenAI's {size}"]]
    tasks, marks = find_tasks(), {}  # marks by source
    for r in results:
        stderr, theirs = "" if r.stderr is None else f"± {r.stderr:.4f}", ""
        figures = tasks[r.task].published if r.task in tasks else VALIDATION
        if (r.protocol, r.metric, size) in figures:
            value, source = figures[r.protocol, r.metric, size]
            theirs = f"{value:.4f} {marks.setdefault(source, f'[{len(marks) + 1}]')}"
        lines.append([r.task, r.protocol, r.metric, f"{r.n:,}", f"{r.value:.4f}", stderr, theirs])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    form = "  ".join(f"{{:{'>' if i in (3, 4) else '<'}{w}}}" for i, w in enumerate(widths))
    notes = [f"{mark} {source}" for source, mark in marks.items()]
    for r in results:
        if r.ties:
            rule = "each best choice counts as its share"
            if r.protocol.startswith("lm-eval"):
                rule = "the first best choice counts, as in the harness"
            notes.append(f"{r.task}, {r.protocol}, {r.metric}: {r.ties:,} ties; {rule}")
    return "\n".join([form.format(*line).rstrip() for line in lines] + notes)
