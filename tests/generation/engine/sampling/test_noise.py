"""Noise: standard Gumbel, a function of its key alone, and independent between keys."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spec_trl.generation.engine.rows import NoiseAhead, Request, Rows
from spec_trl.generation.engine.sampling import noise
from spec_trl.generation.engine.sampling.noise import (
    RoundNoise,
    derive,
    draw,
    gumbel_noise,
    position_keys,
    sample,
    stream_keys,
    token_logprobs,
    uniform_coins,
    widen,
)
from spec_trl.native import cpu_sampling
from spec_trl.native.native_code import compiler


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, or without a compiler."""
    monkeypatch.setattr(cpu_sampling, "library", lambda: None)


def noise_of(seed: int, requests: int, positions: int, vocabulary: int) -> torch.Tensor:
    """`[requests, positions, vocabulary]` as the engine draws it."""
    streams = stream_keys(seed, torch.arange(requests))
    keys = position_keys(streams, torch.arange(positions).expand(requests, -1))  # [requests, positions]
    return gumbel_noise(keys.flatten(), vocabulary).view(requests, positions, vocabulary)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten().double(), b.flatten().double()]))[0, 1])


def is_even(values: torch.Tensor, bins: int) -> bool:
    """Whether numbers of 0 to 1 pass the χ² test of bins of equal probability."""
    counts, expected = torch.histc(values, bins=bins, min=0, max=1), values.numel() / bins
    return float(((counts - expected) ** 2 / expected).sum()) < bins - 1 + 5 * math.sqrt(2 * (bins - 1))


def test_standard_gumbel() -> None:
    noise = noise_of(0, 64, 32, 512).double()  # 2**20 numbers
    assert is_even(torch.exp(-torch.exp(-noise)), 128)  # by the Gumbel distribution function


def test_tails_are_finite_and_long() -> None:
    """A float32 that rounds u to 1 gives an infinity about once in 2**25 draws."""
    extremes = [torch.stack(noise_of(seed, 1, 16, 152_000).aminmax()) for seed in range(4)]
    assert torch.isfinite(torch.stack(extremes)).all()
    assert torch.stack(extremes).max() > 13  # the largest of 10 million: 16.7 on average


