"""Calls generate, "none" and the most promising strategies in turns, as often as the time allows."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from .gains import BASELINES, ENOUGH_TOKENS, ENOUGH_VISITS, Call, Way, Work


PROBE = 8
"""Tokens per row of the calls that estimate the seconds of a visit."""
CANDIDATES = 3
"""Most strategies that are compared with the baselines, besides those that the user names."""
PLANNED_VISITS, MOST_VISITS = ENOUGH_VISITS + 1.5, 8
"""A visit calls every strategy once. If there are several visits, the first does not count: on a GPU forwards are
captured in it. Half a visit is in reserve, since durations vary."""


class NotEnoughTime(ValueError):
    """Too little time to compare anything. `seconds`: of a comparison; None: not even a probe has ended."""

    def __init__(self, seconds: float | None) -> None:
        super().__init__("there is no time to compare anything")
        self.seconds = seconds


def measure(
    model: PreTrainedModel,
    ways: Sequence[Way],
    work: Work,
    seed: int,
    share: float,
    until: float,
    clock: Callable[[], float] = time.perf_counter,
    begin: Callable[[Way], object] = lambda way: None,
) -> tuple[Work, dict[Way, list[Call]]]:
    """Compares generate, "none" and the candidates that a probe ranks first. Returns equally many calls of each, and
    their work: as much of `work` as ends before `share`, or before `until` if the least does not.

    A probe is two calls of `PROBE` tokens a row, of which the first loads and compiles; another γ needs one call. The
    probe of generate and "none" comes first and gives the time of the least comparison: `PLANNED_VISITS` of both and
    of one candidate with `ENOUGH_TOKENS`. Then candidates are tried while there is time for the least. Compared are,
    as far as time allows, those named by the user, "auto", and drafters by the seconds of a token, each at its best γ:
    at most `CANDIDATES` unnamed ones. Visit i has the seed `seed` + i, and begins with another way than visit i - 1.
    `begin` is called before a call.

    Raises:
        NotEnoughTime: the least does not end before `until`. Only probes have run.
    """
    started, probe = clock(), replace(work, new_tokens=min(PROBE, work.new_tokens))
    baselines = [way for way in ways if way.strategy in BASELINES]
    paces: dict[Way, tuple[float, float]] = {}  # seconds of reading the prompts, and per token of a row
    enough, prefill = min(ENOUGH_TOKENS, work.new_tokens), 0.0

    def try_out(way: Way) -> bool:
        nonlocal prefill
        call: Call | None = None
        for _ in range(1 if way.strategy in {other.strategy for other in paces} else 2):  # another γ: nothing to load
            begin(way)
            call = way(model, probe, seed, clock, until)
            if call is None:
                return False
        assert call is not None
        if way.strategy == "none" and call.statistics is not None:
            prefill = call.statistics.phase_seconds["prefill"]
        paces[way] = min(prefill, call.seconds), max(call.seconds - prefill, 1e-9) / probe.new_tokens
        return True

    def takes(ways: Sequence[Way], tokens: int, visits: float = PLANNED_VISITS) -> float:
        return visits * sum(reading + per_token * tokens for reading, per_token in map(paces.__getitem__, ways))

    for way in sorted(baselines, key=lambda way: way.strategy != "none"):  # "none" measures reading
        if not try_out(way):
            raise NotEnoughTime(None)
    none = next(way for way in baselines if way.strategy == "none")
    least = takes([*baselines, none], enough)  # a candidate that is as fast as "none"
    end = share if clock() + least <= share else until

    def rank(way: Way) -> tuple[bool, bool, float]:
        return way.assistant is None, way.strategy != "auto", paces[way][1] if way in paces else 0.0

    for way in sorted((way for way in ways if way not in baselines), key=rank):
        if clock() + least > end or not try_out(way):
            break
    chosen, strategies = list(baselines), set(BASELINES)
    for way in sorted((way for way in paces if way not in baselines), key=rank):
        full = sum(other.assistant is None for other in chosen) == len(baselines) + CANDIDATES
        visits = PLANNED_VISITS if len(chosen) > len(baselines) else ENOUGH_VISITS + 1  # no reserve for the first
        fits = clock() + takes([*chosen, way], enough, visits) <= end
        if way.strategy not in strategies and fits and (way.assistant is not None or not full):
            chosen.append(way)
            strategies.add(way.strategy)
    if len(chosen) == len(baselines):
        candidate = min((way for way in paces if way not in baselines), key=rank, default=none)
        raise NotEnoughTime(clock() - started + takes([*baselines, candidate], enough))
    reading, per_token = (sum(part) for part in zip(*(paces[way] for way in chosen), strict=True))
    fitting = int(((end - clock()) / PLANNED_VISITS - reading) / per_token)
    work = replace(work, new_tokens=min(max(fitting, enough), work.new_tokens))
    expected = {way: takes([way], work.new_tokens, visits=1) for way in chosen}
    return work, _visits(model, expected, work, seed, end, clock, begin)


def _visits(
    model: PreTrainedModel, expected: dict[Way, float], work: Work, seed: int, until: float,
    clock: Callable[[], float], begin: Callable[[Way], object],
) -> dict[Way, list[Call]]:  # fmt: skip
    ways, calls = list(expected), {way: list[Call]() for way in expected}
    for visit in range(MOST_VISITS):
        if visit and clock() + sum(expected.values()) > until:
            break
        shift = visit % len(ways)
        for way in [*ways[shift:], *ways[:shift]]:
            begin(way)
            call = way(model, work, seed + visit, clock, until)
            if call is None:
                return {way: made[:visit] for way, made in calls.items() if made[:visit]}
            calls[way].append(call)
            expected[way] = call.seconds
    return calls
