"""Ranges of options, declared in the type of a field: max_steps: Count = 19_073.

`check_ranges` is the one place that checks ranges, for command lines, recipes and architectures.
"""

import math
from dataclasses import fields
from typing import Annotated, ClassVar, Literal, Protocol, get_args, get_origin

from utils.errors import UserError

# The text of a rule is its name in Annotated types, here and at fields, and stands in the error
# message. Every rule returns False for NaN.
RULES = {
    "at least 0": lambda x: 0 <= x < math.inf,
    "at least 1": lambda x: x >= 1,
    "at least 2": lambda x: x >= 2,
    "at least 0 and below 1": lambda x: 0 <= x < 1,
    "above 0 and at most 1": lambda x: 0 < x <= 1,
}
Count = Annotated[int, "at least 1"]
Natural = Annotated[int, "at least 0"]
NonNegative = Annotated[float, "at least 0"]
BelowOne = Annotated[float, "at least 0 and below 1"]


class Dataclass(Protocol):
    """Type of an instance of any dataclass, for type checkers."""

    __dataclass_fields__: ClassVar[dict]


def check_ranges(options: Dataclass, prefix: str = "") -> None:
    """Raise UserError for the first field of a dataclass whose type does not allow its value. The
    message puts `prefix` before the field's name: "--" for flags."""
    for field in fields(options):
        value = getattr(options, field.name)
        rule = broken_rule(field.type, value)  # "at least 1", or None
        if rule is not None:
            raise UserError(f"{prefix}{field.name} {value} must be {rule}")


def broken_rule(field_type: object, value: object) -> str | None:
    """Return the rule that a value of a field breaks, such as "at least 1", or None if the type of
    the field allows the value. None and "auto" break no rule."""
    # the choices of Literal["a", "b"], or the parts of Count | None
    type_args = get_args(field_type)
    if get_origin(field_type) is Literal and value not in type_args:
        return f"one of {', '.join(type_args)}"
    if isinstance(value, int | float):
        # The rule is in the type itself (Count) or in a part of the type (Count | None).
        for part in (field_type,) + type_args:
            # Only Annotated types have rules: int, None and "auto" have no __metadata__.
            for rule in getattr(part, "__metadata__", ()):
                if not RULES[rule](value):
                    return rule
    return None
