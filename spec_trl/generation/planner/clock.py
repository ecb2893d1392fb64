"""Predicts the seconds of decoding rounds, and corrects the prediction after every round.

Plain numpy: it runs in every plan, and in simulations.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...json_files import read_json, write_json
from ...user_cache import save_cached
from .plan import PLAIN, Plan


Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]
RoundSeconds: TypeAlias = Callable[[Mapping[str, int], int, int, float], float]
"""Predicts a round's seconds from γ by drafter, most draft tokens of a row, rows, and their mean length."""

# Standard deviations (sd) and terms are in log seconds. README.md says what breaks when one is doubled.
DRIFT = 0.02  # sd of the machine's speed from round to round, and of autoregressive rounds of one size
CELL_ERROR = 0.1  # sd of a plan at one size beyond its drafters' terms, and of a calibrated drafter
PROBE_ERROR = 0.3  # sd of a probed drafter: a probe leaves out long texts, and work between forwards
NOISE = 0.02, 0.05  # least and first sd of a round: no prediction is better than 2 %
OUTLIER = 3.0  # sds; a longer round is an outlier or a jump of the machine: of usual noise, one round in 400
OUTLIER_ROUNDS = 20  # rounds of a plan and size; one of them may be ignored as an outlier
UNTRIED = math.log(6)  # sd of a drafter before its first round: a probe may be wrong by a factor of six
LEAST_SHARE = 0.3  # of a drafted round, that its drafters' terms scale at least: predictions leave out Python
MOST_OFF = math.log(36)  # largest term of a drafter: corrections are limited to a factor of 36 either way
STEPS = 5  # iterations of a fit of a drafter's term; a term that is off by e² is then fitted within 1 %
FADE = 0.95  # decay of the noise's estimate per round, and of certainty per rollout
FEWEST_ROUNDS = 100  # fewest rounds in a file
VERSION = 3  # of the saved state: differences from one kind of predictions
FILE_VERSION = 2  # of a file of predictions and state


class Rounds(NamedTuple):
    """Rounds of A plans for B rows, beside autoregressive ones; M drafters at most draft in a round."""

    seconds: Floats  # [A, B], predicted for 1 to B rows
    plain: float  # predicted of an autoregressive round of B rows
    weights: Floats  # [A, terms] of the terms that add up: plans
    drafters: Integers  # [A, M], places of the drafters' terms
    shares: Floats  # [A, M] of the predicted round that each drafter adds to an autoregressive one; 0: none
    untried: Floats  # [A], extra uncertainty, a variance of log seconds, of plans whose first drafter has not run yet


