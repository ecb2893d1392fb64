"""Puts the parts' JSON together: `summary.json` with every figure that is wanted, and a table.

    python -m benchmarks.gpu.summary FOLDER [FOLDER ...]

A part that is in several folders counts from the last one in which it measured anything. Needs nothing but Python.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any


SUMMARY = "summary.json"
NOT_RUN, TRIED_OUT = "not run", "tried out"
BATCHES = (1, 8, 32)
EXACT_BATCHES = (1, 4, 16)
SMALL = (1, 2, 4, 8)
"""Batches up to which a draft step must be cheap."""
CHECKS = ("checks_cuda", "checks_kernels", "checks_sanitizer")

Parts = dict[str, dict[str, Any]]


@dataclass
class Figure:
    """One figure that is wanted.

    Args:
        what: in words.
        bound: ">=" or "<=".
        wanted: its bound; None: only stated.
        measured: None: not run.
        met: "yes", "no", "stated" or "not run"; "tried out" without a GPU, where figures say nothing.
        note: how it was measured, or why not.
    """

    what: str
    bound: str
    wanted: float | None
    measured: float | None
    met: str
    note: str


def figure(what: str, bound: str, wanted: float | None, look: Callable[[], Any], note: str = "") -> Figure:
    """Reads a figure from the parts; where it cannot be found it was not run."""
    try:
        measured = look()
    except (LookupError, TypeError, ValueError, ZeroDivisionError):
        measured = None
    if measured is None:
        return Figure(what, bound, wanted, None, NOT_RUN, note)
    measured = float(measured)
    if wanted is None:
        return Figure(what, bound, wanted, measured, "stated", note)
    holds = measured >= wanted if bound == ">=" else measured <= wanted
    return Figure(what, bound, wanted, measured, "yes" if holds else "no", note)


def figures(parts: Parts) -> list[Figure]:
    """All that is wanted, in order."""
    on_gpu = {name: part for name, part in parts.items() if part.get("machine", {}).get("accelerator")}
    rows = _figures(on_gpu)
    if len(on_gpu) < len(parts):
        for row, tried in zip(rows, _figures(parts), strict=True):
            if row.measured is None and tried.measured is not None:
                row.met = TRIED_OUT
    return rows


class _Reader:
    """Finds figures in the parts; raises LookupError and its like where they are not."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def value(self, part: str, *path: str) -> Any:
        value: Any = self._parts[part]["measured"]
        for key in path:
            value = value[key]
        return value

    def fastest_batched(self, batch: int) -> float:
        """The ratio of the better of continuous batching's configurations."""
        methods = self.value("decode_batched", f"batched, B {batch}")
        return min(found["over_plain"] for name, found in methods.items() if "over_plain" in found)

    def worst_ratio(self, head: str, key: str) -> float:
        """Over small batches."""
        ratios = self.value("rounds", f"head {head}", "ratios")
        return max(ratios[str(batch)][key] for batch in SMALL)

    def failed_checks(self) -> float:
        """Tests that failed, and commands that failed without naming one."""
        found = [each for name in CHECKS if name in self._parts for each in self._parts[name]["measured"].values()]
        if not found:
            raise LookupError("no check was run")
        return sum(max(len(each["failed"]), each["state"] == "failed") for each in found)

    def misjudged(self, kind: str, go: str) -> float:
        """By what factor the probe was off, either way, at the worst batch."""
        ratios = self.value("probe_check", f"believed over taken, {go}", kind).values()
        return max(max(ratio, 1 / ratio) for ratio in ratios)

    def share_drafted(self, *path: str) -> float:
        """Of a call's rounds."""
        facts = self.value("speculation", *path, "facts")
        return facts["speculative_rounds"] / facts["rounds"]

    def captures(self, graphs: str) -> float:
        """Of the second rollout with a long tail."""
        _, second = self.value("tail", f"self, graphs {graphs}")
        return second["captures"]

    def round_ratio(self, over: str, under: str, part: str = "top_p", batch: int = 1) -> float:
        """Of two ways' rounds in a part of `decode`."""
        methods = self.value(f"decode_{part}", f"{part}, B {batch}")
        return methods[over]["facts"]["round_seconds"] / methods[under]["facts"]["round_seconds"]

    def exact_prompts(self, batch: int) -> float:
        """Seconds of prompts, exact over not."""
        methods = self.value("decode_exact", f"exact, B {batch}")
        exact, plain = (methods[name]["facts"]["phase_seconds"]["prefill"] for name in ("none, exact", "none"))
        return exact / plain

    def exact_rows(self) -> float:
        """Share of identical rows of "self" and "none", both exact."""
        found = [
            self.value("decode_exact", f"exact, B {b}", "among exact", "self, exact", "identical_rows")
            for b in EXACT_BATCHES
        ]
        return sum(same for same, _ in found) / sum(rows for _, rows in found)

    def identical(self, *cells: tuple[str, str]) -> float:
        """Share of identical rows over the cells of the speculation part."""
        counts = [self.value("speculation", *cell, "identical_rows") for cell in cells]
        return sum(same for same, _ in counts) / sum(rows for _, rows in counts)


