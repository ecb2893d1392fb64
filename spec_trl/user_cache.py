"""Files in the user's cache: under SPEC_TRL_CACHE, or the user's cache directory. The user did not name them, so a
file that cannot be read or written ends no run."""

import hashlib
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar


T = TypeVar("T")


def cache_directory(kind: str = "kernels") -> Path:
    """The folder of "kernels" (compiled code, tables of kernel times) or of "profiles" (times of rounds)."""
    home = os.environ.get("SPEC_TRL_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "spec_trl" / kind


def file_name(readable: str, text: str) -> str:
    """Name of a JSON file: the characters of `readable` that file names allow, and a hash of `text`."""
    start = re.sub(r"[^A-Za-z0-9.+-]+", "-", readable)[:120].strip("-")
    return f"{start}_{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"


def read_cached(path: Path, load: Callable[[Path], T], then: str = "") -> T | None:
    """Returns `load(path)`; None if there is no file, or if it is damaged, with a warning that says what happens
    `then`."""
    try:
        return load(path) if path.exists() else None
    except (ValueError, LookupError, TypeError, OSError) as error:
        warnings.warn(f"{path} is left aside{then}: {error}", stacklevel=3)
        return None


def save_cached(save: Callable[[Path], object], path: Path, what: str) -> None:
    """Saves `what` to `path`; warns if that cannot be written, as in a read-only home."""
    try:
        save(path)
    except OSError as error:
        warnings.warn(f"the {what} could not be kept in {path}: {error}", stacklevel=3)
