"""Best-of-N over simulated machines: who drafts first, who races, and when that stops."""

import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from spec_trl.scheduling.acceptance import Acceptance, AcceptanceCounts
from spec_trl.scheduling.best_of_n import BestOfN
from spec_trl.scheduling.control import Candidate, Chain
from spec_trl.scheduling.ladder import Ladder, Rung
from spec_trl.scheduling.race_judge import Field, RaceJudge
from spec_trl.scheduling.roofline import Coefficients, ModelConstants, Roofline
from spec_trl.scheduling.selection import AcceptanceHistory, select_method
from spec_trl.scheduling.toggle import HOPELESS, PROBE_ROUNDS, WINDOW


NETWORKS = ("self", "model")
GAMMAS = (2, 4, 8)


@dataclass
class Machine:
    """Decodes with a control: drafts are right with a probability by method and request.

    Args:
        drafting: seconds of one draft token of each method.
        acceptance: p of (method, request).
        verifying: seconds of a target forward over so many tokens.
    """

    drafting: dict[str, float]
    acceptance: Callable[[str, int], float]
    verifying: Callable[[int], float] = lambda tokens: 1.0
    seed: int = 0
    plans: list[tuple[list[int], int, Sequence[Chain]]] = field(default_factory=list)  # requests, waiting, plan
    rounds: int = 0
    seconds: float = 0.0

    def ladder(self, **changes: Callable[[int], float]) -> Ladder:
        """What profiling it would find; `verifying` where the profile is to be wrong."""
        verifying = changes.get("verifying", self.verifying)
        rungs = [
            Rung(name, batch, gamma, p, gamma * draft + verifying(batch * (1 + gamma)), verifying(batch))
            for name, draft in self.drafting.items()
            for batch, gamma, p in itertools.product((1, 4, 16), GAMMAS, (0.3, 0.9))
        ]
        return Ladder(tuple(rungs), "machine")

    def control(self, history: AcceptanceHistory | None = None, **options: Any) -> BestOfN:
        candidates = [Candidate(name, 5, 5.0, 1000, None, name in NETWORKS) for name in self.drafting]
        ladder = options.pop("ladder", None) or self.ladder()
        return BestOfN(candidates, ladder, history or AcceptanceHistory(), **options)

    def run(self, control: BestOfN, tokens: list[int], capacity: int | None = None) -> "Machine":
        """One rollout of requests of so many tokens."""
        chance = random.Random(self.seed)
        self.plans, self.rounds, self.seconds = [], 0, 0.0
        names = [candidate.name for candidate in control.candidates]
        left, rows = dict(enumerate(tokens)), list[int]()
        waiting = list(left)
        control.begin(capacity or len(tokens), [f"prompt {request}" for request in left])
        while left:
            while waiting and len(rows) < (capacity or len(tokens)):
                rows.append(waiting.pop(0))
            plan = control.plan(list(rows), 100.0, len(waiting))
            self.plans.append((list(rows), len(waiting), plan))
            accepted: dict[int, list[int]] = {chain.which: [-1] * len(rows) for chain in plan}
            drafted = {which: list(counts) for which, counts in accepted.items()}
            widths, drafts = [0] * len(rows), 0.0
            for chain in plan:
                drafts += chain.draft_length * self.drafting[names[chain.which]]
                for row in range(len(rows)) if chain.rows is None else chain.rows:
                    p = self.acceptance(names[chain.which], rows[row])
                    right = next((k for k in range(chain.draft_length) if chance.random() >= p), chain.draft_length)
                    accepted[chain.which][row] = min(right, left[rows[row]])
                    drafted[chain.which][row] = min(chain.draft_length, left[rows[row]])
                    widths[row] += chain.draft_length
            kept = [
                min(1 + max((counts[row] for counts in accepted.values()), default=0), left[request])
                for row, request in enumerate(rows)
            ]
            seconds = drafts + self.verifying(len(rows) * (1 + max(widths)))
            if plan:
                control.record_rows(list(rows), accepted, drafted)
            control.record(max(widths), seconds, sum(kept))
            self.rounds += 1
            self.seconds += seconds
            for request, count in zip(rows, kept, strict=True):
                left[request] -= count
            rows = [request for request in rows if left[request]]
            left = {request: count for request, count in left.items() if count}
        control.finish()
        return self

    def widths(self) -> list[tuple[int, int, int]]:
        """By round: rows, Σγ of the row with most, and chains of the row with most."""
        found = []
        for rows, _, plan in self.plans:
            chains: list[list[int]] = [[] for _ in rows]
            for chain in plan:
                for row in range(len(rows)) if chain.rows is None else chain.rows:
                    chains[row].append(chain.draft_length)
            found.append((len(rows), max(map(sum, chains)), max(map(len, chains))))
        return found

    def drafters(self) -> list[set[int]]:
        return [{chain.which for chain in plan} for _, _, plan in self.plans]


