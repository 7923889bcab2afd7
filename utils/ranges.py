"""Values that an option may have, declared in the type of its field: max_steps: Count = 19_073.

`check_ranges` is the one place that checks them, for command lines, recipes and architectures.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Literal, get_args, get_origin

from utils.errors import UserError


@dataclass(frozen=True, repr=False)
class Range:
    """Numbers that a field may have."""

    rule: str
    """What a number must be, in words."""
    holds: Callable[[float], bool]
    """Return whether a number is one of them; False for NaN."""

    def __repr__(self) -> str:  # the parser's own errors show the types of flags
        return self.rule


Count = Annotated[int, Range("at least 1", lambda x: x >= 1)]
Natural = Annotated[int, Range("at least 0", lambda x: x >= 0)]
# PyTorch's generators take no larger seed
Seed = Annotated[int, Range("at least 0 and below 2**63", lambda x: 0 <= x < 2**63)]
NonNegative = Annotated[float, Range("at least 0 and finite", lambda x: 0 <= x < math.inf)]
Positive = Annotated[float, Range("above 0 and finite", lambda x: 0 < x < math.inf)]
BelowOne = Annotated[float, Range("at least 0 and below 1", lambda x: 0 <= x < 1)]


def check_ranges(options: object, prefix: str = "") -> None:
    """Raise UserError for the first field of a dataclass whose value its type does not allow. None
    and "auto" stand for values that are found later. `prefix` stands before names, as -- of flags.
    """
    for field in fields(options):
        value = getattr(options, field.name)
        rules: list[str] = []  # that the value breaks
        if get_origin(field.type) is Literal and value not in get_args(field.type):
            rules.append(f"one of {', '.join(get_args(field.type))}")
        if isinstance(value, int | float):
            # a range stands in the type, Count, or in a part of it, Count | None
            for part in (field.type, *get_args(field.type)):
                for mark in getattr(part, "__metadata__", ()):
                    if isinstance(mark, Range) and not mark.holds(value):
                        rules.append(mark.rule)
        if rules:
            raise UserError(f"{prefix}{field.name} {value} must be {rules[0]}")
