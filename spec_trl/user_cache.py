"""Files that are kept between processes: under SPEC_TRL_CACHE, or the user's cache directory. Nobody named them, so
one that cannot be read or written ends no run."""

import hashlib
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar


T = TypeVar("T")


def cache_directory(kind: str = "kernels") -> Path:
    """The folder of "kernels", compiled code and tables of kernels, or of "profiles", what is known of rounds."""
    home = os.environ.get("SPEC_TRL_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "spec_trl" / kind


def file_name(readable: str, text: str) -> str:
    """The name of a JSON file that begins with what can stand in a name of `readable`; no other `text` has it."""
    start = re.sub(r"[^A-Za-z0-9.+-]+", "-", readable)[:120].strip("-")
    return f"{start}_{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"


def read_kept(path: Path, load: Callable[[Path], T], then: str = "") -> T | None:
    """What `load` reads of `path`. None where there is no file, or where it is damaged; then a warning says what will
    happen `then`."""
    try:
        return load(path) if path.exists() else None
    except (ValueError, LookupError, TypeError, OSError) as error:
        warnings.warn(f"{path} is left aside{then}: {error}", stacklevel=3)
        return None


def save_kept(save: Callable[[Path], object], path: Path, what: str) -> None:
    """Saves `what` to `path`; a warning where that cannot be written, as in a read-only home."""
    try:
        save(path)
    except OSError as error:
        warnings.warn(f"the {what} could not be kept in {path}: {error}", stacklevel=3)