def at(rate: float, positions: float) -> AcceptanceCounts:
    """So many first positions and as many further ones, all accepted at `rate`."""
    return AcceptanceCounts.expecting(Acceptance.geometric(rate), positions)


def by_method(**rates: float) -> Callable[[str, int], float]:
    return lambda name, request: rates[name]


# ---- the primary ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("drafting", "first"), [(0.3, ("self", 4)), (1.0, ("model", 4))])
def test_first_choice_is_that_of_history_and_ladder(drafting: float, first: tuple[str, int]) -> None:
    machine = Machine({"self": drafting, "ngram": 0.0, "model": 0.1}, by_method(self=0.9, ngram=0.2, model=0.6))
    history = AcceptanceHistory()
    for name, rate in (("self", 0.9), ("ngram", 0.2), ("model", 0.6)):
        history.record(name, "elsewhere", at(rate, 1000))
    control = machine.control(history)
    control.begin(4, ["a", "b", "c", "d"])
    choice = select_method(control.ladder, history, ["a", "b", "c", "d"], 4, ["self", "ngram", "model"])
    (chain,) = control.plan(range(4), 100.0, 0)
    # By hand: "self" makes 4.10 tokens of γ = 4 in 1 + 4 x 0.3 s, "model" 2.31 of γ = 4 in 1.4 s.
    assert (control.candidates[chain.which].name, chain.draft_length) == (choice.method, choice.draft_length) == first


def test_lookups_that_are_right_all_or_none_are_not_overrated() -> None:
    """8 of 8 in every second round are τ = 5. 8 of 9 judged positions would say 5.9, more than "self" at 6.1 in 1.16 s
    has to offer."""
    machine = Machine({"self": 0.02, "ngram": 0.0}, by_method(self=0.9, ngram=0.5))
    history = AcceptanceHistory()
    history.record("self", "elsewhere", at(0.9, 10_000))
    for accepted in (8, 0) * 5000:
        history.record("ngram", "elsewhere", AcceptanceCounts.of_round(accepted, min(accepted + 1, 8)))
    control = machine.control(history)
    control.begin(4, ["a", "b", "c", "d"])
    found = [(candidate.draft_length, candidate.block_efficiency) for candidate in control.candidates]
    assert found == [(8, pytest.approx(6.13, abs=0.01)), (8, pytest.approx(5.0, abs=0.01))]
    (chain,) = control.plan(range(4), 100.0, 0)
    assert chain.which == 0


