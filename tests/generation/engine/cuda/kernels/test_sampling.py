"""The fused draw against the draw in torch, and the cut of top-p against transformers, interpreted or on a device."""

from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import TopPLogitsWarper

from spec_trl.generation.engine.sampling.noise import (
    gumbel_noise,
    position_keys,
    sample,
    stream_keys,
    token_logprobs,
    widen,
)
from tests.generation.engine.cuda.kernels.ahead_of_time import CAPABILITIES, compile_for


pytest.importorskip("triton", reason="Triton is not installed")

from spec_trl.generation.engine.cuda.kernels import sampling
from spec_trl.generation.engine.cuda.kernels.sampling import fused_draw


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def keys_of(seed: int, rows: int) -> torch.Tensor:
    """`[rows]` int64, one position in each of `rows` streams."""
    streams = stream_keys(seed, torch.arange(rows, device=DEVICE))
    return position_keys(streams, torch.zeros(rows, 1, dtype=torch.int64, device=DEVICE))[:, 0]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (3 * torch.randn(*shape)).to(DEVICE, dtype)


def divided(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """float32(logits) / temperature with the rounding that CUDA gives it; on a CPU torch really divides."""
    if DEVICE == "cuda":
        return widen(logits) / temperature
    return widen(logits) * (1 / torch.tensor(temperature, dtype=torch.float32))


def compare(logits: torch.Tensor, keys: torch.Tensor | None, temperature: float = 1.0) -> None:
    """Against torch: the same tokens but for scores closer than rounding."""
    x = divided(logits, temperature)  # [N, V]
    noise = None if keys is None else gumbel_noise(keys, x.shape[1])
    expected_scores, expected_tokens = sample(x, noise)
    tokens, scores, logprobs = fused_draw(logits, keys, temperature)
    assert (tokens.dtype, scores.dtype, logprobs.dtype) == (torch.int64, torch.float32, torch.float32)
    perturbed = x if noise is None else x + noise
    gap = expected_scores - perturbed.gather(1, tokens[:, None])[:, 0]
    assert ((tokens == expected_tokens) | (gap < 1e-5)).all() and (tokens == expected_tokens).float().mean() > 0.998
    if noise is None:
        assert torch.equal(tokens, expected_tokens) and torch.equal(scores, expected_scores)
    torch.testing.assert_close(scores, expected_scores, rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(logprobs, token_logprobs(x.double(), tokens).float(), rtol=1e-6, atol=4e-6)


def test_a_draw_from_two_chunks() -> None:
    """Rows and keys any stride apart, floors, a token below its floor, NaN, and rows with one token or none left."""
    torch.manual_seed(0)
    vocabulary = sampling.CHUNK + 3
    logits = random(8, 2, vocabulary + 5, dtype=torch.bfloat16)[:, 1, :vocabulary]  # [8, V]
    keys = torch.stack([keys_of(0, 8), torch.tensor([0, -1, 1, -(2**63), 2**63 - 1, 2**31, -12345, 1 << 40])], dim=1)
    keys, x = keys.to(DEVICE)[:, 1], divided(logits, 0.7)
    floors = torch.stack([x.topk(20).values[:, -1], x[:, 0]], dim=1)[:, 0]  # [8]
    logits[3, 4000] = logits[4, vocabulary - 1] = torch.nan  # in either chunk, below any floor
    logits[5] = -torch.inf
    floors[6] = torch.inf
    logits[7], floors[7] = -torch.inf, -torch.inf
    logits[7, vocabulary - 2] = -3
    x = divided(logits, 0.7)
    expected_scores, expected = sample(x.masked_fill(x < floors[:, None], -torch.inf), gumbel_noise(keys, vocabulary))
    tokens, scores, logprobs = fused_draw(logits, keys, 0.7, floors)
    assert scores.isnan().tolist() == [False] * 3 + [True, True] + [False] * 3
    assert logprobs.isnan().tolist() == [False] * 3 + [True] * 4 + [False]
    assert scores[5] == scores[6] == -torch.inf and tokens[5] == 0 and logprobs[7] == 0
    kept = torch.tensor([0, 1, 2, 7])
    assert torch.equal(tokens[kept], expected[kept]) and (tokens < vocabulary).all() and (tokens >= 0).all()
    torch.testing.assert_close(scores[kept], expected_scores[kept], rtol=1e-6, atol=4e-6)
    filtered = x.masked_fill(x < floors[:, None], -torch.inf)
    torch.testing.assert_close(logprobs[kept], token_logprobs(filtered, tokens)[kept], rtol=1e-6, atol=4e-6)
    compare(logits[:3, :90], keys[:3], 0.7)
    compare(logits[:3, :90], None)


def test_noise_is_that_of_torch() -> None:
    """A row with one token left shows that token's noise: a token a row."""
    alone = torch.full((7, 7), -torch.inf, device=DEVICE).fill_diagonal_(0)
    column = torch.full((7,), 0x7FFFFFFF00000000, device=DEVICE)
    tokens, noise, logprobs = fused_draw(alone, column)
    expected = gumbel_noise(column[:1], 7)[0].double()
    assert tokens.tolist() == list(range(7)) and (logprobs == 0).all()
    # Three roundings of two logarithms: float32 cannot be asked for more.
    assert ((noise.double() - expected).abs() <= 4 * 2**-23 * expected.abs().clamp(min=1)).all()
    assert [len(part) for part in fused_draw(random(0, 10), keys_of(0, 0))] == [0, 0, 0]


@pytest.mark.slow
@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.sampled_from([1, 7, 500, 4096, 4097, 12_293]),
    st.integers(-(2**63), 2**63), st.sampled_from([0.3, 0.7, 1.0, 1.7]),
)  # fmt: skip
def test_any_vocabulary(dtype: torch.dtype, vocabulary: int, seed: int, temperature: float) -> None:
    torch.manual_seed(0)
    logits = random(6, vocabulary, dtype=dtype)
    compare(logits, keys_of(seed, 6), temperature)
    compare(logits, None, temperature)
    # x in the kernel has the bits that it has where the floors are made; one less, and nothing would be left.
    tokens, scores, _ = fused_draw(logits, keys_of(seed, 6), temperature, divided(logits, temperature).amax(1))
    assert torch.equal(logits.gather(1, tokens[:, None])[:, 0], logits.amax(1)) and torch.isfinite(scores).all()


def test_the_first_of_equals_wins() -> None:
    logits = torch.zeros(3, 2 * sampling.CHUNK, device=DEVICE, dtype=torch.bfloat16)
    logits[0, [8191, 5000, 5001]] = 2  # in the second chunk
    logits[1, [4000, 4095, 4096]] = 2  # on both sides of a border
    tokens, scores, logprobs = fused_draw(logits, None)
    assert tokens.tolist() == [5000, 4000, 0]
    assert scores.tolist() == [2, 2, 0]
    torch.testing.assert_close(logprobs, token_logprobs(logits.double(), tokens).float())


@pytest.mark.parametrize(
    "tests",
    [("test_schema", "test_faketensor"), pytest.param("test_aot_dispatch_dynamic", marks=pytest.mark.slow)],
)
def test_is_a_proper_operator(tests: str | tuple[str, ...]) -> None:
    inputs = random(5, 90, dtype=torch.bfloat16), keys_of(0, 5), 0.7, None
    torch.library.opcheck(torch.ops.spec_trl.gumbel_draw.default, inputs, test_utils=tests)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_machine_code(capability, tmp_path) -> None:
    """What the interpreter lets pass, a compiler may not."""
    calls = """
from spec_trl.generation.engine.cuda.kernels.sampling import fused_draw
keys, floors = torch.empty(2, dtype=torch.int64), torch.empty(2)
for dtype in (torch.bfloat16, torch.float32):
    fused_draw(torch.empty(2, 152064, dtype=dtype), keys, 0.7, floors)
    fused_draw(torch.empty(2, 152064, dtype=dtype), None)
"""
    kernels = compile_for(capability, calls, tmp_path)
    assert [kernel.name for kernel in kernels] == ["_draw_chunk", "_merge_chunks"] * 4


@pytest.mark.cuda
def test_a_captured_graph_draws_anew() -> None:
    torch.manual_seed(0)
    logits, keys = random(32, 152_064, dtype=torch.bfloat16), keys_of(0, 32)
    fused_draw(logits, keys, 0.7)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = fused_draw(logits, keys, 0.7)
    for seed in (1, 2):
        logits.copy_(random(32, 152_064))
        keys.copy_(keys_of(seed, 32))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(drawn, fused_draw(logits, keys, 0.7), strict=True))
        compare(logits, keys, 0.7)


