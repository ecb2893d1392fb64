"""Masks and spans by position, and what attends under them. `test_families.py` has softcaps, sinks and scales."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spec_trl.generation.engine.forwards.runner import EagerRunner
from spec_trl.generation.engine.kv.pages import PagedCache
from spec_trl.generation.engine.network import attention
from spec_trl.generation.engine.network.attention import MaskPlan, ragged_attention
from spec_trl.generation.engine.network.family import Family
from spec_trl.generation.engine.network.shadow import make_shadow
from spec_trl.generation.engine.rows import Request, Rows
from tests.tiny_families import make


RULES: dict[str, Callable[[int, int], bool]] = {
    "full_attention": lambda column, position: column <= position,
    "sliding_attention": lambda column, position: position - 3 < column <= position,
    "chunked_attention": lambda column, position: column <= position and column // 4 == position // 4,
}


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.sampled_from(list(RULES)), st.lists(st.integers(0, 12), min_size=1, max_size=3), st.integers(1, 4))
def test_masks_and_spans_follow_the_rule(kind: str, starts: list[int], count: int) -> None:
    plan = MaskPlan((kind,), False, sliding_window=3, chunk_size=4)
    positions = torch.tensor(starts)[:, None] + torch.arange(count)  # [B, q]
    mask, spans = plan.build(positions, 16, torch.float64), plan.spans(positions)
    assert isinstance(mask, torch.Tensor) and isinstance(spans, torch.Tensor)
    expected = [[[RULES[kind](column, at) for column in range(16)] for at in row] for row in positions.tolist()]
    assert set(mask.unique().tolist()) <= {0.0, torch.finfo(mask.dtype).min}
    assert (mask[:, 0] == 0).tolist() == expected
    column = torch.arange(16)
    inside = (column >= spans[..., :1]) & (column <= spans[..., 1:])  # [B, 1, q, columns]
    assert inside[:, 0].tolist() == expected


def test_spans_go_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ragged_attention` under spans is what it is under the mask they stand for (fp32, interpreted on a CPU)."""
    pytest.importorskip("triton")
    monkeypatch.setattr(attention, "run_on", lambda device: True)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, n, 16, generator=generator) for heads, n in ((2, 2), (1, 20), (1, 20)))
    plan = MaskPlan(("sliding_attention",), False, sliding_window=7, chunk_size=0)
    positions = torch.tensor([[0, 1], [17, 18]])
    options: dict[str, Any] = dict(scaling=0.3, softcap=5.0, s_aux=torch.randn(2, generator=generator))
    masks = plan.build(positions, 20, torch.float32)
    masked, _ = ragged_attention(torch.nn.Module(), query, key, value, masks, **options)
    spanned, _ = ragged_attention(torch.nn.Module(), query, key, value, plan.spans(positions), **options)
    torch.testing.assert_close(spanned, masked, rtol=1e-5, atol=1e-5)


class Largest(TorchDispatchMode):
    """Notes the most elements of a tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [each.numel() for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        self.elements = max(self.elements, *made, 0)
        return result


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_5_text"])
def test_a_long_prompt_makes_no_mask(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: of 8,192 tokens, under windows and beside states too. The kernel itself would take the interpreter
    minutes."""
    kernel = pytest.importorskip("spec_trl.generation.engine.cuda.kernels.ragged_attention", exc_type=ImportError)
    calls: list[int] = []

    def hold(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *_: Any) -> torch.Tensor:
        calls.append(query.shape[2])
        return query.transpose(1, 2).contiguous()

    monkeypatch.setattr(kernel, "ragged_decode_attention", hold)
    monkeypatch.setattr(attention, "run_on", lambda device: True)
    network = make_shadow(make(family).float())
    kind = Family.of(network)
    paged = PagedCache.with_pages(network, 1, 8256, None)
    cache = paged if kind.takes_pages else kind.cache.for_network(network, 1, 8256)
    rows = Rows(1, 8256, torch.device("cpu"))
    admission = rows.admit([Request(0, torch.arange(8192) % 64, 8250, 0)])
    with Largest() as largest:
        _, logits = EagerRunner(network, cache).read_prompts(rows, admission)
    assert logits is not None and logits.shape == (1, 1, 64) and sum(calls) % 8192 == 0 and max(calls) == 2048
    assert largest.elements < 2048 * 2048, "else it has a number for each query and column"


@pytest.mark.parametrize("wanted", [True, False])
def test_torchs_own_kernels_inside_and_the_users_choice_after(wanted: bool) -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(wanted)
        with ThreadPoolExecutor(1) as pool:
            leave, entered = threading.Event(), threading.Event()

            def in_another_thread() -> bool:
                with attention.WITHOUT_CUDNN:
                    entered.set()
                    assert leave.wait(10)
                    return torch.backends.cuda.cudnn_sdp_enabled()

            with attention.WITHOUT_CUDNN:
                assert not torch.backends.cuda.cudnn_sdp_enabled()
                found = pool.submit(in_another_thread)
                assert entered.wait(10)
            # The other one, which came second, is still inside.
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            leave.set()
            assert not found.result()
        assert torch.backends.cuda.cudnn_sdp_enabled() == wanted
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.cuda
def test_masked_attention_plans_nothing_per_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    attend = attention.F.scaled_dot_product_attention

    def watch(*args: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*args, **options)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", watch)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    query, key = (torch.randn(2, heads, 3, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2))
    ragged_attention(torch.nn.Module(), query, key, key, torch.zeros(2, 1, 3, 3, device="cuda", dtype=torch.bfloat16))
    assert seen == [False] and torch.backends.cuda.cudnn_sdp_enabled() == before
