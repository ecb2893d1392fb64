"""One rule for when to draft, with what and how far: the plan of least expected time to the last row.

It chooses among no draft, each drafter at each γ, rows divided among two of them, and races of two. What is not known
well yet is tried, and paid for from an account: so a rollout is never much slower than one without drafts.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ..papers import load
from .account import FAILED, INCOME, MOST_SAVED, Account, decision, first_trial, no_budget, promise, too_many_rows
from .arms import PLAIN, Arm, Kept, Table
from .control import NO_METHOD, Candidate, Chain, Control, RoundSeconds, Tally
from .ledger import LEAST_SHARE, UNTRIED, Drafts, Floats, Kind, Times
from .plain_decoding import PlainRounds


SHARE = 0.005  # of a rollout's time that each may take: planning, and each lookup that drafts beside rounds
CARRIED = 1.0  # autoregressive rounds of the account that pass on to the next rollout, which may be short
KNOWN = 0.05  # variance of log(arm / plain seconds) above which gains are discounted
YARDSTICK = 5  # γ at which accepted shares are compared, since shares at different γ cannot be
CAUTION = 1.5  # sds by which a plan may turn out worse than expected where its worst case is asked for


class Planner(Control):
    """The control of all strategies that may choose.

    * **Expected**: an arm's τ on each row in flight (`Drafts`) and its seconds (predicted, corrected by `Times`) give
      the time until the last row ends; while requests wait for a row, tokens per second count instead.
    * **Rule**: the arm of largest log gain over autoregressive decoding plus its standard deviation, among those whose
      worst case the account covers. So what might be better is tried, and what is known to be worse is not.
    * **First trial**: a prediction that was never measured may be off six times, either way. A method that would pay
      then is tried once, at the shortest γ, when the account holds what that is predicted to cost, or `MOST_SAVED`:
      `MOST_SAVED` / `INCOME` rounds after the first, at most.
    * **Account**, in autoregressive rounds: it has an income, and what speculation measurably gained or lost.
    * **Planning takes time**: a plan is kept until planning is at most `SHARE` of the time, while its rows stay and it
      does not lose. The ledger is told of its rounds at once when the next plan is made.

    Without uncertainty, with one candidate of one γ and rows that are alike, the rule is ER's π_SD (Eq. 3).

    Args:
        candidates: drafters of different names, at least one.
        draft_lengths: γ that may be chosen, ascending.
        seconds: predicts rounds.
        times, drafts: the ledger, which outlives the control.
        margin: ε of ER Eq. 3: log gain, about, from which drafting begins.
        race: whether rows may get chains of two drafters.
        budget: most tokens of a race's verification, all rows together; None: as many as pay.
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
        budget: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.candidates = list(candidates)
        self._lengths, self._margin, self._may_race = np.array(sorted(draft_lengths)), margin, race
        self._budget = math.inf if budget is None else budget
        self._predict, self.times, self.drafts, self._clock = seconds, times, drafts, clock
        self._singles = [
            Arm(((which, int(length)),)) for which in range(len(self.candidates)) for length in self._lengths
        ]
        self._kind = lru_cache(self._kind_of)
        self.listens_to = [which for which, candidate in enumerate(self.candidates) if not candidate.is_network]
        self.most_listened = int(self._lengths[-1])
        self.saved = self._needed = 0.0
        self.tallies = [Tally() for _ in self.candidates]
        self.begin(1, [])

    @property
    def races(self) -> bool:  # type: ignore[override]
        """Whether a round may have chains of two drafters."""
        return len({candidate.is_network for candidate in self.candidates}) == 2

    @property
    def most_drafted(self) -> int:
        return int(self._lengths[-1]) * (2 if self.races and self._may_race else 1)

    # ---- a rollout ------------------------------------------------------------------------------------------------

    def begin(self, capacity: int, prompts: Sequence[str]) -> None:
        self._capacity = max(capacity, 1)
        self._sizes = sorted({min(1 << power, self._capacity) for power in range(self._capacity.bit_length() + 1)})
        self._predicted: dict[Arm, Floats] = {}
        self._length_then = math.nan
        self.drafts.begin(prompts)
        self.saved = min(self.saved, max(CARRIED, self._needed))
        self.tallies = [Tally() for _ in self.candidates]
        self._dropped: set[int] = set()
        self._tables: dict[tuple[tuple[Arm, ...], int, int], Table] = {}
        self._kept, self._said = Kept(PLAIN, [], False), Account(None, "no round was planned")

    def drop(self, index: int) -> None:
        self._dropped.add(index)
        self._kept.failed, self._kept.lasts = True, 0.0  # perhaps within a round, of which nothing is told then

    def further_method(
        self, requests: Sequence[int], helpers: Mapping[tuple[int, str], int]
    ) -> tuple[str, list[int]] | None:
        """By SA Algorithm 3, for the requests of this rank: methods are ordered by what they gain for one row."""
        arms = [arm for arm in self._singles if self._may_draft(arm)]
        if not self._may_race or not arms or not len(requests):
            return None
        survivals = self.drafts.survivals(np.array(requests), max(int(self._lengths[-1]), YARDSTICK))  # [B, M, most]
        gains: dict[str, float] = {}
        for arm in arms:
            ((which, length),) = arm.chains
            name, tau = self.candidates[which].name, 1 + survivals[:, which, :length].sum(1).mean()
            gains[name] = max(gains.get(name, 0.0), tau / self._seconds(arm)[0])
        drafting = [self.candidates[which].name for which, _ in self._kept.arm.chains]
        own = drafting[0] if drafting else NO_METHOD
        judge = [candidate.name for candidate in self.candidates].index(own if own in gains else next(iter(gains)))
        rates = 1 + survivals[:, judge, :YARDSTICK].sum(1)  # [B]
        order = sorted(gains, key=gains.__getitem__, reverse=True)
        speeds = dict(zip(requests, rates.tolist(), strict=True))
        added: tuple[str, list[int]] | None = load("specactor.assignment").further_method(speeds, order, own, helpers)
        return added

    def account(self) -> Account:
        return self._said

    def forecast(self, batch: int, length: float) -> Account:
        if batch > (most := max(candidate.max_rows for candidate in self.candidates)):
            return Account(None, too_many_rows(batch, most))
        return Account(None, f"rounds will tell when to draft; trials may take {INCOME:.1%} of the time")

    def finish(self) -> None:
        self._settle()
        self.times.end_rollout()
        self.drafts.end_rollout()

    # ---- a round --------------------------------------------------------------------------------------------------

    def plan(self, requests: Sequence[int], length: float, waiting: int) -> Sequence[Chain]:
        started, before = self._clock(), self._kept
        same = before.requests == requests and before.waiting == (waiting > 0)
        if same and before.passed < before.lasts and not before.loses:
            return before.chains
        self._settle()
        self._batch = len(requests)
        if not 0.8 < length / self._length_then < 1.25:  # predictions move little within that
            self._predicted, self._tables, self._length_then = {}, {}, length
        survivals = self.drafts.survivals(np.array(requests), int(self._lengths[-1]))  # [B, M, most γ]
        efficiencies = (1 + survivals.cumsum(-1)[..., self._lengths - 1]).transpose(1, 2, 0)  # [M, Γ, B]
        taus = efficiencies.reshape(len(self._singles), -1)  # [arms, B]
        singles = self._table(())
        gains = self._log_gains(singles, taus, waiting)  # [arms]
        pairs = list(self._pairs(gains, taus, survivals, waiting))
        table = self._table(tuple(arm for arm, _ in pairs))
        if pairs:
            taus = np.concatenate([taus, [tau for _, tau in pairs]])
            gains = self._log_gains(table, taus, waiting)
        arm = self._choose(table, gains)
        kept = Kept(
            arm, list(requests), waiting > 0, arm.width, self._shares(arm), float(self._seconds(arm)[self._batch - 1]),
            gain=self._gain,
        )  # fmt: skip
        for which, chosen in kept.arm.chains:
            self.candidates[which].draft_length = chosen
        kept.chains, kept.plain = self._chains(kept.arm, efficiencies), self._plain_seconds()
        self._kept, kept.lasts = kept, (self._clock() - started) / SHARE
        return kept.chains

    def _choose(self, table: Table, gains: Floats) -> Arm:
        """The arm of largest optimistic gain that the account covers; `gains` `[arms]` are the predicted ones."""
        offsets, variances = self.times.offsets(table.terms)
        unsure = self.drafts.variances(int(self._lengths[-1])).ravel()[table.drafts].max(1)  # [arms]
        gains = np.minimum(gains - offsets, table.most)  # no draft makes a round shorter
        # Each of its rounds commits a token per row at least, so it costs at most this many autoregressive rounds.
        ratios = table.seconds[:, -1] / table.plain * np.exp(offsets)
        # A first trial is covered as predicted: it is one round of the shortest γ, and what it will cost nobody knows.
        caution = np.where(table.untried, 0.0, CAUTION)
        tokens = np.maximum(np.exp(gains - caution * np.sqrt(unsure)) * ratios, 1.0)
        worst = ratios * np.exp(caution * np.sqrt(variances)) - tokens  # [arms]
        worst = np.where(table.untried, np.minimum(worst, MOST_SAVED), worst)
        # What a long rollout saves while nothing drafts lets it doubt more: a few unlucky drafts rule no method out.
        doubt = 1 + (max(self.saved - 2 * CARRIED, 0.0) / MOST_SAVED if self._kept.arm == PLAIN else 0.0)
        begins = math.log1p(self._margin) if self._kept.arm == PLAIN else 0.0
        served = [self._may_draft(arm) for arm in table.arms]
        hopes = gains + np.sqrt(doubt**2 * (variances + unsure) + table.untried) - begins
        hopes = np.where(served, hopes, -np.inf)
        firsts = np.flatnonzero((table.untried > 0) & ~table.waits)
        for at in firsts:  # a first trial tells of all γ of its method
            hopes[at] = hopes[at : at + len(self._lengths)].max()
        next_trial = min(((float(worst[at]), int(at)) for at in firsts if hopes[at] > 0), default=None)
        self._needed = next_trial[0] if next_trial else 0.0
        known = (table.untried == 0) | (self.times.rounds > 0)  # a trial is compared with an autoregressive round
        hopes = np.where((worst <= self.saved) & known & ~table.waits, hopes, -np.inf)
        best = int(hopes.argmax())
        self._gain = math.exp(gains[best])
        chosen = table.arms[best] if hopes[best] > 0 else PLAIN
        if chosen.chains:
            self._say(chosen, self._gain, "drafting")
        else:
            self._say_why_not(table.arms, gains, worst, None if next_trial is None else next_trial[1])
        return chosen

    def _say(self, arm: Arm, gain: float, then: str) -> None:
        """Keeps what is said of the rollout: `arm` promises `gain`, and `then` what follows from it."""
        names = " and ".join(f'"{self.candidates[which].name}" (γ = {length})' for which, length in arm.chains)
        said = promise(names, gain, self._batch, self._length_then, by="promises")
        self._said = Account(gain, f"{said}: {then}")

    def _say_why_not(self, arms: Sequence[Arm], gains: Floats, worst: Floats, trial: int | None) -> None:
        """Says of the arm that promises most why it does not draft, or when the first trial, arm `trial`, will run;
        nothing after drafts of this rollout."""
        if any(tally.rounds for tally in self.tallies):
            return
        served = [self._may_draft(arm) for arm in arms]
        if not any(served):
            left = [each.max_rows for which, each in enumerate(self.candidates) if which not in self._dropped]
            self._said = Account(None, too_many_rows(self._batch, max(left)) if left else FAILED)
            return
        best = int(np.where(served, gains, -np.inf).argmax()) if trial is None else trial
        gain = math.exp(gains[best])
        if trial is not None:
            self._say(arms[trial], gain, first_trial(worst[trial], self.saved))
            return
        too_little = gain < 1 + self._margin
        self._say(arms[best], gain, decision(gain, self._margin) if too_little else no_budget(worst[best], self.saved))

    def _may_draft(self, arm: Arm) -> bool:
        if arm.race and self._batch * (1 + arm.width) > self._budget:
            return False
        served = (
            which not in self._dropped and self._batch <= self.candidates[which].max_rows for which, _ in arm.chains
        )
        return all(served)

    def _pairs(self, gains: Floats, taus: Floats, survivals: Floats, waiting: int) -> Iterator[tuple[Arm, Floats]]:
        """A network beside a lookup, each at the γ that is best alone, with τ of each row."""
        best = gains.reshape(len(self.candidates), -1).argmax(1) + np.arange(len(self.candidates)) * len(self._lengths)
        for network, lookup in self._couples:
            one, other = best[network], best[lookup]
            chains = (*self._singles[one].chains, *self._singles[other].chains)
            if self._batch > 1:
                yield Arm(chains), np.maximum(taus[one], taus[other])
            if self._may_race and not waiting:
                both = min(length for _, length in chains)  # of two chains the longer one counts
                shared = (survivals[:, network, :both] * survivals[:, lookup, :both]).sum(1)  # [B]
                yield Arm(chains, race=True), taus[one] + taus[other] - 1 - shared

    @property
    def _couples(self) -> list[tuple[int, int]]:
        networks, lookups = (
            [which for which, candidate in enumerate(self.candidates) if candidate.is_network == is_network]
            for is_network in (True, False)
        )
        return [(network, lookup) for network in networks for lookup in lookups]

    def _log_gains(self, table: Table, taus: Floats, waiting: int) -> Floats:
        """How much sooner the rows end than autoregressively, `[arms]`, with τ of each row `[arms, B]`."""
        if waiting:
            return np.log(taus.mean(1) * table.plain / table.seconds[:, -1])
        stays = np.sort(1 / taus, axis=1)  # rounds per token of each row, the first to end first
        stays[:, 1:] -= stays[:, :-1].copy()
        return np.log(table.plain / (stays * table.seconds[:, ::-1]).sum(1))

    def _table(self, pairs: tuple[Arm, ...]) -> Table:
        """All single arms and `pairs`, for rounds of the present size."""
        key = pairs, self._batch, len(self.times.tried)
        if key not in self._tables:
            arms, batch, most = (*self._singles, *pairs), self._batch, int(self._lengths[-1])
            places = [[which * most + length - 1 for which, length in arm.chains] for arm in arms]
            untried = np.array([self._is_untried(arm) for arm in arms])
            self._tables[key] = Table(
                arms,
                np.array([self._seconds(arm)[:batch] for arm in arms]),
                self._seconds(PLAIN)[batch - 1],
                self.times.weights(
                    [self._kind(arm, batch) for arm in arms], self._kind(PLAIN, batch),
                    [self._shares(arm) for arm in arms],
                ),
                np.where(untried, [(UNTRIED * sum(self._shares(arm))) ** 2 for arm in arms], 0.0),
                untried & [len(arm.chains) > 1 or arm.width > self._lengths[0] for arm in arms],
                np.log1p([max(length for _, length in arm.chains) for arm in arms]),
                np.array([(own[0], own[-1]) for own in places]),
            )
        return self._tables[key]

    def _chains(self, arm: Arm, efficiencies: Floats) -> tuple[Chain, ...]:
        if len(arm.chains) < 2 or arm.race:
            return tuple(Chain(which, length) for which, length in arm.chains)
        taus = np.array([efficiencies[which, self._lengths == length][0] for which, length in arm.chains])  # [2, B]
        best = taus.argmax(0)
        rows = [tuple(np.flatnonzero(best == place).tolist()) for place in range(len(arm.chains))]
        return tuple(
            Chain(which, length, None if len(own) == self._batch else own)
            for (which, length), own in zip(arm.chains, rows, strict=True)
            if own
        )

    # ---- what rounds did --------------------------------------------------------------------------------------------

    def record_rows(
        self, requests: Sequence[int], accepted: Mapping[int, Sequence[int]], drafted: Mapping[int, Sequence[int]]
    ) -> None:
        if not self._kept.failed:
            self._kept.verdicts.append((accepted, drafted))

    def record(self, draft_length: int, seconds: float, tokens: int, is_typical: bool = True) -> None:
        kept = self._kept
        kept.passed += seconds
        if kept.failed or not is_typical or draft_length < kept.width or seconds <= 0:
            return  # forwards were captured, or these were a rollout's last rounds: they are of no kind
        kept.measured.append((seconds, tokens))

    def overheard(
        self, which: int, requests: Sequence[int], accepted: Sequence[int], attempted: Sequence[int]
    ) -> None:
        self.drafts.record(which, np.array(requests), np.array([accepted]), np.array([attempted]))

    def _settle(self) -> None:
        """Writes to the ledger, the account and the tallies what the rounds of the plan that was kept did."""
        kept = self._kept
        if rounds := len(kept.measured):
            measured = np.array(kept.measured)  # [rounds, 2], seconds and tokens
            kind, ratios = self._kind(kept.arm, kept.batch), np.log(measured[:, 0] / kept.predicted)
            counts = self.times.observe(kind, *ratios, shares=kept.shares)
            gained = 0.0
            if kept.arm.chains:
                plain = self._plain_seconds()
                # After a jump of the machine drafts may seem cheap, as nothing else was measured: no credit for that.
                terms = self.times.weights([kind], self._kind(PLAIN, kept.batch), [kept.shares])
                doubt = math.sqrt(max(self.times.offsets(terms)[1].item() - KNOWN, 0.0))
                seconds, tokens = measured[counts].sum(0)
                gained = tokens / kept.batch - seconds / plain * math.exp(CAUTION * doubt)
                seconds, tokens = measured.sum(0).tolist()
                for which, _ in kept.arm.chains:  # a race or a mixture counts for both
                    self.tallies[which] += Tally(
                        rounds, rounds * kept.batch, int(tokens), seconds,
                        plain * tokens / kept.batch, rounds * kept.gain, rounds,
                    )  # fmt: skip
            self.saved = min(max(self.saved + INCOME * rounds + gained, -MOST_SAVED), MOST_SAVED)
            kept.measured = []
        for which in {which for accepted, _ in kept.verdicts for which in accepted}:
            of_rounds = [(accepted[which], drafted[which]) for accepted, drafted in kept.verdicts if which in accepted]
            right, tried = np.array(of_rounds).swapaxes(0, 1)  # [R, B] each; -1: no draft
            if not self.candidates[which].is_network:  # it drafts less than γ where it knows no more: that is no hit
                tried = np.full_like(tried, dict(kept.arm.chains).get(which, 0))
            self.drafts.record(which, np.array(kept.requests), right, np.minimum(right + 1, tried))
        kept.verdicts.clear()

    def spend(self, seconds: float) -> bool:
        self._settle()
        rounds = seconds / self._plain_seconds()
        if self.saved < rounds:
            return False
        self.saved -= rounds
        return True

    # ---- predictions ------------------------------------------------------------------------------------------------

    def _seconds(self, arm: Arm) -> Floats:
        """Predicted seconds of a round of 1, 2, … rows: `[capacity]`, between powers of two by straight lines."""
        if arm not in self._predicted:
            lengths = {self.candidates[which].name: length for which, length in arm.chains}
            at = [self._predict(lengths, arm.width, rows, self._length_then) for rows in self._sizes]
            self._predicted[arm] = np.interp(np.arange(1, self._capacity + 1), self._sizes, at)
        return self._predicted[arm]

    def _shares(self, arm: Arm) -> tuple[float, ...]:
        """Of a round that each of its chains adds to an autoregressive one, as predicted."""
        plain, whole = (float(self._seconds(own)[self._batch - 1]) for own in (PLAIN, arm))
        alone = [float(self._seconds(Arm((chain,)))[self._batch - 1]) for chain in arm.chains]
        added = [max(seconds - plain, LEAST_SHARE * seconds) for seconds in alone]
        share = max(1 - plain / whole, LEAST_SHARE)
        return tuple(share * own / sum(added) for own in added)

    def _is_untried(self, arm: Arm) -> bool:
        """Whether a first trial has yet to tell what it takes. A lookup beside a network needs none: alone it may
        never promise more than the network."""
        candidates = [self.candidates[which] for which, _ in arm.chains]
        alone = len(candidates) == 1
        return any(self.times.is_untried(each.name) for each in candidates if alone or each.is_network)

    def _plain_seconds(self) -> float:
        """What an autoregressive round takes now."""
        return self.times.seconds(self._kind(PLAIN, self._batch), float(self._seconds(PLAIN)[self._batch - 1]))

    def _kind_of(self, arm: Arm, batch: int) -> Kind:
        names = tuple(self.candidates[which].name for which, _ in arm.chains)
        return Kind(names, (*(length for _, length in arm.chains), int(arm.race)), batch.bit_length())

    def plain_seconds(self, rounds: Sequence[PlainRounds]) -> float | None:
        self._settle()
        if not self.times.rounds:
            return None
        return sum(
            each.rounds
            * self.times.seconds(self._kind(PLAIN, each.batch), self._predict({}, 0, each.batch, each.length))
            for each in rounds
        )

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The ledger, as a checkpoint keeps it; JSON."""
        return {"times": self.times.state_dict(), **self.drafts.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave, or from the acceptance that earlier releases kept."""
        self.drafts.load_state_dict(state)
        if "times" in state:
            self.times.load_state_dict(state["times"])
