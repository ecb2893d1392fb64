"""Checks of values that users give: each raises a ValueError that names the argument, the value and the remedy."""

import math
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A question to end a message with, where `name` is nearly one of `known`; else nothing."""
    near = get_close_matches(str(name), known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def require_choice(name: str, value: object, words: Sequence[str]) -> None:
    """Raises ValueError, naming `name`, unless `value` is one of `words`."""
    if value not in words:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {list(words)}.{did_you_mean(value, words)}")


def require_bool(name: str, value: object, hint: str = "") -> None:
    """Raises ValueError, naming `name`, unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is no bool; pass True or False{hint}.")


def require_int(name: str, value: object, low: int | None, high: int | None, hint: str = "") -> None:
    """Raises ValueError, naming `name`, unless `value` is an integer from `low` to `high`; None: unbounded."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r} is a {type(value).__name__}; pass an integer{hint}.")
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"{low} to {high}" if high is not None else f"at least {low}"
        raise ValueError(f"{name}={value} is out of range; it must be {bounds}{hint}.")


def require_number(name: str, value: object, positive: bool, hint: str = "") -> None:
    """Raises ValueError, naming `name`, unless `value` is a finite number of at least 0; `positive`: above 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (positive and value == 0):  # type: ignore[operator]
        bound = "a positive number" if positive else "a number of at least 0"
        raise ValueError(f"{name}={value!r} is out of range; it must be {bound}{hint}.")


def require_folder_or_id(name: str, assistant: object) -> None:
    """Raises ValueError, naming `name`, where `assistant` is a text that is no folder and can be no hub id."""
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
