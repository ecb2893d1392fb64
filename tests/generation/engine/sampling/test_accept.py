"""Verification, by hand and by the distribution of what comes out of the engine."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM

from spec_trl.generation.engine.drafter import Drafter
from spec_trl.generation.engine.sampling.accept import Proposal, judge, on_host, verify_rejection
from spec_trl.generation.engine.sampling.noise import Draw, RoundNoise, draw
from spec_trl.generation.planner.control import Chain
from spec_trl.papers.test_time_speculation.distilled_drafter import DistilledDrafter
from spec_trl.papers.test_time_speculation.options import TTSOptions
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.races import PROMPTS, Knowing, Plans, random_plans


TOKENS = st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), min_size=1, max_size=5)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(TOKENS, st.data())
def test_exact_accepts_the_leading_agreement(target: list[list[int]], data: st.DataObject) -> None:
    drafts = [data.draw(st.lists(st.integers(0, 2), min_size=3, max_size=3)) for _ in target]
    lengths = [data.draw(st.integers(0, 3)) for _ in target]
    logits = torch.nn.functional.one_hot(torch.tensor(target), 3).double() * 5  # [B, 4, 3]
    proposal = Proposal(torch.tensor(drafts), torch.tensor(lengths))
    drawn = draw(logits, None, want_logprobs=True)
    remaining = [data.draw(st.integers(1, 5)) for _ in target]
    most = data.draw(st.none() | st.lists(st.integers(0, 3), min_size=len(target), max_size=len(target)))
    limit = None if most is None else torch.tensor(most)
    judged = judge(*on_host([proposal], [replace(drawn, most=limit)]), np.array(remaining))
    for row, (drafted, length) in enumerate(zip(drafts, lengths, strict=True)):
        assert judged.drafted[row] == min(length, remaining[row] - 1)
        equal = next((n for n in range(3) if drafted[n] != target[row][n]), 3)
        assert judged.accepted[row] == min(equal, judged.drafted[row], 3 if most is None else most[row])
    assert judged.tokens.tolist() == target and (judged.sound == 4).all() and not judged.is_broken.any()
    torch.testing.assert_close(drawn.logprobs, logits.log_softmax(-1).amax(-1))


def test_drafts_end_where_their_scores_are_not_sound() -> None:
    scores = torch.tensor([[1.0, -torch.inf, 2.0], [torch.nan, 1.0, 1.0], [1.0, 2.0, 3.0]])
    tokens = torch.tensor([[1, 2, 3, 4]] * 3)
    proposal = Proposal(tokens[:, :-1], None, None, scores)
    drawn = torch.tensor([[0.0, 0.0, -torch.inf, torch.nan]] * 3)
    for parts in on_host([proposal] * 2, [Draw(tokens, drawn, None)] * 2):
        own = judge(parts, np.array([9, 9, 9]))
        assert own.drafted.tolist() == own.accepted.tolist() == proposal.drafted().tolist() == [1, 0, 3]
        assert own.is_broken.tolist() == [False, True, False]
        assert own.sound.tolist() == [2, 2, 2]


def chi_square(counts: Tensor, p: Tensor) -> tuple[float, float]:
    """χ² of counts `[V]` against probabilities p `[V]`, and the limit it passes in all but a few of 10⁶ cases.

    Tokens expected fewer than five times are pooled.
    """
    expected = p.double() * counts.sum()
    assert not counts[p == 0].any(), "a token of probability 0 came out"
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    if expected[-1] < 5:  # too few even together: their count has no χ² distribution
        observed, expected = observed[:-1], expected[:-1]
    freedom = max(len(expected) - 1, 1)
    return float(((observed - expected) ** 2 / expected).sum()), freedom + 5 * (2 * freedom) ** 0.5


def reject(p: Tensor, drafts: Tensor, q_logits: Tensor, lengths: int = 1, seed: int = 0) -> tuple[Draw, Tensor]:
    """What comes of drafts `[n, 1]` with q's logits `[V]`, for a target distribution p `[V]` at both positions; and
    how many of them are accepted."""
    samples, generator = len(drafts), torch.Generator().manual_seed(seed)
    keys = torch.randint(-(2**63), 2**63 - 1, (2, samples, 2), generator=generator)
    tested = torch.full((samples,), lengths)
    proposal = Proposal(drafts, tested, q_logits.expand(samples, 1, -1))
    drawn = verify_rejection(p.log().expand(samples, 2, -1), proposal, tested, keys[0], keys[1], want_logprobs=False)
    assert drawn.most is not None
    return drawn, drawn.most


def follows(drawn: Draw, p: Tensor) -> bool:
    statistic, limit = chi_square(torch.bincount(drawn.tokens[:, 0], minlength=len(p)), p)
    return statistic < limit


WEIGHTS = st.lists(st.integers(0, 10), min_size=5, max_size=5).filter(any)


@settings(deadline=None, max_examples=8, derandomize=True)
@given(WEIGHTS, WEIGHTS, st.integers(0, 1000))
@example([4, 3, 2, 1, 0], [0, 0, 1, 9, 0], 0)  # nearly all of it is what the target likes least
@example([4, 3, 2, 1, 0], [0, 0, 0, 0, 1], 0)  # what the target never says
@example([4, 3, 2, 1, 0], [4, 3, 2, 1, 0], 0)
def test_rejection_gives_the_target_distribution(weights: list[int], drafted: list[int], seed: int) -> None:
    """It accepts Σ min(p, q) of the drafts; without drafts, or where their probabilities are NaN, p alone is drawn."""
    p, q = (torch.tensor(each).double() / sum(each) for each in (weights, drafted))
    samples = 20_000
    drafts = torch.multinomial(q, samples, replacement=True, generator=torch.Generator().manual_seed(seed))[:, None]
    drawn, accepted = reject(p, drafts, q.log(), seed=seed)
    assert follows(drawn, p)
    assert float(accepted.double().mean()) == pytest.approx(float(torch.minimum(p, q).sum()), abs=0.025)
    unlike = (reject(p, drafts, q.log(), lengths=0), reject(p, drafts, torch.full_like(q, torch.nan)))
    for other, accepted in unlike:
        assert not accepted.any() and torch.isfinite(other.scores.gather(1, accepted[:, None])).all()
        assert follows(other, p)


# ---- Through the engine: many requests of one prompt -----------------------------------------------------------


PROMPT = random_rows([6], seed=8)[0]
MANY = pad_left([PROMPT] * 2000)
WARPED = dict(temperature=0.8, top_k=12)


def vocal(initializer_range: float = 0.06, seed: int = 4) -> LlamaForCausalLM:
    """A model whose next tokens are neither certain nor uniform."""
    return tiny_llama(seed, initializer_range=initializer_range, num_hidden_layers=1)


class Adversary(Drafter):
    """Drafts, with full conviction, the token that the row's own last token is (and says so in its logits)."""

    has_probabilities = True

    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        rows = self.session.rows
        tokens = rows.window(-1, 1).expand(-1, draft_length)  # [B, γ]
        logits = torch.full((*tokens.shape, 64), -torch.inf, dtype=torch.float64).scatter_(2, tokens[..., None], 0.0)
        return Proposal(tokens, torch.full_like(rows.lengths, draft_length), logits)


