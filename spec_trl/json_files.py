"""Reads and writes the JSON files of spec_trl: profile, ladder, run log, kernel table, state of a run.

A file holds one dataclass; pydantic checks the content against its annotations. Writing is atomic.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4


if TYPE_CHECKING:
    from pydantic import TypeAdapter


T = TypeVar("T")
LONGEST = 200
"""Characters of a value's text in JSON: the text of a dtype or device has fewer, that of a model thousands."""
_adapters: "dict[Any, TypeAdapter[Any]]" = {}  # one per dataclass: making one takes milliseconds


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary file next to `path`, and replaces `path` by it at the end unless an exception is raised.

    A reader sees the old file or the new one, never a part, even if ranks write `path` at once or the machine stops.
    The folder is created.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{uuid4().hex}.new")  # ranks on several hosts may share a process id
    try:
        yield fresh
        with fresh.open("rb+") as written:  # a renamed file can else be empty after the machine stops
            os.fsync(written.fileno())
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes) -> None:
    with replacing(path) as file:
        file.write_bytes(content.encode() if isinstance(content, str) else content)


def to_json(value: Any, indent: int | None = None) -> str:
    """The JSON text of a dataclass. Values without a JSON form change: NaN and infinity become null, others, such as
    models among settings, texts."""
    return _adapter(type(value)).dump_json(value, indent=indent, fallback=_named).decode()


def jsonable(value: Any) -> Any:
    """`value` as :func:`to_json` writes it, made of dicts, lists, numbers and texts."""
    from pydantic_core import to_jsonable_python

    return to_jsonable_python(value, fallback=_named)


def _named(value: Any) -> Any:
    """The JSON form of another value: the number in a scalar of numpy or torch; the path of a class or function; the
    class, and the path or hub id, of a model; else the value's text."""
    if getattr(value, "shape", None) == ():
        return value.item()
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    text = str(value)
    if len(text) <= LONGEST and "\n" not in text:
        return text
    return f"{type(value).__name__} {getattr(value, 'name_or_path', '')}".strip()


def from_json(text: str | bytes, kind: type[T]) -> T:
    """Parses `text` into the dataclass `kind`.

    Raises:
        ValueError: `text` is no JSON, or a field is missing, unknown, of the wrong type or refused by the dataclass;
            the message names the first such field and its value.
    """
    from pydantic import ValidationError  # imported here: most calls save its quarter of a second

    try:
        value: T = _adapter(kind).validate_json(text, strict=True, extra="forbid")
        return value
    except ValidationError as error:
        problems = error.errors(include_url=False)
        # A file of another version also differs in other fields; report the version.
        first = next((each for each in problems if each["loc"] == ("version",)), problems[0])
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
        found = f" (found {first['input']!r:.60})" if first["type"] != "missing" and place else ""
        message = first["msg"].removeprefix("Value error, ").rstrip(".")
        raise ValueError(f"{place}: {message}{found}" if place else message) from None


def write_json(path: str | Path, value: Any) -> None:
    """Writes a dataclass to `path`, whole or not at all."""
    write_atomically(Path(path), to_json(value, indent=1) + "\n")


def read_json(path: str | Path, kind: type[T], what: str, remedy: str) -> T:
    """Reads what :func:`write_json` wrote; the file may have been edited by hand.

    Args:
        path, kind: the file, and the dataclass in it.
        what: names the content in errors: "roofline profile".
        remedy: the user's remedy for a damaged file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: as of :func:`from_json`; the message also names the file and the remedy.
    """
    try:
        return from_json(Path(path).read_bytes(), kind)
    except ValueError as error:
        raise ValueError(f"{path} is not a valid {what}: {error}; {remedy}.") from None


def _adapter(kind: Any) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]