# ---- where top-p cuts -----------------------------------------------------------------------------------------------


def kept(x: Tensor, floors: Tensor, first: Tensor) -> Tensor:
    """`[N, V]` bool."""
    token = torch.arange(x.shape[1], device=x.device)
    return (x > floors[:, None]) | ((x == floors[:, None]) & (token >= first[:, None]))


def of_stable_sort(x: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """What transformers' top-p keeps if its sort is stable, in float64; and which rows cut too close to a token to
    ask float32 for it."""
    values, tokens = x.double().sort(stable=True)
    mass = values.softmax(-1).cumsum(-1)
    removed = mass <= 1 - top_p
    removed[:, -1] = False
    close = ((mass - (1 - top_p)).abs() < 1e-6).any(1)
    return removed.logical_not().scatter(1, tokens, removed.logical_not()), close


@settings(deadline=None, max_examples=20, derandomize=True, database=None, phases=[Phase.generate])  # it is slow
@given(
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.99]), seed=st.integers(0, 2**32),
    vocabulary=st.sampled_from([1, 7, 40, 61]), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    temperature=st.sampled_from([1.0, 0.7]), top_k=st.sampled_from([None, 1, 5]), scale=st.sampled_from([0.1, 3.0]),
)  # fmt: skip
def test_keeps_what_a_stable_sort_keeps(top_p, seed, vocabulary, dtype, temperature, top_k, scale) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(3, 2, vocabulary, generator=generator)).to(DEVICE, dtype)[:, 1]
    logits[1] = logits[1].round()  # ties, zeros of either sign
    logits[2] = 0.5
    x = logits.float() * (1 / torch.tensor(temperature))
    floors = None if top_k is None else x.topk(min(top_k, vocabulary)).values[:, -1].contiguous()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "CHUNK", 32)
        floor, first = sampling.top_p_floors(logits, top_p, temperature, floors)
    filtered = x if floors is None else x.masked_fill(x < floors[:, None], -torch.inf)
    expected, close = of_stable_sort(filtered, top_p)
    assert torch.equal(kept(filtered, floor, first)[~close], expected[~close])
    assert kept(filtered, floor, first).any(1).all()
    if top_k is None:
        alone = expected[~close] == (TopPLogitsWarper(top_p)(None, x)[~close] > -torch.inf)
        assert alone[(x[~close].sort(1).values.diff(dim=1) > 0).all(1)].all()  # transformers itself, without ties


