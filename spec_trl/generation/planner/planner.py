"""Plans when, with which drafter and how far to draft: the least expected time to the last row.

It chooses among no draft, every drafter at every γ, rows divided between two drafters, and races of two. Uncertain
plans are tried, and paid for from an exploration budget, so a rollout is never much slower than one without drafts.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...papers import load
from .acceptance import Drafts
from .clock import Bools, Clock, Floats, Integers, Rounds
from .control import FAILED, NO_METHOD, Candidate, Chain, Control, Explanation, PlainRounds, Tally, decision, promise
from .plan import PLAIN, CurrentPlan, Plan


# README.md says what breaks when one is doubled.
ROUND_BUDGET = 0.015  # autoregressive rounds added to the exploration budget per round: trials may cost 1.5 %
MAX_BUDGET = 8.0  # autoregressive rounds; bound of the budget either way: old gains and losses do not count
CARRIED_BUDGET = 1.0  # autoregressive rounds: most budget that the next, maybe short, rollout inherits
SHARE = 0.005  # largest share of the time for planning, and for evaluating a lookup drafter
CERTAIN = 0.05  # variance of log(drafted / autoregressive seconds); above it measured gains are discounted
YARDSTICK = 5  # tokens; γ for comparisons of requests
CAUTION = 1.5  # sds between the expected and the worst case of a plan


class Choice(NamedTuple):
    """A plans for the current number of rows."""

    plans: tuple[Plan, ...]
    rounds: Rounds  # their seconds
    waits: Bools  # [A], whether another plan must measure its drafter first
    most: Floats  # [A], log of the most tokens that a round may commit for a row: γ + 1
    drafters: Integers  # [A, 2], index of the first and the last candidate
    places: Integers  # [A, 2], of these at their γ in `Drafts.variances`


class Planner(Control):
    """The control of all strategies by default (`sd_toggle="measured"`).

    * **Expected**: a plan's τ by row (`Drafts`) and its seconds (`Clock`) give the time until the last row ends; while
      requests wait for a row, tokens per second count instead.
    * **Rule**: the plan of largest log gain over autoregressive decoding plus its standard deviation, among those
      whose worst case the budget covers: plans that might be better are tried, plans known to be worse are not.
    * **First trial**: an unmeasured prediction may be off by a factor of six, either way. A drafter that would pay
      with such an error is tried once, at the shortest γ, when the budget holds the predicted cost, or `MAX_BUDGET`:
      at most `MAX_BUDGET` / `ROUND_BUDGET` rounds after the first round.
    * **Budget**, in autoregressive rounds: `ROUND_BUDGET` per round, plus measured gains and losses of speculation.
    * **Planning takes time**: a plan lasts until planning is at most `SHARE` of the time, if its rows stay and it does
      not lose. The clock gets its rounds when the next plan is made.

    Without uncertainty, with one candidate of one γ and equal rows, the rule is ER's π_SD (Eq. 3).

    Args:
        candidates: drafters of different names, at least one.
        clock, drafts: seconds of rounds, and acceptance of the candidates' drafts.
        margin: ε of ER Eq. 3: drafting begins at a log gain of about this.
        race: whether rows may get chains of two drafters.
        race_budget: most tokens of a race's verification, all rows together; None: as many as pay.
        now: seconds; limits planning time. A constant plans every round.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        draft_lengths: Sequence[int],
        clock: Clock,
        drafts: Drafts,
        margin: float = 0.05,
        race: bool = True,
        race_budget: int | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.candidates = list(candidates)
        self._lengths, self._margin, self._may_race = np.array(sorted(draft_lengths)), margin, race
        self._race_budget = math.inf if race_budget is None else race_budget
        self.clock, self.drafts, self._now = clock, drafts, now
        self._index = {candidate.name: index for index, candidate in enumerate(candidates)}
        self._singles = [Plan((name,), (length,)) for name in self._index for length in self._lengths.tolist()]
        self.compared_lookups = [index for index, candidate in enumerate(candidates) if not candidate.is_network]
        self.compared_length = int(self._lengths[-1])
        networks = [index for index, candidate in enumerate(candidates) if candidate.is_network]
        self._couples = [(network, lookup) for network in networks for lookup in self.compared_lookups]
        self.several_chains = race and bool(self._couples)
        self.budget = self._trial_cost = 0.0
        self.begin(1, [])

    @property
    def most_drafted(self) -> int:
        return self.compared_length * (2 if self.several_chains else 1)

    def begin(self, capacity: int, prompts: Sequence[str]) -> None:
        self.clock.begin(capacity)
        self._choices: dict[tuple[Plan, ...], Choice] = {}
        self._batch = 1
        self._max_rows = np.array([candidate.max_rows for candidate in self.candidates])  # [M], 0: it failed
        self.drafts.begin(prompts)
        self.budget = min(self.budget, max(CARRIED_BUDGET, self._trial_cost))
        self.tallies = [Tally() for _ in self.candidates]
        self._current, self._explanation = CurrentPlan(), Explanation(None, "no round was planned")

    def drop(self, index: int) -> None:
        self._max_rows[index] = 0
        self._current.failed, self._current.lasts = True, 0.0  # a round in progress has no verdicts

    def limit(self, index: int, max_rows: int) -> None:
        super().limit(index, max_rows)
        self._max_rows[index] = min(self._max_rows[index], max_rows)
        self._current.lasts = 0.0

    def further_method(
        self, requests: Sequence[int], helpers: Mapping[tuple[int, str], int]
    ) -> tuple[str, list[int]] | None:
        """Runs SA Algorithm 3 for the `requests` of this rank: returns a method by which a free rank may draft for
        rows of this one, and their requests; None: none pays. Methods are ordered by their gain for one row.
        `helpers`: ranks that do so already, by request and method."""
        may = {name: self._may_race and self._batch <= self._max_rows[index] for name, index in self._index.items()}
        plans = [plan for plan in self._singles if may[plan.drafters[0]]]
        if not plans or not len(requests):
            return None
        survivals = self.drafts.survivals(np.array(requests), max(self.compared_length, YARDSTICK))  # [B, M, most]
        gains: dict[str, float] = {}
        for plan in plans:
            (name,), (length,) = plan.drafters, plan.draft_lengths
            tau = 1 + survivals[:, self._index[name], :length].sum(1).mean()
            gains[name] = max(gains.get(name, 0.0), tau / self.clock.predicted(plan)[0])
        method = next(iter(self._current.plan.drafters), NO_METHOD)
        judge = self._index[method if method in gains else next(iter(gains))]
        rates = 1 + survivals[:, judge, :YARDSTICK].sum(1)  # [B]
        speeds = dict(zip(requests, rates.tolist(), strict=True))
        order = sorted(gains, key=gains.__getitem__, reverse=True)
        choice: tuple[str, list[int]] | None
        choice = load("papers.specactor.assignment").further_method(speeds, order, method, helpers)
        return choice

    def explain(self) -> Explanation:
        return self._explanation

    def forecast(self, batch: int, length: float) -> Explanation:
        if batch > (most := max(candidate.max_rows for candidate in self.candidates)):
            return Explanation.too_many_rows(batch, most)
        return Explanation(None, f"rounds will show when to draft; trials may take {ROUND_BUDGET:.1%} of the time")

    def finish(self) -> None:
        self._settle()
        self.clock.end_rollout()
        self.drafts.end_rollout()

    def plan(self, requests: Sequence[int], length: float, waiting: int) -> Sequence[Chain]:
        started, before = self._now(), self._current
        same = before.requests == requests and before.waiting == (waiting > 0)
        if same and before.passed < before.lasts and not before.loses:
            return before.chains
        self._settle()
        self._batch = len(requests)
        self.clock.follow(length)
        going = [request for request in requests if request >= 0]
        survivals = self.drafts.survivals(np.array(going), self.compared_length)  # [B, M, most γ]
        if self.in_step:  # a row may commit what all accept
            survivals = np.broadcast_to(survivals.prod(0), (self._batch, *survivals.shape[1:]))
        efficiencies = (1 + survivals.cumsum(-1)[..., self._lengths - 1]).transpose(1, 2, 0)  # [M, Γ, B]
        taus = efficiencies.reshape(len(self._singles), -1)  # [A, B]
        choice = self._choice(())
        gains = self._log_gains(choice, taus, waiting)  # [A]
        if not self.in_step and (pairs := self._pairs(gains, taus, survivals, waiting)):
            choice = self._choice(tuple(pairs))
            taus = np.concatenate([taus, [*pairs.values()]])
            gains = self._log_gains(choice, taus, waiting)
        current = CurrentPlan(requests=list(requests), waiting=waiting > 0)
        if (best := self._choose(choice, gains)) is not None:
            current.plan, current.gain = choice.plans[best], self._explanation.predicted_speedup or 0.0
            current.width, current.chains = current.plan.width, self._chains(current.plan, efficiencies)
            for name, chosen in current.plan.by_drafter.items():
                self.candidates[self._index[name]].draft_length = chosen
        current.plain = self.clock.seconds(PLAIN, self._batch)
        self._current, current.lasts = current, (self._now() - started) / SHARE
        return current.chains

    def _choose(self, choice: Choice, gains: Floats) -> int | None:
        """The plan of largest optimistic gain that the budget covers, by predicted `gains` `[A]`; None: no drafts."""
        rounds, untried = choice.rounds, choice.rounds.untried
        offsets, variances = self.clock.offsets(rounds)
        unsure = self.drafts.variances(self.compared_length).ravel()[choice.places].max(1)  # [A]
        gains = np.minimum(gains - offsets, choice.most)  # no draft makes a round shorter
        # A round commits at least a token per row: an upper bound of its cost in autoregressive rounds.
        ratios = rounds.seconds[:, -1] / rounds.plain * np.exp(offsets)
        # A first trial, one round of the shortest γ, is covered by its predicted cost: the real cost is unknown.
        caution = np.where(untried, 0.0, CAUTION)
        tokens = np.maximum(np.exp(gains - caution * np.sqrt(unsure)) * ratios, 1.0)
        worst = ratios * np.exp(caution * np.sqrt(variances)) - tokens  # [A], rounds that a trial may cost
        worst = np.where(untried, np.minimum(worst, MAX_BUDGET), worst)
        # The budget that grows while nothing drafts allows new trials: a few unlucky drafts exclude no drafter.
        is_plain = self._current.plan == PLAIN
        doubt = 1 + (max(self.budget - 2 * CARRIED_BUDGET, 0.0) / MAX_BUDGET if is_plain else 0.0)
        begins = math.log1p(self._margin) if is_plain else 0.0
        served = self._max_rows[choice.drafters].min(1) >= self._batch  # [A]
        hopes = gains + np.sqrt(doubt**2 * (variances + unsure) + untried) - begins
        hopes = np.where(served, hopes, -np.inf)
        firsts = np.flatnonzero((untried > 0) & ~choice.waits)
        for at in firsts:  # a first trial measures its drafter for all γ
            hopes[at] = hopes[at : at + len(self._lengths)].max()
        trial = min(firsts[hopes[firsts] > 0], key=worst.__getitem__, default=None)
        self._trial_cost = 0.0 if trial is None else float(worst[trial])
        known = (untried == 0) | (self.clock.rounds > 0)  # a trial is compared with an autoregressive round
        hopes = np.where((worst <= self.budget) & known & ~choice.waits, hopes, -np.inf)
        best = int(hopes.argmax())
        if hopes[best] > 0:
            self._explain_plan(choice.plans[best], math.exp(gains[best]), "drafting")
            return best
        if not any(tally.rounds for tally in self.tallies):  # else the explanation of the newest draft stays
            self._explain_no_draft(choice, np.where(served, gains, -np.inf), worst, trial)
        return None

    def _explain_plan(self, plan: Plan, gain: float, then: str) -> None:
        named = " and ".join(f'"{name}" (γ = {length})' for name, length in plan.by_drafter.items())
        promised = promise(named, gain, self._batch, self.clock.length, by="promises")
        self._explanation = Explanation(gain, f"{promised}: {then}")

    def _explain_no_draft(self, choice: Choice, gains: Floats, worst: Floats, trial: int | None) -> None:
        """Explains why the plan of largest gain does not draft, or when trial plan `trial` will run; `gains` of
        impossible plans are -inf."""
        best = int(gains.argmax()) if trial is None else trial
        gain, cost = math.exp(gains[best]), float(worst[best])
        if (most := int(self._max_rows.max())) < self._batch:
            failed = not most and any(candidate.max_rows for candidate in self.candidates)
            self._explanation = Explanation(None, FAILED) if failed else Explanation.too_many_rows(self._batch, most)
            return
        if trial is None and not gain >= 1 + self._margin:  # NaN, where a prediction is infinite
            then = decision(gain, self._margin)
        elif cost > MAX_BUDGET:
            remedy = 'sd_toggle="always" drafts without trials'
            then = f"decoding plainly, since a trial may cost more than {MAX_BUDGET:.0f} rounds; {remedy}"
        else:  # a first trial may have a small predicted gain: the prediction may be wrong
            left = max(math.ceil((cost - self.budget) / ROUND_BUDGET), 1)
            kind = "trial (longer completions help)" if trial is None else "first trial"
            then = f"decoding plainly for about {left} more rounds, until the budget covers a {kind}"
        self._explain_plan(choice.plans[best], gain, then)

    def _pairs(self, gains: Floats, taus: Floats, survivals: Floats, waiting: int) -> dict[Plan, Floats]:
        pairs: dict[Plan, Floats] = {}
        best = gains.reshape(len(self.candidates), -1).argmax(1) + np.arange(len(self.candidates)) * len(self._lengths)
        for network, lookup in self._couples:
            one, other = best[network], best[lookup]
            (first, length, _), (second, other_length, _) = self._singles[one], self._singles[other]
            shares = Plan(first + second, length + other_length)
            if self._batch > 1:
                pairs[shares] = np.maximum(taus[one], taus[other])
            race = shares._replace(on_all_rows=True)
            if self._may_race and not waiting and self._batch * (1 + race.width) <= self._race_budget:
                both = min(race.draft_lengths)  # of two chains the longer one counts
                shared = (survivals[:, network, :both] * survivals[:, lookup, :both]).sum(1)  # [B]
                pairs[race] = taus[one] + taus[other] - 1 - shared
        return pairs

    def _log_gains(self, choice: Choice, taus: Floats, waiting: int) -> Floats:
        """Speedup over autoregressive decoding until the rows end, `[A]`, with τ by row `[A, B]`."""
        rounds = choice.rounds
        if waiting:
            return np.log(taus.mean(1) * rounds.plain / rounds.seconds[:, -1])
        stays = np.sort(1 / taus, axis=1)  # rounds per token by row, the first to end first
        stays[:, 1:] -= stays[:, :-1].copy()
        return np.log(rounds.plain / (stays * rounds.seconds[:, ::-1]).sum(1))

    def _choice(self, pairs: tuple[Plan, ...]) -> Choice:
        """All plans of one drafter and `pairs`, for rounds of the current size."""
        plans = (*self._singles, *pairs)
        rounds = self.clock.compare(plans, self._batch)
        known = self._choices.get(pairs)
        if known is None or known.rounds is not rounds:
            # [A, 2] each: index and γ of the first and the last drafter.
            drafters = np.array([[self._index[plan.drafters[end]] for end in (0, -1)] for plan in plans])
            lengths = np.array([[plan.draft_lengths[end] for end in (0, -1)] for plan in plans])
            most = lengths.max(1)
            # A lookup beside a network needs no first trial: alone it may never have a larger gain than the network.
            waits = (rounds.untried != 0) & ((drafters[:, 0] != drafters[:, 1]) | (most > self._lengths[0]))
            places = drafters * self.compared_length + lengths - 1
            self._choices[pairs] = known = Choice(plans, rounds, waits, np.log1p(most), drafters, places)
        return known

    def _chains(self, plan: Plan, efficiencies: Floats) -> tuple[Chain, ...]:
        """Returns the chains of a plan; of two drafters a row gets the one of larger τ."""
        drafts = [(self._index[name], length) for name, length in plan.by_drafter.items()]
        if len(drafts) < 2 or plan.on_all_rows:
            return tuple(Chain(*draft) for draft in drafts)
        better = np.array([efficiencies[index, self._lengths == length][0] for index, length in drafts]).argmax(0)
        chains = []
        for place, draft in enumerate(drafts):
            if rows := tuple(np.flatnonzero(better == place).tolist()):
                chains.append(Chain(*draft, None if len(rows) == self._batch else rows))
        return tuple(chains)

    def record_rows(
        self, requests: Sequence[int], accepted: Mapping[int, Sequence[int]], drafted: Mapping[int, Sequence[int]]
    ) -> None:
        if not self._current.failed:
            self._current.verdicts.append((accepted, drafted))

    def record(self, draft_length: int, seconds: float, tokens: int, is_typical: bool = True) -> None:
        current = self._current
        current.passed += seconds
        if current.failed or not is_typical or draft_length < current.width or seconds <= 0:
            return  # forwards were captured, or a rollout's last rounds: no plan fits
        current.measured.append((seconds, tokens))

    def record_unverified(
        self, drafter: int, requests: Sequence[int], accepted: Sequence[int], attempted: Sequence[int]
    ) -> None:
        self.drafts.record(drafter, np.array(requests), np.array([accepted]), np.array([attempted]))

    def _settle(self) -> None:
        current, batch, plan = self._current, len(self._current.requests), self._current.plan
        if rounds := len(current.measured):
            measured = np.array(current.measured)  # [rounds, 2], seconds and tokens
            counts = self.clock.observe(plan, batch, *measured[:, 0])
            gained = 0.0
            if plan.drafters:
                plain = self.clock.seconds(PLAIN, batch)
                # After a jump of the machine drafts may seem cheap, since no other round was measured: no credit.
                _, variance = self.clock.offsets(self.clock.compare((plan,), batch))
                doubt = math.sqrt(max(variance.item() - CERTAIN, 0.0))
                seconds, tokens = measured[counts].sum(0)
                gained = tokens / current.going - seconds / plain * math.exp(CAUTION * doubt)
                seconds, tokens = measured.sum(0).tolist()
                for name in plan.drafters:  # a race or a mixture counts for both
                    self.tallies[self._index[name]] += Tally(
                        rounds, rounds * current.going, int(tokens), seconds, plain * tokens / current.going,
                        rounds * current.gain, rounds,
                    )  # fmt: skip
            self.budget = min(max(self.budget + ROUND_BUDGET * rounds + gained, -MAX_BUDGET), MAX_BUDGET)
            current.measured = []
        for index, candidate in enumerate(self.candidates):
            verdicts = [(right[index], tried[index]) for right, tried in current.verdicts if index in right]
            if not verdicts:
                continue
            going = np.array(current.requests) >= 0  # [B]
            right, tried = np.array(verdicts).swapaxes(0, 1)[..., going]  # [R, n] each; -1: no draft
            if not candidate.is_network:  # a lookup drafts less than γ if it finds no more: not a full acceptance
                tried = np.full_like(tried, plan.by_drafter.get(candidate.name, 0))
            if self.in_step:  # no draft is judged after the first that some row rejects
                tried = np.minimum(tried, right.min(1, keepdims=True) + 1)
            self.drafts.record(index, np.array(current.requests)[going], right, np.minimum(right + 1, tried))
        current.verdicts.clear()

    def spend(self, seconds: float) -> bool:
        self._settle()
        rounds = seconds / self.clock.seconds(PLAIN, self._batch)
        covered = bool(self.budget >= rounds)  # of numpy's numbers
        self.budget -= rounds if covered else 0.0
        return covered

    def plain_seconds(self, rounds: Sequence[PlainRounds]) -> float | None:
        self._settle()
        if not self.clock.rounds:
            return None
        return sum(count * self.clock.seconds(PLAIN, batch, length) for count, batch, length in rounds)

    def state_dict(self) -> dict[str, Any]:
        return {"times": self.clock.state_dict(), **self.drafts.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`, or from the acceptance in checkpoints of earlier releases."""
        self.drafts.load_state_dict(state)
        if "times" in state:
            self.clock.load_state_dict(state["times"])
