"""The ledger of decoding rounds: seconds (`Times`) beside their prediction (`ProbedRounds`), and acceptance of drafts
(`Drafts`).

A control reads them, and records every round. Plain numpy: it runs in every round, and in simulations.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]

DRIFT = 0.02  # sd by which the machine's level moves in a round, and plain rounds of one size are off; log seconds
CELL_ERROR = 0.1  # sd of log(measured / predicted) of a plan and size beyond its method's, and of a calibrated method
NOISE = 0.02, 0.05  # least, and first, sd of a round's time: formulas are no truer than 2 %
OUTLIER = 3.0  # sds: a longer round is an outlier or a jump; a machine's noise has such errors once in 400 rounds
UNTRIED = math.log(6)  # sd of a method's term when it is first measured: a probe may be off six times
LEAST_SHARE = 0.3  # least share of a drafted round that its method's term moves: predictions leave out the host
MOST_OFF = math.log(36)  # largest term of a method, either way: a draft that takes less than a 36th counts as free
OUTLIER_ROUNDS = 20  # of so many rounds of a kind one may be an outlier
STEPS = 5  # of a fit of a method's term: one that is off by e^2 is fitted within 1 %
FADE = 0.95  # decay: of noise and of a row's evidence per round, and of all evidence per rollout
FIRST_GUESS = 0.6, 2.0  # prior acceptance of a method, and its weight in draft positions
LIKENESS = 15.0  # prior strength, in draft positions: of a method for a prompt, and of a prompt for a row
VERSION = 3  # of the state of `Times`, which says how rounds differ from the probe's predictions
MOST_PROMPTS = 4096  # most stored prompts; the newest stay


class Kind(NamedTuple):
    """A kind of round; without methods: autoregressive."""

    methods: tuple[str, ...]  # strategies that draft
    plan: tuple[int, ...]  # γ of each, and whether rows get chains of all
    size: int  # bit length of the number of rows


class Terms(NamedTuple):
    """The terms by which rounds of several kinds differ from a baseline; at most M methods draft in a round."""

    weights: Floats  # [kinds, terms] of the terms that add up: level and kinds
    methods: Integers  # [kinds, M], places of the methods' terms
    shares: Floats  # [kinds, M] of the predicted round that each method adds to an autoregressive one; 0: none


class Times:
    """How rounds differ from their prediction: log(measured / predicted) is

        the machine's level  +  log(1 + Σ share (exp(a term of each method) - 1))  +  a term of the kind  +  noise

    in one Kalman filter. A method's share is the part of the predicted round that it adds to an autoregressive one: a
    wrong draft time is wrong by one factor at every γ. The level drifts and jumps, other terms hardly move. So effects
    on all rounds (contention, a slow clock, an error of the whole prediction) cancel when kinds are compared.
    Autoregressive rounds become less certain while other kinds run, so a control tries them again before long, and
    sees whether drafts still gain.

    Args:
        method_error: sd of a method's term before it was measured, in log seconds. The first measurement may differ by
            far more (`UNTRIED`).
    """

    def __init__(self, method_error: float) -> None:
        self._method_error = method_error
        self._places: dict[Any, int] = {"level": 0}
        self._plain_places: list[int] = []  # of the terms of autoregressive kinds
        self._mean, self._covariance = np.zeros(1), np.ones((1, 1))  # [terms], [terms, terms]
        self._noise = NOISE[1] ** 2
        self._last: Kind | None = None
        self._next_outlier: dict[Kind, int] = {}  # the round from which on an outlier of the kind may be ignored again
        self.tried: set[str] = set()  # methods with a counted round
        self.rounds = 0

    def observe(self, kind: Kind, *log_ratios: float, shares: Sequence[float] = ()) -> Bools:
        """Records consecutive rounds: log(measured / predicted), finite numbers. `shares`: by method, as in `Terms`;
        None: the whole round, in equal parts.

        Returns:
            `[rounds]`: which of them count. One much longer round of a kind in `OUTLIER_ROUNDS` is ignored: it
            compiled, or touched memory for the first time, and the next rounds will not.
        """
        ratios, counts = np.array(log_ratios), np.ones(len(log_ratios), dtype=bool)
        terms = self.terms([kind], None, [shares])
        covariance, places = self._covariance, self._terms_of(kind)
        covariance[0, 0] += len(ratios) * DRIFT**2
        if kind.methods:  # slower drafts look like a slower machine until the next autoregressive round
            covariance[self._plain_places, self._plain_places] += len(ratios) * DRIFT**2
        (expected,), (slopes,) = self._linear(terms)
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
        for name in kind.methods:
            if self.is_untried(name):
                covariance[self._places[name], self._places[name]] = UNTRIED**2
        self.tried.update(kind.methods)
        noise, measured = self._noise / len(ratios), float(ratios.mean())
        error, variance = measured - expected, slopes @ covariance @ slopes + noise
        surprise = error * error / variance
        scatter, weight = surprise * self._noise, 1  # error of the first prediction, or spread of the rounds
        if len(ratios) > 1:
            scatter, weight = float(ratios.var(ddof=1)), len(ratios) - 1
        scatter = max(min(scatter, OUTLIER**2 * self._noise), NOISE[0] ** 2)
        self._noise += (scatter - self._noise) * weight / (FADE / (1 - FADE) + weight)
        if surprise > OUTLIER**2:
            # The machine has jumped, or the prediction of the drafts is wrong: an autoregressive round will show
            # which.
            covariance[0, 0] += error * error
            if kind.methods and kind != self._last:
                covariance[places, places] += np.minimum((error / slopes[places]) ** 2, MOST_OFF**2) / len(places)
        self._last = kind
        before, methods = self._mean.copy(), [self._places[name] for name in self.tried]
        for _ in range(STEPS if kind.methods else 1):  # the mean is where the line that is fitted touches the curve
            (expected,), (slopes,) = self._linear(terms)
            cross = covariance @ slopes  # [terms]
            variance = slopes @ cross + noise
            self._mean = before + cross * ((measured - expected - slopes @ (before - self._mean)) / variance)
            self._mean[methods] = self._mean[methods].clip(-MOST_OFF, MOST_OFF)
        self._covariance = covariance - np.outer(cross, cross / variance)
        return counts

    def is_untried(self, method: str) -> bool:
        """Whether rounds of `method` are only predicted, by a probe, and none has counted."""
        return self._method_error > CELL_ERROR and method not in self.tried

    def terms(
        self, kinds: Sequence[Kind], baseline: Kind | None, shares: Sequence[Sequence[float]] | None = None
    ) -> Terms:
        """The terms by which rounds of `kinds` differ from `baseline`, an autoregressive kind, or if that is None from
        their predictions. `shares`: by kind, as in `observe`."""
        places = list(map(self._terms_of, kinds))  # may add terms
        baseline_places = self._terms_of(baseline) if baseline else []
        count = max(map(len, places)) - 1
        weights = np.zeros((len(kinds), len(self._mean)))
        methods, parts = np.zeros((len(kinds), count), dtype=np.int64), np.zeros((len(kinds), count))
        for row, (*of_methods, of_kind) in enumerate(places):
            if drafting := len(of_methods):
                methods[row, :drafting] = of_methods
                parts[row, :drafting] = shares[row] if shares and shares[row] else 1 / drafting
            weights[row, of_kind] = 1.0
        weights[:, baseline_places] -= 1.0
        weights[:, 0] = 0.0 if baseline else 1.0
        return Terms(weights, methods, parts)

    def _linear(self, terms: Terms) -> tuple[Floats, Floats]:
        """Expected logarithms `[kinds]`, and their slopes by the terms `[kinds, terms]`."""
        parts = terms.shares * np.exp(self._mean[terms.methods])  # [kinds, M]
        whole = 1 - terms.shares.sum(1) + parts.sum(1)  # [kinds]
        slopes = terms.weights.copy()
        np.add.at(slopes, (np.arange(len(slopes))[:, None], terms.methods), parts / whole[:, None])
        return terms.weights @ self._mean[: slopes.shape[1]] + np.log(whole), slopes

    def offsets(self, terms: Terms) -> tuple[Floats, Floats]:
        """Log factor of rounds over their predictions, relative to the baseline: mean and variance, `[kinds]` each.
        `terms` may be older than the newest terms."""
        means, slopes = self._linear(terms)
        count = slopes.shape[1]
        variances = ((slopes @ self._covariance[:count, :count]) * slopes).sum(1)
        return means, np.maximum(variances, 0.0)

    def seconds(self, kind: Kind, predicted: float) -> float:
        """Expected seconds of a round of `kind` now."""
        places = [0, *self._terms_of(kind)]  # first, as this may add terms to the mean
        return predicted * math.exp(self._mean[places].sum())

    def end_rollout(self) -> None:
        """Makes well-known terms less certain: anything may have changed a little between rollouts."""
        place = np.arange(1, len(self._mean))
        variance = self._covariance[place, place]
        self._covariance[place, place] = np.where(variance < CELL_ERROR**2, variance / FADE, variance)

    def _terms_of(self, kind: Kind) -> list[int]:
        """Places of the terms of the kind's methods and, last, of the kind, without the level; adds missing terms."""
        places = []
        for name in (*kind.methods, kind):
            if name not in self._places:
                self._places[name] = place = len(self._mean)
                error = DRIFT if not kind.methods else CELL_ERROR if name == kind else self._method_error
                if not kind.methods:
                    self._plain_places.append(place)
                self._mean = np.append(self._mean, 0.0)
                self._covariance = np.pad(self._covariance, (0, 1))
                self._covariance[place, place] = error**2
            places.append(self._places[name])
        return places

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint keeps; JSON."""
        return {
            "version": VERSION,
            "terms": [[*name] if isinstance(name, Kind) else name for name in self._places],
            "mean": self._mean.tolist(),
            "covariance": self._covariance.tolist(),
            "noise": self._noise,
            "rounds": self.rounds,
            "tried": sorted(self.tried),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`. The machine may be a different one: its level is reset. A state of releases
        before `VERSION` is ignored: their predictions differ, and in some a compiling round could exclude drafts.

        Raises:
            ValueError: the numbers do not fit the terms, or are not finite.
        """
        if state.get("version") != VERSION:
            return
        names = [
            name if isinstance(name, str) else Kind(tuple(name[0]), tuple(name[1]), name[2]) for name in state["terms"]
        ]
        mean, covariance = (np.array(state[name], dtype=float) for name in ("mean", "covariance"))
        shape = len(set(names)), len(names)
        if covariance.shape != shape or mean.shape != shape[:1] or not np.isfinite(covariance.sum() + mean.sum()):
            raise ValueError(
                f"the ledger of rounds is damaged: its mean {mean.shape} and covariance {covariance.shape} must be "
                f"finite numbers of {len(names)} different terms. Delete the file that holds it."
            )
        self._places = {name: place for place, name in enumerate(names)}
        self._plain_places = [
            place for name, place in self._places.items() if isinstance(name, Kind) and not name.methods
        ]
        self._mean, self._covariance = mean, covariance
        self._covariance[0, 0] += 1.0
        self._noise, self.rounds, self._next_outlier = state["noise"], state["rounds"], {}
        self.tried = set(state["tried"])


