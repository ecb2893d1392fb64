"""The fused draw against the draw in torch, in the interpreter or on a device."""

import math

import pytest
import torch

from spec_trl.generation.engine.noise import gumbel_noise, position_keys, sample, stream_keys, token_logprobs, widen
from tests.generation.engine.kernels.ahead_of_time import compile_for


pytest.importorskip("triton", reason="Triton is not installed")

from spec_trl.generation.engine.kernels import gumbel_sampler
from spec_trl.generation.engine.kernels.gumbel_sampler import fused_draw


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF_AND_FULL = [torch.float32, torch.bfloat16, torch.float16]


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


@pytest.mark.parametrize("keys", [[0, -1, 1], [-(2**63), 2**63 - 1, 2**31], [0x7FFFFFFF00000000, 1 << 40, -12345]])
def test_noise_is_that_of_torch(keys: list[int]) -> None:
    """A row with one token left shows that token's noise: all of the vocabulary, a token a row."""
    vocabulary = 15
    alone = torch.full((vocabulary, vocabulary), -torch.inf, device=DEVICE).fill_diagonal_(0)
    for key in keys:
        column = torch.full((vocabulary,), key, device=DEVICE)
        tokens, noise, logprobs = fused_draw(alone, column)
        expected = gumbel_noise(column[:1], vocabulary)[0].double()
        assert tokens.tolist() == list(range(vocabulary))
        # Three roundings of two logarithms: float32 cannot be asked for more.
        assert ((noise.double() - expected).abs() <= 4 * 2**-23 * expected.abs().clamp(min=1)).all()
        assert (logprobs == 0).all()


def test_noise_of_late_tokens_and_extreme_hashes() -> None:
    """Tokens beyond a chunk, and the draws where u is nearly 0 and nearly 1."""
    vocabulary = 3 * gumbel_sampler._CHUNK
    key = keys_of(3, 1)
    noise = gumbel_noise(key, vocabulary)[0]
    chosen = torch.cat([noise.topk(3).indices, (-noise).topk(3).indices])
    alone = torch.full((6, vocabulary), -torch.inf, device=DEVICE)
    alone[torch.arange(6), chosen] = 0
    tokens, found, _ = fused_draw(alone, key.expand(6))
    assert torch.equal(tokens, chosen)
    torch.testing.assert_close(found, noise[chosen], rtol=5e-7, atol=5e-7)


@pytest.mark.parametrize("seed", [-5, 2**63])
def test_draws_of_many_keys(seed: int) -> None:
    torch.manual_seed(0)
    rows = 1000 if DEVICE == "cuda" else 50  # the interpreter takes its time per row
    compare(random(rows, 500), keys_of(seed, rows))


@pytest.mark.parametrize("dtype", HALF_AND_FULL)
@pytest.mark.parametrize("vocabulary", [1, 7, 4096, 4097, 12_293])
def test_any_vocabulary(vocabulary: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = random(6, vocabulary, dtype=dtype)
    compare(logits, keys_of(1, 6), 0.7)
    compare(logits, None, 0.7)


def test_chunks_are_seamless(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits, keys = random(10, 1000), keys_of(2, 10)
    whole = fused_draw(logits, keys, 1.3)
    monkeypatch.setattr(gumbel_sampler, "_CHUNK", 64)
    parts = fused_draw(logits, keys, 1.3)
    assert torch.equal(parts[0], whole[0]) and torch.equal(parts[1], whole[1])
    torch.testing.assert_close(parts[2], whole[2], rtol=1e-6, atol=1e-6)


def test_draws_follow_the_softmax() -> None:
    rows = 200_000 if DEVICE == "cuda" else 200
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -torch.inf, 0.5], device=DEVICE)
    tokens, _, _ = fused_draw(logits.expand(rows, -1), keys_of(7, rows), 1.5)
    counts = torch.bincount(tokens, minlength=6).double()
    expected = (logits.double() / 1.5).softmax(0) * rows
    assert counts[4] == 0
    kept = expected > 0
    assert float(((counts - expected) ** 2 / expected)[kept].sum()) < 4 + 5 * math.sqrt(2 * 4)


@pytest.mark.parametrize("dtype", HALF_AND_FULL)
def test_the_first_of_equals_wins(dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 12_000, device=DEVICE, dtype=dtype)
    logits[0, [11_999, 5000, 5001]] = 2  # in the second and the third chunk
    logits[1, [4000, 4095, 4096]] = 2  # on both sides of a border
    tokens, scores, logprobs = fused_draw(logits, None)
    assert tokens.tolist() == [5000, 4000, 0]
    assert scores.tolist() == [2, 2, 0]
    torch.testing.assert_close(logprobs, token_logprobs(logits.double(), tokens).float())


def test_nan_and_dead_rows() -> None:
    logits = random(4, 9000)
    logits[1, 8000] = torch.nan
    logits[2] = -torch.inf
    logits[3, :8999] = -torch.inf
    for keys in (None, keys_of(0, 4)):
        tokens, scores, logprobs = fused_draw(logits, keys)
        assert scores.isnan().tolist() == [False, True, False, False]
        assert logprobs.isnan().tolist() == [False, True, True, False]
        assert scores[2] == -torch.inf and tokens[2] == 0
        assert tokens[3] == 8999 and logprobs[3] == 0
        assert 0 <= tokens[1] < 9000


