"""Attention in C++, and its runner. Layers in one call: `test_one_call.py`; tokens: `test_token_identity.py`."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPTNeoConfig,
    GptOssConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
)

from spec_trl.generation.engine.forwards.cpu_runner import CompiledRunner, cpu_runner
from spec_trl.generation.engine.forwards.runner import EagerRunner
from spec_trl.generation.engine.kv.cache import RaggedCache
from spec_trl.generation.engine.network import cpu_layers
from spec_trl.generation.engine.network.attention import MaskPlan, ragged_attention
from spec_trl.generation.engine.network.cpu_layers import attend
from spec_trl.generation.engine.network.shadow import make_shadow
from spec_trl.native import native_code
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows


pytestmark = pytest.mark.skipif(native_code.compiler() is None, reason="no C++ compiler")
PROMPTS = pad_left(random_rows([9, 2, 14]))
SIZES: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, max_position_embeddings=128, initializer_range=0.1,
)  # fmt: skip
COLUMNS = 1100  # many blocks of columns
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCES))
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "softcap and sinks": {"softcap": 2.0, "sinks": torch.randn(6)}}


def heads(rows: int, count: int, kv_heads: int, groups: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries `[rows, heads, count, size]` as a projection lays them, keys and values as a part of a larger cache."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(rows, count, kv_heads * groups, size, generator=generator).to(dtype).transpose(1, 2)
    cache = torch.randn(2, rows + 2, kv_heads, COLUMNS + 7, size, generator=generator).to(dtype)
    return [queries, *cache[:, 1 : rows + 1, :, :COLUMNS]]


def plan_of(window: int | None) -> MaskPlan:
    return MaskPlan(("full_attention" if window is None else "sliding_attention",), False, window or 0, 0)


def spans_of(rows: int, count: int, window: int | None = None) -> tuple[Tensor, Tensor]:
    """Spans of queries in the last columns of rows of different lengths, and the mask that they stand for."""
    plan = plan_of(window)
    positions = torch.arange(COLUMNS - count, COLUMNS) - torch.arange(rows)[:, None] * 97 % (COLUMNS - count)  # [B, q]
    spans, mask = plan.spans(positions), plan.build(positions, COLUMNS, torch.float64)
    assert isinstance(spans, Tensor) and isinstance(mask, Tensor)
    return spans, mask


def attended(query: Tensor, key: Tensor, value: Tensor, spans: Any, **options: Any) -> Tensor:
    found = attend(query, key, value, spans, 0.3, **options)
    assert found is not None and found.dtype == query.dtype
    return found


@DTYPES
@pytest.mark.parametrize(("size", "groups", "count", "window"), [(64, 3, 1, None), (24, 3, 40, 50), (6, 3, 7, 5)])
@pytest.mark.parametrize(("threads", "options"), [(1, "plain"), (2, "softcap and sinks")])
def test_it_is_attention_under_the_mask(size, groups, count, window, dtype, threads: int, options: str) -> None:
    given = OPTIONS[options]
    query, key, value = heads(5, count, 2, groups, size, dtype)
    spans, mask = spans_of(5, count, window)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = attended(query, key, value, spans, **given)
    finally:
        torch.set_num_threads(before)
    wide = dict(scaling=0.3, softcap=given.get("softcap"), s_aux=given.get("sinks"))
    expected, _ = ragged_attention(nn.Module(), query.double(), key.double(), value.double(), mask, **wide)
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_rounds_to_the_nearest_and_ties_to_even(dtype: torch.dtype) -> None:
    """Means of two neighbours."""
    query, numbers = torch.zeros(1, 1, 1, 16, dtype=dtype), 1 + torch.arange(17) * torch.finfo(dtype).eps
    value = torch.stack([numbers[:-1], numbers[1:]])[None, None].to(dtype)  # [1, 1, 2, 16]
    found = attended(query, torch.zeros_like(value), value, torch.tensor([[[[0, 1]]]]))
    assert torch.equal(found.flatten(), value.double().mean(2).flatten().to(dtype))


@DTYPES
@pytest.mark.parametrize("size", [24, 64])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("options", list(OPTIONS))
def test_nothing_else_in_a_call_changes_a_bit(size: int, window: int | None, dtype: torch.dtype, options: str) -> None:
    """Neither other queries, a thousand or one, nor other rows, nor columns, nor threads."""
    given, plan = OPTIONS[options], plan_of(window)
    query, key, value = heads(7, 1000, 1, 6, size, dtype)
    spans = plan.spans(torch.arange(1000).expand(7, -1))
    assert isinstance(spans, Tensor)
    whole = attended(query, key, value, spans, **given)
    rows = torch.arange(64) * 5 % 7
    for count in (1, 6, 9, 65):
        for first in (0, 61, 1000 - count):
            own, end = slice(first, first + count), first + count
            parts = query[:, :, own], key[:, :, :end], value[:, :, :end], spans[:, :, own]
            assert torch.equal(attended(*parts, **given), whole[:, own])
            assert torch.equal(attended(*(part[3:4] for part in parts), **given), whole[3:4, own])
        assert torch.equal(attended(*(part[rows] for part in parts), **given), whole[rows, own])
    some = torch.tensor([900, 3, 64, 63, 500])
    assert torch.equal(attended(query[:, :, some], key, value, spans[:, :, some], **given), whole[:, some])


@DTYPES
def test_what_a_query_does_not_see_may_be_anything(dtype: torch.dtype) -> None:
    query, key, value = heads(1, 9, 1, 2, 16, dtype)
    spans, _ = spans_of(1, 9)
    expected = attended(query, key, value, spans)
    key[:, :, COLUMNS - 3 :] = value[:, :, COLUMNS - 3 :] = torch.nan
    found = attended(query, key, value, spans)
    assert torch.equal(found[:, :6], expected[:, :6]) and found[:, 6:].isnan().all()


@DTYPES
@pytest.mark.parametrize("size", [24, 64])
@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention", "chunked_attention"])
def test_chains_are_summed_as_if_each_were_alone(dtype: torch.dtype, size: int, kind: str, monkeypatch) -> None:
    plan = MaskPlan((kind,), False, 45, 70)
    query, key, value = heads(2, 9, 2, 3, size, dtype)
    last = torch.tensor([62, 200])[:, None]
    shifts = torch.tensor([0, 0, 0, 0, 3, 3, 5, 5, 5])  # chains of three, two and three tokens after the last one
    places = last + torch.arange(9)  # [B, q]
    positions = places - shifts
    spans = plan.spans(positions, places=places)
    assert isinstance(spans, Tensor)
    together = attended(query, key, value, spans)
    for slots in (range(4), (0, 4, 5), (0, 6, 7, 8)):
        own = torch.tensor(slots)
        alone_key, alone_value = key.clone(), value.clone()
        for row in range(2):
            to, where = positions[row, own], places[row, own]
            alone_key[row, :, to], alone_value[row, :, to] = key[row, :, where], value[row, :, where]
        alone = attended(query[:, :, own], alone_key, alone_value, plan.spans(positions[:, own]))
        assert torch.equal(together[:, own], alone)
    monkeypatch.setattr(cpu_layers, "attention_function", lambda *_: None)
    masks = plan.build(positions, COLUMNS, dtype, places)
    masked, spanned = (ragged_attention(nn.Module(), query, key, value, given)[0] for given in (masks, spans))
    assert torch.equal(masked, spanned)


def test_nan_is_not_lost() -> None:
    """It is compiled by the rules for finite numbers."""
    query, key, value = heads(2, 1, 1, 1, 16, torch.float32)
    spans, _ = spans_of(2, 1)
    key[1, 0, 3] = torch.nan
    found = attend(query, key, value, spans, 0.3)
    assert found is not None and found[0].isfinite().all() and found[1].isnan().all()


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens per row of each call of `attend` that served."""
    found: list[int] = []

    def noted(query: Tensor, *given: Any) -> Tensor | None:
        output = attend(query, *given)
        found.extend([] if output is None else [query.shape[2]])
        return output

    monkeypatch.setattr("spec_trl.generation.engine.network.attention.attend", noted)
    return found


