"""Markdown of the TTS benchmark: tables shaped like the paper's (arXiv 2605.09329), its numbers beside ours."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .measure import machine_line, markdown_table
from .tts_drafters import FROZEN, NONE, TITLES, TTS
from .tts_figures import bars_figure, depth_figure, distributions_figure, run_figure, strides_figure
from .tts_numbers import PAPER_GAIN, PAPER_RELATIVE, PAPER_SPEEDUPS, PAPER_STRIDES, THIRDS, paper_stride_gain, trend
from .tts_parts import COARSE, ROLLOUT, asynchronous


Row = dict[str, Any]
Result = dict[str, Any]
_CLAIMS = {
    "drafters": "Acceptance length, frozen against learning after every round (TTS Tab. 1, 2; Fig. 1, 2, 5)",
    "strides": "Update strides (TTS Tab. 3, 7, 8)",
    "steps": "Optimizer steps per update (TTS Fig. 6a)",
    "anchors": "The second loss term: λ and its anchor",
    "rates": "Learning rates",
    "distributions": "Target and draft by output depth (TTS Fig. 4, 6b)",
    "run": "Learning that is kept over many requests",
    "batch": "Several requests at a time",
}


def report(result: Result, figures: Path) -> str:
    """`result` as Markdown.

    Args:
        result: of one part, see `tts.main`.
        figures: path of figures, without the ending.
    """
    settings, part = result["settings"], result["part"]
    same = result["identity"]
    low, high = result["loads"]
    lines = [
        f"# Test-Time Speculation: {_CLAIMS[part][0].lower()}{_CLAIMS[part][1:]}",
        "",
        machine_line(result["machine"]),
        "",
        f"Target {settings['target']}, {settings['dtype']}, batch {settings['batch']}, {settings['new_tokens']} new "
        f"tokens per request behind prompts of {settings['prompt_tokens']}, an earlier end of sequence suppressed, "
        f"exact verification, {settings['threads']} threads, load average during the calls {low:.1f} to {high:.1f}. "
        "Acceptance length: committed tokens per verified block, the corrected or bonus token included, over all "
        "requests together. Ratios are to the frozen drafter on the same requests and seeds in the same process, in "
        "turns; a ratio of throughput is the median over requests. Intervals: 95 %, paired bootstrap over requests.",
        "",
        *[_drafter_line(name, facts) for name, facts in result["drafters"].items()],
        "",
        f'Identity with `"none"`: {same["same"]} of {same["tokens"]} tokens in {same["calls"]} calls; '
        f"{same['ties']} near-ties of scores (text behind them is not counted), {same['unexplained']} unexplained "
        f"mismatches. The target's parameters are {'bit-equal to' if result['target_unchanged'] else 'NOT those'} "
        "before.",
        "",
    ]
    return "\n".join([*lines, *_BODIES[part](result, figures)])


def _drafter_line(name: str, facts: dict[str, Any]) -> str:
    line = f"* {TITLES[name]}: γ = {facts['draft_length']}, η = {facts['learning_rate']:g}"
    if "quantization" in facts:
        return f"{line}, {facts['quantization']}, rank-8 corrections"
    training = facts["training"]
    if isinstance(training, str):
        return f"{line}, weights {facts['digest']}, {training}"
    since = " since it was resumed" if training["resumed"] else ""
    options = " ".join(training["options"])
    return f"{line}, weights {facts['digest']}, trained in {training['seconds']} s{since}: {options}"


def _groups(rows: Sequence[Row]) -> list[tuple[str, float, dict[str, Row]]]:
    """Rows by way, for each drafter and temperature."""
    found: dict[tuple[str, float], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["kind"], row["temperature"]), {})[row["way"]] = row
    return [(kind, temperature, ways) for (kind, temperature), ways in found.items()]


def _tau(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1%}"


def _gain(row: Row) -> str:
    return "" if row["way"] == FROZEN else _with_interval(row["gain"], row["interval"])


def _third_gains(row: Row) -> list[str]:
    return ["" if row["way"] == FROZEN else _percent(value) for value in row["third_gains"]]


def _with_interval(value: float | None, interval: Sequence[float] | None) -> str:
    return _percent(value) + ("" if interval is None else f" ({interval[0]:+.1%} to {interval[1]:+.1%})")


def _drafters(result: Result, figures: Path) -> list[str]:
    rows, lengths, depths = result["summary"], [], []
    remarks = []
    for kind, temperature, ways in _groups(rows):
        frozen, learned = ways[FROZEN], ways[TTS]
        head = [TITLES[kind], f"{temperature:g}"]
        lengths.append(
            [*head, _tau(frozen["tau"]), _tau(learned["tau"]), _gain(learned), _percent(PAPER_GAIN.get(kind))]
            + [f"{frozen['accepted_per_round']:.2f}", f"{learned['accepted_per_round']:.2f}"]
            + [f"{learned['updates_per_call']:.0f}", f"{learned['speed_ratio']:.2f}×"]
            + [f"{learned['learning_bytes'] / 1e6:.1f}"]
        )
        depths.append(
            [*head]
            + [f"{_tau(a)} → {_tau(b)}" for a, b in zip(frozen["thirds"], learned["thirds"], strict=True)]
            + [_with_interval(*pair) for pair in zip(learned["third_gains"], learned["third_intervals"], strict=True)]
        )
        first, last = learned["third_gains"][0], learned["third_gains"][-1]
        grows = "–" if first is None or last is None else ("yes" if last > first else "no")
        remarks.append(
            f"* {TITLES[kind]}, T = {temperature:g}: gain larger in the last third than in the first: {grows}; frozen "
            f"acceptance length over the thirds {trend(frozen['thirds'])}."
        )
    header = ["drafter", "T", "frozen", "TTS", "Δ", "paper's mean Δ", "accepted per round, frozen", "TTS"]
    header += ["updates per request", "throughput", "learning MB"]
    thirds = [f"{name} third" for name in THIRDS]
    name = depth_figure(rows, result["settings"]["new_tokens"], figures.with_suffix(".png"))
    width = result["settings"]["new_tokens"] / len(COARSE)
    fine = [
        [TITLES[row["kind"]], f"{row['temperature']:g}", row["way"], *map(_tau, row["by_depth"])]
        for row in rows
        if row["way"] != NONE
    ]
    edges = [f"{i * width:.0f}–{(i + 1) * width:.0f}" for i in range(len(COARSE))]
    return [
        markdown_table(header, lengths), "", "By thirds of the output (TTS §6.3: the gain grows with length):", "",
        markdown_table(["drafter", "T", *thirds, *(f"Δ {each}" for each in thirds)], depths), "", *remarks, "",
        "By output depth in tokens:", "", markdown_table(["drafter", "T", "way", *edges], fine), "", f"![]({name})",
    ]  # fmt: skip


def _strides(result: Result, figures: Path) -> list[str]:
    strides = result["options"]["strides"]
    lines: list[str] = []
    for kind, temperature, ways in _groups(result["summary"]):
        lines += [f"## {TITLES[kind]}, T = {temperature:g}", ""]
        rows = []
        for name in [*(f"S={stride}" for stride in strides), "adaptive"]:
            plain, beside = ways[name], ways[asynchronous(name)]
            paper = paper_stride_gain(int(name[2:])) if name != "adaptive" else None
            rows.append(
                [name, _tau(plain["tau"]), _gain(plain), _percent(paper), f"{plain['speed_ratio']:.2f}×"]
                + [f"{plain['speed_ratio'] / (1 + plain['gain']):.2f}", _tau(beside["tau"]), _percent(beside["gain"])]
                + [f"{beside['speed_ratio']:.2f}×", f"{beside['speed_ratio'] / (1 + beside['gain']):.2f}"]
                + [f"{beside['speed_ratio'] / plain['speed_ratio']:.2f}×"]
                + [f"{plain['updates_per_call']:.0f}", f"{plain['update_milliseconds']:.1f}"]
                + [f"{plain['waited_share']:.0%}, {beside['waited_share']:.0%}"]
            )
        header = ["stride", "acceptance length", "Δ", "paper's mean Δ (Tab. 7)", "throughput"]
        header += ["of its acceptance ratio", "asynchronous: length", "Δ", "throughput", "of its acceptance ratio"]
        header += ["asynchronous / synchronous"]
        header += ["updates per request", "ms per update", "waited (sync, async)"]
        frozen = ways[FROZEN]
        lines += [
            f"Frozen: {_tau(frozen['tau'])}, {frozen['tokens_per_second']:.1f} tokens/s; `\"none\"` "
            f"{ways[NONE]['tokens_per_second']:.1f} tokens/s.", "", markdown_table(header, rows), "",
        ]  # fmt: skip
        lines += [*_tab3(ways, strides), *_tab8(ways, strides), *_stride_trends(ways, strides)]
    name = strides_figure(result["summary"], strides, figures.with_suffix(".png"))
    remark = (
        "Throughput over frozen: the frozen drafter ran once more right before or behind each way, on the same "
        "request; tokens/s are medians of single runs, minutes apart."
    )
    return [remark, "", *lines, f"![]({name})"]


def _tab3(ways: dict[str, Row], strides: Sequence[int]) -> list[str]:
    shown = [stride for stride in PAPER_SPEEDUPS if stride in strides]
    if not shown:
        return []
    frozen = ways[FROZEN]

    def cell(row: Row) -> str:
        return f"{_tau(row['tau'])} / {row['tokens_per_second']:.1f}"

    def ratios(name: str) -> str:
        return f"{1 + ways[name]['gain']:.2f} / {ways[name]['speed_ratio']:.2f}"

    rows = [
        ["ours, synchronous", cell(frozen), *(cell(ways[f"S={stride}"]) for stride in shown)],
        ["ours, over frozen", "1.0 / 1.0", *(ratios(f"S={stride}") for stride in shown)],
        ["ours, asynchronous, over frozen", "1.0 / 1.0", *(ratios(asynchronous(f"S={stride}")) for stride in shown)],
        ["paper, over frozen", "1.0 / 1.0", *("{:.2f} / {:.2f}".format(*PAPER_SPEEDUPS[stride]) for stride in shown)],
    ]
    head = ["acceptance length / tokens per s", "frozen", *(f"S={stride}" for stride in shown)]
    return ["As in Tab. 3:", "", markdown_table(head, rows), ""]


def _tab8(ways: dict[str, Row], strides: Sequence[int]) -> list[str]:
    if 1 not in strides:
        return []
    shown = [stride for stride in PAPER_RELATIVE if stride in strides]
    one = ways["S=1"]

    def relative(label: str, quantity: str, names: Callable[[str], str]) -> list[str]:
        return [label, *(f"{ways[names(f'S={stride}')][quantity] / one[quantity]:.2f}×" for stride in shown)]

    rows = [
        relative("acceptance length", "tau", str),
        ["paper's", *(f"{PAPER_RELATIVE[stride][0]:.2f}×" for stride in shown)],
        relative("throughput, synchronous", "speed_ratio", str),
        relative("throughput, asynchronous", "speed_ratio", asynchronous),
        ["paper's", *(f"{PAPER_RELATIVE[stride][1]:.2f}×" for stride in shown)],
    ]
    head = ["relative to S=1, synchronous", *(f"S={stride}" for stride in shown)]
    return ["As in Tab. 8:", "", markdown_table(head, rows), ""]


def _stride_trends(ways: dict[str, Row], strides: Sequence[int]) -> list[str]:
    order = sorted(strides)
    lengths = trend([ways[f"S={stride}"]["tau"] for stride in order])
    gains = [ways[f"S={stride}"]["gain"] for stride in order]
    candidates = [row for name, row in ways.items() if name not in (NONE, FROZEN)]
    best = max(candidates, key=lambda row: row["speed_ratio"])
    beside = [ways[asynchronous(f"S={s}")]["speed_ratio"] > ways[f"S={s}"]["speed_ratio"] for s in order]
    paper = [stride for stride in order if stride in PAPER_STRIDES]
    return [
        f"* Acceptance length from S={order[0]} to S={order[-1]}: {lengths} (paper: falls monotonically). Largest at "
        f"S={order[gains.index(max(gains))]} (paper: 1).",
        f"* Over the paper's strides {paper}: {trend([ways[f'S={s}']['tau'] for s in paper])}.",
        f"* Best throughput: {best['way']}, {best['speed_ratio']:.2f}× of frozen at an acceptance ratio of "
        f"{1 + best['gain']:.2f} (paper: S=5 in Tab. 3, S=10 in Tab. 8); above 1×: "
        f"{'yes' if best['speed_ratio'] > 1 else 'no'}.",
        f"* Asynchronous faster than synchronous at {sum(beside)} of {len(beside)} strides.",
        "",
    ]


def _ways_table(result: Result) -> list[str]:
    rows = [
        [TITLES[row["kind"]], f"{row['temperature']:g}", row["way"], _tau(row["tau"]), _gain(row)]
        + (_third_gains(row) if "third_gains" in row else [])
        + [f"{row['accepted_per_round']:.2f}", f"{row['speed_ratio']:.2f}×"]
        + [f"{row['learning_bytes'] / 1e6:.1f}" if "learning_bytes" in row else ""]
        for row in result["summary"]
        if row["way"] != NONE
    ]
    thirds = [f"Δ {name} third" for name in THIRDS] if "third_gains" in result["summary"][-1] else []
    header = ["drafter", "T", "way", "acceptance length", "Δ", *thirds, "accepted per round", "throughput"]
    return [markdown_table([*header, "learning MB"], rows), ""]


def _compared_ways(result: Result, figures: Path) -> list[str]:
    """Steps, anchors, rates."""
    lines, part = _ways_table(result), result["part"]
    for kind, temperature, ways in _groups(result["summary"]):
        learned = [row for name, row in ways.items() if name not in (NONE, FROZEN)]
        best = max(learned, key=lambda row: row["tau"])
        line = f"* {TITLES[kind]}, T = {temperature:g}: best {best['way']} ({_percent(best['gain'])})"
        if part == "steps":
            line += (
                f"; K=1 best: {'yes' if best['way'] == 'K=1' else 'no'} (paper: yes); acceptance length with K "
                f"{trend([row['tau'] for row in learned])} (paper: falls)"
            )
        elif part == "rates":
            line += f"; acceptance length with η {trend([row['tau'] for row in learned])}"
        lines.append(f"{line}.")
    return [*lines, "", f"![]({bars_figure(result['summary'], figures.with_suffix('.png'))})"]


def _distributions(result: Result, figures: Path) -> list[str]:
    rows, remarks = [], []
    quantities = ("cross_entropy", "cross_entropy_seen", "cross_entropy_unseen")
    for kind, temperature, ways in _groups(result["summary"]):
        for name in (FROZEN, TTS):
            thirds, whole = ways[name]["distribution_thirds"], ways[name]["distributions"][-1]
            rows.append(
                [TITLES[kind], f"{temperature:g}", name]
                + [_arrow([third["entropy"] for third in thirds])]
                + [_arrow([third[quantity] for third in thirds]) for quantity in quantities]
                + [_arrow([third["agreement"] for third in thirds])]
                + [f"{whole['positions']:.0f} ({whole['unseen_positions']:.0f})"]
            )
        depths = {name: ways[name]["distributions"][:-1] for name in (FROZEN, TTS)}
        frozen, learned = ([each["cross_entropy"] for each in depths[name]] for name in (FROZEN, TTS))
        entropy = [each["entropy"] for each in depths[FROZEN]]
        nearer = [a is not None and b is not None and b < a for a, b in zip(frozen, learned, strict=True)]
        remarks.append(
            f"* {TITLES[kind]}, T = {temperature:g}: over {len(COARSE)} depths the target's entropy {trend(entropy)} "
            f"(paper: falls), the frozen draft's cross-entropy {trend(frozen)} (paper: rises); TTS's is lower at "
            f"{sum(nearer)} of {len(nearer)} depths."
        )
    header = ["drafter", "T", "way", "target entropy", "cross-entropy", "on tokens seen before", "on unseen ones"]
    header += ["same likeliest token", "positions (unseen)"]
    name = distributions_figure(result["summary"], result["settings"]["new_tokens"], figures.with_suffix(".png"))
    return [
        "Of the first draft token of each block, from unprocessed logits at temperature 1, in nats: the target's "
        "entropy, and the draft's cross-entropy on the target's likeliest token, also by whether that token stood in "
        "the prompt or output before. First → middle → last third of the output. Frozen and learning drafters begin "
        "their blocks at different places, always behind a correction or a whole block, so these are not means over "
        "all positions.", "", markdown_table(header, rows), "", *remarks, "", f"![]({name})",
    ]  # fmt: skip


def _arrow(values: Sequence[float | None]) -> str:
    return " → ".join(_tau(value) for value in values)


def _run(result: Result, figures: Path) -> list[str]:
    rows = [
        [TITLES[row["kind"]], f"{row['temperature']:g}", str(row["requests"]), str(row["updates"]), str(row["last"])]
        + [_tau(row["frozen"]), _tau(row["tau"]), _with_interval(row["gain"], row["interval"])]
        + [_percent(PAPER_GAIN.get(row["kind"])), f"{row['speed_ratio']:.2f}×"]
        + [_arrow(values) for values in row["quarters"]]
        for row in result["summary"]
    ]
    header = ["drafter", "T", "requests", "updates", "last requests", "frozen on them", "TTS", "Δ", "paper's mean Δ"]
    header += ["throughput", "frozen by quarters of the requests", "TTS"]
    name = run_figure(result["summary"], figures.with_suffix(".png"))
    options = result["options"]
    how = f"S = {options['run_stride']}" + (", asynchronous" if options["run_asynchronous"] else "")
    return [
        f"Scope \"run\", {how}: the drafter keeps what it learned from request to request (the paper resets it). "
        "Compared on the last quarter of the requests.", "", markdown_table(header, rows), "", f"![]({name})",
    ]  # fmt: skip


def _batch(result: Result, figures: Path) -> list[str]:
    lines = _ways_table(result)
    rows, edges = [], sorted({int(edge) for row in result["summary"] for edge in row.get("by_edge", ())})
    for row in result["summary"]:
        if row["way"] != NONE:
            values = [row["by_edge"].get(str(edge)) for edge in edges]
            rows.append([TITLES[row["kind"]], f"{row['temperature']:g}", row["way"], *map(_tau, values)])
    lines += ["By output depth, from:", "", markdown_table(["drafter", "T", "way", *map(str, edges)], rows), ""]
    rate = result["options"]["adapter_rate"]
    lines.append(
        f'"{ROLLOUT}" learns all weights from all rows together, and starts anew with each batch; per request, each '
        "row learns a rank-8 correction of its own" + (f" with η = {rate:g}." if rate else ".")
    )
    return lines


_BODIES: dict[str, Callable[[Result, Path], list[str]]] = {
    "drafters": _drafters, "strides": _strides, "steps": _compared_ways, "anchors": _compared_ways,
    "rates": _compared_ways, "distributions": _distributions, "run": _run, "batch": _batch,
}  # fmt: skip
