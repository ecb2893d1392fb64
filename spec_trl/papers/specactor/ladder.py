"""Ranks drafting methods by speedup at an acceptance and a batch (SA §4.2, Fig. 10a).

Acceptance here is p, the probability that a draft token is accepted if all tokens before it were. Profiled rounds
accept tokens at random with probability p, and have τ = (1 - p^(γ+1)) / (1 - p) tokens. A caller passes τ, of which
:class:`~.Acceptance` makes better estimates than of p.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Literal, TypeAlias

from ...generation.planner.acceptance import MAX_DRAFT_LENGTH, Acceptance
from ...generation.planner.control import NO_METHOD
from ...json_files import read_json, write_json
from ...value_checks import require_field
from ..efficient_rollout.roofline import Roofline


BlockEfficiency: TypeAlias = Callable[[int], float]  # expected τ by γ


@dataclass(frozen=True)
class Rung:
    """One profiled cell. Raises ValueError if a value is of the wrong type or out of range."""

    method: str  # the drafter's strategy
    batch: int  # rows
    draft_length: int  # γ, 1 to 64
    acceptance: float  # probability of marking a draft token as accepted, 0 to 1
    seconds: float  # of a round (draft, verify, accept)
    plain_seconds: float  # of an autoregressive round at the same batch, measured in the same profile

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or self.method in ("", NO_METHOD):
            raise ValueError(f"method={self.method!r} must be the name of a drafter.")
        for name in ("batch", "draft_length", "seconds", "plain_seconds"):
            require_field(self, name, above=0)
        require_field(self, "acceptance", most=1)
        if self.draft_length > MAX_DRAFT_LENGTH:
            raise ValueError(f"draft_length={self.draft_length} is out of range; it must be 1 to {MAX_DRAFT_LENGTH}.")

    @cached_property
    def block_efficiency(self) -> float:
        return Acceptance.geometric(self.acceptance).block_efficiency(self.draft_length)

    @property
    def speedup(self) -> float:
        """Speedup over plain decoding, by the times of this rung."""
        return self.block_efficiency * self.plain_seconds / self.seconds


@dataclass(frozen=True)
class Ladder:
    """Speedups of drafting methods, from profiled rounds, which do not depend on weights. Raises ValueError without a
    rung, or if a cell has two."""

    rungs: tuple[Rung, ...]  # profiled cells, one per (method, batch, γ, acceptance)
    shape: str  # fingerprint of the target's and the drafters' shapes, for the caller to compare

    def __post_init__(self) -> None:
        if not self.rungs:
            raise ValueError("rungs is empty; a ladder needs at least one profiled cell.")
        cells = set()
        for rung in self.rungs:
            cell = (rung.method, rung.batch, rung.draft_length, rung.acceptance)
            if cell in cells:
                raise ValueError(f"rungs has {cell} (method, batch, γ, acceptance) twice; keep one of them.")
            cells.add(cell)

    @cached_property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(rung.method for rung in self.rungs))

    @cached_property
    def batches(self) -> tuple[int, ...]:
        return tuple(sorted({rung.batch for rung in self.rungs}))

    @cached_property
    def _profiled(self) -> dict[str, dict[int, dict[int, list[Rung]]]]:
        cells: dict[str, dict[int, dict[int, list[Rung]]]] = {}
        for rung in sorted(self.rungs, key=lambda rung: rung.acceptance):
            cells.setdefault(rung.method, {}).setdefault(rung.batch, {}).setdefault(rung.draft_length, []).append(rung)
        return cells

    def draft_lengths(self, method: str, batch: int) -> tuple[int, ...]:
        """γ profiled for `method` at the batch nearest to `batch`, ascending."""
        return tuple(sorted(self._nearest(method, batch)))

    def speedup(self, method: str, block_efficiency: float, batch: int, draft_length: int) -> float:
        """TGS_c over plain decoding: expected tokens of a round, bonus included, times T_plain / T_round.

        Times are interpolated linearly between profiled τ, and constant beyond them. They are those of the profiled
        batch with the smallest ratio to `batch`; of two equally near batches the larger, whose speedup is lower.

        Raises:
            ValueError: `method` or γ was not profiled, τ is not 1 to γ + 1, or `batch` is less than 1.
        """
        if not 1 <= block_efficiency <= draft_length + 1 + 1e-9:
            raise ValueError(
                f"block_efficiency={block_efficiency} of {method!r} is out of range; it must be 1 to γ + 1 = "
                f"{draft_length + 1}."
            )
        # Both times are from one profile: a slow machine was slow for both.
        seconds, plain_seconds = self.round_seconds(method, block_efficiency, batch, draft_length)
        return block_efficiency * plain_seconds / seconds

    def round_seconds(
        self, method: str, block_efficiency: float, batch: int, draft_length: int
    ) -> tuple[float, float]:
        """Seconds of a round of `method` and of an autoregressive round; interpolation and errors as in `speedup`."""
        lengths = self._nearest(method, batch)
        if draft_length not in lengths:
            raise ValueError(
                f"draft_length={draft_length} of {method!r} was not profiled near batch {batch}; choose one of "
                f"{sorted(lengths)} or profile the ladder again."
            )
        rungs = lengths[draft_length]
        place = bisect_left(rungs, block_efficiency, key=lambda rung: rung.block_efficiency)
        low, high = rungs[max(place - 1, 0)], rungs[min(place, len(rungs) - 1)]
        gap = high.block_efficiency - low.block_efficiency
        share = (block_efficiency - low.block_efficiency) / gap if gap else 0.0
        seconds = low.seconds + share * (high.seconds - low.seconds)
        return seconds, low.plain_seconds + share * (high.plain_seconds - low.plain_seconds)

    def plain_seconds(self, batch: int) -> float:
        """Seconds of an autoregressive round at the profiled batch nearest to `batch`: the same for all methods."""
        return self._plain[_nearest_batch(self.batches, batch)]

    @cached_property
    def _plain(self) -> dict[int, float]:
        by_batch: dict[int, list[float]] = {}
        for rung in self.rungs:
            by_batch.setdefault(rung.batch, []).append(rung.plain_seconds)
        return {batch: median(seconds) for batch, seconds in by_batch.items()}

    def best_draft_length(self, method: str, expected: BlockEfficiency, batch: int) -> tuple[int, float]:
        """The profiled γ of largest speedup, the smallest among equals, and that speedup. Errors as in `speedup`."""
        lengths = self.draft_lengths(method, batch)
        speedups = [self.speedup(method, expected(length), batch, length) for length in lengths]
        return max(zip(lengths, speedups, strict=True), key=lambda pair: pair[1])

    def _nearest(self, method: str, batch: int) -> dict[int, list[Rung]]:
        if method not in self._profiled:
            raise ValueError(f"method={method!r} is not in the ladder, which has {list(self.methods)}; profile it.")
        if batch < 1:
            raise ValueError(f"batch={batch} is out of range; it must be at least 1.")
        batches = self._profiled[method]
        return batches[_nearest_batch(batches, batch)]

    def save(self, path: str | Path) -> None:
        write_json(path, _File(1, self.shape, self.rungs))

    @classmethod
    def load(cls, path: str | Path) -> "Ladder":
        """Reads the file of `save`. Raises FileNotFoundError if missing, ValueError if not a ladder of this version;
        the message names file, field and value."""
        file = read_json(path, _File, "draft ladder", "correct it, or delete the file and profile again")
        return cls(file.rungs, file.shape)


@dataclass(frozen=True)
class LadderRounds:
    """Predicts rounds by a profiled draft ladder (SA §4.2): an autoregressive round, plus a drafter's seconds."""

    ladder: Ladder
    target: Roofline | None = None  # predicts autoregressive rounds by length; None: the ladder predicts them

    def __call__(self, lengths: Mapping[str, int], width: int, batch: int, length: float) -> float:
        rounds = [self.ladder.round_seconds(name, 1.0, batch, count) for name, count in lengths.items()]
        slowdown = 1 + sum(seconds / plain - 1 for seconds, plain in rounds)
        if self.target is not None:
            return self.target.target_seconds(batch, length) * slowdown
        return self.ladder.plain_seconds(batch) * slowdown


@dataclass(frozen=True)
class _File:
    version: Literal[1]
    shape: str
    rungs: tuple[Rung, ...]

    def __post_init__(self) -> None:
        Ladder(self.rungs, self.shape)  # refuses what no ladder can be


def _nearest_batch(batches: Iterable[int], batch: int) -> int:
    """Returns the batch with the smallest ratio to `batch`, the larger of two equally near ones."""
    return min(batches, key=lambda other: (max(other, batch) / min(other, batch), -other))


def ladder_path(profile_path: str | Path) -> Path:
    """Path of the ladder's file, next to the roofline profile's."""
    path = Path(profile_path)
    return path.with_name(f"{path.name.removesuffix('.json')}.ladder.json")
