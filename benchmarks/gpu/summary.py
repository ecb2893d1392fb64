"""Puts the parts' JSON together: `summary.json` with every figure that is wanted, and a table.

    python -m benchmarks.gpu.summary FOLDER [FOLDER ...]

A part that is in several folders counts from the last one in which it measured anything. Needs nothing but Python.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


SUMMARY = "summary.json"
BATCHES, EXACT_BATCHES = (1, 8, 32), (1, 4, 16)
SMALL = (1, 2, 4, 8)  # batches up to which a draft step must be cheap
CHECKS = ("checks_cuda", "checks_kernels", "checks_sanitizer")

Parts = dict[str, dict[str, Any]]
Look = Callable[[Callable[..., Any]], float]
"""Reads a figure with a function that takes a part and a path in what it measured; LookupError: it is not there."""
Wanted = tuple[str, str, float | None, Look]
"""What in words, ">=" or "<=", the bound (None: it is only stated), and how to read it."""


@dataclass
class Figure:
    """One figure that is wanted; `met`: "yes", "no", "stated" or "not run"; "tried out" without a GPU, where figures
    say nothing."""

    what: str
    bound: str
    wanted: float | None
    measured: float | None
    met: str


def at(*path: str) -> Look:
    """The figure that stands there."""
    return lambda value: float(value(*path))


def failed_checks(value: Callable[..., Any]) -> float:
    """Tests that failed, and commands that failed without naming one."""
    found: list[dict[str, Any]] = []
    for name in CHECKS:
        try:
            found += value(name).values()
        except LookupError:
            pass
    if not found:
        raise LookupError("no check was run")
    return sum(max(len(each["failed"]), each["state"] == "failed") for each in found)


def misjudged(kind: str, go: str) -> Look:
    """By what factor the probe was off, either way, at the worst batch."""
    return lambda value: max(
        max(ratio, 1 / ratio) for ratio in value("rounds", f"believed over taken, {go}", kind).values()
    )


def worst_ratio(head: str, key: str) -> Look:
    """Over small batches."""
    return lambda value: max(value("rounds", f"head {head}", "ratios")[str(batch)][key] for batch in SMALL)


def fastest_batched(batch: int) -> Look:
    """The ratio of the better of continuous batching's configurations."""
    return lambda value: min(
        own["over_plain"] for own in value("decode_batched", f"batched, B {batch}").values() if "over_plain" in own
    )


def drafted(*path: str) -> Look:
    """Share of a call's rounds that drafted."""
    return lambda value: (
        value("speculation", *path, "facts", "speculative_rounds") / value("speculation", *path, "facts", "rounds")
    )


def ratio(group: str, batch: int, over: str, under: str, *fact: str) -> Look:
    """Of two ways' facts in a part of `decode`."""
    cell = f"decode_{group}", f"{group}, B {batch}"
    return lambda value: value(*cell, over, "facts", *fact) / value(*cell, under, "facts", *fact)


def identical(*cells: tuple[str, ...]) -> Look:
    """Share of identical rows over cells."""

    def look(value: Callable[..., Any]) -> float:
        counts = [value(*cell, "identical_rows") for cell in cells]
        return sum(same for same, _ in counts) / sum(rows for _, rows in counts)

    return look