def test_draft_length_and_tokens_are_those_of_the_batchs_prompts() -> None:
    """γ + 1 where "copy" is drafted for right, else 1. Of prompts in turns τ is the harmonic mean, of those
    in flight together the smallest, for rounds of one row are as dear as those of four."""
    machine = Machine({"self": 0.2}, by_method(self=0.5))
    history = AcceptanceHistory()
    history.record("self", "copy", at(1.0, 10**6))
    history.record("self", "story", at(0.0, 10**6))
    control = machine.control(history)
    pair, four = ["copy", "story"], ["copy"] * 3 + ["story"]
    for rows, prompts, tau in (
        (4, ["copy"], 9.0), (4, ["story"], 1.0), (4, pair, 1.0), (4, four, 1.0), (1, pair, 1.5), (1, four, 2.0),
    ):  # fmt: skip
        control.begin(rows, prompts)
        (candidate,) = control.candidates
        assert candidate.draft_length == (8 if tau == 9 else 2)
        assert candidate.block_efficiency == pytest.approx(tau, abs=0.01)


def test_a_drafter_of_some_rows_alone_stops() -> None:
    """Half of the rows leave the others behind by drafts that slow every round down: the last row ends no sooner."""
    machine = Machine(
        {"ngram": 0.1}, lambda name, request: 0.9 if request % 2 else 0.0, lambda tokens: 1 + tokens / 50
    )
    history = AcceptanceHistory()
    control = machine.control(history, race=False)
    machine.run(control, [200] * 16)
    speculating = sum(map(bool, machine.drafters()))
    assert 4 <= speculating <= WINDOW and machine.seconds < 1.1 * 200 * (1 + 16 / 50)
    machine.run(control, [200] * 16)
    assert sum(map(bool, machine.drafters())) <= WINDOW
    machine.run(control, [200] * 16, capacity=1)  # one row after the other: each has its share
    assert any(machine.drafters())


@pytest.mark.parametrize("race", [False, True])
def test_a_drafter_of_all_rows_alike_takes_over(race: bool) -> None:
    """In a round "model" gains most; "self" brings the last row to its end soonest."""
    machine = Machine(
        {"self": 0.05, "model": 0.05}, lambda name, request: 0.7 if name == "self" else 0.95 * (request % 2)
    )
    control = machine.control(race=race)
    machine.run(control, [1200] * 8)
    primaries = [plan[0].which for _, _, plan in machine.plans if plan]
    if not race:  # rows that a racer leads have none of the primary
        assert sum(a != b for a, b in itertools.pairwise(primaries)) <= 2  # both had their trial
    machine.run(control, [300] * 8)
    primaries = [plan[0].which for _, _, plan in machine.plans if plan]
    assert primaries.count(0) > 0.7 * len(primaries) and machine.seconds < 200


def test_help_that_failed_is_none() -> None:
    """With nobody to draft for the other rows, a drafter of some rows alone stops."""
    machine = Machine(
        {"ngram": 0.1, "history": 0.1},
        lambda name, request: 0.9 * (request % 2 if name == "ngram" else 1 - request % 2),
        lambda tokens: 1 + tokens / 50,
    )
    control = machine.control(race=False)
    machine.run(control, [200] * 16)
    control.begin(16, [f"prompt {request}" for request in range(16)])
    control.plan(range(16), 100.0, 0)
    assert control._others_can_help(range(16))  # prompts have methods of their own by now
    control.drop(0)
    control.drop(1)
    assert not control._others_can_help(range(16))


GROWING = Roofline(  # a second, and one per 100 cached tokens
    ModelConstants("growing", 1.0, 0.0, 1.0, 0.0, 0.01),
    Coefficients(F_eff=1e9, BW_eff=1.0, rho_kappa=1.0, eta_D=0.0, c_T=0.0, c_D=0.0, c_V=0.0),
)


