"""What the planner says of a rollout, which method it gives to a worker that helps, and rounds by a roofline."""

import math
from collections.abc import Mapping

import numpy as np
import pytest

from spec_trl.generation.planner.acceptance import Drafts
from spec_trl.generation.planner.clock import Clock
from spec_trl.generation.planner.control import Candidate, Explanation, NeverSpeculate
from spec_trl.generation.planner.plan import PLAIN, Plan
from spec_trl.generation.planner.planner import Planner
from spec_trl.papers.efficient_rollout.profile import RooflineRounds
from tests.papers.efficient_rollout.test_toggle import A100


DRAFTING = {"self": 0.2, "model": 1.0, "ngram": 0.05}  # autoregressive rounds that a draft takes


def seconds(lengths: Mapping[str, int], width: int, batch: int, length: float) -> float:
    return 1.0 + sum(DRAFTING[name] for name in lengths)


def planner(*names: str, race: bool = True, most: int = 64) -> Planner:
    candidates = [Candidate(name, 5, 1.0, most, name != "ngram") for name in names]
    drafts = Drafts(names, [name == "ngram" for name in names])
    return Planner(candidates, [5], Clock(seconds, 0.2), drafts, race=race, now=lambda: 0.0)


def known(control: Planner, rows: int, *names: str) -> None:
    """Rounds took what is predicted: one of a row without drafts, and of `rows` rows one of each drafter."""
    for count, plan in ((1, PLAIN), *((rows, Plan((name,), (5,))) for name in names)):
        control.clock.observe(plan, count, control.clock.predicted(plan)[count - 1])


def accept(control: Planner, which: int, accepted: list[int], drafts: int = 30) -> None:
    """Each request had `drafts` drafts of 5 tokens, of which so many were right."""
    right = np.array([accepted])
    for _ in range(drafts):
        control.drafts.record(which, np.arange(len(accepted)), right, np.minimum(right + 1, 5))


# ---- words ----------------------------------------------------------------------------------------------------------


def test_where_nothing_was_drafted_the_best_promise_is_said() -> None:
    control = planner("model", "self")
    control.begin(2, ["a", "b"])
    known(control, 2, "model", "self")
    for which in (0, 1):
        accept(control, which, [0, 0])
    assert not control.plan([0, 1], 100.0, 0)
    said = control.explain()
    assert said.predicted_speedup is not None and 1 / 1.2 <= said.predicted_speedup < 0.9  # by a single token each
    promised = f'"self" (γ = 5) promises {said.predicted_speedup:.2f}× at 2 rows × 100 tokens'
    assert said.reason == f"{promised}: decoding plainly"


@pytest.mark.parametrize(
    ("dear", "margin", "promised", "why"),
    [
        (0.2, 3.0, "1.67×", "decoding plainly, since efficient_rollout.margin asks for 4.00×"),
        (3.0, 0.05, "0.50×", "decoding plainly for about 134 more rounds, until the budget covers a first trial"),
        (10.0, 0.05, "0.20×", "decoding plainly for about 534 more rounds, until the budget covers a first trial"),
    ],
)
def test_what_was_never_tried_says_when_it_will_be(
    monkeypatch: pytest.MonkeyPatch, dear: float, margin: float, promised: str, why: str
) -> None:
    """Below the margin; the account holds too little yet; it will never hold what the trial is predicted to cost."""
    monkeypatch.setitem(DRAFTING, "self", dear)
    candidate, drafts = Candidate("self", 5, 1.0, 64), Drafts(["self"], [False])
    control = Planner([candidate], [5], Clock(seconds, 0.2), drafts, margin, now=lambda: 0.0)
    control.begin(1, ["a"])
    accept(control, 0, [1], drafts=1 if dear == 10 else 30)  # two tokens in each round
    assert not control.plan([0], 100.0, 0)
    assert control.explain().reason.startswith(f'"self" (γ = 5) promises {promised} at 1 row × 100 tokens: {why}')


def test_what_is_uncertain_waits_for_the_account() -> None:
    """A method that was measured, but not for long, at a new size of the batch: its worst case is not covered."""
    control = planner("self")
    control.begin(8, ["a"] * 8)
    known(control, 1, "self")
    accept(control, 0, [1] * 8, drafts=1)
    control.budget = -1.0
    assert not control.plan(range(8), 100.0, 0)
    said = control.explain().reason
    assert "decoding plainly for about" in said and "until the budget covers a trial (longer" in said


@pytest.mark.parametrize("draft", [1e308, np.inf])
@pytest.mark.parametrize("is_tried", [True, False])
def test_a_draft_of_endless_seconds_is_explained(
    monkeypatch: pytest.MonkeyPatch, draft: float, is_tried: bool
) -> None:
    monkeypatch.setitem(DRAFTING, "self", draft)
    control = planner("self")
    control.begin(1, ["a"])
    known(control, 1, *["self"] * is_tried)
    accept(control, 0, [5])
    with np.errstate(all="ignore"):
        assert not control.plan([0], 100.0, 0)
    assert control.explain().reason.endswith("× at 1 row × 100 tokens: decoding plainly")


