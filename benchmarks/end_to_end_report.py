"""The end-to-end benchmark's result as Markdown: the paper's Table 2, and what the ablations show."""

import statistics
from collections.abc import Sequence
from typing import Any

from .configurations import (
    ALWAYS_ADAPTIVE,
    AUTOREGRESSIVE,
    AWQ,
    EFFICIENT_ROLLOUT,
    FIXED,
    LADDER,
    LEARNED_ADAPTED,
    LEARNED_FROZEN,
    LEARNED_TTS,
    METHODS,
    TRL,
    always_on,
    always_on_w8,
    toggled,
)
from .measure import machine_line, markdown_table
from .paper.breakdown import Shape, idealized_draft_ratio


_NAMES = {
    AUTOREGRESSIVE: "autoregressive (ours)",
    TRL: "trl.GRPOTrainer (transformers generate)",
    "history": "history-based, lossless",
    EFFICIENT_ROLLOUT: "EfficientRollout",
    LEARNED_FROZEN: "learned auxiliary, as it came",
    LEARNED_ADAPTED: "learned auxiliary, adapted behind each micro-batch",
    LEARNED_TTS: "learned auxiliary, learning from each round (TTS)",
}


def report(result: dict[str, Any]) -> str:
    """`result` as Markdown."""
    options, target, methods = result["options"], result["target"], result["methods"]
    lines = [
        f"# End to end: {target['model']}, {target['dtype']}",
        "",
        machine_line(result["machine"]),
        "",
        f"GRPO, {options['steps']} steps of {options['rows']} completions ({options['group']} of a prompt) of up to "
        f"{options['max_completion_length']} tokens at temperature 1, {options['questions']} prompts of up to "
        f"{options['longest_prompt']} tokens, the same seeds for each method. Times are means over the steps but the "
        f"first of medians over {options['repeats']} repeats; the percentage is the change against autoregressive "
        f"decoding (trl draws other texts: compare its tokens/s). τ and γ̄ are means over steps. Reward: mean of the "
        f"last {max(1, options['steps'] // 3)} steps. The policy learns at "
        f"{options['learning_rate']:g}. The whole benchmark took {result['seconds']:.0f} s.",
    ]
    if target["synthetic_weights"]:
        agreement = target["agreement"]
        lines.append(
            f"Synthetic weights, overlap with the 4-bit copy {agreement['overlap_packed_head']:.3f}; random tokens "
            "end completions. The reward is the share of odd tokens, so only times mean anything."
        )
    if (calibration := result["calibration"]) is not None:
        rows = calibration["max_rows"]
        limit = "" if rows is None or rows >= 1 << 31 else f" The self-drafter's kernel serves up to {rows} rows."
        lines.append(f"Calibration, once for all and in none of the times: {calibration['seconds']:.1f} s.{limit}")
    lines += ["", "## Methods (Table 2)", "", _methods_table(result), "", *_identity_lines(result)]
    lines += ["", "## Where a rollout's seconds go", "", _phase_table(methods, result["best_fixed"])]
    if result["ablations"]:
        lines += ["", *_ablation_lines(result)]
    return "\n".join(lines)


def _methods_table(result: dict[str, Any]) -> str:
    methods = result["methods"]
    header = ["method", "preparation s", "τ / γ̄", "rounds speculating", "rollout s", "step s", "tokens/step"]
    header += ["rollout tokens/s", "final reward", "identical completions"]
    rows = []
    for name in _rows_of_table(methods, result["best_fixed"]):
        m = methods[name]
        rows.append(
            [_name(name, result["best_fixed"]), _number(m["preparation_seconds"], 3), _tau(m)]
            + [_percent(m["sd_on_fraction"]), *_times(m, methods), f"{m['tokens']:.0f}"]
            + [f"{m['tokens_per_second']:.1f}", f"{m['reward']:.3f}", _identity(m)]
        )
    table = markdown_table(header, rows)
    fixed = [
        f"γ = {length}: {methods[always_on(length)]['rollout_seconds']:.3f} s"
        for length in FIXED
        if always_on(length) in methods
    ]
    if fixed:
        table += f"\n\nAlways on, seconds of a rollout by draft length (γ*: the shortest): {', '.join(fixed)}."
    return table


def _rows_of_table(methods: dict[str, Any], best: str | None) -> list[str]:
    """Names in the order of Table 2, of the always-on ones only the best."""
    others = [always_on(length) for length in FIXED if always_on(length) != best]
    order = [*METHODS, LEARNED_FROZEN, LEARNED_ADAPTED, LEARNED_TTS]
    return [name for name in order if name in methods and name not in others]


def _identity_lines(result: dict[str, Any]) -> list[str]:
    compared = {n: m for n, m in result["methods"].items() if m["identical_steps"] is not None and n != AUTOREGRESSIVE}
    if not compared:
        return []
    different = [name for name, m in compared.items() if m["identical_steps"] < m["steps"]]
    largest = max(m["reward_difference"] for m in compared.values())
    verdict = (
        f"Identical completions in every step for {len(compared) - len(different)} of {len(compared)} configurations "
        f"of SpecGRPOTrainer; largest difference of a step's reward from autoregressive decoding's {largest:.3f}."
    )
    if different:
        verdict += (
            f" Different: {', '.join(different)}. Forwards of different shapes differ in the last bits, so a near-tie "
            "can flip a token, and behind the first such step the policies are no longer the same (docs/lossless.md); "
            "--dtype float64 rules ties out."
        )
    return [verdict]


