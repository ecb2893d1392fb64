"""A training run's log as a world in which a control decodes: rounds take what the run measured, drafts are as good as
they were, and texts as long. No clock is read.

What a log does not say is left out: requests differ in length but not in acceptance, and no two share a prompt. Where
lookups are good on some prompts alone, they seem better than they were: the slow rows, which end last, are not known.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from spec_trl import SpeculativeConfig
from spec_trl.generation.engine.record import LENGTH_BIN
from spec_trl.generation.engine.statistics import RoundPoint
from spec_trl.generation.planner.acceptance import Acceptance
from spec_trl.generation.planner.clock import Floats
from spec_trl.trainers.run_log import RolloutRecord, read_run

from .control_worlds import Cell, Rollout, World


LOOKUPS = ("ngram", "history")
RATES = np.linspace(0.0, 0.99, 100)  # acceptance is fitted to per cents
LENGTH_STEP = 32  # tokens by which the mean length is rounded, so that few rounds are asked for
ANCHOR = 0.01  # weight of a rollout's first-token acceptance for each of several drafters, whose mean it is


class RecordedMachine:
    """Seconds of rounds between those that were measured.

    A plan is who drafts and how many tokens of a row are verified at most. Between draft lengths, batches and lengths
    there are straight lines, from γ = 0, plain rounds, on. Beyond its own batches a plan follows the shape that all
    plans together have over batches. Two drafters that never drafted together take both their drafts.

    Raises:
        ValueError: no plain round was measured.
    """

    def __init__(self, points: Sequence[RoundPoint]) -> None:
        sums: dict[tuple[str, int, int], dict[int, Floats]] = {}  # by plan and batch, then by bin of length
        for point in points:
            name = _key((point.drafter or "").split("+")) if point.draft_length else ""
            bins = sums.setdefault((name, point.draft_length, point.batch), {})
            own = np.array([point.rounds, point.rounds * point.length, point.seconds])
            bins[int(point.length) // LENGTH_BIN] = bins.get(int(point.length) // LENGTH_BIN, np.zeros(3)) + own
        # By who drafts and γ, then by batch: rounds, mean lengths and mean seconds of the bins, [3, bins].
        self._plans: dict[str, dict[int, dict[int, Floats]]] = {}
        for (name, width, batch), bins in sorted(sums.items()):
            rounds, lengths, seconds = np.array([bins[place] for place in sorted(bins)]).T  # [bins] each
            found = np.array([rounds, lengths / rounds, seconds / rounds])
            self._plans.setdefault(name, {}).setdefault(width, {})[batch] = found
        if "" not in self._plans:
            raise ValueError("no round of this run was plain, so nothing says what decoding without drafts takes.")
        self._batches = sorted({batch for _, _, batch in sums})
        self._shape = self._shape_over_batches()
        self._of_plan = lru_cache(maxsize=None)(self._seconds_of_plan)

    def round_seconds(self, batch: int, length: float, lengths: Mapping[str, int], width: int) -> float:
        """See `Rounds.round_seconds`."""
        rounded = round(length / LENGTH_STEP) * LENGTH_STEP
        drafting = {name: count for name, count in lengths.items() if count}
        name = _key(drafting)
        if len(drafting) < 2 or name in self._plans:
            return self._between(name, width, batch, rounded)
        plain = self._of_plan("", 0, batch, rounded)
        alone = [self._between(own, count, batch, rounded) for own, count in drafting.items()]
        return plain + sum(max(seconds - plain, 0.0) for seconds in alone)

    def _between(self, name: str, width: int, batch: int, length: int) -> float:
        """Between the draft lengths that were measured; beyond them a token takes as long as one of the longest."""
        plain, own = self._of_plan("", 0, batch, length), sorted(self._plans.get(name, ()))
        if not name or not own:
            return plain
        low = max((count for count in own if count <= width), default=0)
        below = self._of_plan(name, low, batch, length) if low else plain
        if low == width:
            return below
        if low == own[-1]:
            return below + max(below - plain, 0.0) * (width / low - 1)  # measured too fast: no token takes less than 0
        high = min(count for count in own if count > width)
        return below + (self._of_plan(name, high, batch, length) - below) * (width - low) / (high - low)

    def _seconds_of_plan(self, name: str, width: int, batch: int, length: int) -> float:
        sizes = self._plans[name][width]
        low = max((each for each in sizes if each <= batch), default=min(sizes))
        high = min((each for each in sizes if each >= batch), default=max(sizes))
        at = [float(np.interp(length, *sizes[each][1:])) for each in (low, high)]
        if low <= batch <= high:
            return float(np.interp(batch, (low, high), at)) if low < high else at[0]
        here, there = np.interp([batch, low if batch < low else high], self._batches, self._shape)
        return at[0 if batch < low else 1] * math.exp(here - there)

    def _shape_over_batches(self) -> list[float]:
        """Log seconds over the batches beside each plan's own level, by least squares; where no plan was measured at
        two neighbours, these are taken as equal."""
        plans = [sizes for own in self._plans.values() for sizes in own.values()]
        count, rows, values = len(self._batches), [], []
        for place, sizes in enumerate(plans):
            for batch, (rounds, _, seconds) in sizes.items():
                row, weight = np.zeros(count + len(plans)), math.sqrt(rounds.sum())
                row[self._batches.index(batch)], row[count + place] = weight, weight
                rows.append(row)
                values.append(weight * math.log(np.average(seconds, weights=rounds)))
        for place in range(count - 1):
            row = np.zeros(count + len(plans))
            row[place], row[place + 1] = -1e-3, 1e-3
            rows.append(row)
            values.append(0.0)
        found: list[float] = np.linalg.lstsq(np.array(rows), np.array(values), rcond=None)[0][:count].tolist()
        return found


class RecordedWorld(World):
    """The training rollouts of a log, `most` of them from the first one on; texts and errors are drawn by `seed`.
    Rounds take what they took after the first rollout, in which caches and memory were cold.

    Raises:
        ValueError: the log cannot be read, no round was plain, or none drafted.
    """

    def __init__(self, path: Path | str, seed: int = 0, most: int = 8) -> None:
        run = read_run(path)
        records = [_named(record) for record in run.of("train") if record.points and record.completion_curve]
        points = [point for record in records for point in record.points]
        self.methods = sorted({name for point in points for name in (point.drafter or "").split("+") if name})
        if not self.methods:
            raise ValueError(f"{run.path}: no training rollout drafted, so nothing says how good drafts would be.")
        self.networks = [name for name in self.methods if name not in LOOKUPS]
        settings = run.header.settings
        given = settings["draft_length" if "draft_length" in settings else "draft_lengths"]  # the name in older logs
        self.draft_lengths = [*SpeculativeConfig(draft_length=given).choice_of_draft_lengths()]
        batch = max(point.batch for point in points)
        self.cell = Cell(batch, "recorded", -(-max(record.completion_curve[-1][1] for record in records) // batch))
        warm = [point for record in records[1:] or records for point in record.points]
        self.seed, self.machine = seed, RecordedMachine(warm)
        self._draw_errors()
        self.prompt = max(1.0, sum(map(_prompt, records)) / len(records))
        usual = {name: acceptance_of(records, name) for name in self.methods}
        self.rollouts = [self._recorded(record, usual) for record in records[:most]]

    def predict(self, lengths: Mapping[str, int], width: int, batch: int, length: float) -> float:
        """See `World.predict`; drafting and verifying cannot be told apart."""
        plain, drafting, verifying = self._errors
        without = self.machine.round_seconds(batch, length, {}, 0)
        if not lengths:
            return plain * without
        seconds = self.machine.round_seconds(batch, length, lengths, width)
        return verifying * min(seconds, without) + drafting * max(seconds - without, 0.0)

    def _recorded(self, record: RolloutRecord, usual: Mapping[str, Acceptance | None]) -> Rollout:
        chance, runs = random.Random(f"{self.seed} {record.rollout}"), []
        rates = {name: acceptance_of([record], name) or usual[name] or Acceptance(0.0, 0.0) for name in self.methods}
        lengths = lengths_of(record)
        for length in lengths:
            own: dict[str, list[int]] = {}
            for name, (first, further) in rates.items():
                # Each position has a run of its own: so drafts are as good as recorded, wherever rounds begin.
                own[name] = []
                for left in range(length, -1, -1):
                    right = 0
                    while right < left and chance.random() < (further if right else first):
                        right += 1
                    own[name].append(right)
            runs.append(own)
        return Rollout([f"{record.rollout}-{request}" for request in range(len(lengths))], lengths, runs)


def acceptance_of(records: Sequence[RolloutRecord], name: str) -> Acceptance | None:
    """Two rates by which drafter `name` commits what its points say, for each γ; what they leave open, the rollouts'
    first-token acceptance tells. None: it never drafted alone."""
    error, blocks = np.zeros((len(RATES), len(RATES))), 0.0
    first, further = RATES[:, None], RATES[None, :]  # [F, 1], [1, R]
    for record in records:
        drafted = [point for point in record.points if point.draft_length]
        own = [point for point in drafted if point.drafter == name]
        for point in own:
            weight: float = point.rounds * point.batch
            tau = 1 + first * sum(further**at for at in range(point.draft_length))  # [F, R]
            error += weight * (tau - point.tokens / weight) ** 2
            blocks += weight
        if own and record.first_token_acceptance is not None:
            trust = 1.0 if len(own) == len(drafted) else ANCHOR
            weight = trust * sum(point.rounds * point.batch for point in own)
            error += weight * (first - record.first_token_acceptance) ** 2
    if not blocks:
        return None
    at_first, at_further = np.unravel_index(int(error.argmin()), error.shape)
    return Acceptance(float(RATES[at_first]), float(RATES[at_further]))


def lengths_of(record: RolloutRecord) -> list[int]:
    """Tokens of each request of rank 0 by when it ended, and began where that is logged. Their sum is what the rounds
    committed."""
    curve = record.completion_curve
    ends = [second for (_, before), (second, done) in pairwise([(0.0, 0), *curve]) for _ in range(done - before)]
    rows = max(point.batch for point in record.points)
    begun = min((own.changes[0][0] for own in record.timeline), default=0.0)
    begins = sorted([begun] * min(rows, len(ends)) + ends[: max(len(ends) - rows, 0)])
    spans = []
    for own in record.timeline[-len(ends) :]:  # its end and its begin are known; the others' go by turns
        start = own.changes[0][0]
        ends.remove(min(ends, key=lambda second: abs(second - own.ended)))
        begins.remove(min(begins, key=lambda second: abs(second - start)))
        spans.append((start, own.ended))
    spans += zip(begins, ends, strict=True)
    # Rows become fewer: a row's tokens until a share of the time, from the largest batch to the smallest.
    seconds, tokens = [0.0], [0.0]
    for batch in sorted({point.batch for point in record.points}, reverse=True):
        own_points = [point for point in record.points if point.batch == batch]
        seconds.append(seconds[-1] + sum(point.seconds for point in own_points))
        tokens.append(tokens[-1] + sum(point.tokens for point in own_points) / batch)
    scale = seconds[-1] / max(curve[-1][0] - begun, 1e-9)
    found = [np.diff(np.interp([(at - begun) * scale for at in span], seconds, tokens))[0] for span in sorted(spans)]
    total = sum(point.tokens for point in record.points)
    return [max(1, round(float(each) * total / sum(found))) for each in found]


def _named(record: RolloutRecord) -> RolloutRecord:
    """The record with who drafted in its points, which older logs do not say."""
    points = [p if p.drafter or not p.draft_length else replace(p, drafter=record.drafter) for p in record.points]
    return replace(record, points=points)


def _prompt(record: RolloutRecord) -> float:
    """Mean tokens of its prompts: of what was cached where a token was committed, what texts did not come to."""
    committed = sum(point.tokens for point in record.points)
    cached = sum(point.tokens * point.length for point in record.points) / committed
    return cached - sum(length**2 for length in lengths_of(record)) / 2 / committed


def _key(names: Sequence[str] | Mapping[str, int]) -> str:
    return "+".join(sorted(names))
