"""The tables of the README and of docs/performance.md about a real chat model, made of the result files.

Each stands between two marks of its page. `python -m benchmarks.results_page` writes them. Only results that may be
claimed are used (:meth:`~benchmarks.measure.Result.refusal`); a table says which it lacks.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from .measure import Result
from .rollout import AUTO, GENERATE, PLAIN


ROOT = Path(__file__).parents[1]
MARK, END = "<!-- made by benchmarks.results_page -->\n", "<!-- end -->"
MODEL = "SmolLM2-135M-Instruct"
TRAINING = "end_to_end_chat"
ROLLOUTS = {
    "float32": ("rollout_chat", "rollout_chat_many"),
    "bfloat16": ("rollout_chat_bfloat16", "rollout_chat_bfloat16_many"),
}
"""Results by dtype: few rows and many, each a command of a few minutes."""
BATCHES = (1, 4, 8, 16)
README_ROWS = (
    ('`"none"`: the engine alone, float32', "float32", PLAIN),
    ('`"auto"`: with drafts where they pay, float32', "float32", AUTO),
    ('`"auto"`, bfloat16', "bfloat16", AUTO),
)
TRAINER, PARTS = "trl.GRPOTrainer (transformers generate)", ("rollout tokens/s", "tokens/s of a whole step")


def usable(results: Mapping[str, Result]) -> dict[str, Result]:
    """Those that may be claimed."""
    return {name: result for name, result in results.items() if not result.refusal()}


def _gains(results: Mapping[str, Result], dtype: str, method: str) -> list[float | None]:
    """Tokens/s of a method over `generate`'s for each of `BATCHES`."""
    parts = [results[name].findings for name in ROLLOUTS[dtype] if name in results]
    found = {(each.what, each.baseline): each.value for each in sum(parts, [])}
    return [found.get((f"{MODEL}, {dtype}, batch {batch}: {method}", GENERATE)) for batch in BATCHES]


def _table(first: str, rows: Sequence[tuple[str, Sequence[float | None]]]) -> str:
    """Rows without a number are left out; a table without rows is empty."""
    lines = [
        f"| {name} | " + " | ".join("–" if value is None else f"{value:.2f}" for value in values) + " |"
        for name, values in rows
        if any(value is not None for value in values)
    ]
    header = [f"| {first} | {' | '.join(map(str, BATCHES))} |", "|---" * (1 + len(BATCHES)) + "|"]
    return "".join(f"{line}\n" for line in header + lines) if lines else ""


def _foot(results: Mapping[str, Result], names: Sequence[str], page: str) -> str:
    """The machines of what is shown, and what is not; `page`: where RESULTS.md is."""
    shown = [name for name in names if name in results]
    machines = {
        f"{machine['cpu']} with {machine['cpu_capability']}, {machine['threads']} threads, {machine['date'][:7]}": None
        for machine in (results[name].machine for name in shown)
    }
    parts = [f"Measured on: {'; '.join(machines)}. Results: {_listed(shown)}."] if shown else []
    if missing := [name for name in names if name not in results]:
        parts.append(f"Not measured as the rules for a claim ask: {_listed(missing)} ([rules]({page}#left-out)).")
    return " ".join(parts) + "\n"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def readme_table(results: Mapping[str, Result]) -> str:
    """The headline, `README_ROWS`, a training, and the machine."""
    results = usable(results)
    rows = [(name, _gains(results, dtype, method)) for name, dtype, method in README_ROWS]
    text = _table("answers at a time", rows)
    if known := [value for value in _gains(results, "float32", PLAIN) if value is not None]:
        text = (
            f"**In float32 the engine alone writes {min(known):.1f} to {max(known):.1f} times as many tokens per "
            f"second as `generate`; drafts come on top for few rows and large weights.**\n\n{text}"
        )
    if TRAINING in results:
        found = {(each.what, each.baseline): each.value for each in results[TRAINING].findings}
        rollout, step = (found[f"{MODEL}, float32: auto, {part}", TRAINER] for part in PARTS)
        text += (
            "\nGRPO on such questions, float32, 8 answers to one in a step, over TRL's `GRPOTrainer`: "
            f"rollouts make {rollout:.2f} times the tokens per second, whole steps {step:.2f} times.\n"
        )
    names = [*sum(ROLLOUTS.values(), ()), TRAINING]
    return text + "\n" * bool(text) + _foot(results, names, "benchmarks/RESULTS.md")


def performance_table(results: Mapping[str, Result]) -> str:
    """A row per dtype and method: tokens/s over `generate`'s at each number of rows."""
    results, rows = usable(results), []
    for dtype, names in ROLLOUTS.items():
        options = [results[name].details["options"]["strategies"] for name in names if name in results]
        for strategy in dict.fromkeys(sum(options, [])):
            rows.append((f'`"{strategy}"`, {dtype}', _gains(results, dtype, f"ours {strategy}")))
    text = _table("rows", rows)
    return text + "\n" * bool(text) + _foot(results, list(sum(ROLLOUTS.values(), ())), "../benchmarks/RESULTS.md")


TABLES = {ROOT / "README.md": readme_table, ROOT / "docs/performance.md": performance_table}


def with_table(text: str, table: str) -> str:
    """The page's text with `table` between its marks; raises ValueError where it has none."""
    before, mark, rest = text.partition(MARK)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"the page has no {MARK.strip()} or no {END} after it: put them around its table")
    return before + mark + "\n" + table + "\n" + end + after


def write_tables(results: Mapping[str, Result]) -> None:
    """Into both pages."""
    for page, make in TABLES.items():
        page.write_text(with_table(page.read_text(encoding="utf-8"), make(results)), encoding="utf-8")
