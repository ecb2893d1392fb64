"""Compiled attention on a CPU, and their runner. Token identity: `test_token_identity.py`."""

import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaForCausalLM

from spec_trl import native_code
from spec_trl.generation.engine import cpu_attention
from spec_trl.generation.engine.attention import MaskPlan, ragged_attention
from spec_trl.generation.engine.cache import RaggedCache
from spec_trl.generation.engine.compiled import CompiledRunner, cpu_runner
from spec_trl.generation.engine.cpu_attention import attend
from spec_trl.generation.engine.runner import EagerRunner
from spec_trl.generation.engine.shadow import make_shadow
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows


pytestmark = pytest.mark.skipif(native_code.compiler() is None, reason="no C++ compiler")
PROMPTS = pad_left(random_rows([9, 2, 14]))
SIZES: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, max_position_embeddings=128, initializer_range=0.1,
)  # fmt: skip
COLUMNS = 600  # more than one block of columns, for heads of 64


def heads(rows: int, count: int, kv_heads: int, groups: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries `[rows, heads, count, size]` as a projection lays them, keys and values as a part of a larger cache."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(rows, count, kv_heads * groups, size, generator=generator, dtype=dtype).transpose(1, 2)
    cache = torch.randn(2, rows + 2, kv_heads, COLUMNS + 7, size, generator=generator, dtype=dtype)
    return [queries, *cache[:, 1 : rows + 1, :, :COLUMNS]]


def spans_of(rows: int, count: int, window: int | None = None) -> tuple[Tensor, Tensor]:
    """Spans of queries in the last columns of rows of different lengths, and the mask that they stand for."""
    kind = "full_attention" if window is None else "sliding_attention"
    plan = MaskPlan((kind,), False, window or 0, 0)
    positions = torch.arange(COLUMNS - count, COLUMNS) - torch.arange(rows)[:, None] * 97 % (COLUMNS - count)  # [B, q]
    spans, mask = plan.spans(positions), plan.build(positions, COLUMNS, torch.float64)
    assert isinstance(spans, Tensor) and isinstance(mask, Tensor)
    return spans, mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("size", "groups", "count", "window"), [(64, 1, 1, None), (24, 3, 4, 50), (6, 2, 7, 5)])
@pytest.mark.parametrize("threads", [1, 2])
def test_it_is_attention_under_the_mask(size, groups, count, window, dtype: torch.dtype, threads: int) -> None:
    query, key, value = heads(5, count, 2, groups, size, dtype)
    spans, mask = spans_of(5, count, window)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = attend(query, key, value, spans, 0.3)
    finally:
        torch.set_num_threads(before)
    expected, _ = ragged_attention(nn.Module(), query.double(), key.double(), value.double(), mask, 0.3)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    assert found is not None and found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_neither_other_rows_nor_columns_nor_later_queries_change_a_bit() -> None:
    query, key, value = heads(5, 6, 2, 2, 16, torch.float32)
    spans, _ = spans_of(5, 6)
    together = attend(query, key, value, spans, 0.3)
    assert together is not None
    for row in range(5):
        for count in (1, 2, 5):
            own = slice(row, row + 1)
            columns = int(spans[row, 0, count - 1, 1]) + 1
            parts = query[own, :, :count], key[own, :, :columns], value[own, :, :columns], spans[own, :, :count]
            alone = attend(*parts, 0.3)
            assert alone is not None and torch.equal(alone, together[own, :count])


def test_nan_is_not_lost() -> None:
    """It is compiled by the rules for finite numbers."""
    query, key, value = heads(2, 1, 1, 1, 16, torch.float32)
    spans, _ = spans_of(2, 1)
    key[1, 0, 3] = torch.nan
    found = attend(query, key, value, spans, 0.3)
    assert found is not None and found[0].isfinite().all() and found[1].isnan().all()


