"""The tables of the README and of docs/performance.md about a real chat model, made of the result files.

Each stands between two marks of its page. `python -m benchmarks.results_page` writes them.
"""

from collections.abc import Mapping
from pathlib import Path

from .measure import Result
from .rollout import CONTINUOUS, GENERATE, PLAIN


ROOT = Path(__file__).parents[1]
MARK, END = "<!-- made by benchmarks.results_page -->\n", "<!-- end -->"
MODEL = "SmolLM2-135M-Instruct"
FLOAT32, BFLOAT16, LONG = "rollout_chat", "rollout_chat_bfloat16", "rollout_chat_256"
DTYPES = {FLOAT32: "float32", BFLOAT16: "bfloat16", LONG: "float32"}




def _rollouts(result: str, method: str, baseline: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"{MODEL}, {DTYPES[result]}, batch {batch}: {method}", baseline) for batch in (1, 4, 8, 16))


_ROWS = "1 / 4 / 8 / 16 answers at a time"
_TRAINED, _TRAINER = f"{MODEL}, float32: auto", "trl.GRPOTrainer (transformers generate)"
README_ROWS: tuple[tuple[str, str, str, tuple[tuple[str, str], ...]], ...] = (
    (f'a chat model answers maths questions, float32, `"auto"` with its defaults, {_ROWS}', FLOAT32, "`generate`",
     _rollouts(FLOAT32, "ours auto", GENERATE)),
    (f'the same, `"self"`: the model\'s 8-bit copy drafts three tokens in each round, {_ROWS}', FLOAT32, "`generate`",
     _rollouts(FLOAT32, "ours self", GENERATE)),
    (f'the same, `"none"`: our engine without drafts, {_ROWS}', FLOAT32, "`generate`",
     _rollouts(FLOAT32, PLAIN, GENERATE)),
    (f'the same, `"none"`, {_ROWS}', FLOAT32, "`generate_batch`", _rollouts(FLOAT32, PLAIN, CONTINUOUS)),
    (f'the same in bfloat16 and up to 64 tokens, `"auto"`, {_ROWS}', BFLOAT16, "`generate`",
     _rollouts(BFLOAT16, "ours auto", GENERATE)),
    ('GRPO on such questions, float32, 8 answers to one question in a step, `"auto"`: writing them / a whole step',
     "end_to_end_chat", "TRL's `GRPOTrainer`",
     tuple((f"{_TRAINED}, {part}", _TRAINER) for part in ("rollout tokens/s", "tokens/s of a whole step"))),
    ('the model repeats a sentence of its prompt, greedily, one thread, `"auto"`, empty cache: first / second call',
     "fresh_machine", '`"none"`', (("first call: auto", "none"), ("second call: auto", "none"))),
)  # fmt: skip
"""The README's table: a sentence that a user understands, the result, the baseline for the reader, and what and
baseline of each finding in the order of the sentence."""


def readme_table(results: Mapping[str, Result]) -> str:
    """Of `README_ROWS`; raises KeyError where a result or a finding is missing."""
    lines = ["| what | result | baseline | factor |", "|---|---|---|---|"]
    for sentence, result, baseline, names in README_ROWS:
        found = {(each.what, each.baseline): each.value for each in results[result].findings}
        factors = " / ".join(f"{found[name]:.2f}" for name in names)
        lines.append(f"| {sentence} | `{result}` | {baseline} | {factors} |")
    return "\n".join(lines) + "\n"


def performance_table(results: Mapping[str, Result]) -> str:
    """A row per result: tokens/s of each method over `generate`'s at each number of rows; raises KeyError where a
    result is missing."""
    lines: list[str] = []
    for name in DTYPES:
        batches = results[name].details["batches"]
        methods = [each["method"] for each in next(iter(batches.values())) if each["method"].startswith("ours")]
        if not lines:
            named = [f'`"{method.removeprefix("ours ")}"`' for method in methods]
            lines = [f"| result | rows | {' | '.join(named)} |", "|---" * (len(named) + 2) + "|"]
        gains = [
            ", ".join(
                f"{each['ratio_to'][GENERATE]:.2f}"
                for found in batches.values()
                for each in found
                if each["method"] == method
            )
            for method in methods
        ]
        lines.append(f"| `{name}` | {', '.join(batches)} | {' | '.join(gains)} |")
    return "\n".join(lines) + "\n"


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