@pytest.fixture(scope="module")
def marginals() -> tuple[Tensor, Tensor, Tensor]:
    """Exact distributions `[V]` of the first three tokens after the prompt under WARPED, by enumeration. The first is
    not drafted."""

    def distribution(rows: Tensor) -> Tensor:
        with torch.no_grad():
            scores = vocal()(rows).logits[:, -1] / WARPED["temperature"]  # [n, V]
        return scores.masked_fill(scores < scores.topk(12).values[:, -1:], -torch.inf).softmax(-1)

    first = distribution(PROMPT[None])[0]  # [V]
    continued = torch.cat([PROMPT.expand(64, -1), torch.arange(64)[:, None]], dim=1)  # [V, 7]
    second = distribution(continued)  # [V, V], given the first
    pairs = torch.cartesian_prod(torch.arange(64), torch.arange(64))  # [V * V, 2]
    third = distribution(torch.cat([PROMPT.expand(len(pairs), -1), pairs], dim=1))  # [V * V, V], given both
    return first, first @ second, (first[:, None] * second).flatten() @ third


# Exact verification gives what "none" gives, token by token, as other tests show.
@pytest.mark.parametrize("kind", ["none", "good model", "bad model", "adversary"])
def test_marginals(kind: str, marginals: tuple[Tensor, Tensor]) -> None:
    config: dict[str, Any] = {"verification": "rejection", "draft_length": 2, "seed": 17}
    options: dict[str, Any] = {
        "none": dict(),
        "good model": dict(strategy="model", assistant_model=vocal(0.057)),
        "bad model": dict(strategy="model", assistant_model=vocal(0.1, seed=99)),
        "adversary": dict(drafter=Adversary()),
    }[kind]
    result = generate(vocal(), MANY, config=config if options else {"seed": 17}, max_new_tokens=4, **WARPED, **options)
    for position, expected in enumerate(marginals):
        statistic, limit = chi_square(torch.bincount(result.sequences[:, 6 + position], minlength=64), expected)
        assert statistic < limit, f"token {position}"


