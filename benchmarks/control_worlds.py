"""Worlds in which a control decodes without any clock: machines, texts and noise are functions of a seed.

* Whether a draft token is right is drawn for (method, request, position) before the rollout. So all controls decode
  the same text, and the best that could be done with it can be computed.
* A round has a true time, by formula, and a measured one, the true one times noise, drift and contention. The control
  is told the measured one and charged the true one: noise acts through decisions alone.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from spec_trl.generation.engine.sampling.accept import draft_lengths
from spec_trl.generation.planner.control import Chain, Control


MOST_TOKENS, PROMPT = 256, 64  # of a completion at most, and of each prompt
DRAFT_LENGTHS = (2, 5, 10)
METHODS = ("self", "model", "ngram")
NETWORKS = ("self", "model")
REGIMES = ("pays", "neutral", "hurts")
EPOCH = 6  # rollouts after which prompts come back

Plan = tuple[tuple[str, int], ...]  # methods with their γ, raced; none: autoregressive


@dataclass(frozen=True)
class Cell:
    """A batch, how well drafting pays, and how many requests there are for each row."""

    batch: int
    regime: str
    refill: int = 1

    def __str__(self) -> str:
        return f"{self.batch}{' refilled' if self.refill > 1 else ''} {self.regime}"


CELLS = [Cell(batch, regime) for batch in (1, 4, 16, 64) for regime in REGIMES]
CELLS += [Cell(16, regime, refill=3) for regime in REGIMES]


PROBES: dict[str, dict[str, float]] = {"right": {}}
"""By what a prediction is off beyond a calibration's errors: the draft seconds of a method, the seconds of plain
rounds ("plain": the host was left out) or of verifying ("verify")."""
PROBES |= {
    f"{part} {sign}{times}": {part: times if sign == "x" else 1 / times}
    for part in NETWORKS for times in (3, 6) for sign in "x/"
}  # fmt: skip
PROBES |= {"self, model x6": {"self": 6.0, "model": 6.0}, "plain /3": {"plain": 1 / 3}, "plain x3": {"plain": 3.0}}
PROBES |= {"verify x3": {"verify": 3.0}, "verify /3": {"verify": 1 / 3}}


class Rounds(Protocol):
    """A machine's true seconds."""

    def round_seconds(self, batch: int, length: float, lengths: Mapping[str, int], width: int) -> float:
        """Of a round in which each method of `lengths` drafts its γ, and rows have at most `width` drafts."""


@dataclass(frozen=True)
class Machine:
    """True seconds. An autoregressive round of the whole batch in a short context takes about 1."""

    knee: float  # tokens whose arithmetic takes as long as reading the weights
    copy: float  # bytes of the self-drafter over the target's
    small: float  # bytes of the small model over the target's

    def round_seconds(self, batch: int, length: float, lengths: Mapping[str, int], width: int) -> float:
        """See `Rounds.round_seconds`."""
        drafts = sum(self._drafts(method, batch, length, count) for method, count in lengths.items())
        attention = 0.000025 * batch * length
        return 0.08 + drafts + _either(1.0 + attention, batch * (1 + width) / self.knee)

    def _drafts(self, method: str, batch: int, length: float, count: int) -> float:
        if method == "ngram":
            return 0.0005 * batch
        if method == "self":
            return count * (0.05 + _either(self.copy + 0.000025 * batch * length, batch / self.knee))
        return count * (0.03 + _either(self.small, batch / self.knee * 0.1))


_MACHINES = {"pays": (14.0, 0.22, 0.08), "neutral": (3.5, 0.34, 0.22), "hurts": (2.2, 0.45, 0.3)}
# By regime and kind of prompt: chance of a right token of "self" and "model", and of "ngram" after a wrong and a
# right one.
_TEXTS = {
    "pays": {"story": (0.88, 0.70, 0.04, 0.40), "copy": (0.90, 0.60, 0.35, 0.95)},
    "neutral": {"story": (0.80, 0.50, 0.03, 0.35), "copy": (0.82, 0.45, 0.10, 0.80)},
    "hurts": {"story": (0.66, 0.40, 0.01, 0.20), "copy": (0.68, 0.35, 0.03, 0.50)},
}


@dataclass(frozen=True)
class Rollout:
    """Requests, each with its prompt's key, its length, and by method how many tokens are right from a position on."""

    prompts: list[str]
    lengths: list[int]
    runs: list[dict[str, list[int]]]