def _figures(parts: Parts) -> list[Figure]:
    reader = _Reader(parts)
    value = reader.value
    per_token = "seconds per token after the prompt"
    rows = [figure("failed tests", "<=", 0, reader.failed_checks, "and findings of compute-sanitizer")]
    # The planner finds out by itself where it was told wrongly, at a price.
    for kind, what in (("target", "T_p"), ("draft", "T_q"), ("verify", "T_V(5)"), ("T_q / T_p", "T_q / T_p")):
        rows += [
            figure(
                f"{what}, probed and measured: factor between them, {go} probe", "<=", 1.5,
                partial(reader.misjudged, kind, go), "the worse of batch 1 and 8",
            )
            for go in ("first", "second")
        ]  # fmt: skip
    rows += [
        figure(
            f"none over generate, batch {b}", ">=", wanted,
            partial(value, "decode_default", f"default, B {b}", "generate", "over_plain"), per_token,
        )
        for b, wanted in ((1, 3.0), (8, 3.0), (32, 2.5))
    ]  # fmt: skip
    rows += [
        figure(
            f"none over generate with static cache and compile, batch {b}", ">=", 1.1,
            partial(value, "decode_static", f"static, B {b}", "generate, static cache, compiled", "over_plain"),
            per_token,
        )
        for b in BATCHES
    ]  # fmt: skip
    rows += [
        figure(
            f"none over generate_batch, batch {b}", ">=", 1.1, partial(reader.fastest_batched, b),
            "the faster of its own choice and CUDA graphs; its attention is what this machine has installed",
        )
        for b in BATCHES
    ]  # fmt: skip
    worst = "the worst of batch 1, 2, 4, 8"
    rows += [
        figure(
            "T_p at batch 1 over weight bytes / copy bandwidth", "<=", 1.3,
            partial(value, "rounds", "T_p over weight bytes / copy bandwidth, auto"), "a whole round of the engine",
        ),
        figure(
            "the same with compiled layers", "<=", None,
            partial(value, "rounds", "T_p over weight bytes / copy bandwidth, compiled"), 'runner="compiled"',
        ),
        figure(
            "T_q / T_p, batch 1 to 8, lm_head packed", "<=", 0.38,
            partial(reader.worst_ratio, "packed", "T_q / T_p"), worst,
        ),
        figure(
            "T_q / T_p, batch 1 to 8, lm_head dense", "<=", None,
            partial(reader.worst_ratio, "dense", "T_q / T_p"), worst,
        ),
        figure(
            "T_V(5) / T_p, batch 1 to 8", "<=", 1.2, partial(reader.worst_ratio, "packed", "T_V / T_p"), worst
        ),
    ]  # fmt: skip
    for name, toggle in (("measured", "the default toggle"), ("roofline", "a calibrated toggle")):
        rows += [
            figure(
                f"self over none, {toggle}, batch {b}", ">=", wanted,
                partial(value, "speculation", f"self, {name}, B {b}", "speedup"), _policy(parts),
            )
            for b, wanted in ((1, 1.6), (8, 1.4), (32, 1.0))
        ]  # fmt: skip
    rows += [
        figure(
            "share of rounds that draft, the default toggle, batch 1, first call", ">=", 0.5,
            partial(reader.share_drafted, "self, measured, first call, B 1"), "by what the probe says",
        ),
        figure(
            "the same, later calls", ">=", 0.5, partial(reader.share_drafted, "self, measured, B 1", "self, measured")
        ),
    ]  # fmt: skip
    for b in BATCHES:
        always = f"self, always, B {b}"
        rows.append(figure(
            f"self over none, always drafting, batch {b}", ">=", None, partial(value, "speculation", always, "speedup")
        ))  # fmt: skip
        rows.append(figure(
            f"block efficiency at γ = 5, always drafting, batch {b}", ">=", 5.0,
            partial(value, "speculation", always, "self, always", "facts", "block_efficiency"), _policy(parts),
        ))  # fmt: skip
    rows += [
        figure("refresh, seconds, lm_head packed", "<=", 0.5, partial(value, "refresh", "head packed", "seconds")),
        figure(
            "sampling's share of a step, batch 32", "<=", 0.04,
            partial(value, "rounds", "head packed", "sampling", "share"),
            "phases noise and accept, the wait for the round's tokens included",
        ),
        figure(
            "identical sequences, self and none, float32", ">=", 1.0,
            partial(reader.identical, ("identity, float32", "self, always")),
        ),
        figure(
            "identical sequences, self and none, bfloat16", ">=", None,
            partial(reader.identical, *((f"self, always, B {b}", "none") for b in BATCHES)), "always drafting",
        ),
    ]  # fmt: skip
    kept = "bfloat16, graphs kept"
    for other, ours, wanted in (
        ("TRL, float32 under autocast", "float32 under autocast", 2.0),
        ("TRL", kept, 2.0),
        ("TRL, continuous batching", kept, 1.3),
        ("none, graphs kept", kept, 1.0),
        ("bfloat16", kept, None),
    ):
        rows += [
            figure(
                f"GRPO {what}, {other} over ours, {ours}", ">=", wanted if what == "rollout" else None,
                partial(value, "grpo", "ratios", f"{other} over {ours}", what),
                "ours has the trainer's defaults but for what its name says",
            )
            for what in ("rollout", "step", "tokens per second")
        ]  # fmt: skip
    tail = "64 rows with a long tail"
    rows += [
        figure(
            f"{tail}: captures in the second rollout, graphs {how}", "<=", 8,
            partial(reader.captures, how),
        )
        for how in ("freed", "kept")
    ]  # fmt: skip
    rows += [
        figure(f"{tail}: {what}", ">=", wanted, partial(value, "tail", "ratios", what), "the second rollout")
        for what, wanted in (("freed over kept", None), ("none over self, graphs kept", 1.2))
    ]
    rows += [
        figure(
            f"{name} with top-p over {name}, seconds of a round, batch 1", "<=", 1.05,
            partial(reader.round_ratio, f"{name}, top-p", name), "self drafts 5 tokens in every round",
        )
        for name in ("none", "self")
    ]  # fmt: skip
    # Where all of these hold, exact="auto" may mean True on CUDA.
    for b in EXACT_BATCHES:
        rows += [
            figure(
                f"{name} exact over {name}, seconds of a round, batch {b}", "<=", 1.05,
                partial(reader.round_ratio, f"{name}, exact", name, "exact", b),
                "self drafts 5 tokens in every round",
            )
            for name in ("none", "self")
        ]  # fmt: skip
        rows.append(figure(
            f"none exact over none, seconds of the prompts, batch {b}", "<=", 1.05, partial(reader.exact_prompts, b)
        ))  # fmt: skip
    rows.append(figure("identical sequences, self and none, bfloat16, exact", ">=", 1.0, reader.exact_rows))
    return rows


