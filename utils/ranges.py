"""Values that an option may have, declared in the type of its field: max_steps: Count = 19_073.

`check_ranges` is the one place that checks them, for command lines, recipes and architectures.
"""

import math
from dataclasses import fields
from typing import Annotated, ClassVar, Literal, Protocol, get_args, get_origin

from utils.errors import UserError

# A rule is named by its text, which stands in the type and in the message. All are false for NaN.
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
    """Object of any dataclass, as `fields` takes it."""

    __dataclass_fields__: ClassVar[dict]


def check_ranges(options: Dataclass, prefix: str = "") -> None:
    """Raise UserError for the first field of a dataclass whose value its type does not allow.
    `prefix` stands before the field's name in the message: -- for flags."""
    for field in fields(options):
        value = getattr(options, field.name)
        rule = broken_rule(field.type, value)  # "at least 1", or None
        if rule is not None:
            raise UserError(f"{prefix}{field.name} {value} must be {rule}")


def broken_rule(field_type: object, value: object) -> str | None:
    """Return what a value of a field must be and is not, None for one that its type allows. Values
    that are found later, None and "auto", are allowed."""
    # the choices of Literal["a", "b"], or the parts of Count | None
    type_args = get_args(field_type)
    if get_origin(field_type) is Literal and value not in type_args:
        return f"one of {', '.join(type_args)}"
    if isinstance(value, int | float):
        # The rule is in the type itself (Count) or in a part of it (Count | None).
        for part in (field_type,) + type_args:
            # int, None and "auto" are not Annotated and have no rules
            for rule in getattr(part, "__metadata__", ()):
                if not RULES[rule](value):
                    return rule
    return None