class World:
    """A cell with its machine and `rollouts` consecutive rollouts. `wrong`: one of `PROBES`; the truth is the same."""

    methods: Sequence[str] = METHODS
    networks: Sequence[str] = NETWORKS  # those of `methods` that run forwards; others look up
    draft_lengths: Sequence[int] = DRAFT_LENGTHS
    prompt: float = PROMPT  # tokens of each

    def __init__(self, cell: Cell, seed: int, rollouts: int = 8, wrong: str = "right") -> None:
        self.cell, self.seed, self.wrong = cell, seed, PROBES[wrong]
        knee, copy, small = _MACHINES[cell.regime]
        self.machine: Rounds = Machine(knee * cell.batch, copy, small)
        self._draw_errors()
        self.rollouts = [self._rollout(number) for number in range(rollouts)]

    def _draw_errors(self) -> None:
        chance = random.Random(f"profile {self.cell} {self.seed}")
        self._errors = [math.exp(chance.gauss(0, error)) for error in (0.03, 0.10, 0.08)]

    def predict(self, lengths: Mapping[str, int], width: int, batch: int, length: float) -> float:
        """What a calibration believes of a round: the truth but for factors of plain rounds, drafts and verifying."""
        plain, drafting, verifying = self._errors
        seconds = self.machine.round_seconds
        alone = seconds(batch, length, {}, 0)
        if not lengths:
            return plain * self.wrong.get("plain", 1.0) * alone
        drafts = sum(
            self.wrong.get(method, 1.0) * (seconds(batch, length, {method: count}, 0) - alone)
            for method, count in lengths.items()
        )
        verifying *= self.wrong.get("verify", 1.0)
        return drafting * drafts + verifying * seconds(batch, length, {}, width)

    def _rollout(self, number: int) -> Rollout:
        cell, count = self.cell, self.cell.batch * self.cell.refill
        group = 4 if count >= 4 else 1  # completions of a prompt
        keys = [f"{number % EPOCH}-{request // group}" for request in range(count)]
        lengths, runs = [], []
        for request, key in enumerate(keys):
            prompt = random.Random(f"prompt {cell} {self.seed} {key}")
            chances = _TEXTS[cell.regime]["copy" if prompt.random() < 0.5 else "story"]
            shifts = {method: prompt.gauss(0, 0.35) for method in METHODS}
            slopes = {method: prompt.gauss(0, 0.5) for method in METHODS}
            usual = prompt.gauss(math.log(80), 0.4)
            row = random.Random(f"row {cell} {self.seed} {number} {request}")
            length = int(min(max(math.exp(row.gauss(usual, 0.5)), 12), MOST_TOKENS))
            own = {}
            for method in METHODS:
                right, was_right = [], False
                for position in range(length + 1):
                    if method == "ngram":
                        chance, weight = chances[3 if was_right else 2], 0.5
                    else:
                        chance, weight = chances[METHODS.index(method)], 1.0
                    learned = 0.02 * number * (method == "self")  # it follows the policy
                    moved = shifts[method] + slopes[method] * position / MOST_TOKENS + learned
                    was_right = row.random() < _sigmoid(math.log(chance / (1 - chance)) + weight * moved)
                    right.append(was_right)
                own[method] = _runs(right)
            lengths.append(length)
            runs.append(own)
        return Rollout(keys, lengths, runs)


@dataclass(frozen=True)
class Noise:
    """What measured times are off by: noise of each round, a slow drift, a burst of contention, and single rounds that
    compile, or wait for memory or for another process."""

    spread: float = 0.0  # sd of the logarithm
    drift: float = 0.0
    burst: tuple[int, int, int] | None = None  # rollout, and its rounds from, to, that seem three times as long
    seed: int = 0
    first: float = 1.0  # how many times as long the first round of all seems
    shocks: float = 0.0  # share of rounds that seem 2 to 1,000 times as long

    def factor(self, rollout: int, number: int, clock: float) -> float:
        """Of round `number`, at `clock` seconds of the world."""
        own = random.Random(f"{self.seed} {rollout} {number}")
        factor = math.exp(own.gauss(0, self.spread) - self.spread**2 / 2) if self.spread else 1.0
        factor *= 1 + self.drift * math.sin(clock / 60 + self.seed)
        if self.burst and self.burst[0] == rollout and self.burst[1] <= number < self.burst[2]:
            factor *= 3.0
        if (rollout, number) == (0, 0):
            factor *= self.first
        if self.shocks and own.random() < self.shocks:
            factor *= math.exp(own.uniform(math.log(2), math.log(1000)))
        return factor


