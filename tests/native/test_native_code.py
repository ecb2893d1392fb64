"""Compiling C++: once per machine, by several processes at once, and where nothing compiles. What is kept of it, and
of trials of exactness, is checked before it is used."""

import ctypes
import os
import platform
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_trl import user_cache
from spec_trl.generation.engine.forwards import exactness
from spec_trl.generation.engine.network import cpu_layers
from spec_trl.native import native_code
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

    for begun in native_code.ahead.values():  # by tests before
        begun.exception()
    native_code.ahead.clear()
    monkeypatch.setenv("SPEC_TRL_CACHE", str(tmp_path))
    monkeypatch.setattr(native_code.subprocess, "run", noted)
    monkeypatch.setattr(native_code, "loaded", [])
    monkeypatch.setattr(native_code, "failed", [])
    cpu_layers.attention_function.cache_clear()
    native_code._macros.cache_clear()
    yield compiled
    cpu_layers.attention_function.cache_clear()


def stem(path: str) -> str:
    return Path(path).stem


def test_it_is_compiled_once_and_kept(compilations: list[str], tmp_path: Path) -> None:
    model = tiny_llama()
    expected = outputs(generate(model, PROMPTS, "none", {"runner": "eager"}))
    assert "cpu_attention" not in map(stem, compilations)
    for _ in range(2):
        assert outputs(generate(model, PROMPTS)) == expected
        cpu_layers.attention_function.cache_clear()  # as in another process
    assert [*map(stem, compilations)].count("cpu_attention") == 1
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
        load = partial(native_code.load, cpu_layers._ATTENTION, SCALAR="float", HEAD_SIZE=16)
        libraries = [loading.result() for loading in [pool.submit(load) for _ in range(3)]]
    assert all(library is not None and library.attend for library in libraries)
    assert len([path for path in (tmp_path / "spec_trl").rglob("*") if path.is_file()]) == 1


def test_libraries_are_compiled_ahead_and_a_fork_starts_anew(compilations: list[str], tmp_path: Path) -> None:
    source = tmp_path / "answer.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    native_code.load_ahead(source)
    native_code.load_ahead(source)
    assert len(native_code.ahead) == 1
    if not (child := os.fork()):
        signal.alarm(60)  # ends a child that waits for a thread of its parent
        right = False
        try:
            found = native_code.load(source)
            right = found is not None and found.answer() == 42 and not native_code.ahead
        finally:
            os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    found = native_code.load(source)
    assert found is not None and found.answer() == 42 and not native_code.ahead
    native_code.load_ahead(source)
    assert not native_code.ahead, "it is loaded"
    assert len(compilations) <= 1  # 0: the child was faster


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
        f'#include "{native_code.SOURCES}/cpu_vectors.h"\n'
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
        monkeypatch.setattr(cpu_layers, "_ATTENTION", broken)
    else:
        monkeypatch.setattr(native_code, "_SECONDS", 1e-3)
    for runner in ("compiled", "auto"):
        assert outputs(generate(model, PROMPTS, "self", {"runner": runner})) == expected
    assert [*map(stem, compilations)].count("broken") == (trouble == "it fails")  # tried once
    assert not [warning for warning in recwarn if "attention" in str(warning.message)]


@pytest.fixture
def answer(compilations: list[str], tmp_path: Path) -> Callable[[], Any]:
    """Loads a small library, as another process does."""
    source = tmp_path / "answer.cpp"
    source.write_text('extern "C" int answer() { return 42; }')

    def load() -> Any:
        native_code.loaded.clear()
        library = native_code.load(source)
        return None if library is None else library.answer()

    return load


def cut(path: Path, size: int) -> None:
    """Leaves a part of a library, in a file of its own: this process uses the first one."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:size])


def make_foreign(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives `path` to another user."""
    user_cache._warn_of_foreign.cache_clear()
    if os.geteuid() == 0:
        os.chown(path, 1, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)


@pytest.mark.parametrize("damage", ["emptied", "cut", "another user's", "in another user's folder"])
def test_a_library_that_cannot_be_trusted_is_compiled_again(
    answer: Callable[[], Any], compilations: list[str], monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """To load a part of one ends the process by SIGBUS."""
    assert answer() == 42
    folder = user_cache.cache_directory()
    (path,) = folder.glob("*.so")
    assert folder.stat().st_mode & 0o777 == 0o700
    if damage in ("emptied", "cut"):
        cut(path, 0 if damage == "emptied" else 9000)
        said = rf"{path.name} is left aside, and compiled again: the file is damaged"
    else:
        make_foreign(path if damage == "another user's" else folder, monkeypatch)
        said = "that another user owns are left aside"
    with pytest.warns(UserWarning, match=said) as warned:
        assert answer() == 42 and len(compilations) == 2
        assert answer() == 42
    assert len(warned) == 1 and len(compilations) == (3 if damage.startswith("in ") else 2)


def test_a_folder_that_others_may_write_is_closed(answer: Callable[[], Any]) -> None:
    folder = user_cache.cache_directory()
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert answer() == 42 and folder.stat().st_mode & 0o777 == 0o700


@pytest.fixture
def trials(answer: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Runners of trials of exactness, each of which needs a library and succeeds."""
    tried: list[Any] = []
    monkeypatch.setattr(exactness, "_try_out", lambda runner: [] if tried.append(runner) or answer() else [])
    return tried


def exact() -> Any:
    """What a call says of a model that this process has not seen."""
    native_code.loaded.clear()
    model = tiny_llama(num_hidden_layers=1).float()
    return generate(model, PROMPTS, "none", {"runner": "eager"}, max_new_tokens=2).statistics.exact


def test_a_verdict_is_used_only_where_it_holds(
    compilations: list[str], monkeypatch: pytest.MonkeyPatch, trials: list[Any]
) -> None:
    """It depends on what limits kernels, and on the libraries that load."""
    assert exact() is True and exact() is True and len(trials) == 1
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    assert exact() is True and len(trials) == 2
    monkeypatch.delenv("MKL_CBWR")
    (path,) = user_cache.cache_directory().glob("answer*.so")
    cut(path, 0)
    with pytest.warns(UserWarning, match="is left aside, and compiled again"):
        assert exact() is True
    assert len(trials) == 2 and len([name for name in compilations if "answer" in name]) == 2
    path.unlink()
    monkeypatch.setattr(native_code, "_LINK", ("-no-such-option",))
    for tried in (3, 4):  # a verdict without the library is not kept
        assert exact() is True and len(trials) == tried


def test_a_verdict_that_is_none_is_tried_anew(trials: list[Any]) -> None:
    exact()
    (path,) = user_cache.cache_directory().glob("exact_*.json")
    kept = path.read_bytes()
    wrong = '{"parts": "a", "libraries": []}', '{"parts": [], "libraries": [["a"]]}', '{"parts": []}'
    for number, text in enumerate(["true", "[1]", *wrong, "", "\xff"], start=2):
        path.write_text(text, encoding="latin-1")
        with pytest.warns(UserWarning, match="is left aside, and exactness is tried anew"):
            assert exact() is True
        assert len(trials) == number and path.read_bytes() == kept
