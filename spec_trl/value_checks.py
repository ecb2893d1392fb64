"""Checks of values that users give: each raises a ValueError that names the argument, the value and the remedy."""

import math
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Returns a question that ends a message, if `name` is nearly one of `known`; else ""."""
    near = get_close_matches(str(name), known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def require_choice(name: str, value: object, words: Sequence[str]) -> None:
    """Raises ValueError, naming `name`, unless `value` is one of `words`."""
    if value not in words:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {list(words)}.{did_you_mean(value, words)}")


def require_value(
    name: str,
    value: Any,
    kinds: Sequence[Any],
    low: int | None = None,
    high: int | None = None,
    positive: bool = False,
    hint: str = "",
) -> None:
    """Raises ValueError, naming `name`, unless `value` is one of the words, or of a type, in `kinds`.

    An integer lies between `low` and `high` (None: no bound); a float is finite and at least 0, or, if `positive`,
    above 0. `hint` ends the error, after the words that may stand for a bool or a number.
    """
    if (value is None and type(None) in kinds) or (isinstance(value, str) and value in kinds):
        return
    problem = ""
    if bool in kinds:
        if not isinstance(value, bool):
            problem = "is no bool; pass True or False"
    elif int in kinds:
        if isinstance(value, bool) or not isinstance(value, int):
            problem = f"is a {type(value).__name__}; pass an integer"
        elif (low is not None and value < low) or (high is not None and value > high):
            problem = f"is out of range; it must be {f'{low} to {high}' if high else f'at least {low}'}"
    elif float in kinds:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < 0 or (positive and value == 0):
            problem = f"is out of range; it must be a {'positive number' if positive else 'number of at least 0'}"
    elif words := [kind for kind in kinds if isinstance(kind, str)]:
        require_choice(name, value, words)
    if problem:
        words = [f' or "{kind}"' for kind in kinds if isinstance(kind, str)]
        raise ValueError(f"{name}={value!r} {problem}{''.join(words)}{hint}.")


def require_folder_or_id(name: str, assistant: object) -> None:
    """Raises ValueError, naming `name`, if `assistant` is a text that is neither a folder nor a possible hub id."""
    if not isinstance(assistant, str) or Path(assistant).is_dir():
        return
    if Path(assistant).is_file():
        raise ValueError(f"{name}={assistant!r} is a file; give the folder that it lies in.")
    from huggingface_hub.errors import HFValidationError  # here: `spec-trl --help` would wait for them
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(assistant)
    except HFValidationError:
        raise ValueError(f"{name}={assistant!r} is a folder that does not exist; correct the path.") from None


def require_field(owner: Any, name: str, above: float | None = None, most: float = math.inf) -> None:
    """Raises ValueError unless `owner`'s field `name` is a finite number of at least 0 (or greater than `above`) and
    at most `most`, and an integer where the field is declared as one."""
    value = vars(owner)[name]
    kinds = (int,) if type(owner).__dataclass_fields__[name].type is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        wanted = "an integer" if kinds == (int,) else "a number"
        raise ValueError(f"{name}={value!r} is a {type(value).__name__}; it must be {wanted}.")
    if not value <= sys.float_info.max or not 0 <= value <= most or (above is not None and value <= above):
        bound = "at least 0" if above is None else f"greater than {above:g}"
        bound = f"finite and {bound}" if most == math.inf else f"{bound} and at most {most:g}"
        raise ValueError(f"{name}={value} is out of range; it must be {bound}.")