def test_the_ladders_times_stand_beside_those_of_the_roofline() -> None:
    """An autoregressive round takes the same for a candidate that brings a roofline and one that has none."""
    machine = Machine({"self": 0.5, "ngram": 0.0}, by_method())
    candidates = [Candidate("self", 5, 5.0, 1000), Candidate("ngram", 5, 5.0, 1000, GROWING, False)]
    control = BestOfN(candidates, machine.ladder(), AcceptanceHistory(), roofline=GROWING)
    for _ in range(2):  # rollouts
        control.begin(4, ["a", "b", "c", "d"])
        own, lookup = (candidate.roofline for candidate in control.candidates)
        assert own is not None and lookup is GROWING
        gamma = candidates[0].draft_length
        for batch, length in ((1, 10.0), (4, 100.0), (100, 1e4)):
            plain = own.target_seconds(batch, length)
            assert plain == lookup.target_seconds(batch, length)
            assert own.cycle_seconds(batch, length, gamma) == pytest.approx((1 + 0.5 * gamma) * plain)


def test_measuring_has_the_last_word() -> None:
    """History praises one method, and rounds find that another one is the better."""
    machine = Machine({"self": 0.1, "ngram": 0.0}, by_method(self=0.9, ngram=0.1))
    history = AcceptanceHistory()
    history.record("ngram", "elsewhere", at(0.95, 1000))
    history.record("self", "elsewhere", at(0.8, 1000))
    machine.run(machine.control(history, race=False), [400] * 4)
    assert machine.drafters()[0] == {1} and machine.drafters()[-1] == {0}


@pytest.mark.parametrize("best", ["self", "ngram", "model"])
def test_best_method_is_found_and_known_from_then_on(best: str) -> None:
    rates = {name: 0.9 if name == best else 0.3 for name in ("self", "ngram", "model")}
    machine = Machine({"self": 0.1, "ngram": 0.02, "model": 0.1}, by_method(**rates))
    history, index = AcceptanceHistory(), list(rates).index(best)
    machine.run(machine.control(history, race=False), [500] * 4)
    assert machine.drafters()[-1] == {index}
    machine.run(machine.control(history, race=False), [100] * 4)
    assert all(drafters == {index} for drafters in machine.drafters())


def test_nothing_drafts_where_nothing_pays() -> None:
    machine = Machine({"self": 1.0, "ngram": 0.3}, by_method(self=0.9, ngram=0.0))
    control = machine.control()
    machine.run(control, [300] * 4)
    machine.run(control, [300] * 4)
    assert sum(map(bool, machine.drafters())) <= WINDOW


@pytest.mark.parametrize(("name", "b"), [("self", (2, 3)), ("ngram", (2, 3)), ("model", (1, 1)), ("history", (1, 2))])
def test_history_has_each_verdict(name: str, b: tuple[int, int]) -> None:
    """A round of γ with a accepted is a + 1 positions, at most γ. What a lookup did not find counts as a wrong token;
    what a network had no room for does not, nor does what lies behind a row's end."""
    history = AcceptanceHistory(decay=1.0)
    control = Machine({name: 0.0}, by_method()).control(history)
    control.begin(4, ["a", "b", "c", "d"])
    (chain,) = control.plan([0, 1, 2, 3], 10.0, 0)
    gamma, accepted = chain.draft_length, 1 + b[0]
    assert gamma == 8
    drafted = 8 if accepted == 3 else 2
    control.record_rows([0, 1, 2, 3], {0: [gamma, accepted, 3, 0]}, {0: [gamma, drafted, 3, 2]})
    control.record(gamma, 1.0, 17)
    control.plan([0, 1, 3], 10.0, 0)  # the third has ended
    control.finish()
    found = {key: own[name][1:] for key, own in history.state_dict()["prompts"]}
    # Accepted and judged: of first tokens, of further ones.
    assert found == {"a": [1, 1, 7, 7], "b": [1, 1, *b], "c": [1, 1, 2, 2], "d": [0, 1, 0, 0]}


