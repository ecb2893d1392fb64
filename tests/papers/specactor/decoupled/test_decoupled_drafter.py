"""Decoupled execution changes no token, wastes no more than the paper says, and goes as fast as its model says."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from spec_trl.generation.drafters.autoregressive import NetworkDrafter
from spec_trl.generation.engine.drafter import Drafter, DraftSession
from spec_trl.generation.engine.network.shadow import make_shadow
from spec_trl.generation.engine.sampling.accept import Proposal
from spec_trl.generation.engine.sampling.noise import RoundNoise
from spec_trl.generation.planner.control import Chain
from spec_trl.generation.planner.shared_work import AffineSeconds
from spec_trl.papers.specactor.decoupled.decoupled_drafter import DecoupledDrafter
from spec_trl.papers.specactor.decoupled.pipe import DraftThread
from spec_trl.papers.specactor.decoupled.worker import Kind
from spec_trl.papers.specactor.decoupled_plan import ExecutionPlan
from spec_trl.papers.specactor.reconfiguration import RequestPlan, RequestPlans
from spec_trl.papers.specactor.token_speed import busy_window_tokens, replicated
from tests.generation.calls import Alternate, generate, outputs, pad_left, random_rows
from tests.generation.races import EOS, PROMPTS, Knowing, Plans
from tests.papers.specactor.decoupled.scripted import Chance, InTurn


SAMPLING: dict[str, dict[str, Any]] = {
    "softmax": {},
    "greedy": dict(do_sample=False),
    "EOS": EOS,
    "filters": dict(temperature=0.7, top_k=20, top_p=0.9, **EOS),
    "penalty": dict(repetition_penalty=1.3, temperature=0.8),
    "own processor": dict(logits_processor=[Alternate()]),
}


@pytest.fixture(scope="module")
def plain(tiny) -> Callable[[str], list[list[int]]]:
    """What is generated without drafts."""
    return functools.cache(lambda sampling: outputs(generate(tiny, PROMPTS, **SAMPLING[sampling])))


@pytest.mark.parametrize("sampling", SAMPLING)
def test_tokens_are_those_of_plain_decoding(sampling: str, tiny, drafters) -> None:
    options = SAMPLING[sampling]
    expected = generate(tiny, PROMPTS, **options)
    for name, rows in (("self", None), ("model", 3), ("ngram", 2)):  # all at once; refilled
        drafter = DecoupledDrafter(DraftThread(*drafters(name)))
        config = {"draft_length": 3, "max_batch_size": rows}
        result = generate(tiny, PROMPTS, drafter=drafter, config=config, **options)
        assert outputs(result) == outputs(expected) and result.statistics.drafter_failure is None
        torch.testing.assert_close(result.logprobs, expected.logprobs, rtol=0, atol=1e-5)
        assert drafter.drafted > 0 and (name == "ngram" or result.statistics.total.accepted > 0)


def test_windows_that_are_not_full(tiny, drafters) -> None:
    """A lookup finds fewer tokens than were asked for: the next window follows those."""
    prompts = pad_left([torch.tensor([5, 6, 7, 8] * 6), torch.tensor([9, 10, 11])])
    drafter = DecoupledDrafter(DraftThread(*drafters("ngram")))
    found = outputs(generate(tiny, prompts, drafter=drafter, do_sample=False))
    assert drafter.drafted > 0 and found == outputs(generate(tiny, prompts, do_sample=False))


def test_a_cache_of_its_own_is_right_where_another_drafter_was_taken(tiny) -> None:
    """That one's chain goes past the first draft that was wrong: what was computed from there on is not the text's."""
    texts = outputs(generate(tiny, PROMPTS, max_new_tokens=40))
    found: list[bool] = []

    class Erring(NetworkDrafter):
        """An exact copy that goes another way from the second token of each second window on."""

        windows = steps = 0

        def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
            rows, self.windows, self.steps = self.session.rows, self.windows + 1, 0
            proposal = super().propose(draft_length, noise)
            for row, request in enumerate(rows.indices):
                start, end = int(rows.prompt_lengths[row]), int(rows.lengths[row])
                text, done = texts[request], end - start
                if self.windows % 2 == 0 and rows.tokens[row, start:end].tolist() == text[:done]:
                    drafts = proposal.tokens[row, : len(text) - done].tolist()
                    found.append(drafts == text[done : done + len(drafts)])
            return proposal

        def begin(self, session: DraftSession) -> None:
            super().begin(session)
            forward = self._runner.forward

            def err(*fed: Any) -> Tensor:
                self.steps += 1
                return forward(*fed).roll(self.windows % 2 if self.steps > 1 else 0, dims=-1)

            self._runner.forward = err

    drafter = Erring(make_shadow(tiny), shares_target_cache=False)
    control = Plans(2, [[Chain(0, 4)], [Chain(1, 4)], [Chain(1, 4)]])
    given = [DecoupledDrafter(InTurn(drafter)), Knowing(texts, 1)]
    assert outputs(generate(tiny, PROMPTS, drafter=given, control=control, max_new_tokens=40)) == texts
    assert len(found) > 10 and all(found)


# ---- every pattern of right and wrong drafts -----------------------------------------------------------------------


@st.composite
def rollouts(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.integers(1, 3))
    chain = st.builds(
        Chain, st.integers(0, count - 1), st.integers(1, 6), st.sampled_from([None, None, (0, 2, 4), (1, 3, 5)])
    )
    return dict(
        acceptance=[draw(st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0])) for _ in range(count)],
        is_decoupled=[True, *(draw(st.booleans()) for _ in range(count - 1))],
        rounds=draw(st.lists(st.lists(chain, max_size=3), min_size=1, max_size=4).filter(any)),
        capacity=draw(st.integers(1, 7)),
        new_tokens=draw(st.sampled_from([24, 24, 1, 2, 7])),
        options=draw(st.sampled_from(["softmax", "EOS", "greedy"])),
        seed=draw(st.integers(0, 1 << 20)),
        modes=draw(st.sampled_from([None, "decoupled", "coupled", "plain", "changing"])),
    )


DRAFT, VERIFY = replicated(AffineSeconds(0.0, 0.1)), lambda gpus, positions: AffineSeconds(0.01 * positions, 1.0)


def group(mode: Any, window: int) -> ExecutionPlan:
    return ExecutionPlan(mode, 1, 1, window, 8, 0.0)


class Assigned(RequestPlans[int]):
    """Gives each request a window of its own, and `mode` or, "changing", all modes in turns; others in each round."""

    def __init__(self, mode: str) -> None:
        super().__init__(group("decoupled", 4), DRAFT, VERIFY)
        self.modes = ("decoupled", "coupled", "plain") if mode == "changing" else (mode,)
        self.rounds = 0

    def of(self, request: int) -> RequestPlan:
        turn = request + self.rounds // 2
        mode: Any = self.modes[turn % len(self.modes)]
        return RequestPlan(mode, 0 if mode == "plain" else 1 + turn % 5)

    def record(self, *counts: Any) -> None:
        self.rounds += 1


@settings(
    deadline=None, max_examples=40, derandomize=True, database=None, suppress_health_check=list(HealthCheck),
    phases=[Phase.generate], report_multiple_bugs=False,
)  # fmt: skip
@given(rollout=rollouts())
def test_any_pattern_of_drafts(rollout: dict[str, Any], tiny, plain) -> None:
    """Windows that change, rounds without drafts, races, refills and ends: the same tokens, and bounded waste."""
    texts = plain(rollout["options"])
    options = SAMPLING[rollout["options"]] | dict(max_new_tokens=rollout["new_tokens"])
    members: list[Drafter] = [
        Chance(texts, acceptance, rollout["seed"] + which) for which, acceptance in enumerate(rollout["acceptance"])
    ]
    plans = [None if rollout["modes"] is None else Assigned(rollout["modes"]) for _ in members]
    links = [InTurn(member) for member in members]
    given = [
        DecoupledDrafter(link, plan) if decoupled else member
        for link, plan, member, decoupled in zip(links, plans, members, rollout["is_decoupled"], strict=True)
    ]
    control = Plans(len(given), rollout["rounds"])
    config = {"max_batch_size": rollout["capacity"]}
    result = generate(tiny, PROMPTS, drafter=given, control=control, config=config, **options)
    assert outputs(result) == [text[: rollout["new_tokens"]] for text in texts]
    assert result.statistics.drafter_failure is None
    window = 1 + max(chain.draft_length for plan in rollout["rounds"] for chain in plan)
    for link in links:
        assert link.most_ahead <= 2 * window - 1  # the committed token before them makes it 2w
        assert max(link.wasted, default=0) <= 2 * window - 1


@pytest.mark.parametrize("window", [2, 4, 7])
def test_the_bound_on_waste_is_reached(window: int, tiny) -> None:
    texts = outputs(generate(tiny, PROMPTS))
    wasted = []
    for seed in range(6):
        link = InTurn(Chance(texts, 0.8, seed))
        generate(tiny, PROMPTS, drafter=DecoupledDrafter(link), config={"draft_length": window - 1})
        wasted += link.wasted
    assert max(wasted) == 2 * window - 1


def test_drafts_that_are_not_verified_do_not_pile_up(tiny) -> None:
    """Rows without a chain of their own decode, and their drafts stay."""
    texts = outputs(generate(tiny, PROMPTS))
    link = InTurn(Chance(texts, 1.0))
    control = Plans(1, [[Chain(0, 2, (0,))]])
    assert outputs(generate(tiny, PROMPTS, drafter=DecoupledDrafter(link), control=control)) == texts
    assert link.most_ahead == 5


def test_coupled_requests_draft_nothing_ahead(tiny) -> None:
    """A window is drafted beside one decoded token, and verified before the next one is drafted."""
    texts = outputs(generate(tiny, PROMPTS))
    plans = RequestPlans(group("coupled", 3), DRAFT, VERIFY)
    link = InTurn(Chance(texts, 1.0))
    result = generate(tiny, PROMPTS, drafter=DecoupledDrafter(link, plans), config={"draft_length": 3})
    assert outputs(result) == texts and link.most_ahead == 4
    # 1 and 4 tokens in turns: 24 are 10 rounds, the last one cut short.
    assert result.statistics.rounds == 10


def test_requests_get_windows_and_modes_of_their_own(tiny) -> None:
    """Algorithm 2 within a rollout: requests whose drafts fail leave the group's plan, the others do not."""
    texts = outputs(generate(tiny, PROMPTS, max_new_tokens=64))
    right = Chance(texts, 1.0)

    class HalfOfTheRequests(Chance):
        def token(self, request: int, position: int) -> int:
            return right.token(request, position) if request < 3 else -1 % 64

    plans = RequestPlans(group("decoupled", 5), DRAFT, VERIFY, every=16)
    drafter = DecoupledDrafter(InTurn(HalfOfTheRequests(texts, 0.0)), plans)
    result = generate(tiny, PROMPTS, drafter=drafter, max_new_tokens=64, config={"draft_length": 4})
    assert outputs(result) == texts
    assert [plans.of(request).mode for request in range(7)] == ["decoupled"] * 3 + ["plain"] * 4
    drafted = [own.drafted for own in result.statistics.per_request]
    assert min(drafted[:3]) > 3 * max(drafted[3:])


