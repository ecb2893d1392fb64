"""Stores files under SPEC_TRL_CACHE, or in the user's cache directory. A file that cannot be read or written ends no
run. A file that another user can have written is not read: it may be code."""

import functools
import hashlib
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar


T = TypeVar("T")
_ROOT = 0  # may read and write everything anyway


def cache_directory(kind: str = "kernels") -> Path:
    """The folder of "kernels" (compiled code, tables of kernel times, verdicts on exactness) or of "profiles" (times
    of rounds)."""
    return _home() / "spec_trl" / kind


def _home() -> Path:
    return Path(os.environ.get("SPEC_TRL_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def file_name(readable: str, text: str) -> str:
    """Name of a JSON file: the characters of `readable` that file names allow, and a hash of `text`."""
    start = re.sub(r"[^A-Za-z0-9.+-]+", "-", readable)[:120].strip("-")
    return f"{start}_{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"


def read_cached(path: Path, load: Callable[[Path], T], then: str = "") -> T | None:
    """Returns `load(path)`; None without a file, or, with a warning that ends with `then`, if the file is damaged or
    another user's."""
    try:
        return load(path) if path.exists() and not is_foreign(path) else None
    except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        warnings.warn(f"{path} is left aside{then}: {error}", stacklevel=3)
        return None


def save_cached(save: Callable[[Path], object], path: Path, what: str = "") -> bool:
    """Saves to `path`, in a folder of this user alone, and returns whether that succeeded. Warns if `what` could not
    be written, as in a read-only home."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_foreign(path.parent):
            return False
        save(path)
    except OSError as error:
        if what:
            warnings.warn(f"the {what} could not be kept in {path}: {error}", stacklevel=3)
        return False
    return True


def is_foreign(path: Path) -> bool:
    """Whether another user can have written `path`, a file or folder in the user's cache; one warning per folder. A
    folder of this user that others may write is closed to them. Other files are named by the user."""
    if not hasattr(os, "geteuid") or not path.is_relative_to(_home() / "spec_trl"):  # Windows has no such owners
        return False
    folder = path if path.is_dir() else path.parent
    ours = {os.geteuid(), _ROOT}
    about = folder.stat()
    if about.st_uid == os.geteuid() and about.st_mode & 0o022:
        folder.chmod(0o700)
    if {about.st_uid, path.stat().st_uid} <= ours:
        return False
    _warn_of_foreign(folder)
    return True


@functools.cache
def _warn_of_foreign(folder: Path) -> None:
    warnings.warn(
        f"files in {folder} that another user owns are left aside, and made anew in this process. Set SPEC_TRL_CACHE "
        "to a folder of your own.",
        stacklevel=4,
    )
