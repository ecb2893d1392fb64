"""Verification: by hand, and by the distribution of what comes out of the engine."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from spec_trl.generation.engine.drafter import Drafter
from spec_trl.generation.engine.noise import RoundNoise, draw, stream_keys
from spec_trl.generation.engine.verification import Proposal, verify_exact, verify_rejection
from tests.conftest import tiny_llama
from tests.generation.calls import generate, pad_left, random_rows


def one_hot_logits(tokens: list[list[int]], vocabulary: int = 10) -> Tensor:
    """Logits `[B, n, vocabulary]` whose argmax are `tokens`."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocabulary).double() * 5


def test_exact_accepts_the_leading_agreement() -> None:
    target = [[4, 5, 6, 7]] * 6
    drafts = [[4, 5, 6], [4, 5, 0], [4, 0, 6], [0, 5, 6], [4, 5, 6], [4, 5, 6]]
    lengths = [3, 3, 3, 3, 1, 0]
    drawn = draw(one_hot_logits(target), None, want_logprobs=True)
    verdict = verify_exact(drawn, Proposal(torch.tensor(drafts), torch.tensor(lengths)))
    assert verdict.accepted.tolist() == [3, 2, 1, 0, 1, 0]
    assert verdict.tokens.tolist() == target
    assert verdict.logprobs is not None
    torch.testing.assert_close(verdict.logprobs, one_hot_logits(target).log_softmax(-1).amax(-1))


def test_exact_samples_with_the_noise_of_the_position() -> None:
    logits = torch.randn(2, 3, 50, dtype=torch.float64)
    noise = RoundNoise(stream_keys(0, torch.arange(2)), torch.tensor([4, 9]), 3, 50)
    verdict = verify_exact(draw(logits, noise), Proposal(torch.zeros(2, 2).long(), torch.zeros(2).long()))
    for position in range(3):
        assert verdict.tokens[:, position].tolist() == (logits[:, position] + noise.at(position)).argmax(-1).tolist()


def rejection_counts(p: Tensor, q: Tensor, lengths: int = 1, samples: int = 100_000) -> tuple[Tensor, float]:
    """Counts of the first token that comes out, and the share of drafts accepted, for p, q `[V]`."""
    generator = torch.Generator().manual_seed(0)
    drafts = torch.multinomial(q, samples, replacement=True, generator=generator)[:, None]  # [n, 1]
    keys = torch.randint(-(2**63), 2**63 - 1, (2, samples, 2), generator=generator)
    logits = p.log().expand(samples, 2, -1)
    proposal = Proposal(drafts, torch.full((samples,), lengths), q.log().expand(samples, 1, -1))
    verdict = verify_rejection(logits, proposal, keys[0], keys[1], want_logprobs=False)
    return torch.bincount(verdict.tokens[:, 0], minlength=len(p)), float(verdict.accepted.double().mean())


def chi_square(counts: Tensor, p: Tensor) -> tuple[float, float]:
    """χ² of counts `[V]` against probabilities p `[V]`, and the limit it passes in all but a few of 10⁶ cases.

    Tokens expected fewer than five times are pooled.
    """
    expected = p.double() * counts.sum()
    assert not counts[p == 0].any(), "a token of probability 0 came out"
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    if expected[-1] < 1e-9:
        observed, expected = observed[:-1], expected[:-1]
    freedom = len(expected) - 1
    return float(((observed - expected) ** 2 / expected).sum()), freedom + 5 * (2 * freedom) ** 0.5


P = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "q",
    [
        [0.38, 0.32, 0.19, 0.11, 0.0],
        [0.2, 0.2, 0.2, 0.2, 0.2],
        [0.0, 0.0, 0.1, 0.9, 0.0],  # adversarial: nearly all of it is what the target likes least
        [0.0, 0.0, 0.0, 0.0, 1.0],  # and what it never says
        [0.4, 0.3, 0.2, 0.1, 0.0],
    ],
)
def test_rejection_gives_the_target_distribution(q: list[float]) -> None:
    drafted = torch.tensor(q, dtype=torch.float64)
    counts, acceptance = rejection_counts(P, drafted)
    statistic, limit = chi_square(counts, P)
    assert statistic < limit
    overlap = float(torch.minimum(P, drafted).sum())
    assert acceptance == pytest.approx(overlap, abs=0.01)


def test_rejection_without_a_draft_samples_the_target() -> None:
    counts, acceptance = rejection_counts(P, torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0], dtype=torch.float64), lengths=0)
    statistic, limit = chi_square(counts, P)
    assert statistic < limit and acceptance == 0


