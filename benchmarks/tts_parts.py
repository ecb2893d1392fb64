"""The experiments of the TTS benchmark: which ways to learn each compares, how its cells are made and summed up."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from tqdm import tqdm

from spec_trl.generation.configuration import Distillation
from spec_trl.generation.engine.drafter import Drafter

from .tts_distributions import WatchedDrafter, means
from .tts_drafters import FROZEN, NONE, TTS, Kind
from .tts_numbers import (
    BINS,
    THIRDS,
    Record,
    acceptance_length,
    gain,
    gain_interval,
    median_speed,
    speed_ratio,
    third,
)
from .tts_runs import Bench, identity, in_turns, warm_up
from .tts_store import Store


Ways = dict[str, Distillation | None]
Cell = dict[str, Record]
Row = dict[str, Any]

REQUEST, ROLLOUT = "TTS, per request", "TTS, per rollout"
COARSE = tuple(slice(start, start + 3) for start in range(0, BINS, 3))
"""The depth bins that tables and figures show, as slices of the fine ones."""


def drafters_ways(kind: Kind, options: argparse.Namespace) -> Ways:
    """The paper's default against the frozen drafter (TTS Tab. 1 and 2)."""
    return {FROZEN: None, TTS: kind.how()}


def strides_ways(kind: Kind, options: argparse.Namespace) -> Ways:
    """Update strides, each synchronous and asynchronous (TTS Tab. 3, 7, 8)."""
    strides = [(f"S={stride}", stride) for stride in options.strides] + [("adaptive", None)]
    ways: Ways = {FROZEN: None}
    for name, stride in strides:
        ways[name] = kind.how(stride=stride)
        ways[asynchronous(name)] = kind.how(stride=stride, asynchronous=True)
    return ways


def asynchronous(name: str) -> str:
    """The name of a stride's asynchronous way."""
    return f"{name} async"


def steps_ways(kind: Kind, options: argparse.Namespace) -> Ways:
    """Optimizer steps per update (TTS Fig. 6a)."""
    return {FROZEN: None} | {f"K={steps}": kind.how(steps=steps) for steps in options.steps}


def anchors_ways(kind: Kind, options: argparse.Namespace) -> Ways:
    """λ and its anchor: q_t acts for K > 1 only, q_0 at K = 1 as well."""
    ways: Ways = {FROZEN: None, "K=1, λ=0": kind.how(), "K=2, λ=0": kind.how(steps=2)}
    for weight in options.anchor_weights:
        ways[f"K=2, λ={weight:g}, q_t"] = kind.how(steps=2, anchor_weight=weight)
        ways[f"K=1, λ={weight:g}, q_0"] = kind.how(anchor_weight=weight, anchor="initial")
    return ways


def rates_ways(kind: Kind, options: argparse.Namespace) -> Ways:
    """Learning rates of Adam."""
    return {FROZEN: None} | {f"η={rate:g}": kind.how(learning_rate=rate) for rate in options.learning_rates}


def batch_ways(kind: Kind, options: argparse.Namespace) -> Ways:
    """Requests of one batch that learn apart, low-rank corrections, or together, all weights."""
    return {
        FROZEN: None, REQUEST: kind.how(learning_rate=options.adapter_rate), ROLLOUT: kind.how(scope="rollout"),
    }  # fmt: skip


WAYS: dict[str, Callable[[Kind, argparse.Namespace], Ways]] = {
    "drafters": drafters_ways, "strides": strides_ways, "steps": steps_ways, "anchors": anchors_ways,
    "rates": rates_ways, "batch": batch_ways,
}  # fmt: skip
PARTS = (*WAYS, "distributions", "run", "defaults")
SEQUENCES = ("run", "defaults")
"""Parts whose drafters go on with what they learned, from request to request."""


# ---- making cells --------------------------------------------------------------------------------------------------