@pytest.mark.parametrize(("acceptance", "window"), [(0.5, 3), (0.9, 6)])
def test_tokens_per_period_are_those_of_the_model(acceptance: float, window: int, tiny) -> None:
    """1.27 at p = 0.5 and w = 3, where the paper's verifier, which waits for the drafter, has 0.93."""
    prompts, options = pad_left(random_rows([4] * 40)), dict(max_new_tokens=230, config={"draft_length": window - 1})
    texts = outputs(generate(tiny, prompts, **options))
    result = generate(tiny, prompts, drafter=DecoupledDrafter(InTurn(Chance(texts, acceptance))), **options)
    assert outputs(result) == texts
    assert result.statistics.block_efficiency == pytest.approx(busy_window_tokens(acceptance, window), rel=0.04)


# ---- faults --------------------------------------------------------------------------------------------------------


GARBAGE = {
    "too short": lambda answer: answer[:-1],
    "too long": lambda answer: torch.cat([answer, answer]),
    "floats": lambda answer: answer.double(),
    "negative lengths": lambda answer: answer - 1,
    "huge numbers": lambda answer: answer * 0 + 2**62,
    "NaN": lambda answer: answer * torch.nan,
    "nothing": lambda answer: None,
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_changes_no_token(kind: str, tiny) -> None:
    texts = outputs(generate(tiny, PROMPTS, **EOS))
    windows = 0

    def spoil(answer: Tensor) -> Tensor:
        nonlocal windows
        windows += 1
        return GARBAGE[kind](answer) if windows == 2 else answer

    drafter = DecoupledDrafter(InTurn(Chance(texts, 0.9), spoil))
    with pytest.warns(UserWarning, match="DecoupledDrafter failed"):
        result = generate(tiny, PROMPTS, drafter=drafter, **EOS)
    assert outputs(result) == texts and result.statistics.total.accepted > 0


@pytest.mark.parametrize("message", [Kind.ADMIT, Kind.DRAFT, Kind.COMMIT, Kind.MOVE])
@pytest.mark.parametrize("how", ["cut", "huge", "negative"])
def test_a_worker_refuses_damaged_messages(message: Kind, how: str, tiny) -> None:
    """It raises, and the verifier goes on with the same tokens."""
    texts = outputs(generate(tiny, PROMPTS, **EOS))
    damage = {
        "cut": lambda values: values[:-1],
        "huge": lambda values: values + 2**40,
        "negative": lambda values: values - 2**40,
    }[how]

    class Damaging(InTurn):
        def send(self, kind: Kind, values: Tensor) -> None:
            super().send(kind, damage(values) if kind == message else values)

    link = Damaging(Chance(texts, 0.9))
    with pytest.warns(UserWarning, match="DecoupledDrafter failed"):
        assert outputs(generate(tiny, PROMPTS, drafter=DecoupledDrafter(link), **EOS)) == texts