def random_logits(dtype: torch.dtype) -> Tensor:
    """`[6, 61]`, of any size, with ties, zeros of either sign and numbers that a float32 hardly holds."""
    scales = torch.tensor([0.3, 3, 3, 9, 1e-42, 0])[:, None]
    logits = scales * torch.randn(6, 61, generator=torch.Generator().manual_seed(0))
    logits[1] = logits[1].round()
    logits[2] -= 20
    return logits.to(DEVICE, dtype)


@pytest.mark.parametrize(
    ("dtype", "top_p", "temperature"),
    [(torch.float32, 0.9, 0.7), (torch.bfloat16, 0.3, 0.7), (torch.float16, 0.9, 1.0)], ids=str,
)  # fmt: skip
def test_cuts_where_a_bisection_cuts(dtype, top_p, temperature, monkeypatch) -> None:
    """Bit for bit: both search for the lowest key with more than the same bound at or below it, by the same sums."""
    logits = random_logits(dtype)[1::2]
    monkeypatch.setattr(sampling, "CHUNK", 32)
    found = sampling.top_p_floors(logits, top_p, temperature)
    monkeypatch.setattr(sampling, "WAYS", 2)
    bisected = sampling.top_p_floors(logits, top_p, temperature)
    assert all(map(torch.equal, found, bisected))
    alone = sampling.top_p_floors(logits[:1], top_p, temperature)
    assert all(torch.equal(one, many[:1]) for one, many in zip(alone, found, strict=True))