def make_cells(
    part: str, bench: Bench, kinds: Sequence[Kind], options: argparse.Namespace, store: Store
) -> dict[tuple[str, float], list[Cell]]:
    """All cells of a part, in the order of requests, by drafter and temperature."""
    if part in SEQUENCES:
        return _sequence_cells(part, bench, kinds, options, store)
    batch = options.batch if part == "batch" else 1
    starts = range(0, options.requests, batch)
    cells: dict[tuple[str, float], list[Cell]] = {}
    for kind in kinds:
        ways = drafters_ways(kind, options) if part == "distributions" else WAYS[part](kind, options)
        names = [NONE, *ways]

        @cache
        def drafters(
            kind: Kind = kind, ways: tuple[tuple[str, Distillation | None], ...] = tuple(ways.items())
        ) -> dict[str, Drafter | None]:
            """Made where a cell is missing, not before."""
            if part == "distributions":
                made = {name: WatchedDrafter(kind.student(bench.target), how, bench.new_tokens) for name, how in ways}
                return {NONE: None, **made}
            return {NONE: None, **{name: kind.drafter(bench.target, how) for name, how in ways}}

        warmed = cache(partial(_warmed, bench, drafters, kind, range(batch)))
        title = f"{part}, {kind.name}"
        with tqdm(total=len(options.temperatures) * len(starts) * len(names), desc=title, unit=" calls") as bar:
            for temperature in options.temperatures:
                found = cells[kind.name, temperature] = []
                for index, start in enumerate(starts):
                    requests = range(start, start + batch)
                    before = bar.n

                    def make(
                        requests: range = requests, temperature: float = temperature, index: int = index,
                        kind: Kind = kind, bar: Any = bar, warmed: Callable[[], Any] = warmed,
                    ) -> Cell:  # fmt: skip
                        beside = part == "strides"  # whose throughput matters
                        return _cell(bench, warmed(), kind, requests, temperature, index, bar.update, beside)

                    key = f"{kind.name} T={temperature:g} request={start}"
                    found.append(store.cell(key, f"{kind.fixed_facts()} {ways}", make))
                    bar.update(before + len(names) - bar.n)
    return cells


def _warmed(
    bench: Bench, drafters: Callable[[], dict[str, Drafter | None]], kind: Kind, requests: Sequence[int]
) -> dict[str, Drafter | None]:
    made = drafters()
    warm_up(bench, made, kind.draft_length, requests)
    return made


def _cell(
    bench: Bench, drafters: Mapping[str, Drafter | None], kind: Kind, requests: Sequence[int], temperature: float,
    shift: int, advance: Callable[[], object], beside_frozen: bool,
) -> Cell:  # fmt: skip
    sums: dict[str, Any] = {}

    def note(name: str, drafter: Drafter | None) -> None:
        if isinstance(drafter, WatchedDrafter):
            sums[name] = {key: [round(value, 5) for value in values] for key, values in drafter.sums.items()}

    cell = in_turns(bench, drafters, kind.draft_length, requests, temperature, shift, advance, beside_frozen)
    for name, drafter in drafters.items():
        note(name, drafter)
    return {name: record | ({"sums": sums[name]} if name in sums else {}) for name, record in cell.items()}


def _sequence_cells(
    part: str, bench: Bench, kinds: Sequence[Kind], options: argparse.Namespace, store: Store
) -> dict[tuple[str, float], list[Cell]]:
    """Calls one after the other with one drafter, until there were enough updates ("run") or requests ("defaults").

    A drafter's state is not stored, so one cell is the whole sequence.
    """
    cells: dict[tuple[str, float], list[Cell]] = {}
    batch, most, unit = (1, options.updates, "updates") if part == "run" else (
        options.batch, options.requests, "requests"
    )  # fmt: skip
    for kind in kinds:
        how = kind.how(scope=options.scope, stride=None)
        if part == "run":
            how = kind.how(scope="run", stride=options.run_stride, asynchronous=options.run_asynchronous)
        for temperature in options.temperatures:

            def make(kind: Kind = kind, how: Distillation = how, temperature: float = temperature) -> list[Cell]:
                drafters = {
                    NONE: None, FROZEN: kind.drafter(bench.target, None), TTS: kind.drafter(bench.target, how),
                }  # fmt: skip
                found: list[Cell] = []
                with tqdm(total=most, desc=f"{part}, {kind.name}, T={temperature:g}", unit=f" {unit}") as bar:
                    while (done := _done(found, unit, batch)) < most:
                        bar.update(done - bar.n)
                        shift = len(found)
                        requests = [(shift * batch + i) % len(bench.prompts) for i in range(batch)]
                        found.append(
                            in_turns(bench, drafters, kind.draft_length, requests, temperature, shift, lambda: None)
                        )
                    bar.update(most - bar.n)
                return found

            key = f"{kind.name} T={temperature:g} {unit}={most}"
            cells[kind.name, temperature] = store.cell(key, f"{kind.fixed_facts()} {how}", make)
    return cells


def _done(found: Sequence[Cell], unit: str, batch: int) -> int:
    return sum(cell[TTS]["updates"] for cell in found) if unit == "updates" else len(found) * batch


