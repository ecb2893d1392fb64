"""What the TTS benchmark finds: arithmetic over its records, and the numbers of its paper (arXiv 2605.09329)."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from .measure import Finding
from .tts_drafters import FROZEN, NONE, TITLES, TTS


THIRDS = ("first", "middle", "last")  # of the output: the depth bins
RESAMPLES = 2000

Record = dict[str, Any]
"""What one way did with one request: "blocks" and "committed" tokens, each by depth bin, "seconds", and more."""
Cell = dict[str, Record]
Row = dict[str, Any]
Result = dict[str, Any]

# arXiv 2605.09329. Tab. 1 and 2: mean gains of the acceptance length at S = 1.
PAPER_GAIN = {"dflash": 0.41, "eagle3": 0.34}


def by_depth(rounds: Sequence[int], new_tokens: int) -> tuple[list[int], list[int]]:
    """Blocks, and tokens they committed, by the third of the output in which each block began; `rounds`: tokens that
    each decoding round of one request committed, after its first token. A round with room for one token alone drafts
    nothing and is no block."""
    blocks, committed, depth = [0] * len(THIRDS), [0] * len(THIRDS), 1
    for count in rounds:
        if depth < new_tokens - 1:
            blocks[depth * len(THIRDS) // new_tokens] += 1
            committed[depth * len(THIRDS) // new_tokens] += count
        depth += count
    return blocks, committed


def acceptance_length(records: Sequence[Record], bins: slice = slice(None)) -> float | None:
    """Committed tokens per block, the corrected or bonus token included, of all records together; None: no blocks."""
    blocks = sum(sum(record["blocks"][bins]) for record in records)
    return sum(sum(record["committed"][bins]) for record in records) / blocks if blocks else None


def gain(frozen: float | None, other: float | None) -> float | None:
    """Relative change; None where one of the two is missing."""
    return None if frozen is None or other is None else other / frozen - 1


def gain_interval(
    frozen: Sequence[Record], other: Sequence[Record], seed: int = 0, bins: slice = slice(None)
) -> tuple[float, float] | None:
    """95 % of the gain in acceptance length, by a paired bootstrap over requests; None: fewer than two of them."""
    if len(frozen) < 2:
        return None
    # [requests, (frozen blocks, frozen committed, other blocks, other committed)]
    counts = numpy.array(
        [
            [sum(record[name][bins]) for record in pair for name in ("blocks", "committed")]
            for pair in zip(frozen, other, strict=True)
        ],
        dtype=float,
    )
    drawn = numpy.random.default_rng(seed).integers(len(counts), size=(RESAMPLES, len(counts)))
    sums = counts[drawn].sum(axis=1)  # [resamples, 4]
    sums = sums[(sums[:, 0] > 0) & (sums[:, 2] > 0)]
    if not len(sums):
        return None
    low, high = numpy.percentile(sums[:, 3] / sums[:, 2] / (sums[:, 1] / sums[:, 0]) - 1, (2.5, 97.5))
    return float(low), float(high)


def speed_ratio(frozen: Sequence[Record], other: Sequence[Record]) -> float:
    """Median over requests of the frozen drafter's seconds over the other's: both made the same number of tokens.

    Where the frozen drafter ran once more next to the other one, those are its seconds.
    """
    return statistics.median(
        b.get("frozen_seconds", a["seconds"]) / b["seconds"] for a, b in zip(frozen, other, strict=True)
    )


def identity(cells: Sequence[Mapping[str, Record]]) -> dict[str, int]:
    """How many tokens, and requests, of all ways but "none" are the ones of "none"."""
    records = [record for cell in cells for name, record in cell.items() if name != NONE]
    return {"calls": len(records)} | {key: sum(each[key] for each in records) for key in ("tokens", "same", "differ")}


# ---- summing up ----------------------------------------------------------------------------------------------------


def summarise(cells: Mapping[tuple[str, float], Sequence[Cell]], seed: int) -> list[Row]:
    """One row for each drafter, temperature and way, "none" included."""
    rows = []
    for (kind, temperature), made in cells.items():
        frozen = [cell[FROZEN] for cell in made]
        for name in made[0]:
            records = [cell[name] for cell in made]
            row: Row = {"kind": kind, "temperature": temperature, "way": name, "requests": len(records)}
            row["tokens_per_second"] = statistics.median(each["tokens"] / each["seconds"] for each in records)
            row["speed_ratio"] = speed_ratio(frozen, records)
            if name != NONE:
                row |= _lengths(frozen, records, seed) | _learning(records)
            rows.append(row)
    return rows


def _lengths(frozen: Sequence[Record], records: Sequence[Record], seed: int) -> Row:
    ours, theirs = ([one for record in each for one in _by_request(record)] for each in (records, frozen))
    tau, base = acceptance_length(ours), acceptance_length(theirs)
    row: Row = {"tau": tau, "gain": gain(base, tau), "interval": gain_interval(theirs, ours, seed)}
    if not records[0]["is_batch"]:
        thirds = [slice(which, which + 1) for which in range(len(THIRDS))]
        row["third_gains"] = [gain(acceptance_length(theirs, own), acceptance_length(ours, own)) for own in thirds]
    return row


def _by_request(record: Record) -> list[Record]:
    """The record of a batch as one of each request, for the bootstrap; batch 1: itself."""
    if not record["is_batch"]:
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
    }


def last_quarter(cells: Sequence[Cell], seed: int) -> Row:
    """Of a sequence of calls: learned against frozen on the last quarter of requests."""
    count, last = len(cells), slice(3 * len(cells) // 4, None)
    frozen, learned = ([cell[name] for cell in cells] for name in (FROZEN, TTS))
    base, tau = acceptance_length(frozen[last]), acceptance_length(learned[last])
    interval = gain_interval(frozen[last], learned[last], seed)
    return {
        "requests": count, "updates": sum(record["updates"] for record in learned), "last": len(cells[last]),
        "frozen": base, "tau": tau, "gain": gain(base, tau), "interval": interval,
        "speed_ratio": speed_ratio(frozen[last], learned[last]),
        # Calls without the first one, which compiles.
        "median_ratio": speed_ratio(frozen[1:] or frozen, learned[1:] or learned),
        "total_ratio": sum(r["seconds"] for r in frozen[1:]) / (sum(r["seconds"] for r in learned[1:]) or 1.0),
        "by_request": [[acceptance_length([record]) for record in each] for each in (frozen, learned)],
    }  # fmt: skip


# ---- the result ----------------------------------------------------------------------------------------------------


PART_TITLES = {
    "drafters": "Acceptance length, frozen against learning after every round (TTS Tab. 1, 2; Fig. 1, 2, 5)",
    "strides": "Update strides (TTS Tab. 3, 7, 8)",
    "rates": "Learning rates",
    "run": "Learning that is kept over many requests",
    "batch": "Several requests at a time",
    "defaults": "Updates only where they pay: the defaults against the frozen drafter",
}


def findings(result: Result) -> list[Finding]:
    """Gains in acceptance length and throughput over the frozen drafter, and what the part itself looks at."""
    found = []
    for row in result["summary"]:
        if row.get("way") in (NONE, FROZEN):
            continue
        what = f"{TITLES[row['kind']]}, T = {row['temperature']:g}"
        if result["part"] == "defaults":
            calls = f"{what}, {row['updates']} updates in {row['requests']} calls"
            found.append(Finding(f"{calls}, tokens/s, all calls together", row["total_ratio"], "×", FROZEN))
            found.append(Finding(f"{calls}, tokens/s, median call", row["median_ratio"], "×", FROZEN))
            found.append(Finding(f"{calls}, tokens/s, last {row['last']} calls", row["speed_ratio"], "×", FROZEN))
            continue
        what += f": last {row['last']} of {row['requests']} requests" if result["part"] == "run" else f": {row['way']}"
        interval = None if row["interval"] is None else (row["interval"][0], row["interval"][1])
        found.append(Finding(f"{what}, acceptance length", row["gain"], "±%", _frozen(result, row), interval))
        if result["part"] == "drafters":
            for name, gain in zip(THIRDS, row["third_gains"], strict=True):
                found.append(Finding(f"{what}, acceptance length, {name} third of the output", gain, "±%", FROZEN))
        found.append(Finding(f"{what}, tokens/s", row["speed_ratio"], "×", FROZEN))
    return found


def _frozen(result: Result, row: Row) -> str:
    """The baseline of a gain, with the paper's mean where it has one."""
    paper = PAPER_GAIN.get(row["kind"]) if result["part"] in ("drafters", "run") else None
    return FROZEN if paper is None else f"{FROZEN}; paper's mean {paper:+.1%}"