@pytest.mark.parametrize("strategy", ["none", "self", "ngram"])
def test_tokens_are_those_of_masks(tiny: LlamaForCausalLM, lengths: list[int], strategy: str) -> None:
    prompts = pad_left(random_rows([9, 2, 80]))
    eager = outputs(generate(tiny, prompts, "none", {"runner": "eager"}))
    assert not lengths
    for runner in ("auto", "compiled"):
        lengths.clear()
        assert outputs(generate(tiny, prompts, strategy, {"runner": runner})) == eager
        assert len(lengths) > 10 and max(lengths) == 80


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SIZES, sliding_window=5),
        GptOssConfig(**SIZES, sliding_window=5, num_local_experts=2, num_experts_per_tok=1),
    ],
)
def test_soft_caps_windows_and_sinks(config: PreTrainedConfig, lengths: list[int]) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().eval()
    eager = outputs(generate(model, PROMPTS, "self", {"runner": "eager"}))
    assert not lengths
    assert outputs(generate(model, PROMPTS, "self", {"runner": "compiled"})) == eager
    assert max(lengths) == 25


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


@pytest.mark.parametrize("compiled", [True, False])
def test_texts_of_several_lengths_are_read_as_one_row(
    tiny: LlamaForCausalLM, lengths: list[int], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits, and the states that drafters learn from, are those of each text alone; padding has none."""
    if not compiled:
        monkeypatch.setattr("spec_trl.generation.engine.network.attention.attend", lambda *_: None)
    tokens, positions = torch.arange(3, 21).view(3, 6), torch.arange(6).repeat(3, 1)
    heard: list[Tensor] = []
    found = []
    for rows, fed in ((slice(0, 3), [6, 2, 4]), (slice(0, 1), [6]), (slice(1, 2), [2]), (slice(2, 3), [4])):
        runner = CompiledRunner(make_shadow(tiny), RaggedCache.for_network(tiny, 4, 8))
        runner.listen([1], lambda features, *_: heard.append(features))
        width = max(fed)
        places = [(row, count - 1) for row, count in enumerate(fed)]
        given = tokens[rows, :width], positions[rows, :width]
        found.append(runner.prefill(*given, width, 1, places, fed))
    together, alone = heard[0], heard[1:]
    for row, states in enumerate(alone):
        torch.testing.assert_close(together[row, : states.shape[1]], states[0], atol=1e-12, rtol=0)
        assert not together[row, states.shape[1] :].any()
    torch.testing.assert_close(found[0], torch.cat(found[1:]), atol=1e-12, rtol=0)
    assert lengths == ([12] * 2 + [6] * 2 + [2] * 2 + [4] * 2 if compiled else [])


def test_texts_stay_padded_where_attention_could_not_be_compiled(
    tiny: LlamaForCausalLM, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's attention would need a mask over the columns of all rows."""
    generate(tiny, PROMPTS, "none")
    monkeypatch.setattr("spec_trl.generation.engine.forwards.cpu_runner.attention_failed", lambda: True)
    assert max(lengths) == 25
    lengths.clear()
    generate(tiny, PROMPTS, "none")
    assert max(lengths) == 14


def test_float16_is_compiled_too(lengths: list[int]) -> None:
    generate(tiny_llama().half(), PROMPTS, "none", {"exact": False})
    assert max(lengths) == 25


class _OfItsOwn(nn.Module):
    is_causal = True

    def forward(self, x: Tensor) -> Tensor:
        return x @ x.transpose(-1, -2) @ x


def test_attention_code_that_nobody_knows_stays_eager() -> None:
    layers = dict(num_layers=2, attention_types=[[["global", "local"], 1]])
    model = AutoModelForCausalLM.from_config(GPTNeoConfig(vocab_size=64, hidden_size=32, num_heads=2, **layers))
    cache = RaggedCache.for_network(model, 1, 8)
    assert type(cpu_runner(model, cache)) is not EagerRunner
    model.transformer.h[0].attn.attention = _OfItsOwn()
    assert type(cpu_runner(model, cache)) is EagerRunner


@DTYPES
@pytest.mark.parametrize("sizes", [(24, 16), (16, 24)], ids=str)
def test_heads_of_two_sizes(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    (query, key, _), (_, _, value) = (heads(5, 40, 2, 3, size, dtype) for size in sizes)
    spans, mask = spans_of(5, 40)
    scores = query.double() @ key.double().repeat_interleave(3, 1).transpose(2, 3) * 0.3 + mask
    exact = scores.softmax(-1) @ value.double().repeat_interleave(3, 1)  # [B, heads, q, d]
    found = attended(query, key, value, spans)
    assert (found.double() - exact.transpose(1, 2)).abs().max() < TOLERANCES[dtype]
    assert torch.equal(attended(query[:, :, 7:9], key, value, spans[:, :, 7:9]), found[:, 7:9])
