"""Compiles our C++ on the machine that runs it, and caches the result in the user's cache."""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache, partial
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import torch

from ..json_files import replacing
from ..user_cache import cache_directory, read_cached, save_cached


F = TypeVar("F", bound=Callable[..., Any])
logger = logging.getLogger(__name__)

# Without -ffp-contract=off a compiler rounds a product in one inlined copy of a function, and fuses it in another.
_COMPILE = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC")
# Our C++ leaves out the instructions that oneDNN leaves out, by values of ONEDNN_MAX_CPU_ISA.
_NO_TILES = "-mno-amx-tile", "-mno-amx-bf16"
_LEFT_OUT = (
    dict.fromkeys(("AVX2", "AVX2_VNNI", "AVX2_VNNI_2"), ("-mno-avx512f", *_NO_TILES))
    | dict.fromkeys(("AVX512_CORE", "AVX512_CORE_VNNI"), ("-mno-avx512bf16", *_NO_TILES))
    | dict.fromkeys(("AVX512_CORE_BF16", "AVX512_CORE_FP16"), _NO_TILES)
)
_LINK = ("-shared", "-fopenmp")
SOURCES = Path(__file__).parent
"""The folder of the C++."""
_SECONDS = 300  # most, of a compiler, which takes 4 on an idle machine


@cache
def compiler() -> str | None:
    """Path of the C++ compiler of this machine, or None."""
    return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


class Library(NamedTuple):
    """Inputs of a library's compilation."""

    source: str  # path, from the package's folder if it lies there
    macros: dict[str, str]


loaded: list[Library] = []
"""Libraries that this process has loaded."""
failed: list[Library] = []
"""Libraries that :func:`load` could not load."""
ahead: dict[str, Future[ctypes.CDLL]] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=ahead.clear)  # there its threads are gone


def untraced(function: F) -> F:
    """Hides `function`, which passes addresses to C++, from torch.compile: a trace has neither the addresses of
    tensors nor writes to them."""
    wrapped: F = torch.compiler.disable(function)
    return wrapped


def load_ahead(source: Path, **defined: object) -> None:
    """Begins what :func:`load` will do, in another thread: several libraries are compiled at once."""
    library = _library(source, defined)
    if compiler() is not None and library not in (*loaded, *failed) and str(library) not in ahead:
        ahead[str(library)] = future = Future[ctypes.CDLL]()
        Thread(target=_fill, args=(future, source, library.macros), name="compiler", daemon=True).start()


def _fill(future: Future[ctypes.CDLL], source: Path, macros: dict[str, str]) -> None:
    try:
        future.set_result(_load(source, macros))
    except BaseException as error:
        future.set_exception(error)


@untraced
def load(source: Path, **defined: object) -> ctypes.CDLL | None:
    """Returns the library of `source`, compiled now or by an earlier process, with macros `defined`, or None."""
    library, functions = _library(source, defined), None
    begun = ahead.pop(str(library), None)
    try:
        if compiler() is not None:
            functions = _load(source, library.macros) if begun is None else begun.result()
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or b""
        logger.info("torch does the work of %s, which is slower on a CPU: %s %s", source.stem, error, output.decode())
    known = failed if functions is None else loaded
    if library not in known:
        known.append(library)
    return functions


def _library(source: Path, defined: dict[str, object]) -> Library:
    short = source.relative_to(SOURCES) if source.is_relative_to(SOURCES) else source
    return Library(str(short), {name: str(value) for name, value in defined.items()})


def loads(libraries: list[Library]) -> bool:
    return all(each in loaded or load(SOURCES / each.source, **each.macros) is not None for each in libraries)


def target() -> bytes:
    """The predefined macros: the compiler's version and the instructions of this CPU that our C++ uses; machines may
    share a home. Raises OSError or SubprocessError if the compiler fails."""
    return _macros(_options({}))


def _options(macros: dict[str, str]) -> tuple[str, ...]:
    left_out = _LEFT_OUT.get(os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper(), ())
    return (*_COMPILE, *left_out, *(f"-D{name}={value}" for name, value in macros.items()))


@cache
def _macros(options: tuple[str, ...]) -> bytes:
    return _call(*options, "-dM", "-E", "-x", "c++", "/dev/null")


def _call(*arguments: str) -> bytes:
    program = compiler()
    assert program is not None
    return subprocess.run([program, *arguments], check=True, capture_output=True, timeout=_SECONDS).stdout


def _load(source: Path, macros: dict[str, str]) -> ctypes.CDLL:
    """Loads the library of `source` with `macros`, or compiles it. A library's name ends in the hash of its content:
    loading a part of one, left by a full disk, would end the process."""
    options = _options(macros)
    headers = {*SOURCES.glob("*.h"), *source.parent.glob("*.h")}
    included = b"".join(path.read_bytes() for path in sorted(headers))
    # Some options, such as -ffp-contract, define no macro.
    facts = " ".join(options).encode() + _macros(options) + source.read_bytes() + included
    stem = f"{source.stem}_{_hash(facts)}_"
    for path in sorted(cache_directory().glob(f"{stem}*.so")):
        library = read_cached(path, partial(_open_checked, start=stem), ", and compiled again")
        if library is not None:
            return library
    with tempfile.TemporaryDirectory() as folder:  # a loaded library stays when its file is removed
        compiled, linked = Path(folder, "code.o"), Path(folder, "code.so")
        _call(*options, "-c", str(source), "-o", str(compiled))
        _call(*_LINK, str(compiled), "-o", str(linked))
        path = cache_directory() / f"{stem}{_hash(linked.read_bytes())}.so"
        is_kept = save_cached(partial(_copy, linked), path)  # in a read-only home the next process compiles again
        return ctypes.CDLL(str(path if is_kept else linked))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _open_checked(path: Path, start: str) -> ctypes.CDLL:
    if path.stem != start + _hash(path.read_bytes()):
        raise ValueError("the file is damaged")
    return ctypes.CDLL(str(path))


def _copy(linked: Path, path: Path) -> None:
    with replacing(path) as fresh:  # several processes may do so at once
        shutil.copy(linked, fresh)
