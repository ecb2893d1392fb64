"""Compiles our C++ on the machine where it runs, if it has a compiler, and caches the result in the user's cache."""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from .json_files import replacing
from .user_cache import cache_directory


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
_SECONDS = 60  # after which a compiler is stopped


@cache
def compiler() -> str | None:
    """Path of the C++ compiler of this machine; None: there is none."""
    return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def load(source: Path, **defined: object) -> ctypes.CDLL | None:
    """Returns the library of `source`, compiled now or by an earlier process, with macros `defined`, or None."""
    program = compiler()
    if program is None:
        return None
    left_out = _LEFT_OUT.get(os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper(), ())
    options = (*_COMPILE, *left_out, *(f"-D{name}={value}" for name, value in defined.items()))

    def call(*arguments: str) -> bytes:
        return subprocess.run([program, *arguments], check=True, capture_output=True, timeout=_SECONDS).stdout

    try:
        # The predefined macros name the compiler's version and this CPU's instructions: machines may share a home.
        headers = {*Path(__file__).parent.glob("*.h"), *source.parent.glob("*.h")}
        included = b"".join(path.read_bytes() for path in sorted(headers))
        facts = call(*options, "-dM", "-E", "-x", "c++", "/dev/null") + source.read_bytes() + included
        path = cache_directory() / f"{source.stem}_{hashlib.sha256(facts).hexdigest()[:16]}.so"
        with tempfile.TemporaryDirectory() as folder:  # a loaded library stays when its file is removed
            if not path.exists():
                compiled, linked = Path(folder, "code.o"), Path(folder, path.name)
                call(*options, "-c", str(source), "-o", str(compiled))
                call(*_LINK, str(compiled), "-o", str(linked))
                try:  # several processes may do so at once
                    with replacing(path) as fresh:
                        shutil.copy(linked, fresh)
                except OSError:  # a read-only home, a full disk: the next process compiles again
                    path = linked
            return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or b""
        logger.info("torch does the work of %s, which is slower on a CPU: %s %s", source.stem, error, output.decode())
        return None