def wanted() -> Iterator[Wanted]:
    """All figures, in order."""
    yield "failed tests, and findings of compute-sanitizer", "<=", 0, failed_checks
    # The planner finds out by itself where it was told wrongly, at a price.
    for kind, what in (("target", "T_p"), ("draft", "T_q"), ("verify", "T_V(5)"), ("T_q / T_p", "T_q / T_p")):
        for go in ("first", "second"):
            yield f"{what}, probed over measured or the reverse, {go} probe", "<=", 1.5, misjudged(kind, go)
    for b, bound in ((1, 3.0), (8, 3.0), (32, 2.5)):
        look = at("decode_default", f"default, B {b}", "generate", "over_plain")
        yield f"none over generate, batch {b}", ">=", bound, look
    for b in BATCHES:
        look = at("decode_static", f"static, B {b}", "generate, static cache, compiled", "over_plain")
        yield f"none over generate with static cache and compile, batch {b}", ">=", 1.1, look
        yield f"none over generate_batch, the faster of two ways, batch {b}", ">=", 1.1, fastest_batched(b)
    for runner, most in (("auto", 1.3), ("compiled", None)):
        what = f"T_p over weight bytes / copy bandwidth, {runner}"
        yield f"{what}, batch 1", "<=", most, at("rounds", what)
    for head, share in (("packed", 0.38), ("dense", None)):
        yield f"T_q / T_p, the worst of batch 1 to 8, lm_head {head}", "<=", share, worst_ratio(head, "T_q / T_p")
    yield "T_V(5) / T_p, the worst of batch 1 to 8", "<=", 1.2, worst_ratio("packed", "T_V / T_p")
    yield "sampling's share of a round, batch 32", "<=", 0.04, at("rounds", "head packed", "sampling_share")
    yield "refresh, seconds, lm_head packed", "<=", 0.5, at("rounds", "head packed", "refresh_seconds")
    for b, bound in ((1, 1.6), (8, 1.4), (32, 1.0)):
        look = at("speculation", f"self, measured, B {b}", "speedup")
        yield f"self over none, the default toggle, batch {b}", ">=", bound, look
    call = "share of rounds that draft, the default toggle, batch 1"
    yield f"{call}, first call", ">=", 0.5, drafted("self, measured, first call, B 1")
    yield f"{call}, later calls", ">=", 0.5, drafted("self, measured, B 1", "self, measured")
    for b in BATCHES:
        cell = "speculation", f"self, always, B {b}"
        yield f"self over none, always drafting, batch {b}", ">=", None, at(*cell, "speedup")
        yield (
            f"block efficiency at γ = 5, always drafting, batch {b}", ">=", 5.0,
            at(*cell, "self, always", "facts", "block_efficiency"),
        )  # fmt: skip
    same = "identical sequences, self and none"
    yield f"{same}, float32", ">=", 1.0, identical(("speculation", "identity, float32", "self, always"))
    bfloat16 = [("speculation", f"self, always, B {b}", "none") for b in BATCHES]
    yield f"{same}, bfloat16", ">=", None, identical(*bfloat16)
    # Where all of these hold, exact="auto" may mean True on CUDA.
    cells = [("decode_exact", f"exact, B {b}", "among exact", "self, exact") for b in EXACT_BATCHES]
    yield f"{same}, bfloat16, exact", ">=", 1.0, identical(*cells)
    for b in EXACT_BATCHES:
        for name in ("none", "self"):
            look = ratio("exact", b, f"{name}, exact", name, "round_seconds")
            yield f"{name} exact over {name}, seconds of a round, batch {b}", "<=", 1.05, look
        look = ratio("exact", b, "none, exact", "none", "phase_seconds", "prefill")
        yield f"none exact over none, seconds of the prompts, batch {b}", "<=", 1.05, look
    for name in ("none", "self"):
        look = ratio("top_p", 1, f"{name}, top-p", name, "round_seconds")
        yield f"{name} with top-p over {name}, seconds of a round, batch 1", "<=", 1.05, look
    kept = "bfloat16, graphs kept"
    for other, ours, least in (
        ("TRL, float32 under autocast", "float32 under autocast", 2.0), ("TRL", kept, 2.0),
        ("TRL, continuous batching", kept, 1.3), ("none, graphs kept", kept, 1.0), ("bfloat16", kept, None),
    ):  # fmt: skip
        for what in ("rollout", "step", "tokens per second"):
            look = at("grpo", "ratios", f"{other} over {ours}", what)
            yield f"GRPO {what}, {other} over ours, {ours}", ">=", least if what == "rollout" else None, look


def figures(parts: Parts) -> list[Figure]:
    """All that is wanted."""

    def read(look: Look, among: Parts) -> float | None:
        def value(part: str, *path: str) -> Any:
            found: Any = among[part]["measured"]
            for key in path:
                found = found[key]
            return found

        try:
            return look(value)
        except (LookupError, TypeError, ValueError, ZeroDivisionError):
            return None

    on_gpu = {name: part for name, part in parts.items() if part.get("machine", {}).get("accelerator")}
    rows = []
    for what, bound, most, look in wanted():
        measured = read(look, on_gpu)
        if measured is None:
            met = "not run" if read(look, parts) is None else "tried out"
        elif most is None:
            met = "stated"
        else:
            met = "yes" if (measured >= most if bound == ">=" else measured <= most) else "no"
        rows.append(Figure(what, bound, most, measured, met))
    return rows


def read_parts(folders: Sequence[Path]) -> Parts:
    """The parts' results by name."""
    parts: Parts = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*.json")) if path.name != SUMMARY):
        found = json.loads(path.read_text())
        if "part" in found and (found.get("measured") or found["part"] not in parts):
            parts[found["part"]] = found
    return parts


def table(rows: Sequence[Figure]) -> str:
    """The figures as text."""
    width = max(len(row.what) for row in rows)
    lines = [f"{'':{width}}  {'wanted':>8} {'measured':>9}  met"]
    for row in rows:
        bound = "stated" if row.wanted is None else f"{row.bound} {row.wanted:g}"
        measured = "-" if row.measured is None else f"{row.measured:.3g}"
        lines.append(f"{row.what:{width}}  {bound:>8} {measured:>9}  {row.met}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="of parts' JSON; the summary goes to the last")
    parser.add_argument("--quiet", action="store_true", help="write it, print no table")
    options = parser.parse_args(arguments)
    parts = read_parts(options.folders)
    rows = figures(parts)
    result = {"figures": [asdict(row) for row in rows], "parts": parts}
    (options.folders[-1] / SUMMARY).write_text(json.dumps(result, indent=1) + "\n")
    if not options.quiet:
        for name, part in parts.items():
            gaps = f"{len(part.get('errors', {}))} errors, {len(part.get('skipped', {}))} skipped"
            print(f"{name}: {part['status']}, {part.get('seconds', 0):.0f} s, shape {part.get('shape')}, {gaps}")
        print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