@pytest.mark.skipif(DEVICE == "cuda", reason="it counts in the interpreter")
@pytest.mark.parametrize(("dtype", "passes"), [(torch.bfloat16, 5), (torch.float32, 9)], ids=str)
def test_passes_over_the_logits(dtype, passes, monkeypatch) -> None:
    """The one for the peaks, which is torch's, and the steps; then each row reads one chunk."""
    from triton.runtime.interpreter import InterpreterBuilder

    load, amax, read = InterpreterBuilder.create_masked_load, Tensor.amax, []

    def count(builder, pointers, *others):
        if pointers.data.shape == (32,):  # nothing but logits is read in chunks
            read.append(pointers.data.size)
        return load(builder, pointers, *others)

    def count_all(logits, dim):
        read.append(logits.shape[0] * 64)
        return amax(logits, dim)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", count)
    monkeypatch.setattr(Tensor, "amax", count_all)
    monkeypatch.setattr(sampling, "CHUNK", 32)
    logits = random_logits(dtype)  # two chunks
    sampling.top_p_floors(logits, 0.9)
    assert sum(read) == passes * len(logits) * 64 + len(logits) * 32


def test_rows_that_are_broken() -> None:
    """Nothing is removed, as by transformers, and the draw says what is wrong."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    logits[0, 3], logits[1], logits[2, 9] = torch.nan, -torch.inf, torch.inf
    floors, first = sampling.top_p_floors(logits, 0.5)
    assert floors.tolist()[:3] == [-torch.inf] * 3 and first.tolist()[:3] == [0, 0, 0] and floors[3] > -torch.inf
    _, scores, _ = fused_draw(logits, None, 1.0, floors, first)
    assert scores[0].isnan() and scores[1] == -torch.inf and scores[3] == logits[3].max()


def test_of_equals_the_draw_takes_those_that_are_left() -> None:
    logits = torch.zeros(2, 40, device=DEVICE)
    floors, first = sampling.top_p_floors(logits, 0.26)
    tokens, _, logprobs = fused_draw(logits, None, 1.0, floors, first)
    assert first.tolist() == tokens.tolist() == [29, 29]  # 11 of 40 hold 0.26 and more
    torch.testing.assert_close(logprobs, torch.full_like(logprobs, 11.0).log().neg())


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_machine_code_of_cut_and_draw(capability, tmp_path: Path) -> None:
    """Nothing spills; and where 16 divides the vocabulary, logits are read 16 bytes at a time."""
    calls = """
from spec_trl.generation.engine.cuda.kernels.sampling import fused_draw
from spec_trl.generation.engine.cuda.kernels.sampling import top_p_floors
for vocabulary, dtype in ((50_257, torch.bfloat16), (151_936, torch.bfloat16), (128_256, torch.float32)):
    logits = torch.zeros(4, vocabulary, dtype=dtype)
    floors, first = top_p_floors(logits, 0.9, 0.7, torch.zeros(4))
    fused_draw(logits, None, 0.7, floors, first)
"""
    compiled = compile_for(capability, calls, tmp_path)
    steps = {2: 4, 4: 8}  # bytes of a logit
    for size, is_aligned in ((2, False), (2, True), (4, True)):
        names = ["_narrow"] * steps[size] + ["_finish", "_draw_chunk", "_merge_chunks"]
        assert [each.name for each in compiled[: len(names)]] == names
        for each in compiled[: len(names)]:
            if each.name in ("_narrow", "_draw_chunk") and is_aligned:  # chunks of 4096 by 256 threads
                assert each.ptx.count("ld.global.v4.b32") >= size, each.name
        del compiled[: len(names)]
