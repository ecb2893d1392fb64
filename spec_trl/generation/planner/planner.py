"""The planner decides when to draft, with which drafter and how far: the plan of least expected time to the last row.

It chooses among no draft, every drafter at every γ, rows divided between two drafters, and races of two. Uncertain
plans are tried, and paid for from an exploration budget, so a rollout is never much slower than one without drafts.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...papers import load
from .admission import PlainRounds
from .arms import PLAIN, Arm, ArmTable, CurrentPlan
from .control import FAILED, NO_METHOD, Candidate, Chain, Control, Explanation, RoundSeconds, Tally, decision, promise
from .ledger import LEAST_SHARE, UNTRIED, Drafts, Floats, Kind, Times


ROUND_BUDGET = 0.015  # autoregressive rounds that a round adds to the exploration budget for trials
MAX_BUDGET = 8.0  # bounds of the budget, in autoregressive rounds: old gains and losses do not count
CARRIED_BUDGET = 1.0  # most autoregressive rounds of it that the next rollout, which may be short, inherits
SHARE = 0.005  # most of a rollout's time for planning, and for evaluating a lookup drafter
CERTAIN = 0.05  # variance of log(arm / plain seconds) above which gains are discounted
YARDSTICK = 5  # γ at which acceptance rates are compared
CAUTION = 1.5  # sds between the expected and the worst case of a plan


class Planner(Control):
    """The control of all strategies by default (`sd_toggle="measured"`).

    * **Expected**: an arm's τ by row in flight (`Drafts`) and its seconds (predicted, corrected by `Times`) give the
      time until the last row ends; while requests wait for a row, tokens per second count instead.
    * **Rule**: the arm of largest log gain over autoregressive decoding plus its standard deviation, among those whose
      worst case the budget covers. So arms that might be better are tried, and arms known to be worse are not.
    * **First trial**: an unmeasured prediction may be off by a factor of six, either way. A method that would then pay
      is tried once, at the shortest γ, when the budget holds the predicted cost, or `MAX_BUDGET`: at most `MAX_BUDGET`
      / `ROUND_BUDGET` rounds after the first round.
    * **Budget**, in autoregressive rounds: `ROUND_BUDGET` per round, plus measured gains and losses of speculation.
    * **Planning takes time**: a plan lasts until planning is at most `SHARE` of the time, if its rows stay and it does
      not lose. The ledger gets its rounds when the next plan is made.

    Without uncertainty, with one candidate of one γ and equal rows, the rule is ER's π_SD (Eq. 3).

    Args:
        candidates: drafters of different names, at least one.
        times, drafts: the ledger, which outlives the control.
        margin: ε of ER Eq. 3: log gain, about, from which drafting begins.
        race: whether rows may get chains of two drafters.
        race_budget: most tokens of a race's verification, all rows together; None: as many as pay.
        clock: seconds; limits planning time. A constant clock plans every round.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        draft_lengths: Sequence[int],
        seconds: RoundSeconds,
        times: Times,
        drafts: Drafts,
        margin: float = 0.05,
        race: bool = True,
        race_budget: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.candidates = list(candidates)
        self._lengths, self._margin, self._may_race = np.array(sorted(draft_lengths)), margin, race
        self._race_budget = math.inf if race_budget is None else race_budget
        self._predict, self.times, self.drafts, self._clock = seconds, times, drafts, clock
        self._singles = [
            Arm(((which, length),)) for which in range(len(self.candidates)) for length in self._lengths.tolist()
        ]
        self.compared_lookups = [which for which, candidate in enumerate(candidates) if not candidate.is_network]
        self.compared_length = int(self._lengths[-1])
        networks = [which for which, candidate in enumerate(candidates) if candidate.is_network]
        self._couples = [(network, lookup) for network in networks for lookup in self.compared_lookups]
        self.several_chains = race and bool(self._couples)
        self.budget = self._trial_cost = 0.0
        self.begin(1, [])

    @property
    def most_drafted(self) -> int:
        return self.compared_length * (2 if self.several_chains else 1)

    def begin(self, capacity: int, prompts: Sequence[str]) -> None:
        self._capacity = max(capacity, 1)
        self._sizes = [*(1 << power for power in range((self._capacity - 1).bit_length())), self._capacity]
        self._predicted: dict[Arm, Floats] = {}
        self._tables: dict[tuple[tuple[Arm, ...], int, int], ArmTable] = {}
        self._batch, self._planned_length = 1, math.nan
        self._max_rows = np.array([candidate.max_rows for candidate in self.candidates])  # [M], 0: it failed
        self.drafts.begin(prompts)
        self.budget = min(self.budget, max(CARRIED_BUDGET, self._trial_cost))
        self.tallies = [Tally() for _ in self.candidates]
        self._current, self._explanation = CurrentPlan(), Explanation(None, "no round was planned")

    def drop(self, index: int) -> None:
        self._max_rows[index] = 0
        self._current.failed, self._current.lasts = True, 0.0  # possibly within a round, which then has no verdicts

    def limit(self, index: int, max_rows: int) -> None:
        super().limit(index, max_rows)
        self._max_rows[index] = min(self._max_rows[index], max_rows)
        self._current.lasts = 0.0

    def further_method(
        self, requests: Sequence[int], helpers: Mapping[tuple[int, str], int]
    ) -> tuple[str, list[int]] | None:
        """Runs SA Algorithm 3 for the `requests` of this rank: returns a method with which a free rank may race, and
        the requests to race for; None: no race pays. Methods are ordered by their gain for one row. `helpers`: ranks
        that race already, by request and method."""
        arms = [arm for arm in self._singles if self._may_race and self._batch <= self._max_rows[arm.chains[0][0]]]
        if not arms or not len(requests):
            return None
        survivals = self.drafts.survivals(np.array(requests), max(self.compared_length, YARDSTICK))  # [B, M, most]
        gains: dict[str, float] = {}
        for arm in arms:
            ((which, length),) = arm.chains
            tau, name = 1 + survivals[:, which, :length].sum(1).mean(), self.candidates[which].name
            gains[name] = max(gains.get(name, 0.0), tau / self._seconds(arm)[0])
        names = [candidate.name for candidate in self.candidates]
        method = next((names[which] for which, _ in self._current.arm.chains), NO_METHOD)
        judge = names.index(method if method in gains else next(iter(gains)))
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
        return Explanation(None, f"rounds will tell when to draft; trials may take {ROUND_BUDGET:.1%} of the time")

    def finish(self) -> None:
        self._settle()
        self.times.end_rollout()
        self.drafts.end_rollout()

    def plan(self, requests: Sequence[int], length: float, waiting: int) -> Sequence[Chain]:
        started, before = self._clock(), self._current
        same = before.requests == requests and before.waiting == (waiting > 0)
        if same and before.passed < before.lasts and not before.loses:
            return before.chains
        self._settle()
        self._batch = len(requests)
        if not 0.8 < length / self._planned_length < 1.25:  # predictions change little within that
            self._predicted, self._tables, self._planned_length = {}, {}, length
        going = [request for request in requests if request >= 0]
        survivals = self.drafts.survivals(np.array(going), self.compared_length)  # [B, M, most γ]
        if self.in_step:  # a row may commit what all accept
            survivals = np.broadcast_to(survivals.prod(0), (self._batch, *survivals.shape[1:]))
        efficiencies = (1 + survivals.cumsum(-1)[..., self._lengths - 1]).transpose(1, 2, 0)  # [M, Γ, B]
        taus = efficiencies.reshape(len(self._singles), -1)  # [A, B]
        table = self._table(())
        gains = self._log_gains(table, taus, waiting)  # [A]
        if not self.in_step and (pairs := self._pairs(gains, taus, survivals, waiting)):
            table = self._table(tuple(pairs))
            taus = np.concatenate([taus, [*pairs.values()]])
            gains = self._log_gains(table, taus, waiting)
        current = CurrentPlan(requests=list(requests), waiting=waiting > 0, predicted=table.plain)
        if (best := self._choose(table, gains)) is not None:
            arm, current.gain = table.arms[best], self._explanation.predicted_speedup or 0.0
            current.arm, current.width, current.shares = arm, arm.width, table.shares[best]
            current.predicted = float(table.seconds[best, -1])
            current.chains = self._chains(arm, efficiencies)
            for which, chosen in arm.chains:
                self.candidates[which].draft_length = chosen
        current.plain = self._plain_seconds()
        self._current, current.lasts = current, (self._clock() - started) / SHARE
        return current.chains

    def _choose(self, table: ArmTable, gains: Floats) -> int | None:
        """The arm of largest optimistic gain that the budget covers, None: no drafts; `gains` `[A]` are predicted."""
        offsets, variances = self.times.offsets(table.terms)
        unsure = self.drafts.variances(self.compared_length).ravel()[table.places].max(1)  # [A]
        gains = np.minimum(gains - offsets, table.most)  # no draft makes a round shorter
        # A round commits at least a token per row, so it costs at most this many autoregressive rounds.
        ratios = table.seconds[:, -1] / table.plain * np.exp(offsets)
        # A first trial, one round of the shortest γ, is covered by its predicted cost: the real cost is unknown.
        caution = np.where(table.untried, 0.0, CAUTION)
        tokens = np.maximum(np.exp(gains - caution * np.sqrt(unsure)) * ratios, 1.0)
        worst = ratios * np.exp(caution * np.sqrt(variances)) - tokens  # [A], rounds that a trial may cost
        worst = np.where(table.untried, np.minimum(worst, MAX_BUDGET), worst)
        # The budget that grows while nothing drafts allows new trials: a few unlucky drafts exclude no method.
        is_plain = self._current.arm == PLAIN
        doubt = 1 + (max(self.budget - 2 * CARRIED_BUDGET, 0.0) / MAX_BUDGET if is_plain else 0.0)
        begins = math.log1p(self._margin) if is_plain else 0.0
        served = self._max_rows[table.drafters].min(1) >= self._batch  # [A]
        hopes = gains + np.sqrt(doubt**2 * (variances + unsure) + table.untried) - begins
        hopes = np.where(served, hopes, -np.inf)
        firsts = np.flatnonzero((table.untried > 0) & ~table.waits)
        for at in firsts:  # a first trial measures its method for all γ
            hopes[at] = hopes[at : at + len(self._lengths)].max()
        trial = min(firsts[hopes[firsts] > 0], key=worst.__getitem__, default=None)
        self._trial_cost = 0.0 if trial is None else float(worst[trial])
        known = (table.untried == 0) | (self.times.rounds > 0)  # a trial is compared with an autoregressive round
        hopes = np.where((worst <= self.budget) & known & ~table.waits, hopes, -np.inf)
        best = int(hopes.argmax())
        if hopes[best] > 0:
            self._explain_arm(table.arms[best], math.exp(gains[best]), "drafting")
            return best
        if not any(tally.rounds for tally in self.tallies):  # else the explanation of the newest draft stays
            self._explain_no_draft(table, np.where(served, gains, -np.inf), worst, trial)
        return None

    def _explain_arm(self, arm: Arm, gain: float, then: str) -> None:
        """Explains: `arm` has the predicted `gain`, and `then` follows."""
        names = " and ".join(f'"{self.candidates[which].name}" (γ = {length})' for which, length in arm.chains)
        promised = promise(names, gain, self._batch, self._planned_length, by="promises")
        self._explanation = Explanation(gain, f"{promised}: {then}")

    def _explain_no_draft(self, table: ArmTable, gains: Floats, worst: Floats, trial: int | None) -> None:
        """Explains why the arm of largest gain does not draft, or when the first trial, of arm `trial`, will run.
        `gains` of impossible arms are -inf."""
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
        self._explain_arm(table.arms[best], gain, then)

    def _pairs(self, gains: Floats, taus: Floats, survivals: Floats, waiting: int) -> dict[Arm, Floats]:
        """τ by row of a network and a lookup together, both at their best γ alone."""
        pairs: dict[Arm, Floats] = {}
        best = gains.reshape(len(self.candidates), -1).argmax(1) + np.arange(len(self.candidates)) * len(self._lengths)
        for network, lookup in self._couples:
            one, other = best[network], best[lookup]
            chains = (*self._singles[one].chains, *self._singles[other].chains)
            if self._batch > 1:
                pairs[Arm(chains)] = np.maximum(taus[one], taus[other])
            race = Arm(chains, race=True)
            if self._may_race and not waiting and self._batch * (1 + race.width) <= self._race_budget:
                both = min(length for _, length in chains)  # of two chains the longer one counts
                shared = (survivals[:, network, :both] * survivals[:, lookup, :both]).sum(1)  # [B]
                pairs[race] = taus[one] + taus[other] - 1 - shared
        return pairs

    def _log_gains(self, table: ArmTable, taus: Floats, waiting: int) -> Floats:
        """Speedup over autoregressive decoding until the rows end, `[A]`, with τ by row `[A, B]`."""
        if waiting:
            return np.log(taus.mean(1) * table.plain / table.seconds[:, -1])
        stays = np.sort(1 / taus, axis=1)  # rounds per token by row, the first to end first
        stays[:, 1:] -= stays[:, :-1].copy()
        return np.log(table.plain / (stays * table.seconds[:, ::-1]).sum(1))

    def _table(self, pairs: tuple[Arm, ...]) -> ArmTable:
        """All single arms and `pairs`, for rounds of the current size."""
        key = pairs, self._batch, len(self.times.tried)
        if key not in self._tables:
            arms, batch, plain = (*self._singles, *pairs), self._batch, self._seconds(PLAIN)[self._batch - 1]
            shares = [self._shares(arm, plain) for arm in arms]
            firsts, lasts = (np.array([arm.chains[place] for arm in arms]) for place in (0, -1))  # [A, 2] each
            is_untried = np.array([self.times.is_untried(candidate.name) for candidate in self.candidates])  # [M]
            # A lookup beside a network needs no first trial: alone it may never have a larger gain than the network.
            untried = is_untried[firsts[:, 0]]
            most = np.maximum(firsts, lasts)[:, 1]
            drafters = np.stack([firsts[:, 0], lasts[:, 0]], 1)
            self._tables[key] = ArmTable(
                arms,
                np.array([self._seconds(arm)[:batch] for arm in arms]),
                plain,
                shares,
                self.times.terms([self._kind(arm, batch) for arm in arms], self._kind(PLAIN, batch), shares),
                np.where(untried, (UNTRIED * np.array([sum(of_chains) for of_chains in shares])) ** 2, 0.0),
                untried & ((drafters[:, 0] != drafters[:, 1]) | (most > self._lengths[0])),
                np.log1p(most),
                drafters,
                drafters * self.compared_length + np.stack([firsts[:, 1], lasts[:, 1]], 1) - 1,
            )
        return self._tables[key]

    def _chains(self, arm: Arm, efficiencies: Floats) -> tuple[Chain, ...]:
        """Returns the chains of a plan; if two drafters share the rows, a row gets the one of larger τ."""
        if len(arm.chains) < 2 or arm.race:
            return tuple([Chain(which, length) for which, length in arm.chains])
        taus = np.array([efficiencies[which, self._lengths == length][0] for which, length in arm.chains])  # [2, B]
        chains = []
        for place, (which, length) in enumerate(arm.chains):
            if rows := tuple(np.flatnonzero(taus.argmax(0) == place).tolist()):
                chains.append(Chain(which, length, None if len(rows) == self._batch else rows))
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
            return  # forwards were captured, or a rollout's last rounds: no kind fits
        current.measured.append((seconds, tokens))

    def record_unverified(
        self, which: int, requests: Sequence[int], accepted: Sequence[int], attempted: Sequence[int]
    ) -> None:
        self.drafts.record(which, np.array(requests), np.array([accepted]), np.array([attempted]))

    def _settle(self) -> None:
        """Adds the rounds of the current plan to the ledger, the budget and the tallies."""
        current, batch = self._current, len(self._current.requests)
        if rounds := len(current.measured):
            measured = np.array(current.measured)  # [rounds, 2], seconds and tokens
            kind, ratios = self._kind(current.arm, batch), np.log(measured[:, 0] / current.predicted)
            counts = self.times.observe(kind, *ratios, shares=current.shares)
            gained = 0.0
            if current.arm.chains:
                plain = self._plain_seconds()
                # After a jump of the machine drafts may seem cheap, since no other round was measured: no credit.
                terms = self.times.terms([kind], self._kind(PLAIN, batch), [current.shares])
                doubt = math.sqrt(max(self.times.offsets(terms)[1].item() - CERTAIN, 0.0))
                seconds, tokens = measured[counts].sum(0)
                gained = tokens / current.going - seconds / plain * math.exp(CAUTION * doubt)
                seconds, tokens = measured.sum(0).tolist()
                for which, _ in current.arm.chains:  # a race or a mixture counts for both
                    self.tallies[which] += Tally(
                        rounds, rounds * current.going, int(tokens), seconds, plain * tokens / current.going,
                        rounds * current.gain, rounds,
                    )  # fmt: skip
            self.budget = min(max(self.budget + ROUND_BUDGET * rounds + gained, -MAX_BUDGET), MAX_BUDGET)
            current.measured = []
        for which, candidate in enumerate(self.candidates):
            verdicts = [(right[which], tried[which]) for right, tried in current.verdicts if which in right]
            if not verdicts:
                continue
            going = np.array(current.requests) >= 0  # [B]
            right, tried = np.array(verdicts).swapaxes(0, 1)[..., going]  # [R, n] each; -1: no draft
            if not candidate.is_network:  # a lookup drafts less than γ if it finds no more: not a full acceptance
                tried = np.full_like(tried, dict(current.arm.chains).get(which, 0))
            if self.in_step:  # no draft is judged after the first that some row rejects
                tried = np.minimum(tried, right.min(1, keepdims=True) + 1)
            self.drafts.record(which, np.array(current.requests)[going], right, np.minimum(right + 1, tried))
        current.verdicts.clear()

    def spend(self, seconds: float) -> bool:
        self._settle()
        rounds = seconds / self._plain_seconds()
        covered = bool(self.budget >= rounds)  # of numpy's numbers
        self.budget -= rounds if covered else 0.0
        return covered

    def _seconds(self, arm: Arm) -> Floats:
        """Predicted seconds of a round of 1, 2, … rows: `[capacity]`, interpolated linearly between powers of two."""
        if arm not in self._predicted:
            lengths, width = {self.candidates[which].name: length for which, length in arm.chains}, arm.width
            seconds = [self._predict(lengths, width, rows, self._planned_length) for rows in self._sizes]
            self._predicted[arm] = np.interp(np.arange(1, self._capacity + 1), self._sizes, seconds)
        return self._predicted[arm]

    def _shares(self, arm: Arm, plain: float) -> tuple[float, ...]:
        """Predicted share of a round that a chain adds to an autoregressive round of `plain` seconds."""
        added = []
        for chain in arm.chains:
            alone = float(self._seconds(Arm((chain,)))[self._batch - 1])
            added.append(max(alone - plain, LEAST_SHARE * alone))
        share = max(1 - plain / float(self._seconds(arm)[self._batch - 1]), LEAST_SHARE)
        return tuple([share * seconds / sum(added) for seconds in added])

    def _plain_seconds(self) -> float:
        """Expected seconds of an autoregressive round now."""
        return self.times.seconds(self._kind(PLAIN, self._batch), float(self._seconds(PLAIN)[self._batch - 1]))

    def _kind(self, arm: Arm, batch: int) -> Kind:
        names = tuple([self.candidates[which].name for which, _ in arm.chains])
        return Kind(names, (*[length for _, length in arm.chains], int(arm.race)), batch.bit_length())

    def plain_seconds(self, rounds: Sequence[PlainRounds]) -> float | None:
        self._settle()
        if not self.times.rounds:
            return None
        total = 0.0
        for count, batch, length in rounds:
            total += count * self.times.seconds(self._kind(PLAIN, batch), self._predict({}, 0, batch, length))
        return total

    def state_dict(self) -> dict[str, Any]:
        """The ledger for a checkpoint; JSON."""
        return {"times": self.times.state_dict(), **self.drafts.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`, or from the acceptance in checkpoints of earlier releases."""
        self.drafts.load_state_dict(state)
        if "times" in state:
            self.times.load_state_dict(state["times"])
