"""Compiling C++: once per machine, by several processes at once, and where nothing compiles."""

import ctypes
import platform
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_trl import native_code
from spec_trl.generation.engine import cpu_layers
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows


pytestmark = pytest.mark.skipif(native_code.compiler() is None, reason="no C++ compiler")
PROMPTS = pad_left(random_rows([9, 2, 14]))


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Source files that were compiled into an empty cache."""
    compiled: list[str] = []
    run = subprocess.run

    def noted(arguments: list[str], **options: Any) -> Any:
        compiled.extend(arguments[arguments.index("-c") + 1 :][:1] if "-c" in arguments else [])
        return run(arguments, **options)

    monkeypatch.setenv("SPEC_TRL_CACHE", str(tmp_path))
    monkeypatch.setattr(native_code.subprocess, "run", noted)
    cpu_layers.attention_function.cache_clear()
    yield compiled
    cpu_layers.attention_function.cache_clear()


def test_it_is_compiled_once_and_kept(compilations: list[str], tmp_path: Path) -> None:
    model = tiny_llama()
    expected = outputs(generate(model, PROMPTS, "none", {"runner": "eager"}))
    assert not compilations
    for _ in range(2):
        assert outputs(generate(model, PROMPTS)) == expected
        cpu_layers.attention_function.cache_clear()  # as in another process
    assert len(compilations) == 1
    assert [path.suffix for path in (tmp_path / "spec_trl").rglob("cpu_attention*")].count(".so") == 1


def test_where_nothing_can_be_kept_it_is_compiled_for_this_process(
    compilations: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a read-only home, or on a full disk."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPEC_TRL_CACHE", str(tmp_path / "file"))
    assert cpu_layers.attention_function(torch.float32, 16) is not None
    assert len(compilations) == 1


def test_several_that_compile_at_once_keep_one_library(compilations: list[str], tmp_path: Path) -> None:
    """As the ranks of a first job do; nobody waits for another one."""
    with ThreadPoolExecutor(3) as pool:
        libraries = list(pool.map(lambda _: native_code.load(cpu_layers._SOURCE, SCALAR="float", HEAD_SIZE=16), "abc"))
    assert all(library is not None and library.attend for library in libraries)
    assert len([path for path in (tmp_path / "spec_trl").rglob("*") if path.is_file()]) == 1


def test_a_header_that_changes_is_compiled_anew(compilations: list[str], tmp_path: Path) -> None:
    header, source = tmp_path / "number.h", tmp_path / "answer.cpp"
    source.write_text('#include "number.h"\nextern "C" int answer() { return NUMBER; }')
    for number in (1, 1, 2):
        header.write_text(f"#define NUMBER {number}")
        library = native_code.load(source)
        assert library is not None and library.answer() == number
    assert len(compilations) == 2


def test_a_product_is_fused_where_the_source_says_so(compilations: list[str], tmp_path: Path) -> None:
    """A compiler that chose would choose otherwise in another copy of the same loop."""
    source = tmp_path / "sums.cpp"
    source.write_text(
        f'#include "{cpu_layers._SOURCE.parents[2]}/cpu_vectors.h"\n'
        'extern "C" double plain(double a, double b) { return a * a + b; }\n'
        'extern "C" double fused_(double a, double b) { return fused(a, a, b); }\n'
    )
    library = native_code.load(source)
    x, square = 1 + 2**-30, -(1 + 2**-29)  # x * x is 2**-60 more, before it is rounded
    for name, expected in (("plain", 0), ("fused_", 2**-60)):
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.c_double] * 2, ctypes.c_double
        assert function(x, square) == expected


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the values are those of x86-64")
def test_it_leaves_out_what_onednn_leaves_out(
    compilations: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "has.cpp"
    names = "__AVX2__", "__AVX512F__", "__AVX512BF16__", "__AMX_TILE__"
    lines = [f"#ifdef {name}\n+{2**at}\n#endif" for at, name in enumerate(names)]
    source.write_text('extern "C" int has() { return 0\n' + "\n".join(lines) + "\n; }")

    def has(most: str) -> int:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", most)
        library = native_code.load(source)
        assert library is not None
        return library.has()

    everything = has("ALL")
    for most, allowed in (("AVX2", 1), ("avx512_core", 3), ("AVX512_CORE_BF16", 7), ("AVX512_CORE_AMX", 15)):
        assert has(most) == everything & allowed


@pytest.mark.parametrize("trouble", ["no compiler", "it fails", "it hangs"])
def test_without_a_compiler_attention_stays_torchs(
    compilations: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trouble: str, recwarn, request
) -> None:
    model = tiny_llama()
    expected = outputs(generate(model, PROMPTS, "none", {"runner": "eager"}))
    if trouble == "no compiler":
        monkeypatch.setattr(shutil, "which", lambda name: None)
        native_code.compiler.cache_clear()
        request.addfinalizer(native_code.compiler.cache_clear)
    elif trouble == "it fails":
        broken = tmp_path / "broken.cpp"
        broken.write_text("this is not C++")
        monkeypatch.setattr(cpu_layers, "_SOURCE", broken)
    else:
        monkeypatch.setattr(native_code, "_SECONDS", 1e-3)
    for runner in ("compiled", "auto"):
        assert outputs(generate(model, PROMPTS, "self", {"runner": runner})) == expected
    assert len(compilations) == (trouble == "it fails")  # tried once
    assert not [warning for warning in recwarn if "attention" in str(warning.message)]