def test_acceptance_is_what_theory_says() -> None:
    """Rejection accepts Σ min(p, q) of first drafts; exact, by Gumbel coupling, at least (1 - TV) / (1 + TV)."""
    models = target, assistant = vocal(), vocal(0.05)
    with torch.no_grad():
        first = target(PROMPT[None]).logits[0, -1].softmax(-1)  # [V], of a token that is not drafted
        continued = torch.cat([PROMPT.expand(64, -1), torch.arange(64)[:, None]], dim=1)  # [V, 7]
        p, q = (model(continued).logits[:, -1].softmax(-1) for model in models)  # [V, V] each, given the first
    overlap = float(first @ torch.minimum(p, q).sum(1))
    assert 0.5 < overlap < 0.97

    def call(verification: str, **options: Any) -> Any:
        config = {"verification": verification, "draft_length": 2}
        return generate(target, MANY, "model", config, max_new_tokens=3, assistant_model=assistant, **options)

    exact, rejection = call("exact"), call("rejection")
    error = 4 * (overlap * (1 - overlap) / exact.statistics.total.first_drafted) ** 0.5
    # One round nearly always: 2 tokens after the first one, at most.
    assert overlap / (2 - overlap) - error < exact.statistics.first_token_acceptance < overlap + error
    assert abs(rejection.statistics.first_token_acceptance - overlap) < error
    assert torch.equal(rejection.sequences, call("rejection").sequences)
    assert not torch.equal(rejection.sequences, exact.sequences)
    greedy = [call(verification, do_sample=False).sequences for verification in ("exact", "rejection")]
    assert torch.equal(*greedy)


def test_rejection_verification_of_rows_with_different_drafters(tiny, drafters) -> None:
    """One chain per row is no race: each row's coins are tossed for the drafter that it had."""
    control = Plans(2, [(Chain(0, 4, (0, 2, 4, 6)), Chain(1, 2, (1, 3, 5)))])
    control.several_chains = False
    config = {"verification": "rejection"}
    result = generate(tiny, PROMPTS, config=config, drafter=drafters("self", "model"), control=control)
    assert result.statistics.drafter_failure is None and result.lengths.tolist() == [24] * 7
    counts = result.statistics.per_drafter
    assert counts["self"].acceptance_rate > 0.3 < counts["model"].acceptance_rate
    assert result.statistics.best_of_n is None
    assert {point.drafter for point in result.statistics.points if point.batch == 7} == {"self+model"}