NOISES = ("0%", "5%", "20%", "burst", "first", "shocks")


def noise_named(name: str, seed: int) -> Noise:
    """One of `NOISES`. Bursts come in the first rounds of all, or later. Where rounds take 5 ms, a first round that
    compiles takes 0.1, 1 or 5 s."""
    if name == "burst":
        return Noise(0.05, 0.0, (0, 0, 50) if seed % 2 == 0 else (3, 10, 50), seed)
    if name == "first":
        return Noise(0.05, 0.05, None, seed, first=(20.0, 200.0, 1000.0)[seed % 3])
    if name == "shocks":
        return Noise(0.05, 0.05, None, seed, shocks=0.01)
    return {"0%": Noise(seed=seed), "5%": Noise(0.05, 0.05, None, seed), "20%": Noise(0.20, 0.10, None, seed)}[name]


class Decoder:
    """Decodes one rollout of a world, round by round."""

    def __init__(self, world: World, number: int) -> None:
        self.machine, self.rollout = world.machine, world.rollouts[number]
        self.capacity, self._prompt = world.cell.batch, world.prompt
        self.done = [0] * len(self.rollout.lengths)  # tokens of each request
        self._next, self.rows = 0, []  # type: int, list[int]
        self.refill()

    def copy(self) -> "Decoder":
        """Another one at the same place."""
        other = object.__new__(Decoder)
        other.__dict__ |= self.__dict__ | {"done": list(self.done), "rows": list(self.rows)}
        return other

    @property
    def waiting(self) -> int:
        """Requests without a row."""
        return len(self.done) - self._next

    @property
    def length(self) -> float:
        """Mean of the rows."""
        return self._prompt + sum(self.done[request] for request in self.rows) / len(self.rows)

    def refill(self) -> None:
        """Retires rows that have ended, and gives theirs to those that wait."""
        self.rows = [request for request in self.rows if self.done[request] < self.rollout.lengths[request]]
        free = min(self.capacity - len(self.rows), self.waiting)
        self.rows += range(self._next, self._next + free)
        self._next += free

    def left(self, request: int) -> int:
        """Tokens that it has yet to generate."""
        return self.rollout.lengths[request] - self.done[request]

    def right(self, method: str, request: int, at: int | None = None) -> int:
        """Tokens in a row that the method would have right."""
        return self.rollout.runs[request][method][self.done[request] if at is None else at]

    def play(self, plan: Plan, rounds: float = math.inf) -> float:
        """True seconds of at most so many rounds under one plan."""
        seconds, lengths, width = 0.0, dict(plan), sum(count for _, count in plan)
        done, texts, ends = self.done, self.rollout.runs, self.rollout.lengths
        while self.rows and rounds > 0:
            rounds -= 1
            seconds += self.machine.round_seconds(len(self.rows), self.length, lengths, width)
            ended = False
            for request in self.rows:
                at, runs, best = done[request], texts[request], 0
                for method, count in plan:
                    best = max(best, min(runs[method][at], count))
                done[request] = min(at + 1 + best, ends[request])
                ended = ended or done[request] == ends[request]
            if ended:
                self.refill()
        return seconds


@dataclass(frozen=True)
class Played:
    """A rollout under a control: true seconds, rounds, and how many of them drafted and raced."""

    seconds: float
    rounds: int
    drafted: int
    raced: int


@dataclass
class Clock:
    """A simulated one: rounds move it, and each reading does. A plan is made between two of them."""

    planning: float = 0.0  # seconds of a reading
    now: float = 0.0

    def __call__(self) -> float:
        self.now += self.planning
        return self.now