def _policy(parts: Parts) -> str:
    try:
        chosen = parts["speculation"]["measured"]["policy"]["chosen"]
        return (
            f"policy on the 4-bit grid plus {chosen['noise_in_grid_steps']} grid steps of noise, block efficiency "
            f"{chosen['block_efficiency']:.2f}"
        )
    except KeyError:
        return ""


def read_parts(folders: Sequence[Path]) -> Parts:
    """The parts' results by name."""
    parts: Parts = {}
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            if path.name == SUMMARY:
                continue
            found = json.loads(path.read_text())
            if "part" in found and (found.get("measured") or found["part"] not in parts):
                parts[found["part"]] = found
    return parts


def shown(value: float | None) -> str:
    """A figure for the table."""
    return "-" if value is None else f"{value:.3g}"


def table(rows: Sequence[Figure]) -> str:
    """The figures as text."""
    width = max(len(row.what) for row in rows)
    lines = [f"{'':{width}}  {'wanted':>8} {'measured':>9}  met"]
    for row in rows:
        wanted = "stated" if row.wanted is None else f"{row.bound} {row.wanted:g}"
        lines.append(f"{row.what:{width}}  {wanted:>8} {shown(row.measured):>9}  {row.met}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="of parts' JSON; the summary goes to the last")
    parser.add_argument("--quiet", action="store_true", help="write it, print no table")
    options = parser.parse_args(arguments)
    parts = read_parts(options.folders)
    rows = figures(parts)
    states = {
        name: {"status": part["status"], "seconds": part.get("seconds"), "shape": part.get("shape"),
               "errors": sorted(part.get("errors", {})), "skipped": part.get("skipped", {})}
        for name, part in parts.items()
    }  # fmt: skip
    result = {"figures": [asdict(row) for row in rows], "parts": states, "results": parts}
    (options.folders[-1] / SUMMARY).write_text(json.dumps(result, indent=1) + "\n")
    if not options.quiet:
        for name, state in states.items():
            seconds = "" if state["seconds"] is None else f", {state['seconds']:.0f} s"
            print(f"{name}: {state['status']}{seconds}, shape {state['shape']}, {len(state['errors'])} errors")
        print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