def test_same_history_same_choice_after_a_checkpoint() -> None:
    machine = Machine({"self": 0.1, "ngram": 0.02, "model": 0.05}, by_method(self=0.8, ngram=0.5, model=0.7))
    history = AcceptanceHistory()
    machine.run(machine.control(history), [200] * 8)
    restored = AcceptanceHistory()
    restored.load_state_dict(json.loads(json.dumps(history.state_dict())))
    first = machine.run(machine.control(history), [200] * 8).plans
    assert machine.run(machine.control(restored), [200] * 8).plans == first
    assert history.state_dict() == restored.state_dict() and history.state_dict()["rollout"] == 2


# ---- rows with methods of their own -----------------------------------------------------------------------------


def mostly_self(name: str, request: int) -> float:
    """All requests are easier for "self" but the first, which is so for "ngram", by a speedup of 1.6."""
    return {"self": 0.7, "ngram": 0.8}[name] if request == 0 else {"self": 0.95, "ngram": 0.1}[name]


@pytest.fixture
def mixed() -> tuple[Machine, AcceptanceHistory]:
    machine, history = Machine({"self": 0.02, "ngram": 0.0}, mostly_self), AcceptanceHistory(decay=1.0)
    for request, name in itertools.product(range(6), machine.drafting):
        history.record(name, f"prompt {request}", at(mostly_self(name, request), 10_000))
    return machine, history


Mixed = tuple[Machine, AcceptanceHistory]


def test_prompts_that_favour_another_method_get_it(mixed: Mixed) -> None:
    machine, history = mixed
    machine.run(machine.control(history, race=False), [200] * 6)
    several = [plan for rows, _, plan in machine.plans if len(rows) == 6 and len(plan) > 1]
    assert several and all(most <= 1 for _, _, most in machine.widths())
    assert all({chain.which: chain.rows for chain in plan} == {0: (1, 2, 3, 4, 5), 1: (0,)} for plan in several)


def test_margin_of_a_method_of_ones_own(mixed: Mixed) -> None:
    machine, history = mixed
    machine.run(machine.control(history, race=False, margin=1.0), [200] * 6)
    assert all(len(plan) <= 1 for _, _, plan in machine.plans) and {0} in machine.drafters()


def test_a_method_that_failed_is_nobodys_own(mixed: Mixed) -> None:
    machine, history = mixed
    control = machine.control(history, race=False)
    begin = control.begin

    def begin_and_fail(capacity: int, prompts: Sequence[str]) -> None:
        begin(capacity, prompts)
        control.drop(1)

    control.begin = begin_and_fail  # type: ignore[method-assign]
    machine.run(control, [200] * 6)
    assert set().union(*machine.drafters()) == {0}


def test_rows_have_methods_of_their_own_while_others_wait(mixed: Mixed) -> None:
    machine, history = mixed
    machine.run(machine.control(history, budget=1000), [200] * 6, capacity=3)
    waiting = [
        (len(plan), most)
        for (_, waiting, plan), (_, _, most) in zip(machine.plans, machine.widths(), strict=True)
        if waiting
    ]
    assert {most for _, most in waiting} <= {0, 1} and max(count for count, _ in waiting) == 2


# ---- the race -------------------------------------------------------------------------------------------------------


def complementary(name: str, request: int) -> float:
    """Each request is easy for one method, by turns; for others hardly."""
    return 0.9 if name == ("ngram", "history")[request % 2] else 0.3


def known(machine: Machine, average: float = 0.6) -> AcceptanceHistory:
    """A history in which all methods were tried."""
    history = AcceptanceHistory()
    for name in machine.drafting:
        history.record(name, "elsewhere", at(average, 100))
    return history


LOOKUPS = {"ngram": 0.0, "history": 0.0}
TAIL = [60] * 12 + [600] * 4


def test_racing_ends_the_tail_in_fewer_rounds() -> None:
    machine = Machine(LOOKUPS, complementary)
    alone = machine.run(machine.control(known(machine), race=False), TAIL).rounds
    raced = machine.run(machine.control(known(machine)), TAIL)
    assert max(most for _, _, most in raced.widths()) == 2
    assert raced.rounds < alone / 1.5