def decode(control: Control, world: World, number: int, noise: Noise, clock: Clock | None = None) -> Played:
    """One rollout under `control`, called as the engine calls it; its candidates are named as methods. Its time does
    not include planning, which `clock` shows to the control."""
    names = [candidate.name for candidate in control.candidates]
    state, seconds, rounds, drafts, races = Decoder(world, number), 0.0, 0, 0, 0
    clock = clock or Clock()
    clock.now = 1000.0 * number
    heard = [0] * len(state.done)  # up to where lookups' drafts have been compared with the text
    control.begin(state.capacity, state.rollout.prompts)
    while state.rows:
        rows, length = list(state.rows), state.length
        room = max(state.left(request) for request in rows) - 1
        planned = control.plan(rows, length, state.waiting)
        chains = [Chain(own.drafter, min(own.draft_length, room), own.rows) for own in planned if room]
        lengths = draft_lengths(chains, len(rows))
        width = max((sum(own[row] for own in lengths.values()) for row in range(len(rows))), default=0)
        accepted, drafted, gains = {}, {}, [0] * len(rows)
        for which, own in lengths.items():
            drafted[which] = [min(own[row], state.left(each) - 1) if own[row] else -1 for row, each in enumerate(rows)]
            accepted[which] = [
                min(state.right(names[which], each), drafted[which][row]) for row, each in enumerate(rows)
            ]
            gains = [max(gain, count) for gain, count in zip(gains, accepted[which], strict=True)]
        named = {names[which]: max(own) for which, own in lengths.items()}
        true = state.machine.round_seconds(len(rows), length, named, width)
        measured = true * noise.factor(number, rounds, clock.now)
        if chains:
            control.record_rows(rows, accepted, drafted)
        for request, gain in zip(rows, gains, strict=True):
            state.done[request] += gain + 1
        control.record(width, measured, sum(gains) + len(rows))
        _overhear(control, world, names, state, rows, heard, set(lengths))
        state.refill()
        clock.now += measured
        seconds, rounds = seconds + true, rounds + 1
        drafts, races = drafts + bool(chains), races + (len(lengths) > 1)
    control.finish()
    return Played(seconds, rounds, drafts, races)


def _overhear(
    control: Control, world: World, names: Sequence[str], state: Decoder, rows: Sequence[int], heard: list[int],
    drafted: set[int],
) -> None:  # fmt: skip
    """What lookups would have drafted, compared with the text once it is as long as a draft."""
    most = world.draft_lengths[-1]
    for which, name in enumerate(names):
        if name in world.networks:
            continue
        if which in drafted:  # its verdicts are told already
            for request in rows:
                heard[request] = state.done[request]
            continue
        for request in rows:
            while heard[request] + most < state.done[request]:
                accepted = min(state.right(name, request, heard[request]), most)
                control.record_unverified(which, [request], [accepted], [min(accepted + 1, most)])
                heard[request] += accepted + 1


# ---- what could have been done --------------------------------------------------------------------------------------


PLAIN: Plan = ()
EVERY = 12  # rounds after which the oracle chooses anew


class Bounds:
    """What the rollouts of a world take without drafts, with the best fixed plan, and by an oracle."""

    def __init__(self, world: World) -> None:
        self.world = world
        singles = [(method, count) for method in world.methods for count in world.draft_lengths]
        self._singles: list[Plan] = [PLAIN, *((single,) for single in singles)]
        self._races: list[Plan] = [
            (one, other) for one in singles for other in singles
            if one[0] in world.networks and other[0] not in world.networks
        ]  # fmt: skip

    @cached_property
    def _fixed(self) -> list[dict[Plan, float]]:
        numbers = range(len(self.world.rollouts))
        return [{plan: Decoder(self.world, number).play(plan) for plan in self._singles} for number in numbers]

    @property
    def plain(self) -> list[float]:
        """Never speculating."""
        return [own[PLAIN] for own in self._fixed]

    @property
    def fixed(self) -> list[float]:
        """The best of one method at one γ, or none, for the whole rollout."""
        return [min(own.values()) for own in self._fixed]

    @cached_property
    def oracle(self) -> list[float]:
        """Knows all times and texts: every few rounds it takes the plan that would end the rollout soonest if kept.
        That is no bound: a control that follows each row in each round may be faster."""
        found = []
        for number in range(len(self.world.rollouts)):
            state, seconds = Decoder(self.world, number), 0.0
            while state.rows:
                best = min([*self._singles, *self._races], key=lambda plan: state.copy().play(plan))
                seconds += state.play(best, EVERY)
            found.append(seconds)
        return found


def _either(a: float, b: float) -> float:
    """About the larger one: memory traffic and arithmetic overlap, but not quite."""
    return float((a**3 + b**3) ** (1 / 3))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _runs(right: Sequence[bool]) -> list[int]:
    run, found = 0, [0] * len(right)
    for position in range(len(right) - 1, -1, -1):
        run = found[position] = run + 1 if right[position] else 0
    return found