class _Rollout:
    """Counts of one rollout, of B requests and P different prompts; M methods, four counts as in `Drafts`."""

    def __init__(self, prompts: Sequence[str], known: Mapping[str, Floats], methods: int) -> None:
        place = dict(zip(dict.fromkeys(prompts), itertools.count()))
        self.keys = list(place)
        self.prompt_of = np.array([place[key] for key in prompts], dtype=np.int64)  # [B]
        self.prompts = np.zeros((len(place), methods, 4))  # [P, M, 4]
        for key in known.keys() & place.keys():
            self.prompts[place[key]] = known[key] * FADE
        self.rows = np.zeros((len(prompts), methods, 4))  # [B, M, 4]
        self.continues = np.zeros((len(prompts), methods), dtype=bool)  # [B, M], last draft fully accepted


class Drafts:
    """Acceptance by method, by method and prompt, and by method and row; each level is the prior of the next.

    Acceptance is two rates (`acceptance.py`), so four counts: accepted first tokens, first tokens, accepted further
    tokens, further tokens. After a fully accepted `looked_up` draft the copied passage continues: the next first token
    is as likely as a further one, and counts as one.
    """

    def __init__(self, methods: Sequence[str], looked_up: Sequence[bool]) -> None:
        self.methods = list(methods)
        self._looked_up = np.array(looked_up, dtype=bool)  # [M]
        self._counts = np.zeros((len(methods), 4))
        self._prompts: dict[str, Floats] = {}  # [M, 4] each, oldest first
        self.begin([])

    def begin(self, prompts: Sequence[str]) -> None:
        """Starts a rollout of these prompts, one per request."""
        self._now = _Rollout(prompts, self._prompts, len(self.methods))

    def record(self, method: int, requests: Integers, accepted: Integers, attempted: Integers) -> None:
        """Adds the drafts of R rounds for `requests` `[n]`: `attempted` judged tokens and `accepted` ones, `[R, n]`
        each; -1: no draft."""
        now, drew, first = self._now, accepted >= 0, np.ones_like(accepted)  # [R, n]
        continues, whole = now.continues[requests, method], (0 < attempted) & (attempted == accepted)  # [n], [R, n]
        for row, drew_now, whole_now in zip(first, drew, whole, strict=True):
            row[:] = ~continues | ~self._looked_up[method]
            continues = np.where(drew_now, whole_now, continues)
        now.continues[requests, method] = continues
        right, tried = np.where(drew, accepted, 0), np.where(drew, attempted, 0)
        firsts = [np.minimum(right, first), np.minimum(tried, first)]
        counts = np.stack([*firsts, right - firsts[0], tried - firsts[1]], axis=-1)  # [R, n, 4]
        total = counts.sum(0)  # [n, 4]
        self._counts[method] += total.sum(0)
        np.add.at(now.prompts[:, method], now.prompt_of[requests], total)
        later = drew[::-1].cumsum(0)[::-1]  # [R, n], drafts from this one on
        faded = (FADE ** (later - drew)[..., None] * counts).sum(0)
        now.rows[requests, method] = FADE ** later[0][:, None] * now.rows[requests, method] + faded

    def end_rollout(self) -> None:
        """Decays the counts of older rollouts: of a method at every rollout, of a prompt at every rollout with it."""
        for key, counts in zip(self._now.keys, self._now.prompts, strict=True):
            self._prompts.pop(key, None)
            self._prompts[key] = counts  # at the end: the newest
        for key in list(self._prompts)[:-MOST_PROMPTS]:
            del self._prompts[key]
        self._counts *= FADE
        self.begin([])

    def survivals(self, requests: Integers, most: int) -> Floats:
        """`[B, M, most]`: probabilities that at least 1, 2, … tokens of a draft for `requests` `[B]` are accepted."""
        now = self._now
        rates = _drawn(now.prompts[now.prompt_of[requests]], self._rates(), LIKENESS)  # [B, M, 2]
        rates = _drawn(now.rows[requests], rates, LIKENESS)
        continues = now.continues[requests] & self._looked_up  # [B, M]
        first = np.where(continues, rates[..., 1], rates[..., 0])
        return first[..., None] * rates[..., 1:] ** np.arange(most)

    def variances(self, most: int) -> Floats:
        """`[M, most]`: variance of log τ by method at γ = 1, 2, …, due to little evidence."""
        rates = self._rates()
        spread = np.sqrt(rates * (1 - rates) / (self._counts[:, 1::2] + FIRST_GUESS[1] + 1))  # [M, 2], sd of Beta
        higher = np.minimum(rates + spread, 1.0)
        first = np.stack([rates[:, 0], higher[:, 0], rates[:, 0]])  # [3, M]: expected, or one rate an sd higher
        further = np.stack([rates[:, 1], rates[:, 1], higher[:, 1]])
        tau = 1 + (first[..., None] * further[..., None] ** np.arange(most)).cumsum(-1)  # [3, M, most]
        return ((tau[1:] / tau[0] - 1) ** 2).sum(0)

    def _rates(self) -> Floats:
        """`[M, 2]`: a method's rates of first and of further tokens."""
        return _drawn(self._counts, np.full((len(self.methods), 2), FIRST_GUESS[0]), FIRST_GUESS[1])

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint keeps; JSON."""
        return {
            "methods": {name: counts.tolist() for name, counts in zip(self.methods, self._counts, strict=True)},
            "prompts": [
                [key, dict(zip(self.methods, counts.tolist(), strict=True))] for key, counts in self._prompts.items()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`, with those of its methods that draft here. Earlier releases wrote one more
        number before a prompt's four counts."""

        def counts_of(state: Mapping[str, Sequence[float]]) -> Floats:
            return np.array([state.get(name, [0.0] * 4)[-4:] for name in self.methods], dtype=float).reshape(-1, 4)

        self._counts = counts_of(state["methods"])
        self._prompts = {key: counts_of(counts) for key, counts in state["prompts"]}


