"""What the TTS benchmark finds, with the numbers of its paper (arXiv 2605.09329) as far as they compare."""

from typing import Any

from .measure import Finding
from .tts_drafters import FROZEN, NONE, TITLES
from .tts_numbers import PAPER_GAIN, THIRDS, paper_stride_gain


Row = dict[str, Any]
Result = dict[str, Any]
PART_TITLES = {
    "drafters": "Acceptance length, frozen against learning after every round (TTS Tab. 1, 2; Fig. 1, 2, 5)",
    "strides": "Update strides (TTS Tab. 3, 7, 8)",
    "steps": "Optimizer steps per update (TTS Fig. 6a)",
    "anchors": "The second loss term: λ and its anchor",
    "rates": "Learning rates",
    "distributions": "Target and draft by output depth (TTS Fig. 4, 6b)",
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
        if "distributions" in row:
            frozen = next(other for other in result["summary"] if _place(other) == _place(row, FROZEN))
            found += _nearer(what, frozen, row)
    return found


def _frozen(result: Result, row: Row) -> str:
    """The baseline of a gain, with the paper's mean where it has one."""
    paper = PAPER_GAIN.get(row["kind"]) if result["part"] in ("drafters", "run") else None
    if result["part"] == "strides" and row["way"].startswith("S=") and row["way"][2:].isdigit():
        paper = paper_stride_gain(int(row["way"][2:]))
    return FROZEN if paper is None else f"{FROZEN}; paper's mean {paper:+.1%}"


def _place(row: Row, way: str | None = None) -> tuple[str, float, str]:
    return row["kind"], row["temperature"], way or row["way"]


def _nearer(what: str, frozen: Row, row: Row) -> list[Finding]:
    """Cross-entropy on the target's likeliest token: in the last third, and in how many depths it is lower."""
    theirs, ours = ([each["cross_entropy"] for each in one["distributions"][:-1]] for one in (frozen, row))
    lower = sum(a is not None and b is not None and b < a for a, b in zip(theirs, ours, strict=True))
    last = [one["distribution_thirds"][-1]["cross_entropy"] for one in (frozen, row)]
    baseline = f"{FROZEN}: {last[0]:.2f}" if last[0] is not None else FROZEN
    return [
        Finding(f"{what}, cross-entropy, last third of the output", last[1], "nats", baseline),
        Finding(f"{what}, depths of {len(ours)} with lower cross-entropy", lower, "depths", FROZEN),
    ]


def setup(result: Result) -> str:
    """How it was measured, with which drafters, and whether the output was that of "none"."""
    settings, options, same = result["settings"], result["options"], result["identity"]
    low, high = result["loads"]
    text = (
        f"Target {settings['target']}, {settings['dtype']}, batch {settings['batch']}, {settings['new_tokens']} new "
        f"tokens per request after prompts of {settings['prompt_tokens']}, an earlier end of sequence suppressed, "
        f"exact verification, load average during the calls {low:.1f} to {high:.1f}. Acceptance length: committed "
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
        f'"none": {same["same"]} of {same["tokens"]} tokens in {same["calls"]} calls, {same["ties"]} near-ties, '
        f"{same['unexplained']} unexplained mismatches; the target's parameters are "
        f"{'bit-equal to' if result['target_unchanged'] else 'NOT those'} before."
    )


def drafter_line(name: str, facts: dict[str, Any]) -> str:
    """A drafter's γ, η, weights and training in a sentence."""
    line = f"{TITLES[name]}: γ = {facts['draft_length']}, η = {facts['learning_rate']:g}"
    if "quantization" in facts:
        return f"{line}, {facts['quantization']}, rank-8 corrections."
    training = facts["training"]
    if isinstance(training, str):
        return f"{line}, weights {facts['digest']}, {training}."
    since = " since it was resumed" if training["resumed"] else ""
    options = " ".join(training["options"])
    return f"{line}, weights {facts['digest']}, trained in {training['seconds']} s{since} ({options})."