def setup(result: Result) -> str:
    """How it was measured, with which drafters, and whether the output was that of "none"."""
    settings, options, same = result["settings"], result["options"], result["identity"]
    text = (
        f"Target {settings['target']}, {settings['dtype']}, batch {settings['batch']}, {settings['new_tokens']} new "
        f"tokens per request after prompts of {settings['prompt_tokens']}, an earlier end of sequence suppressed, "
        f"exact verification. Acceptance length: committed "
        "tokens per verified block, the corrected or bonus token included. All is compared with the frozen drafter on "
        "the same requests and seeds, in turns; throughput is the median over requests; intervals are 95 %, paired "
        "bootstrap over requests."
    )
    if result["part"] == "run":
        beside = ", asynchronous" * bool(options["run_asynchronous"])
        text += f' Scope "run", S = {options["run_stride"]}{beside}: what was learned is kept from request to request.'
    if result["part"] == "defaults":
        text += f' Scope "{options["scope"]}", S adaptive; one drafter for all calls, the first of which is left out.'
    return (
        f"{text} {' '.join(drafter_line(name, facts) for name, facts in result['drafters'].items())} Identity with "
        f'"none": {same["same"]} of {same["tokens"]} tokens in {same["calls"]} calls; the target\'s parameters are '
        f"{'bit-equal to' if result['target_unchanged'] else 'NOT those'} before."
    )


def drafter_line(name: str, facts: dict[str, Any]) -> str:
    """A drafter's γ, η and weights in a sentence; how it was trained is in the details."""
    weights = facts.get("quantization") or f"weights {facts['digest']}"
    return f"{TITLES[name]}: γ = {facts['draft_length']}, η = {facts['learning_rate']:g}, {weights}."