def _drawn(counts: Floats, towards: Floats, weight: float) -> Floats:
    """Rates `[..., 2]` of `counts` `[..., 4]`, with the prior rates `towards` of a weight of `weight` positions."""
    return (counts[..., ::2] + weight * towards) / (counts[..., 1::2] + weight)


# ---- predictions of rounds -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForwardSeconds:
    """Seconds of one network's forward by number of tokens: straight lines through the timed points, and beyond."""

    tokens: Sequence[int]  # ascending, two or more
    seconds: Sequence[float]

    def __call__(self, tokens: int) -> float:
        """Seconds of a forward over `tokens` tokens, all rows together."""
        if tokens <= self.tokens[-1]:
            return float(np.interp(tokens, self.tokens, self.seconds))
        (before, last), (start, end) = self.tokens[-2:], self.seconds[-2:]
        return end + max(end - start, 0.0) / (last - before) * (tokens - last)

    def plus(self, seconds: float) -> "ForwardSeconds":
        """The same with `seconds` added to every forward."""
        return ForwardSeconds(self.tokens, [own + seconds for own in self.seconds])

    def times(self, share: float) -> "ForwardSeconds":
        """The same multiplied by `share`, for another network."""
        return ForwardSeconds(self.tokens, [share * seconds for seconds in self.seconds])


@dataclass(frozen=True)
class ProbedRounds:
    """Predicts rounds by timed forwards over short texts; work between forwards is left out."""

    target: ForwardSeconds
    drafters: Mapping[str, ForwardSeconds]  # those of networks, per draft token; lookups take no time

    def __call__(self, lengths: Mapping[str, int], width: int, batch: int, length: float) -> float:
        """As :data:`~.control.RoundSeconds`."""
        drafts = sum(count * self.drafters[name](batch) for name, count in lengths.items() if name in self.drafters)
        return self.target(batch * (1 + width)) + drafts
