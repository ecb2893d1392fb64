"""Checks values that users give, and raises ValueError with argument, value and remedy.

Options are declared once, as fields of a frozen dataclass: configs of trainers, the `--help` of commands and the
tables in docs/options.md take them from there.
"""

import functools
import math
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin

from .json_files import jsonable


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Returns a question to end a message, if `name` is nearly one of `known`; else ""."""
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
    above 0. `hint` ends the error, after words allowed in place of a bool or a number.
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
    at most `most`, and an integer if declared as one."""
    value = vars(owner)[name]
    kinds = (int,) if type(owner).__dataclass_fields__[name].type is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        wanted = "an integer" if kinds == (int,) else "a number"
        raise ValueError(f"{name}={value!r} is a {type(value).__name__}; it must be {wanted}.")
    if not value <= sys.float_info.max or not 0 <= value <= most or (above is not None and value <= above):
        bound = "at least 0" if above is None else f"greater than {above:g}"
        bound = f"finite and {bound}" if most == math.inf else f"{bound} and at most {most:g}"
        raise ValueError(f"{name}={value} is out of range; it must be {bound}.")


# ---- options -------------------------------------------------------------------------------------------------------


def option(default: Any, help: str, **bounds: Any) -> Any:
    """A field with its help. Its annotation has the types or words of its value; `bounds` are arguments of
    :func:`~.require_value`."""
    return field(default=default, metadata={"help": help} | ({"bounds": bounds} if bounds else {}))


@functools.cache
def kinds_of(declared: Field[Any]) -> tuple[Any, ...]:
    """Types and words of the option `declared`, such as `(int, "adaptive")`."""

    def kinds(annotation: Any) -> list[Any]:
        if get_origin(annotation) in (Literal, Union, UnionType):
            return [kind for part in get_args(annotation) for kind in kinds(part)]
        return [get_origin(annotation) or annotation]

    return tuple(kinds(declared.type))


@dataclass(frozen=True)
class DeclaredOptions:
    """Base of a group of options; a dict of the same names is accepted in its place.

    Attributes:
        group: its name, such as "tts"; errors name an option "tts.stride".

    Raises:
        ValueError: an option is unknown, or its value is not allowed; the message names both, and a remedy.
    """

    group: ClassVar[str] = "speculative_config"

    def __new__(cls, *_: Any, **options: Any) -> Self:
        if unknown := sorted(options.keys() - cls.__dataclass_fields__.keys()):
            remedy = cls.remedy(unknown[0], [declared.name for declared in fields(cls)])
            raise ValueError(f"{cls.group} has no option {unknown[0]!r}. {remedy}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, declared in type(self).__dataclass_fields__.items():
            value = vars(self).get(name, declared.default)  # a class variable has none
            if value is declared.default:
                continue
            kinds = kinds_of(declared)
            if isinstance(value, str) and float in kinds and str not in kinds:  # YAML reads 1e-3 as text
                with suppress(ValueError):
                    value = float(value)
                object.__setattr__(self, name, value)
            if isinstance(declared.default, DeclaredOptions):
                object.__setattr__(self, name, declared.default.coerce(value))
            elif isinstance(value, list | tuple) and Sequence in kinds:  # the group checks its entries
                object.__setattr__(self, name, tuple(value))
            else:
                place = name if self.group == DeclaredOptions.group else f"{self.group}.{name}"
                require_value(place, value, kinds, **declared.metadata.get("bounds", {}))

    @classmethod
    def remedy(cls, name: str, known: Iterable[str]) -> str:
        """The remedy for the option `name`, absent from `known`."""
        return f"Its options are {known}.{did_you_mean(name, known)}"

    @classmethod
    def coerce(cls, value: Any) -> Self:
        """Accepts an instance, a mapping of its options, or None for the defaults."""
        if not isinstance(value, cls | Mapping | None):
            kind = type(value).__name__
            raise ValueError(f"{cls.group}={value!r} is a {kind}; pass a {cls.__name__} or a dict.")
        if isinstance(value, cls):
            return value
        given: Any = value or {}
        return cls(**given)

    def by_place(self) -> dict[str, Any]:
        """Values by place, those of nested groups as `{"tts.stride": 1}`."""
        found: dict[str, Any] = {}
        for name, value in vars(self).items():
            nested = isinstance(value, DeclaredOptions)
            found |= {f"{name}.{inner}": one for inner, one in value.by_place().items()} if nested else {name: value}
        return found

    def to_dict(self) -> dict[str, Any]:
        """The options in JSON's types, as saved in a GenerationConfig."""
        options: dict[str, Any] = jsonable(dict(vars(self)))
        return options


def declared_in(config: Any) -> Iterator[tuple[str, Field[Any]]]:
    """The options of the dataclass `config` by place, those of nested groups included."""
    for declared in fields(config):
        if isinstance(declared.default, DeclaredOptions):
            yield from ((f"{declared.name}.{place}", inner) for place, inner in declared_in(declared.default))
        else:
            yield declared.name, declared


def document(config: type, declaring: type) -> None:
    """Appends the options of the class `declaring`, with defaults and help, to the docstring of its subclass
    `config`."""
    config.__doc__ = f"{config.__doc__}\n    Options:"
    for place, declared in declared_in(declaring):
        text = textwrap.indent(textwrap.fill(declared.metadata.get("help", ""), 105), " " * 12)
        if text and place.partition(".")[0] in declaring.__annotations__:
            config.__doc__ += f"\n        {place} (defaults to `{declared.default!r}`):\n{text}"