def test_the_largest_hash_is_finite(in_torch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two ends of the 31 bits that noise is made of."""
    for bits, expected in ((0, 32 * math.log(2)), (0x7FFFFFFF, -math.log(24 * math.log(2)))):
        monkeypatch.setattr(noise, "_hash_into", lambda keys, counters, out, scratch, bits=bits: out.fill_(bits))
        drawn = gumbel_noise(torch.zeros(1, dtype=torch.int64), 4)
        assert drawn.tolist() == [[pytest.approx(expected, abs=1e-5)] * 4]


def test_the_noise_of_a_seed_is_what_it_has_always_been() -> None:
    keys = position_keys(stream_keys(7, torch.tensor([0, 3])), torch.tensor([[0, 1], [5, 2]]))
    assert keys.tolist() == [
        [-3844222181144947526, -7146037130765999330], [2046320547994309485, -4306823600481153522],
    ]  # fmt: skip
    noise = torch.tensor([0.2715192, 1.2206273, -0.4253611, 2.454185])
    torch.testing.assert_close(gumbel_noise(keys.flatten(), 5)[:, 0], noise)
    torch.testing.assert_close(
        gumbel_noise(keys.flatten(), 5)[0],
        torch.tensor([0.2715, -0.2048, -0.4058, -0.5860, -0.2282]),
        rtol=0,
        atol=1e-4,
    )
    assert derive(stream_keys(-5, torch.arange(1)), 2).tolist() == [2332777945548389549]
    assert uniform_coins(keys)[1, 1] == 0.9860789840371091


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=9), st.integers(1, 300))
def test_a_pure_function_of_the_key_and_the_token(keys: list[int], vocabulary: int) -> None:
    together = gumbel_noise(torch.tensor(keys), vocabulary)
    for key, row in zip(keys, together, strict=True):
        assert torch.equal(gumbel_noise(torch.tensor([key]), 300)[0, :vocabulary], row)


def test_chunks_are_seamless() -> None:
    """Two rows are hashed at a time, or less than one."""
    for vocabulary in (100_000, 300_000):
        noise = gumbel_noise(torch.arange(5), vocabulary)
        assert all(torch.equal(gumbel_noise(torch.tensor([i]), 64)[0], noise[i, :64]) for i in range(5))
        assert len(noise[:, -1].unique()) == 5


@settings(deadline=None, max_examples=6, derandomize=True)
@given(st.integers())
@example(2**63)
@example(2**200)
def test_requests_positions_and_seeds_are_independent(seed: int) -> None:
    noise = noise_of(seed, 8, 8, 4096)
    limit = 6 / math.sqrt(8 * 7 * 4096)
    assert abs(correlation(noise[1:], noise[:-1])) < limit, "requests"
    assert abs(correlation(noise[:, 1:], noise[:, :-1])) < limit, "positions"
    assert abs(correlation(noise[..., 1:], noise[..., :-1])) < limit, "tokens"
    assert abs(correlation(noise, noise_of(seed + 1, 8, 8, 4096))) < limit, "seeds"


def test_no_stream_is_a_copy_of_another() -> None:
    """Keys that are linear in request and position would repeat: (r, t + 1) = (r + 1, t), and so on."""
    fingerprints = {tuple(row) for row in noise_of(3, 24, 24, 16).flatten(0, 1).tolist()}
    assert len(fingerprints) == 24 * 24


def test_round_noise_is_the_noise_of_its_positions(in_torch: None) -> None:
    streams, positions = stream_keys(0, torch.arange(3)), torch.tensor([0, 5, 2])
    keys = position_keys(streams, positions[:, None] + torch.arange(1000))  # [3, 1000]
    block, later = RoundNoise(keys[:, :4].clone(), 50), RoundNoise(keys[:, 2:4].clone(), 50)
    assert torch.equal(block.at(2), later.at(0)) and torch.equal(block.at(2, 2), later.at(0, 2))
    large = RoundNoise(keys, 30_000)  # too large to keep: drawn step by step
    assert block.block is not None and large.block is None
    assert all(torch.equal(large.at(step)[..., :50], block.at(step)) for step in range(4))


def test_rows_know_the_keys_of_their_positions() -> None:
    rows = Rows(3, 40, torch.device("cpu"))
    admissions = [([(3, 5), (7, 9)], [5, 9]), ([(1, 4)], [7, 11, 3])]  # tokens of the prompt, stream; lengths then
    for requests, lengths in admissions:
        first = rows.active
        rows.admit([Request(first + i, torch.arange(n), 30, stream) for i, (n, stream) in enumerate(requests)])
        rows.commit(rows.host_lengths + 2, None)
        steps = rows.generated[:, None] + torch.arange(4)  # [active, 4]
        assert rows.lengths.tolist() == rows.host_lengths.tolist() == lengths
        assert torch.equal(rows.noise_keys(4), position_keys(rows.streams, steps))
    rows.drop([0])
    assert torch.equal(rows.noise_keys(1), position_keys(rows.streams, rows.generated[:, None]))
    assert rows.remaining.tolist() == (rows.limits - rows.lengths).tolist()
    assert rows.host_generated.tolist() == rows.generated.tolist()


def test_coins() -> None:
    streams, positions = stream_keys(0, torch.arange(512)), torch.arange(256).expand(512, -1)
    coins, others = (uniform_coins(position_keys(derive(streams, label), positions)) for label in (1, 2))  # [512, 256]
    assert 0 < float(coins.min()) and float(coins.max()) < 1 and is_even(coins, 64)
    drafts = gumbel_noise(position_keys(streams, positions).flatten(), 1)
    for one, other in ((coins, others), (coins, drafts), (coins[:, 1:], coins[:, :-1])):
        assert abs(correlation(one, other)) < 0.015


def test_sampling_follows_the_softmax() -> None:
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, 0.5, -torch.inf]).double()
    _, tokens = sample(logits.expand(200_000, -1), gumbel_noise(stream_keys(1, torch.arange(200_000)), 6))
    counts, expected = torch.bincount(tokens, minlength=6), logits.softmax(0) * 200_000
    assert counts[5] == 0
    assert float(((counts - expected) ** 2 / expected)[:5].sum()) < 4 + 5 * math.sqrt(2 * 4)
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, torch.nan, 1.0], [-torch.inf] * 3])
    scores, tokens = sample(logits, None)
    assert (int(tokens[0]), float(scores[0]), float(scores[2])) == (1, 3, -torch.inf) and torch.isnan(scores[1])


def test_logprobs_and_their_precision() -> None:
    logits, tokens = torch.randn(3, 4, 7, dtype=torch.float64), torch.randint(7, (3, 4))
    expected = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(token_logprobs(logits, tokens), expected, rtol=0, atol=1e-12)
    assert widen(logits.bfloat16()).dtype == torch.float32 and widen(logits).dtype == torch.float64


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.instructions
@pytest.mark.parametrize("vocabulary", [1, 13, 8193, 20_000])
def test_in_cpp_draws_are_those_of_torch(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = position_keys(stream_keys(3, torch.arange(20)), torch.arange(5).expand(20, -1))  # [20, 5]
    ours = gumbel_noise(keys.flatten(), vocabulary)
    logits = torch.randn(20, 5, vocabulary, generator=torch.Generator().manual_seed(0)) * 3
    logits[0, 0, vocabulary // 2], logits[1, 0], logits[2, 0, vocabulary // 3 :] = torch.nan, -torch.inf, -torch.inf
    logits[3, 0] = 1.0
    threads = torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        drawn = draw(logits, RoundNoise(keys, vocabulary), 0, want_logprobs=True)
        alone = draw(logits[4:5, 2:3], RoundNoise(keys[4:5], vocabulary), 2, want_logprobs=True)
        assert torch.equal(alone.logprobs, drawn.logprobs[4:5, 2:3])
    torch.set_num_threads(threads)
    scores, tokens = sample(logits, ours.view_as(logits))
    torch.testing.assert_close(drawn.scores, scores, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(drawn.tokens.flatten()[6:], tokens.flatten()[6:])  # any token of a broken row is right
    monkeypatch.setattr(cpu_sampling, "library", lambda: None)
    torch.testing.assert_close(ours, gumbel_noise(keys.flatten(), vocabulary), rtol=0, atol=2e-6)
    expected = token_logprobs(logits, drawn.tokens)
    torch.testing.assert_close(drawn.logprobs, expected, rtol=0, atol=1e-5, equal_nan=True)


def test_noise_of_later_rounds_is_the_noise_of_these_rounds(in_torch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, hashed = Rows(3, 60, torch.device("cpu")), []
    rows.admit([Request(i, torch.arange(n), 50, 7 * i) for i, n in enumerate([3, 5, 9])])
    gumbel = noise.gumbel_noise
    monkeypatch.setattr(noise, "gumbel_noise", lambda *given: hashed.append(len(given[0])) or gumbel(*given))
    ahead = NoiseAhead(rows, 20)
    for step in range(40):
        count = 3 if step == 5 else 1  # a round that drafts
        expected = gumbel(rows.noise_keys(count).view(-1), 20).view(rows.active, count, 20)
        assert torch.equal(ahead.of_round(count).at(0, count), expected)
        rows.commit(rows.host_lengths + (torch.arange(rows.active).numpy() if step == 9 else 1), None)
        if step == 20:
            rows.drop([0])
        if step == 30:
            rows.admit([Request(0, torch.arange(4), 50, 0)])
    assert len(hashed) < 10