@pytest.mark.parametrize(("tried", "rounds"), [(True, min(HOPELESS)), (False, 2 * WINDOW)])
def test_the_primary_is_measured_alone_first(tried: bool, rounds: int) -> None:
    """For a few rounds, or each for a window where they are on trial."""
    machine = Machine(LOOKUPS, complementary)
    control = machine.control(known(machine) if tried else None, budget=1000)
    machine.run(control, [600] * 4)
    chains = [most for _, _, most in machine.widths()]
    first = chains.index(2)
    assert sum(chains[:first]) == rounds
    alone = sum(len(plan) == 1 and plan[0].rows is None for _, _, plan in machine.plans)
    assert sum(tally.rounds for tally in control.tallies) <= alone < len(chains)


def test_columns_for_all_chains() -> None:
    machine = Machine(LOOKUPS, complementary)
    assert machine.control().most_drafted == 2 * max(GAMMAS)
    assert machine.control(race=False).most_drafted == max(GAMMAS)


def test_races_stay_within_what_was_verified_at_first() -> None:
    machine = Machine(LOOKUPS, complementary)
    machine.run(machine.control(known(machine)), TAIL)
    first = next(rows * (1 + width) for rows, width, _ in machine.widths() if width)
    races = [(rows, width) for rows, width, most in machine.widths() if most > 1]
    assert races and all(rows * (1 + width) <= first for rows, width in races)


@pytest.mark.parametrize("budget", [1, 40, 80])
def test_races_stay_within_the_given_budget(budget: int) -> None:
    machine = Machine(LOOKUPS, complementary)
    machine.run(machine.control(known(machine), budget=budget), TAIL)
    races = [rows * (1 + width) for rows, width, most in machine.widths() if most > 1]
    assert all(verified <= budget for verified in races)
    assert bool(races) is (budget > 1)


ROOFLINE = Roofline(  # free up to 64 tokens, then in proportion to them
    ModelConstants("64", 64.0, 0.0, 1.0, 0.0, 0.0),
    Coefficients(F_eff=1.0, BW_eff=1.0, rho_kappa=0.0, eta_D=0.0, c_T=0.0, c_D=0.0, c_V=0.0),
)