# ---- summing up ----------------------------------------------------------------------------------------------------


def summarise(cells: Mapping[tuple[str, float], Sequence[Cell]], seed: int) -> list[Row]:
    """One row for each drafter, temperature and way, "none" included."""
    rows = []
    for (kind, temperature), made in cells.items():
        frozen = [cell[FROZEN] for cell in made]
        for name in made[0]:
            records = [cell[name] for cell in made]
            row: Row = {"kind": kind, "temperature": temperature, "way": name, "requests": len(records)}
            row["tokens_per_second"] = median_speed(records)
            row["speed_ratio"] = speed_ratio(frozen, records)
            if name != NONE:
                row |= _lengths(frozen, records, seed) | _learning(records)
                row["identity"] = identity([{name: record} for record in records])
            if "sums" in records[0]:
                row["distributions"] = [means(records, bins) for bins in (*COARSE, slice(None))]
                row["distribution_thirds"] = [means(records, third(which)) for which in range(len(THIRDS))]
            rows.append(row)
    return rows


def _lengths(frozen: Sequence[Record], records: Sequence[Record], seed: int) -> Row:
    ours, theirs = ([one for record in each for one in _by_request(record)] for each in (records, frozen))
    tau, base = acceptance_length(ours), acceptance_length(theirs)
    row: Row = {
        "tau": tau, "gain": gain(base, tau), "interval": gain_interval(theirs, ours, seed),
        "accepted_per_round": sum(r["accepted"] for r in records) / sum(sum(r["blocks"]) for r in records),
    }  # fmt: skip
    if "depth" not in records[0]:
        row["thirds"] = [acceptance_length(ours, third(which)) for which in range(len(THIRDS))]
        row["third_gains"] = [
            gain(acceptance_length(theirs, third(which)), value) for which, value in enumerate(row["thirds"])
        ]
        row["third_intervals"] = [gain_interval(theirs, ours, seed, third(which)) for which in range(len(THIRDS))]
        row["by_depth"] = [acceptance_length(ours, bins) for bins in COARSE]
    else:
        edges = sorted({int(edge) for record in records for edge in record["depth"]})
        row["by_edge"] = {
            str(edge): sum(r["depth"].get(str(edge), (0, 0))[1] for r in records)
            / max(sum(r["depth"].get(str(edge), (0, 0))[0] for r in records), 1)
            for edge in edges
        }
    return row


def _by_request(record: Record) -> list[Record]:
    """The record of a batch as one of each request, for the bootstrap; batch 1: itself."""
    if "depth" not in record:
        return [record]
    return [{"blocks": [b], "committed": [c]} for b, c in zip(record["blocks"], record["committed"], strict=True)]


def _learning(records: Sequence[Record]) -> Row:
    if "updates" not in records[0]:
        return {}
    updates = sum(record["updates"] for record in records)
    return {
        "updates_per_call": updates / len(records),
        "update_milliseconds": 1e3 * sum(r["update_seconds"] for r in records) / max(updates, 1),
        "waited_share": sum(r["waited"] for r in records) / sum(r["seconds"] for r in records),
        "learning_bytes": max(record["bytes"] for record in records),
    }


def last_quarter(cells: Sequence[Cell], seed: int) -> Row:
    """Of a sequence with scope "run": learned against frozen on the last quarter of requests, and all quarters' τ."""
    count = len(cells)
    quarters = [slice(i * count // 4, (i + 1) * count // 4) for i in range(4)]
    frozen, learned = ([cell[name] for cell in cells] for name in (FROZEN, TTS))
    last = quarters[-1]
    base, tau = acceptance_length(frozen[last]), acceptance_length(learned[last])
    interval = gain_interval(frozen[last], learned[last], seed)
    return {
        "requests": count, "updates": sum(record["updates"] for record in learned), "last": len(cells[last]),
        "frozen": base, "tau": tau, "gain": gain(base, tau), "interval": interval,
        "speed_ratio": speed_ratio(frozen[last], learned[last]),
        # Calls without the first one, which compiles.
        "median_ratio": speed_ratio(frozen[1:] or frozen, learned[1:] or learned),
        "total_ratio": sum(r["seconds"] for r in frozen[1:]) / (sum(r["seconds"] for r in learned[1:]) or 1.0),
        "quarters": [[acceptance_length(each[quarter]) for quarter in quarters] for each in (frozen, learned)],
        "by_request": [[acceptance_length([record]) for record in each] for each in (frozen, learned)],
    }  # fmt: skip