def _phase_table(methods: dict[str, Any], best: str | None) -> str:
    shown = {name: m for name, m in methods.items() if m["phase_seconds"]}
    phases = list(dict.fromkeys(phase for m in shown.values() for phase in m["phase_seconds"]))
    rows = []
    for name, m in shown.items():
        total = sum(m["phase_seconds"].values()) or 1.0
        cells = [m["phase_seconds"].get(phase, 0.0) for phase in phases]
        rows.append([_name(name, best), *(f"{seconds:.3f} ({seconds / total:.1%})" for seconds in cells)])
    return markdown_table(["method", *phases], rows)


def _ablation_lines(result: dict[str, Any]) -> list[str]:
    methods = result["methods"]
    header = ["", "τ / γ̄", "rounds speculating", "rollout s", "step s"]

    def row(title: str, name: str) -> list[str]:
        method = methods[name]
        return [title, _tau(method), _percent(method["sd_on_fraction"]), *_times(method, methods)]

    def table(rows: list[tuple[str, str]]) -> str:
        return markdown_table(header, [row(title, name) for title, name in rows])

    fixed = [(f"toggle, γ = {length}", toggled(length)) for length in LADDER]
    lines = ["## Draft length under the toggle (Fig. 4a)", ""]
    lines += [table([*fixed, ("toggle, adaptive γ", EFFICIENT_ROLLOUT)]), ""]
    lines += ["## With and without the toggle (Fig. 5)", ""]
    lines += [
        table(
            [("always on, γ = 5", always_on(5)), ("toggle, γ = 5", toggled(5))]
            + [("always on, adaptive γ", ALWAYS_ADAPTIVE), ("toggle, adaptive γ", EFFICIENT_ROLLOUT)]
        ),
        "",
    ]
    length = result["options"]["longest_prompt"] + result["options"]["max_completion_length"]
    lines += [
        "## W4 and W8 (Tab. 4)",
        "",
        f"Always on. The idealized ratio is for one row of {length} tokens where memory alone counts, 16-bit weights "
        "and dense embeddings (ER App. C.3).",
        "",
    ]
    shape = Shape.from_config(result["shape"])
    rows = []
    for title, bits, naming in (("RTN W8", 8, always_on_w8), ("RTN W4", 4, always_on)):
        cells = [methods[naming(gamma)] for gamma in FIXED]
        rows.append(
            [title, f"{idealized_draft_ratio(shape, bits, 1, length):.3f}"]
            + [_number(m["block_efficiency"], 2) for m in cells]
            + [f"{m['rollout_seconds']:.3f}" for m in cells]
        )
    header = ["drafter", "idealized T̂q/T̂p", *(f"τ (γ = {gamma})" for gamma in FIXED)]
    lines += [markdown_table([*header, *(f"rollout s (γ = {gamma})" for gamma in FIXED)], rows), ""]
    lines += ["## RTN and AWQ (Fig. 7)", "", "Always on, γ = 5, W4; τ of the first repeat by step.", ""]
    rows = []
    for title, name in (("RTN", always_on(5)), ("AWQ", AWQ)):
        m = methods[name]
        values = [value for value in m["by_step"]["block_efficiency"] if value is not None]
        rows.append(
            [title, _ends(values), _number(m["block_efficiency"], 3), _number(m["preparation_seconds"], 3)]
            + [f"{m['rollout_seconds']:.3f}"]
        )
    # The first step's drafter is rounded to nearest in both: AWQ has not seen a training step yet.
    header = ["drafter", "τ, first and last third of the steps", "τ but the first step", "preparation s", "rollout s"]
    return [*lines, markdown_table(header, rows)]


def _ends(values: Sequence[float]) -> str:
    if not values:
        return "–"
    third = max(1, len(values) // 3)
    return f"{statistics.fmean(values[:third]):.3f}, {statistics.fmean(values[-third:]):.3f}"


def _name(name: str, best: str | None) -> str:
    if name == best:
        return f"quantized self, always on at γ* = {best.rsplit('-', 1)[1]}"
    return _NAMES.get(name, name)


def _times(method: dict[str, Any], methods: dict[str, Any]) -> list[str]:
    """Rollout and step seconds with the signed change against autoregressive decoding."""
    cells = []
    for quantity in ("rollout_seconds", "step_seconds"):
        seconds, baseline = method[quantity], methods[AUTOREGRESSIVE][quantity]
        change = "" if method["method"] == AUTOREGRESSIVE else f" ({seconds / baseline - 1:+.1%})"
        cells.append(f"{seconds:.3f}{change}")
    return cells


def _tau(method: dict[str, Any]) -> str:
    if method["block_efficiency"] is None:
        return "–"
    return f"{method['block_efficiency']:.2f} / {method['draft_length']:.2f}"


def _identity(method: dict[str, Any]) -> str:
    if method["identical_steps"] is None:
        return "–"
    whole = method["identical_steps"] == method["steps"]
    return "yes" if whole else f"first {method['identical_steps']} of {method['steps']} steps"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