class Clock:
    """Expects a round of a plan to take its prediction, corrected: log(measured / predicted) is

        the machine's level + log(1 + Σ share (exp(a term of each drafter) - 1)) + a term of plan and size + noise

    in one Kalman filter. A drafter's share is the part of the predicted round that it adds to an autoregressive one: a
    wrong draft time is wrong by one factor at every γ. The level drifts and jumps, other terms hardly move. So effects
    on all rounds (contention, a slow clock, an error of the whole prediction) cancel when plans are compared.
    Autoregressive rounds become less certain while other plans run, so the planner tries them again before long, and
    sees whether drafts still gain.

    Args:
        predict: seconds of a round.
        error: sd of a drafter's term before it was measured. The first measurement of a drafter that was only probed
            (`error` above `CELL_ERROR`) may differ by far more (`UNTRIED`).
        path: of a file for :meth:`keep`.
    """

    def __init__(self, predict: RoundSeconds, error: float = CELL_ERROR, path: Path | None = None) -> None:
        self.predict, self.path, self.saved = predict, path, 0  # rounds that the file knows of
        self._error = error
        self._places: dict[Any, int] = {"level": 0}  # of terms; keys are drafters, and (plan, bit length of the rows)
        self._plain_places: list[int] = []  # of the terms of autoregressive rounds
        self._mean, self._covariance = np.zeros(1), np.ones((1, 1))  # [terms], [terms, terms]
        self._noise = NOISE[1] ** 2
        self._last: tuple[Plan, int] | None = None
        self._next_outlier: dict[tuple[Plan, int], int] = {}  # first round that may be an ignored outlier again
        self.tried: set[str] = set()  # drafters with a counted round
        self.rounds = 0
        self.begin(1)

    # ---- predicted --------------------------------------------------------------------------------------------------

    def begin(self, capacity: int) -> None:
        """Starts a rollout of at most `capacity` rows at a time."""
        self._capacity, self.length = max(capacity, 1), math.nan
        self._sizes = [*(1 << power for power in range((self._capacity - 1).bit_length())), self._capacity]
        self.follow(math.nan)

    def follow(self, length: float) -> None:
        """Predicts for rows of mean length `length` from now on. Predictions change little within a quarter of it."""
        if not 0.8 < length / self.length < 1.25:
            self.length = length
            self._predicted: dict[Plan, Floats] = {}
            self._compared: dict[tuple[tuple[Plan, ...], int, int], Rounds] = {}

    def predicted(self, plan: Plan) -> Floats:
        """`[capacity]`: predicted seconds for 1, 2, … rows, interpolated linearly between powers of two."""
        if plan not in self._predicted:
            seconds = [self.predict(plan.by_drafter, plan.width, rows, self.length) for rows in self._sizes]
            self._predicted[plan] = np.interp(np.arange(1, self._capacity + 1), self._sizes, seconds)
        return self._predicted[plan]

    def compare(self, plans: Sequence[Plan], rows: int) -> Rounds:
        key = (*plans,), rows, len(self.tried)
        if key not in self._compared:
            seconds = np.array([self.predicted(plan)[:rows] for plan in plans])
            terms = self._terms(plans, rows, is_relative=True)
            untried = [bool(plan.drafters) and self.is_untried(plan.drafters[0]) for plan in plans]
            spread = (UNTRIED * np.array([sum(own) for own in terms[2].tolist()])) ** 2
            self._compared[key] = Rounds(
                seconds, self.predicted(PLAIN)[rows - 1], *terms, np.where(untried, spread, 0.0)
            )
        return self._compared[key]

    def _shares(self, plan: Plan, rows: int) -> list[float]:
        plain, added = self.predicted(PLAIN)[rows - 1], []
        for name, length in plan.by_drafter.items():
            alone = float(self.predicted(Plan((name,), (length,)))[rows - 1])
            added.append(max(alone - plain, LEAST_SHARE * alone))
        share = max(1 - plain / float(self.predicted(plan)[rows - 1]), LEAST_SHARE) if added else 0.0
        return [share * seconds / sum(added) for seconds in added]

    # ---- corrected --------------------------------------------------------------------------------------------------

    def seconds(self, plan: Plan, rows: int, length: float | None = None) -> float:
        """Expected seconds of a round now, of rows of mean length `length`; None: that of :meth:`follow`."""
        if length is None:
            predicted = float(self.predicted(plan)[rows - 1])
        else:
            predicted = self.predict(plan.by_drafter, plan.width, rows, length)
        if plan.drafters:
            return predicted * math.exp(self._linear(*self._terms([plan], rows))[0].item())
        (place,) = self._places_of(plan, rows)  # first, as this may add a term
        return predicted * math.exp(self._mean[0] + self._mean[place])

    def offsets(self, rounds: Rounds) -> tuple[Floats, Floats]:
        """Log factor of rounds over their predictions, relative to autoregressive ones: mean and variance, `[A]`
        each."""
        means, slopes = self._linear(*rounds[2:5])
        count = slopes.shape[1]  # newer terms are of other plans
        variances = ((slopes @ self._covariance[:count, :count]) * slopes).sum(1)
        return means, np.maximum(variances, 0.0)

    def is_untried(self, drafter: str) -> bool:
        """Whether rounds of `drafter` are only predicted, by a probe, and none has counted."""
        return self._error > CELL_ERROR and drafter not in self.tried

    def observe(self, plan: Plan, rows: int, *measured: float) -> Bools:
        """Records the seconds of consecutive rounds.

        Returns:
            `[rounds]`: whether each counts. One much longer round of a plan and size in `OUTLIER_ROUNDS` is ignored:
            a round that compiled, or touched memory for the first time, says nothing about the next ones.
        """
        kind, counts = (plan, rows.bit_length()), np.ones(len(measured), dtype=bool)
        ratios = np.log(np.array(measured) / self.predicted(plan)[rows - 1])
        terms, places = self._terms([plan], rows), self._places_of(plan, rows)
        covariance = self._covariance
        covariance[0, 0] += len(ratios) * DRIFT**2
        if plan.drafters:  # slower drafts look like a slower machine until the next autoregressive round
            covariance[self._plain_places, self._plain_places] += len(ratios) * DRIFT**2
        (expected,), (slopes,) = self._linear(*terms)
        variance = slopes @ covariance @ slopes + self._noise
        longest = int(ratios.argmax())
        others = np.delete(ratios, longest)
        usual = expected
        if len(others):
            usual, variance = others.mean(), self._noise * (1 + 1 / len(others))
        may_be_outlier = self.rounds >= self._next_outlier.get(kind, 0)
        if may_be_outlier and ratios[longest] - usual > OUTLIER * math.sqrt(variance):
            counts[longest] = False
            self._next_outlier[kind] = self.rounds + len(ratios) + OUTLIER_ROUNDS
        self.rounds += len(ratios)
        ratios = ratios[counts]
        if not len(ratios):
            return counts
        for name in plan.drafters:
            if self.is_untried(name):
                covariance[self._places[name], self._places[name]] = UNTRIED**2
        self.tried.update(plan.drafters)
        noise, ratio = self._noise / len(ratios), float(ratios.mean())
        error, variance = ratio - expected, slopes @ covariance @ slopes + noise
        surprise = error * error / variance
        scatter, weight = surprise * self._noise, 1  # error of the first prediction, or spread of the rounds
        if len(ratios) > 1:
            scatter, weight = float(ratios.var(ddof=1)), len(ratios) - 1
        scatter = max(min(scatter, OUTLIER**2 * self._noise), NOISE[0] ** 2)
        self._noise += (scatter - self._noise) * weight / (FADE / (1 - FADE) + weight)
        if surprise > OUTLIER**2:
            # Either the machine has jumped, or the draft's prediction is wrong: an autoregressive round will show it.
            covariance[0, 0] += error * error
            if plan.drafters and kind != self._last:
                covariance[places, places] += np.minimum((error / slopes[places]) ** 2, MOST_OFF**2) / len(places)
        self._last = kind
        self._fit(terms, ratio, noise, STEPS if plan.drafters else 1)
        return counts

    def _fit(self, terms: tuple[Floats, Integers, Floats], ratio: float, noise: float, steps: int) -> None:
        """Moves the terms towards a measured log `ratio` of variance `noise` by an iterated Kalman update: the mean is
        the point at which the fitted line touches the curve."""
        before, methods, covariance = self._mean.copy(), [self._places[name] for name in self.tried], self._covariance
        for _ in range(steps):
            (expected,), (slopes,) = self._linear(*terms)
            cross = covariance @ slopes  # [terms]
            variance = slopes @ cross + noise
            self._mean = before + cross * ((ratio - expected - slopes @ (before - self._mean)) / variance)
            self._mean[methods] = self._mean[methods].clip(-MOST_OFF, MOST_OFF)
        self._covariance = covariance - np.outer(cross, cross / variance)

    def end_rollout(self) -> None:
        """Makes well-known terms less certain, since anything may have changed a little between rollouts."""
        place = np.arange(1, len(self._mean))
        variance = self._covariance[place, place]
        self._covariance[place, place] = np.where(variance < CELL_ERROR**2, variance / FADE, variance)

    def _terms(
        self, plans: Sequence[Plan], rows: int, is_relative: bool = False
    ) -> tuple[Floats, Integers, Floats]:
        """Weights, drafters and shares, as in `Rounds`, by which rounds differ from their predictions, or with
        `is_relative` from autoregressive rounds."""
        places = [self._places_of(plan, rows) for plan in plans]  # may add terms
        plain = self._places_of(PLAIN, rows) if is_relative else []
        count = max(map(len, places)) - 1
        weights = np.zeros((len(plans), len(self._mean)))
        drafters, shares = np.zeros((len(plans), count), dtype=np.int64), np.zeros((len(plans), count))
        for at, ((*of_drafters, of_plan), plan) in enumerate(zip(places, plans, strict=True)):
            drafters[at, : len(of_drafters)] = of_drafters
            shares[at, : len(of_drafters)] = self._shares(plan, rows)
            weights[at, of_plan] = 1.0
        weights[:, plain] -= 1.0
        weights[:, 0] = 0.0 if is_relative else 1.0
        return weights, drafters, shares

    def _linear(self, weights: Floats, drafters: Integers, shares: Floats) -> tuple[Floats, Floats]:
        """Expected logarithms `[A]`, and slopes by the terms `[A, terms]`."""
        parts = shares * np.exp(self._mean[drafters])  # [A, M]
        whole = 1 - shares.sum(1) + parts.sum(1)  # [A]
        slopes = weights.copy()
        np.add.at(slopes, (np.arange(len(slopes))[:, None], drafters), parts / whole[:, None])
        return weights @ self._mean[: slopes.shape[1]] + np.log(whole), slopes

    def _places_of(self, plan: Plan, rows: int) -> list[int]:
        """Places of the terms of the drafters and, last, of plan and size, without the level; adds missing terms."""
        places, kind = [], (plan, rows.bit_length())
        for name in (*plan.drafters, kind):
            if name not in self._places:
                self._places[name] = place = len(self._mean)
                error = DRIFT if not plan.drafters else CELL_ERROR if name == kind else self._error
                if not plan.drafters:
                    self._plain_places.append(place)
                self._mean = np.append(self._mean, 0.0)
                self._covariance = np.pad(self._covariance, (0, 1))
                self._covariance[place, place] = error**2
            places.append(self._places[name])
        return places

    # ---- stored -----------------------------------------------------------------------------------------------------

    def keep(self) -> None:
        """Writes the file if at least twice as many rounds are known as the file holds. A file that cannot be written
        (read-only home) is skipped: the next process probes again."""
        if self.path is None or self.rounds < max(2 * self.saved, FEWEST_ROUNDS):
            return
        assert isinstance(self.predict, ProbedRounds)
        self.saved = self.rounds
        file = _File(FILE_VERSION, self.predict.target, dict(self.predict.drafters), self.state_dict())
        save_cached(partial(write_json, value=file), self.path)

    @classmethod
    def read(cls, path: Path, error: float) -> "Clock | None":
        """Reads the file of an earlier process; None if its version made other predictions."""
        file = read_json(path, _File, "ledger of rounds", "delete the file")
        if file.version != FILE_VERSION:
            return None
        clock = cls(ProbedRounds(file.target, file.drafters), error, path)
        clock.load_state_dict(file.times)
        clock.saved = clock.rounds
        return clock

    def state_dict(self) -> dict[str, Any]:
        """State of a checkpoint; JSON."""
        terms = []
        for name in self._places:
            plan, size = name if isinstance(name, tuple) else (name, 0)
            terms.append([plan.drafters, [*plan.draft_lengths, int(plan.on_all_rows)], size] if size else name)
        return {
            "version": VERSION,
            "terms": terms,
            "mean": self._mean.tolist(),
            "covariance": self._covariance.tolist(),
            "noise": self._noise,
            "rounds": self.rounds,
            "tried": sorted(self.tried),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`, with a new level: the machine may be another one. A state of releases before
        `VERSION` is ignored: their predictions differ, and in some a compiling round could exclude drafts.

        Raises:
            ValueError: the numbers do not fit the terms, or are not finite.
        """
        if state.get("version") != VERSION:
            return
        names: list[Any] = []
        for name in state["terms"]:
            if not isinstance(name, str):
                drafters, (*lengths, on_all_rows), size = name
                name = Plan(tuple(drafters), tuple(lengths), bool(on_all_rows)), size
            names.append(name)
        mean, covariance = (np.array(state[name], dtype=float) for name in ("mean", "covariance"))
        shape = len(set(names)), len(names)
        if covariance.shape != shape or mean.shape != shape[:1] or not np.isfinite(covariance.sum() + mean.sum()):
            raise ValueError(
                f"the ledger of rounds is damaged: its mean {mean.shape} and covariance {covariance.shape} must be "
                f"finite numbers of {len(names)} different terms. Delete the file that holds it."
            )
        self._places = {name: place for place, name in enumerate(names)}
        self._plain_places = [place for name, place in self._places.items() if name[0] == PLAIN]
        self._mean, self._covariance = mean, covariance
        self._covariance[0, 0] += 1.0
        self._noise, self.rounds, self._next_outlier = state["noise"], state["rounds"], {}
        self.tried = set(state["tried"])


# ---- predictions of rounds -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForwardSeconds:
    """Seconds of one network's forward by number of tokens: straight lines through the timed points, and beyond."""

    tokens: Sequence[int]  # ascending, two or more
    seconds: Sequence[float]

    def __call__(self, tokens: int) -> float:
        if tokens <= self.tokens[-1]:
            return float(np.interp(tokens, self.tokens, self.seconds))
        (before, last), (start, end) = self.tokens[-2:], self.seconds[-2:]
        return end + max(end - start, 0.0) / (last - before) * (tokens - last)

    def scaled(self, share: float = 1.0, plus: float = 0.0) -> "ForwardSeconds":
        """The same times `share`, for another network, `plus` seconds per forward."""
        return ForwardSeconds(self.tokens, [share * own + plus for own in self.seconds])


@dataclass(frozen=True)
class ProbedRounds:
    """Predicts rounds by timed forwards over short texts; work between forwards is left out."""

    target: ForwardSeconds
    drafters: Mapping[str, ForwardSeconds]  # those of networks, per draft token; lookups take no time

    def __call__(self, lengths: Mapping[str, int], width: int, batch: int, length: float) -> float:
        drafts = sum(count * self.drafters[name](batch) for name, count in lengths.items() if name in self.drafters)
        return self.target(batch * (1 + width)) + drafts


@dataclass(frozen=True)
class AffineSeconds:
    """Seconds of a forward as SA §4.1 models them: b · `per_request` + `fixed`.

    Raises:
        ValueError: a number is negative, or both are 0.
    """

    per_request: float  # D' or V', seconds per request of the batch
    fixed: float  # α or β, seconds

    def __post_init__(self) -> None:
        for name in ("per_request", "fixed"):
            if not vars(self)[name] >= 0:
                raise ValueError(f"{name}={vars(self)[name]} is out of range; it must be at least 0.")
        if not self.per_request + self.fixed > 0:
            raise ValueError("per_request=0 and fixed=0 would take no time at all; one of them must be positive.")

    def __call__(self, batch: int) -> float:
        return batch * self.per_request + self.fixed


def fit_affine(times: Sequence[tuple[int, float, float]]) -> AffineSeconds:
    """The line through `times` of (batch, seconds, weight), by least squares, without negative parts.

    Raises:
        ValueError: there is no time.
    """
    if not times:
        raise ValueError("times is empty; a line needs the seconds of one batch at least.")
    total = sum(weight for _, _, weight in times)
    mean_batch = sum(weight * batch for batch, _, weight in times) / total
    mean = sum(weight * seconds for _, seconds, weight in times) / total
    spread = sum(weight * (batch - mean_batch) ** 2 for batch, _, weight in times)
    joint = sum(weight * (batch - mean_batch) * (seconds - mean) for batch, seconds, weight in times)
    slope = max(joint / spread, 0.0) if spread else 0.0
    if mean < slope * mean_batch:  # would be negative: the best line through 0
        through_zero = sum(w * batch * seconds for batch, seconds, w in times) / sum(w * b * b for b, _, w in times)
        return AffineSeconds(through_zero, 0.0)
    return AffineSeconds(slope, mean - slope * mean_batch)


@dataclass(frozen=True)
class _File:
    version: int
    target: ForwardSeconds
    drafters: dict[str, ForwardSeconds]
    times: dict[str, Any]