# ---- what they leave to drafters ------------------------------------------------------------------------------------


def watched(drafter: Drafter, found: dict[tuple[int, ...], list[int]], drafts: bool) -> Drafter:
    """`drafter`, of which is written down what it proposes by request and text; unless it `drafts`, it stays there."""
    propose = drafter.propose

    def watch(draft_length: int, noise: RoundNoise | None) -> Proposal:
        proposal, rows = propose(draft_length, noise), drafter.session.rows
        for row, length in enumerate(rows.lengths.tolist()):
            text = (rows.indices[row], *rows.tokens[row, :length].tolist())
            found[text] = proposal.tokens[row, : int(proposal.drafted()[row])].tolist()
        return proposal if drafts else replace(proposal, lengths=torch.zeros_like(proposal.drafted()))

    drafter.propose = watch  # type: ignore[method-assign]
    return drafter


@pytest.mark.parametrize("kind", ["self", "model", "eagle3", "dflash"])
def test_drafts_depend_on_the_committed_text_alone(kind: str, tiny, drafters: Callable[..., list[Drafter]]) -> None:
    """In races over rows that come and go, a drafter says what it says where each round commits a single token."""
    alone: dict[tuple[int, ...], list[int]] = {}
    among: dict[tuple[int, ...], list[int]] = {}
    plain = generate(tiny, PROMPTS, drafter=watched(*drafters(kind), alone, False), control=Plans(1, [[Chain(0, 4)]]))
    expected = outputs(plain)
    members = [watched(*drafters(kind), among, True), Knowing(expected, 0), Knowing(expected, 1)]
    result = generate(tiny, PROMPTS, config={"max_batch_size": 3}, drafter=members, control=random_plans(3, 1))
    assert outputs(result) == expected and result.statistics.drafter_failure is None
    shared = among.keys() & alone.keys()  # nobody drafts where one token is left unless other rows have more
    assert len(shared) > 15 and len(shared) > 0.8 * len(among)
    for text in shared:
        count = min(len(among[text]), len(alone[text]))
        assert among[text][:count] == alone[text][:count]


@torch.no_grad()
def test_a_learner_hears_of_its_own_chain(tiny, drafters) -> None:
    """What the target would say to the committed text and its own drafts, whatever else was drafted."""
    checked = []

    class Comparing(DistilledDrafter):
        def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
            self.proposal = super().propose(draft_length, noise)
            return self.proposal

        def learn(self, logits: Tensor, verified: Tensor) -> None:
            rows = self.session.rows
            for row in verified.nonzero().flatten().tolist():
                text = rows.tokens[row, : int(rows.lengths[row])]
                drafts = self.proposal.tokens[row, : logits.shape[1] - 1]
                said = tiny(torch.cat([text, drafts])[None]).logits[0, len(text) - 1 :]  # [γ + 1, V]
                torch.testing.assert_close(logits[row], said, rtol=0, atol=1e-9)
                canvas = self.student.canvas(logits.shape[1] - 1, snapshot=False)
                assert canvas.tokens_after(0, len(drafts))[row].tolist() == drafts.tolist()
                checked.append(len(verified) - int(verified.sum()))

    learner = Comparing(*drafters("eagle3"), TTSOptions(learning_rate=1e-3, scope="rollout", stride=1))
    expected = outputs(generate(tiny, PROMPTS, max_new_tokens=20))
    members = [learner, Knowing(expected, 0), Knowing(expected, 1)]
    result = generate(tiny, PROMPTS, drafter=members, control=random_plans(3, 3), max_new_tokens=20)
    assert outputs(result) == expected and result.statistics.drafter_failure is None
    assert len(checked) > 10 and max(checked) > 0