@pytest.mark.parametrize("tolerance", [0.0, 0.05, 0.5])
def test_free_tokens_are_those_of_the_roofline(tolerance: float) -> None:
    machine = Machine(LOOKUPS, complementary, lambda tokens: max(64.0, tokens))
    control = machine.control(known(machine), roofline=ROOFLINE, tolerance=tolerance)
    for batch, gamma in ((1, 8), (4, 4), (8, 4), (16, 8)):
        free, own = control.free_tokens(batch, 100.0, gamma), batch * (1 + gamma)
        assert ROOFLINE.verify_seconds(batch, 100.0, free // batch - 1) <= (1 + tolerance) * max(64, own)
        beyond = ROOFLINE.verify_seconds(batch, 100.0, free // batch)
        assert free // batch == 1 + control.most_drafted or beyond > (1 + tolerance) * max(64, own)
    machine.run(control, TAIL)
    races = [rows * (1 + width) for rows, width, most in machine.widths() if most > 1]
    assert races and max(races) <= (1 + tolerance) * 64 + 4


def test_nobody_races_while_requests_wait() -> None:
    machine = Machine(LOOKUPS, complementary)
    machine.run(machine.control(known(machine), budget=1000), [100] * 8, capacity=2)
    for (_, waiting, _), (_, _, most) in zip(machine.plans, machine.widths(), strict=True):
        assert most < 2 or not waiting
    assert any(most > 1 for _, _, most in machine.widths())


def test_a_race_that_does_not_pay_is_off_until_the_batch_has_halved() -> None:
    """The profile says that tokens are free, and they are not: 8 rows race for a while, then not; then 4 do."""
    machine = Machine(LOOKUPS, by_method(ngram=0.8, history=0.05), lambda tokens: 1 + tokens / 32)
    control = machine.control(known(machine), ladder=machine.ladder(verifying=lambda tokens: 1.0), budget=10_000)
    machine.run(control, [400] * 4 + [800] * 4)
    races = {rows: [most > 1 for batch, _, most in machine.widths() if batch == rows] for rows in (8, 4)}
    for raced in races.values():
        assert min(HOPELESS) <= sum(raced) <= WINDOW + PROBE_ROUNDS and not any(raced[-10:])


def test_a_network_that_cannot_pay_does_not_race() -> None:
    """Its drafts take as long as they could ever gain."""
    for drafting, races in ((0.02, True), (3.0, False)):
        machine = Machine({"ngram": 0.0, "self": drafting}, by_method(ngram=0.6, self=0.6))
        machine.run(machine.control(known(machine), budget=1000), [400] * 4)
        assert any(most > 1 for _, _, most in machine.widths()) is races


def test_failed_drafters_have_no_chains() -> None:
    machine = Machine({"ngram": 0.0, "history": 0.0, "self": 0.01}, by_method(ngram=0.8, history=0.5, self=0.5))
    control = machine.control(known(machine), budget=1000)
    plan, count = control.plan, itertools.count()

    def fail_later(*args: Any) -> Sequence[Chain]:
        if next(count) == 60:
            control.drop(0)
        return plan(*args)

    control.plan = fail_later  # type: ignore[method-assign]
    machine.run(control, [800] * 4)
    assert any(0 in drafters for drafters in machine.drafters()[:60])
    assert not any(0 in drafters for drafters in machine.drafters()[60:])
    assert any(len(drafters) == 2 for drafters in machine.drafters()[60:])


def test_one_candidate_races_nobody() -> None:
    machine = Machine({"ngram": 0.0}, by_method(ngram=0.8))
    machine.run(machine.control(), [200] * 4)
    assert {most for _, _, most in machine.widths()} <= {0, 1} and {0} in machine.drafters()


def test_names_must_differ() -> None:
    machine = Machine(LOOKUPS, complementary)
    twice = [Candidate("ngram", 5, 5.0, 10), Candidate("ngram", 5, 5.0, 10)]
    for candidates in (twice, []):
        with pytest.raises(ValueError, match="must be one or more drafters of different names"):
            BestOfN(candidates, machine.ladder(), AcceptanceHistory())
    with pytest.raises(ValueError, match="method='model' is not in the ladder"):
        BestOfN([Candidate("model", 5, 5.0, 10)], machine.ladder(), AcceptanceHistory()).begin(1, ["a"])


@pytest.mark.parametrize("race", [False, True])
def test_a_losing_network_of_a_prompts_own_stops(race: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slower than profiled: after the verdict no row drafts with it any more."""
    verdicts: list[Field] = []
    field = RaceJudge.field

    def watch(judge: RaceJudge, batch: int) -> Field:
        verdicts.append(field(judge, batch))
        return verdicts[-1]

    monkeypatch.setattr(RaceJudge, "field", watch)
    machine = Machine(
        {"ngram": 0.0, "self": 0.1}, lambda name, request: 0.9 if (name == "self") == (request % 4 == 0) else 0.2
    )
    history = AcceptanceHistory()
    for request in range(8):
        for name in ("ngram", "self"):
            history.record(name, f"prompt {request}", at(machine.acceptance(name, request), 200))
    control = machine.control(history, race=race, ladder=machine.ladder())
    machine.drafting = {"ngram": 0.0, "self": 2.0}
    machine.run(control, [600] * 8)
    assert Field.EVERYBODY in verdicts and (race or Field.LOOKUPS not in verdicts)
    networks = sum(any(c.which == 1 and c.rows is not None for c in plan) for _, _, plan in machine.plans)
    assert 0 < networks <= verdicts.count(Field.EVERYBODY)