def test_who_cannot_draft_is_said() -> None:
    for most, why in ((1, "more rows (2) than the drafter's kernels serve (1)"), (64, "the drafter failed")):
        control = planner("self", most=most)
        control.begin(2, ["a", "b"])
        if most == 64:
            control.drop(0)
        assert not control.plan([0, 1], 100.0, 0)
        assert control.explain() == Explanation(None, why)


def test_nothing_promises_more_than_its_tokens() -> None:
    """Where drafts seem to make a round shorter, as after a wrong measurement of autoregressive rounds."""
    control = planner("self")
    control.begin(1, ["a"])
    accept(control, 0, [5])
    for _ in range(50):
        control.clock.observe(PLAIN, 1, 1.0)
    for _ in range(50):
        control.clock.observe(Plan(("self",), (5,)), 1, seconds({"self": 5}, 5, 1, 9.0) * math.exp(-2.0))
    control.plan([0], 100.0, 0)
    promised = control.explain().predicted_speedup
    assert promised is not None and 5.0 < promised <= 6.0


def test_the_newest_draft_is_said() -> None:
    control = planner("self", "ngram", race=False)
    control.begin(1, ["a"])
    known(control, 1, "self")
    control.budget = 8.0
    accept(control, 0, [4])
    accept(control, 1, [0])
    (chain,) = control.plan([0], 100.0, 0)
    said = control.explain()
    tau = 1 + 1 + 0.75 + 0.75**2 + 0.75**3 + 0.75**4  # of four further tokens three were right
    assert chain.drafter == 0 and said.predicted_speedup == pytest.approx(tau / 1.2, rel=0.02)
    assert said.reason == f'"self" (γ = 5) promises {said.predicted_speedup:.2f}× at 1 row × 100 tokens: drafting'
    control.record(5, 1.2, 5)
    control.drop(0)
    control.drop(1)
    assert not control.plan([0], 300.0, 0)
    assert control.explain() == said  # rounds without a draft change nothing
    control.begin(1, ["a"])
    assert control.explain().reason == "no round was planned"


# ---- a worker that helps --------------------------------------------------------------------------------------------


def racing() -> Planner:
    """Drafts by the copy; request 1 is its slowest. Lookups gain most of all methods, and the small LM least."""
    control = planner("model", "self", "ngram")
    control.begin(2, ["a", "b"])
    known(control, 2, "model", "self", "ngram")
    control.budget = 8.0
    for which in (0, 2):
        accept(control, which, [4, 4])
    accept(control, 1, [5, 3])
    control.drop(2)
    assert [chain.drafter for chain in control.plan([0, 1], 100.0, 0)] == [1]
    return control


def test_a_helper_gets_the_best_method_that_nobody_has_and_the_slowest_rows_first() -> None:
    control = racing()
    assert control.further_method([0, 1], {}) == ("model", [1, 0])  # lookups have failed
    assert control.further_method([0, 1], {(0, "model"): 7, (1, "model"): 7}) is None


def test_where_no_one_can_help() -> None:
    control = racing()
    assert control.further_method([], {}) is None
    control = planner("self", race=False)
    control.begin(1, ["a"])
    control.plan([0], 100.0, 0)
    assert control.further_method([0], {}) is None
    control = planner("self", most=1)
    control.begin(2, ["a", "b"])
    control.plan([0, 1], 100.0, 0)  # more rows than it serves
    assert control.further_method([0, 1], {}) is None


# ---- rounds by a roofline -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 64])
def test_rounds_by_a_roofline(batch: int) -> None:
    rounds = RooflineRounds(A100, {"self": A100})
    assert rounds({}, 0, batch, 512.0) == A100.target_seconds(batch, 512.0)
    assert rounds({"self": 7}, 7, batch, 512.0) == pytest.approx(A100.cycle_seconds(batch, 512.0, 7))
    assert rounds({"ngram": 7}, 7, batch, 512.0) == A100.verify_seconds(batch, 512.0, 7)  # a lookup takes no time
    drafts = 3 * A100.draft_seconds(batch, 512.0)
    raced = A100.verify_seconds(batch, 512.0, 8) + drafts
    assert rounds({"self": 3, "ngram": 5}, 8, batch, 512.0) == pytest.approx(raced)


def test_spends_what_the_account_holds() -> None:
    """In autoregressive rounds, which take a second here."""
    control = planner("self")
    control.begin(1, ["a"])
    control.plan([0], 100.0, 0)
    control.budget = 3.0
    assert control.spend(2.0) is True and control.budget == pytest.approx(1.0)
    control.budget = np.float64(1.0)  # rounds that drafted leave one of numpy's numbers
    assert control.spend(1.5) is False and control.budget == pytest.approx(1.0)
    assert control.spend(1.0) and control.budget == pytest.approx(0.0)


def test_without_an_account_all_is_paid() -> None:
    assert NeverSpeculate().spend(1e9)