def test_floors_act_as_top_k() -> None:
    torch.manual_seed(0)
    logits, keys = random(12, 5000, dtype=torch.bfloat16), keys_of(4, 12)
    x = divided(logits, 0.7)
    floors = x.topk(20).values[:, -1]  # [N]
    floors[7] = -torch.inf  # no floor
    floors[8] = torch.inf  # nothing is left
    filtered = x.masked_fill(x < floors[:, None], -torch.inf)
    tokens, scores, logprobs = fused_draw(logits, keys, 0.7, floors)
    expected_scores, expected_tokens = sample(filtered, gumbel_noise(keys, 5000))
    assert scores[8] == -torch.inf and logprobs[8].isnan()
    kept = torch.arange(12) != 8
    assert torch.equal(tokens[kept], expected_tokens[kept])
    torch.testing.assert_close(scores[kept], expected_scores[kept], rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(logprobs[kept], token_logprobs(filtered, tokens)[kept], rtol=1e-6, atol=4e-6)
    assert (tokens != fused_draw(logits, keys, 0.7)[0]).any(), "the floors did something"


@pytest.mark.parametrize("temperature", [0.3, 0.7, 0.9, 1.1, 1.7])
def test_a_floor_at_the_maximum_leaves_the_maximum(temperature: float) -> None:
    """x in the kernel has the bits that it has where the floors are made; one less, and nothing would be left."""
    torch.manual_seed(0)
    logits = random(50, 300)
    tokens, scores, _ = fused_draw(logits, keys_of(0, 50), temperature, divided(logits, temperature).amax(1))
    assert torch.equal(tokens, logits.argmax(1))
    assert torch.isfinite(scores).all()


def test_nan_below_a_floor_is_still_seen() -> None:
    logits = torch.tensor([[0.0, torch.nan, 3.0]], device=DEVICE)
    assert fused_draw(logits, None, 1.0, torch.tensor([1.0], device=DEVICE))[1].isnan()


def test_rows_any_stride_apart() -> None:
    torch.manual_seed(0)
    logits = random(12, 3, 1003, dtype=torch.bfloat16)
    keys = torch.stack([keys_of(0, 12), keys_of(1, 12)], dim=1)  # [12, 2]
    floors = torch.full((12, 2), -1.0, device=DEVICE)
    strided = fused_draw(logits[:, 1, :1000], keys[:, 1], 0.7, floors[:, 0])
    dense = fused_draw(logits[:, 1, :1000].clone(), keys[:, 1].clone(), 0.7, floors[:, 0].clone())
    assert all(torch.equal(a, b) for a, b in zip(strided, dense, strict=True))


def test_no_rows() -> None:
    assert [len(part) for part in fused_draw(random(0, 10), keys_of(0, 0))] == [0, 0, 0]


def _step(hidden, weight, keys, floors):
    tokens, scores, logprobs = fused_draw(hidden @ weight, keys, 0.7, floors)
    return tokens + 1, scores.isnan(), logprobs * 2


def test_compiles_as_one_graph() -> None:
    torch.manual_seed(0)
    inputs = random(5, 8), random(8, 90), keys_of(0, 5), torch.full((5,), -1.0, device=DEVICE)
    compiled = torch.compile(_step, fullgraph=True, backend="aot_eager")
    for found, expected in zip(compiled(*inputs), _step(*inputs), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("noise", [True, False])
def test_is_a_proper_operator(noise: bool) -> None:
    inputs = random(5, 90, dtype=torch.bfloat16), keys_of(0, 5) if noise else None, 0.7, None
    op = torch.ops.spec_trl.gumbel_draw.default
    torch.library.opcheck(op, inputs, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(logits=torch.zeros(2, 5, dtype=torch.float64)), "logits are torch.float64"),
        (dict(logits=torch.zeros(2, 3, 5)), r"logits are torch.float32 of shape \[2, 3, 5\]"),
        (dict(logits=torch.zeros(2, 0)), r"of shape \[2, 0\]"),
        (dict(logits=torch.zeros(5, 2).T), "logits have strides"),
        (dict(keys=torch.zeros(2, dtype=torch.int32)), "keys are torch.int32"),
        (dict(keys=torch.zeros(3, dtype=torch.int64)), r"keys are torch.int64 of shape \[3\]"),
        (dict(floors=torch.zeros(2).double()), "floors are torch.float64"),
        (dict(temperature=0.0), "temperature=0.0 must be positive"),
        (dict(temperature=math.nan), "temperature=nan must be positive"),
    ],
    ids=str,
)
def test_bad_input_is_refused(change: dict[str, object], message: str) -> None:
    given = dict(logits=torch.zeros(2, 5), keys=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=message):
        fused_draw(**(given | change))


def test_machine_code(tmp_path) -> None:
    """What the interpreter lets pass, a compiler may not."""
    calls = """
from spec_trl.generation.engine.kernels.gumbel_sampler import fused_draw
keys, floors = torch.empty(2, dtype=torch.int64), torch.empty(2)
for dtype in (torch.bfloat16, torch.float32):
    fused_draw(torch.empty(2, 152064, dtype=dtype), keys, 0.7, floors)
    fused_draw(torch.empty(2, 152064, dtype=dtype), None)
"""
    kernels = compile_for(90, calls, tmp_path)
    assert [name for name, _ in kernels] == ["_draw_chunk", "_merge_chunks"] * 4


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