@pytest.mark.parametrize("strategy", ["none", "self", "ngram"])
def test_tokens_are_those_of_masks(tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    calls = []
    monkeypatch.setattr("spec_trl.generation.engine.attention.attend", lambda *a: calls.append(1) or attend(*a))
    eager = outputs(generate(tiny, PROMPTS, "none", {"runner": "eager"}))
    assert not calls
    for runner in ("auto", "compiled"):
        calls.clear()
        assert outputs(generate(tiny, PROMPTS, strategy, {"runner": runner})) == eager
        assert len(calls) > 10


def test_soft_caps_and_windows_go_under_masks() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Gemma2Config(**SIZES, sliding_window=5)).double().eval()
    found = [outputs(generate(model, PROMPTS, "self", {"runner": runner})) for runner in ("compiled", "eager")]
    assert found[0] == found[1]


def test_a_cache_that_is_made_in_inference_mode_outlives_it(tiny: LlamaForCausalLM) -> None:
    """Prompts of one token have no prefill; rows that end first leave gaps, which are filled outside of it."""
    prompts = pad_left([torch.tensor([token]) for token in range(3, 11)])
    config, ends = {"max_batch_size": 4}, list(range(16))
    found = [
        outputs(generate(tiny, prompts, "none", config | {"runner": runner}, eos_token_id=ends))
        for runner in ("compiled", "eager")
    ]
    assert found[0] == found[1] and len({len(tokens) for tokens in found[0]}) > 2


@pytest.mark.parametrize("what", ["logits", "hidden states"])
def test_what_it_returns_can_be_learned_from(tiny: LlamaForCausalLM, what: str) -> None:
    runner = cpu_runner(make_shadow(tiny), RaggedCache.for_network(tiny, 1, 8))
    heard: list[Tensor] = []
    if what == "hidden states":
        runner.listen([1], lambda features, *_: heard.append(features))
    with torch.no_grad():
        found = [runner.forward(torch.tensor([[5]]), torch.tensor([[0]]), 1), *heard][-1]
    weight = torch.ones(found.shape[-1], requires_grad=True)
    (found * weight).sum().backward()
    assert weight.grad is not None


# ---- the compiler ---------------------------------------------------------------------------------------------------


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
    cpu_attention.compiled.cache_clear()
    yield compiled
    cpu_attention.compiled.cache_clear()


def test_it_is_compiled_once_and_kept(compilations: list[str], tmp_path: Path) -> None:
    model = tiny_llama()
    expected = outputs(generate(model, PROMPTS, "none", {"runner": "eager"}))
    assert not compilations
    for _ in range(2):
        assert outputs(generate(model, PROMPTS)) == expected
        cpu_attention.compiled.cache_clear()  # as in another process
    assert len(compilations) == 1
    assert [path.suffix for path in tmp_path.rglob("cpu_attention*")].count(".so") == 1


def test_where_nothing_can_be_kept_it_is_compiled_for_this_process(
    compilations: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a read-only home, or on a full disk."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPEC_TRL_CACHE", str(tmp_path / "file"))
    assert cpu_attention.compiled(torch.float32, 16) is not None
    assert len(compilations) == 1


def test_several_that_compile_at_once_keep_one_library(compilations: list[str], tmp_path: Path) -> None:
    """As the ranks of a first job do; nobody waits for another one."""
    with ThreadPoolExecutor(3) as pool:
        libraries = list(
            pool.map(lambda _: native_code.load(cpu_attention._SOURCE, SCALAR="float", HEAD_SIZE=16), "abc")
        )
    assert all(library is not None and library.attend for library in libraries)
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


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
        monkeypatch.setattr(cpu_attention, "_SOURCE", broken)
    else:
        monkeypatch.setattr(native_code, "_SECONDS", 1e-3)
    for runner in ("compiled", "auto"):
        assert outputs(generate(model, PROMPTS, "self", {"runner": runner})) == expected
    assert len(compilations) == (trouble == "it fails")  # tried once
    assert not [warning for warning in recwarn if "attention" in str(warning.message)]


def test_half_precision_stays_eager() -> None:

    model = tiny_llama()
    cache = RaggedCache.for_network(model, 1, 8)
    assert type(cpu_runner(model, cache)) is CompiledRunner
    assert type(cpu_runner(model.bfloat16(), cache)) is EagerRunner