def test_rejection_survives_broken_draft_probabilities() -> None:
    """NaN draft logits are never accepted, and the target's own distribution takes over."""
    counts, acceptance = rejection_counts(P, torch.tensor([0.25, 0.25, 0.25, 0.25, 0.0], dtype=torch.float64))
    samples = 1000
    proposal = Proposal(
        torch.zeros(samples, 1).long(), torch.ones(samples).long(), torch.full((samples, 1, 5), torch.nan)
    )
    keys = torch.arange(4 * samples).view(2, samples, 2)
    verdict = verify_rejection(P.log().expand(samples, 2, -1), proposal, keys[0], keys[1], False)
    assert not verdict.accepted.any() and torch.isfinite(verdict.scores).all()
    statistic, limit = chi_square(torch.bincount(verdict.tokens[:, 0], minlength=5), P)
    assert statistic < limit


# ---- Through the engine: many requests of one prompt -----------------------------------------------------------

REQUESTS = 6000
WARPED = dict(temperature=0.8, top_k=12)


class Adversary(Drafter):
    """Drafts, with full conviction, the token that the row's own last token is (and says so in its logits)."""

    has_probabilities = True

    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        rows = self.session.rows
        tokens = rows.window(-1, 1).expand(-1, draft_length)  # [B, γ]
        logits = torch.full((*tokens.shape, 64), -torch.inf, dtype=torch.float64)
        logits.scatter_(2, tokens[..., None], 0.0)
        return Proposal(tokens, torch.full_like(rows.lengths, draft_length), logits)


@pytest.fixture(scope="module")
def vocal() -> LlamaForCausalLM:
    """A model whose next tokens are neither certain nor uniform."""
    return tiny_llama(seed=4, initializer_range=0.06)


@pytest.fixture(scope="module")
def marginals(vocal: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Exact distributions `[V]` of the first and second token behind the prompt under WARPED, by enumeration."""
    prompt = random_rows([6], seed=8)[0]

    def distribution(rows: Tensor) -> Tensor:
        with torch.no_grad():
            scores = vocal(rows).logits[:, -1] / WARPED["temperature"]  # [n, V]
        return scores.masked_fill(scores < scores.topk(12).values[:, -1:], -torch.inf).softmax(-1)

    first = distribution(prompt[None])[0]  # [V]
    continued = torch.cat([prompt.expand(64, -1), torch.arange(64)[:, None]], dim=1)  # [V, 7]
    return first, first @ distribution(continued)


@pytest.mark.parametrize("verification", ["exact", "rejection"])
@pytest.mark.parametrize("kind", ["none", "self", "good model", "bad model", "adversary"])
def test_marginals(kind: str, verification: str, vocal: PreTrainedModel, marginals: tuple[Tensor, Tensor]) -> None:
    prompts = pad_left(random_rows([6], seed=8) * REQUESTS)
    options: dict[str, Any] = {
        "good model": dict(assistant_model=tiny_llama(seed=4, initializer_range=0.057)),
        "bad model": dict(assistant_model=tiny_llama(seed=99)),
        "adversary": dict(drafter=Adversary()),
    }.get(kind, {})
    strategy = "model" if kind.endswith("model") else "none" if kind == "adversary" else kind
    config = {"verification": verification, "draft_length": 2, "seed": 17}
    result = generate(vocal, prompts, strategy, config, max_new_tokens=3, **WARPED, **options)
    for position, expected in enumerate(marginals):
        counts = torch.bincount(result.sequences[:, 6 + position], minlength=64)
        statistic, limit = chi_square(counts, expected)
        assert statistic < limit, f"token {position}"


@pytest.mark.parametrize("verification", ["exact", "rejection"])
def test_acceptance_is_what_theory_says(verification: str, vocal: PreTrainedModel) -> None:
    """Rejection accepts Σ min(p, q) of first drafts; exact, by Gumbel coupling, at least (1 - TV) / (1 + TV)."""
    assistant = tiny_llama(seed=4, initializer_range=0.05)
    prompt = random_rows([6], seed=8)[0]
    with torch.no_grad():
        p, q = (model(prompt[None]).logits[0, -1].softmax(-1) for model in (vocal, assistant))
    overlap = float(torch.minimum(p, q).sum())
    assert 0.5 < overlap < 0.97
    config = {"verification": verification, "draft_length": 2}
    result = generate(vocal, pad_left([prompt] * 4000), "model", config, max_new_tokens=2, assistant_model=assistant)
    first_round = result.statistics.first_token_acceptance  # one round nearly always: 2 tokens at most
    drafted = result.statistics.total.first_drafted
    error = 4 * (overlap * (1 - overlap) / drafted) ** 0.5
    if verification == "rejection":
        assert abs(first_round - overlap) < error
    else:
        assert overlap / (2 - overlap) - error < first_round < overlap + error


def test_rejection_differs_from_exact_and_is_reproducible(tiny, tiny_assistant) -> None:
    prompts = pad_left(random_rows([4] * 6))

    def call(verification: str, **options: Any) -> list[list[int]]:
        config = {"verification": verification}
        return generate(tiny, prompts, "model", config, assistant_model=tiny_assistant, **options).sequences.tolist()

    assert call("rejection") == call("rejection") != call("exact")
    assert call("rejection", do_sample=False) == call("exact", do_sample=False)
