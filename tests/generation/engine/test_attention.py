"""Masks by position, and attention with folded heads, against the textbook."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from spec_trl.generation.engine import attention
from spec_trl.generation.engine.attention import MaskPlan, ragged_attention


POSITIONS = torch.tensor([[3, 4], [7, 8]])


def visible(plan: MaskPlan, columns: int = 10) -> torch.Tensor:
    """`[B, q, columns]` bool."""
    mask = plan.build(POSITIONS, columns, torch.float32)
    assert isinstance(mask, torch.Tensor) and mask.shape == (2, 1, 2, columns)
    assert set(mask.unique().tolist()) <= {0.0, torch.finfo(torch.float32).min}
    return mask[:, 0] == 0


@pytest.mark.parametrize(
    "kind, window, chunk, rule",
    [
        ("full_attention", 0, 0, lambda column, position: column <= position),
        ("sliding_attention", 3, 0, lambda column, position: position - 3 < column <= position),
        ("chunked_attention", 0, 4, lambda column, position: column <= position and column // 4 == position // 4),
    ],
)
def test_masks(kind, window, chunk, rule) -> None:
    found = visible(MaskPlan((kind,), False, window, chunk))
    for row in range(2):
        for query in range(2):
            position = int(POSITIONS[row, query])
            assert found[row, query].tolist() == [rule(column, position) for column in range(10)]


def test_one_mask_for_each_layer_type() -> None:
    plan = MaskPlan.from_config(AutoConfig.for_model("gemma3_text", sliding_window=3, num_hidden_layers=7))
    masks = plan.build(POSITIONS, 10, torch.float64)
    assert set(masks) == {"full_attention", "sliding_attention"}
    assert torch.equal(masks["sliding_attention"][:, 0] == 0, visible(MaskPlan(("sliding_attention",), False, 3, 0)))
    assert torch.equal(masks["full_attention"][:, 0] == 0, visible(MaskPlan(("full_attention",), False, 0, 0)))


@pytest.mark.parametrize(
    "config, types, per_type",
    [
        (AutoConfig.for_model("llama"), ("full_attention",), False),
        (AutoConfig.for_model("mistral", sliding_window=9), ("sliding_attention",), False),
        (AutoConfig.for_model("mistral", sliding_window=None), ("full_attention",), False),
        (AutoConfig.for_model("qwen2"), ("full_attention",), True),
    ],
)
def test_plans(config, types, per_type) -> None:
    plan = MaskPlan.from_config(config)
    assert (plan.layer_types, plan.per_type) == (types, per_type)


def test_layers_with_a_recurrent_state_are_refused_by_name() -> None:
    config = AutoConfig.for_model("qwen3_next", num_hidden_layers=4)
    with pytest.raises(ValueError, match="'qwen3_next' has layers of type .*'linear_attention'"):
        MaskPlan.from_config(config)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("extra", ["plain", "softcap", "sinks", "scaled"])
def test_attention(extra: str, length: int, groups: int) -> None:
    torch.manual_seed(0)
    batch, kv_heads, columns, size = 2, 3, 10, 8
    heads = kv_heads * groups
    query = torch.randn(batch, heads, length, size).double()
    key, value = (
        torch.randn(batch, kv_heads, columns, size).double(),
        torch.randn(batch, kv_heads, columns, 5).double(),
    )
    positions = torch.tensor([[3], [7]]) + torch.arange(length)
    mask = MaskPlan(("full_attention",), False, 0, 0).build(positions, columns, torch.float64)
    options = {
        "plain": {}, "softcap": dict(softcap=2.0), "sinks": dict(s_aux=torch.randn(heads).double()),
        "scaled": dict(scaling=0.7),
    }[extra]  # fmt: skip
    output, _ = ragged_attention(torch.nn.Identity(), query, key, value, mask, dropout=0.5, **options)
    assert output.shape == (batch, length, heads, 5)
    for row in range(batch):
        for head in range(heads):
            for step in range(length):
                seen = int(positions[row, step]) + 1
                scores = key[row, head // groups, :seen] @ query[row, head, step] * options.get("scaling", size**-0.5)
                if extra == "softcap":
                    scores = torch.tanh(scores / 2) * 2
                if extra == "sinks":
                    scores = torch.cat([scores, options["s_aux"][head : head + 1]])
                expected = scores.softmax(0)[:seen] @ value[row, head // groups, :seen]
                torch.testing.assert_close(output[row, step, head], expected)


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention", "chunked_attention"])
def test_spans_say_what_masks_say(kind: str) -> None:
    plan = MaskPlan((kind,), False, sliding_window=3, chunk_size=4)
    positions = torch.tensor([[0, 1, 2], [2, 3, 4], [9, 10, 11]])
    spans, mask = plan.spans(positions), plan.build(positions, 16, torch.float64)
    assert isinstance(spans, torch.Tensor) and isinstance(mask, torch.Tensor)
    column = torch.arange(16)
    inside = (column >= spans[..., :1]) & (column <= spans[..., 1:])  # [B, 1, q, columns]
    assert torch.equal(inside, mask == 0)


def test_spans_go_to_the_kernel() -> None:
    """`ragged_attention` under spans is what it is under the mask they stand for (fp32, interpreted on a CPU)."""
    pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(3, heads, n, 16, generator=generator) for heads, n in ((4, 3), (2, 40), (2, 40)))
    plan = MaskPlan(("sliding_attention",), False, sliding_window=7, chunk_size=0)
    positions = torch.tensor([[0, 1, 2], [12, 13, 14], [37, 38, 39]])
    for options in ({}, {"softcap": 5.0}, {"s_aux": torch.randn(4, generator=generator)}):
        masked, _ = ragged_attention(
            torch.nn.Module(), query, key, value, plan.build(positions, 40, torch.float32), 0.3, **options
        )
        spanned, _ = ragged_attention(torch.nn.Module(), query, key, value, plan.spans(positions), 0.3, **options)
        torch.testing.assert_close(spanned, masked, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wanted", [True, False])
def test_torchs_own_kernels_inside_and_the_users_choice_after(wanted: bool) -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(wanted)
        with ThreadPoolExecutor(1) as pool:
            leave, entered = threading.Event(), threading.Event()

            def beside() -> bool:
                with attention._WITHOUT_CUDNN:
                    entered.set()
                    assert leave.wait(10)
                    return torch.backends.cuda.cudnn_sdp_enabled()

            with attention._WITHOUT_CUDNN:
                assert not torch.backends.cuda.cudnn_sdp_enabled()
                found = pool.submit(beside)
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
