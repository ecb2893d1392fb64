"""Options, each declared once as a field of a frozen dataclass: its default, what it does, what values it may have.

Configs of trainers, the `--help` of commands and the tables in docs/options.md take them from the declarations.
"""

import functools
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from types import UnionType
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin

from .json_files import jsonable
from .value_checks import did_you_mean, require_value


def option(default: Any, help: str, **bounds: Any) -> Any:
    """A field with its help. Its annotation says which types or words its value may have; `bounds` are arguments of
    :func:`~.require_value`."""
    return field(default=default, metadata={"help": help} | bounds)


@functools.cache
def kinds_of(declared: Field[Any]) -> tuple[Any, ...]:
    """Types and words that the option `declared` may have, such as `(int, "adaptive")`."""

    def kinds(annotation: Any) -> list[Any]:
        if get_origin(annotation) in (Literal, Union, UnionType):
            return [kind for part in get_args(annotation) for kind in kinds(part)]
        return [get_origin(annotation) or annotation]

    return tuple(kinds(declared.type))


@dataclass(frozen=True)
class DeclaredOptions:
    """Base of a group of options. A dict of the same names stands for an instance.

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
            if isinstance(declared.default, DeclaredOptions):
                object.__setattr__(self, name, declared.default.coerce(value))
            elif isinstance(value, list | tuple) and Sequence in kinds_of(declared):  # the group checks its entries
                object.__setattr__(self, name, tuple(value))
            else:
                bounds = {key: bound for key, bound in declared.metadata.items() if key != "help"}
                place = name if self.group == DeclaredOptions.group else f"{self.group}.{name}"
                require_value(place, value, kinds_of(declared), **bounds)

    @classmethod
    def remedy(cls, name: str, known: Iterable[str]) -> str:
        """What to do about the option `name`, which is none of those `known`."""
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
        """Its options as JSON has them, as a GenerationConfig that carries it saves them."""
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
    """Appends the options that the class `declaring` declares to the docstring of the class `config`, which has them,
    with their defaults and what they do."""
    config.__doc__ = f"{config.__doc__}\n    Options:"
    for place, declared in declared_in(declaring):
        text = textwrap.indent(textwrap.fill(declared.metadata.get("help", ""), 105), " " * 12)
        if text and place.partition(".")[0] in declaring.__annotations__:
            config.__doc__ += f"\n        {place} (defaults to `{declared.default!r}`):\n{text}"
