"""Writes benchmarks/RESULTS.md and its figures from the result files: one section and one figure for each theme; and
the tables of the README and of docs/performance.md that are made of them.

    python -m benchmarks.results_page
"""

from pathlib import Path

from matplotlib.figure import Figure

from spec_trl.cli.figures import BLUE, GREY

from .chat_tables import write_tables
from .measure import RESULTS, THEMES, Finding, Result, findings_table, machine_line, read_result


PAGE = Path(__file__).parent / "RESULTS.md"
HEAD = """# Results

Made by `python -m benchmarks.results_page` from the files in [results](results); what else was measured is in those.
No GPU has run any of this. "No commit" means that none was recorded; the command then was put together from the
recorded options. [docs/performance.md](../docs/performance.md) says what the numbers mean,
[docs/glossary.md](../docs/glossary.md) what the words mean.
"""
FIGURES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "rollouts": ("×", "tokens/s over the baseline's", ("rollout_none", "rollout_continuous_450", "rollout_continuous",
                 "rollout_batch1", "rollout_qwen_093", "rollout_qwen_085")),
    "never_slower": ("×", "tokens/s over the baseline's",
                     ("control_machine", "control_machine_260k", "control_machine_05b", "first_call")),
    "lossless": ("rows", 'identical to "none" with the same seed', ("identity_grid",)),
    "tts": ("±%", "change of the acceptance length against the frozen drafter",
            ("tts_drafters", "tts_drafters_self", "tts_run", "tts_run_S5")),
    "best_of_n": ("×", "over the baseline's", ("best_of_n_tail", "best_of_n_tail_stories")),
    "workers": ("×", "over the baseline's", ("specactor",)),
    "quantization": ("tokens per round", "block efficiency, or its gain over the baseline's", ("rtn_awq",)),
    "calibration": ("%", "error of a time, or agreement of the sign", ("calibration",)),
}  # fmt: skip
"""The unit, the axis and the results of each theme's figure."""


def read_results(folder: Path = RESULTS) -> dict[str, Result]:
    """All results of a folder by name."""
    return {path.stem: read_result(path) for path in sorted(folder.glob("*.json"))}


def page(results: dict[str, Result]) -> str:
    """The page's text."""
    lines = [HEAD]
    for theme, title in THEMES.items():
        lines += [f"## {title}\n", f"![{title}](results/{theme}.png)\n"]
        for name, result in results.items():
            if result.theme == theme:
                commit = result.commit or "no commit"
                lines += [
                    f"### {name}: {result.title}\n",
                    f"`{result.command}` ({commit})\n",
                    f"{machine_line(result.machine)}. {result.setup}\n",
                    f"{findings_table(result.findings)}\n",
                ]
    return "\n".join(lines)


def draw(theme: str, results: dict[str, Result]) -> Figure:
    """The findings of a theme's figure as points with their intervals."""
    unit, axis, names = FIGURES[theme]
    found = [each for name in names for each in results[name].findings if each.unit == unit and each.value is not None]
    # Where repeats have an interval, what has none is a remark.
    found = [each for each in found if each.interval] or found
    figure = Figure(figsize=(8, 0.8 + 0.17 * len(found)), layout="constrained")
    axes = figure.subplots()
    for place, each in enumerate(found):
        assert each.value is not None
        low, high = each.interval or (each.value, each.value)
        axes.plot((low, high), (place, place), color=GREY, linewidth=2)
        axes.plot(each.value, place, "o", color=BLUE, markersize=4)
    axes.set_yticks(range(len(found)), [_label(each) for each in found], fontsize=6)
    axes.invert_yaxis()
    axes.axvline(1 if unit == "×" else 0, color=GREY, linewidth=0.8)
    if unit in ("%", "±%"):
        axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    axes.set_xlabel(axis, fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    return figure


def _label(finding: Finding) -> str:
    return f"{finding.what} / {finding.baseline}" if finding.baseline else finding.what


def main() -> None:
    results = read_results()
    for theme in THEMES:
        draw(theme, results).savefig(RESULTS / f"{theme}.png", dpi=90)
    PAGE.write_text(page(results), encoding="utf-8")
    write_tables(results)
    print(f"written: {PAGE}, {len(THEMES)} figures, and the tables about a chat model in README.md and performance.md")


if __name__ == "__main__":
    main()
