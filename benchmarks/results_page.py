"""Writes benchmarks/RESULTS.md, one page of what README and docs claim, and the tables of README.md and of
docs/performance.md about a chat model, from the result files; or prints all that a result found.

    python -m benchmarks.results_page           # writes the pages
    python -m benchmarks.results_page NAME ...  # prints these results
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .chat_tables import usable, write_tables
from .gpu.summary import figures, other_cards, read_stages, table
from .measure import FEWEST_REPEATS, RESULTS, Finding, Result, interval_text, number, read_result, text_of


PAGE = Path(__file__).parent / "RESULTS.md"
HEAD = """# Results

Made by `python -m benchmarks.results_page` from [results](results): what README and docs claim. The same with a name
prints a result whole. [docs/performance.md](../docs/performance.md) says what the numbers mean.
Ratios and changes are medians over repeats, with the lowest and the highest or 95 % in brackets.

## Claims

| result | what | value | against |
|---|---|---|---|
"""
ON_A_GPU = """
## On a GPU

Predicted before any GPU ran this code (`results/gpu/predicted.json` says how); measured by
`benchmarks/gpu/quarter.sh`. A factor is measured over predicted, or over the nearer end of a range.

"""
LEFT_OUT = f"""
## Left out

A claim needs a commit, and where a clock decides it {FEWEST_REPEATS} repeats or more and a load at its start that is
not above its threads. Left out are:

"""
COMMANDS = """
## Commands and machines

Each begins with `python -m benchmarks.`. AMD: EPYC, 2 cores; Xeon: Intel, 2 cores; both with their instruction set,
threads, repeats (–: no clock decides), load at the start, commit ("+": files differed from it) and date.

| result | command | machine |
|---|---|---|
"""
CLAIMS = {
    **dict.fromkeys(("rollout_chat", "rollout_chat_many"), r"ours (none|self|auto) / transformers generate$"),
    **dict.fromkeys(("rollout_chat_bfloat16", "rollout_chat_bfloat16_many"), r"ours (none|auto) / transformers gen"),
    **dict.fromkeys(("end_to_end_chat", "end_to_end_chat_bfloat16"), "auto, (rollout tokens|tokens/s of a whole)"),
    "fresh_machine": "call: (auto|none) / generate",
    "rollout_batch1": "none / transformers assisted",
    "rollout_qwen_fp32": "self / ours none",
    "control_machine_stories": r"(batch \d+|first call) / none",
    "control_constants": "as it is",
    "control_regret": "mean over worlds|worst eight",
    "identity_grid_bits": "rows",
    "sampler_mismatch": ": TRL's",
    "exact_logprobs": "forward with|both with|sampler, exact_logprobs",
    "between_commits": r"SmolLM2-135M-Instruct, bfloat16: none, \d+ rows",
    "rivals": r"(none|auto), \d+ rows / the better",
    "rivals_half_billion": r"(float32: none, 16?|bfloat16: none, \d+) rows / ",
    "rivals_half_billion_again": r": none, 4 rows / ",
    "rivals_long": r"(none|auto), \d+ rows / the better",
    **dict.fromkeys(("cpu_attention", "dense_linear", "registers"), ""),
    "kv_memory": "K/V",
    "specactor": "SpecActor over veRL;",
}
"""By result: the findings that are claimed, as "what / baseline". All results are here, and those to be measured."""
_PARTS = re.compile(
    r"^(?:float32 weights, autocast|float32|bfloat16)(?=: (?:seconds|largest))|(?<=, )\d+ rows\b|"
    r"batch \d+|\d+ layers|rows: \d+|\d+ tokens over \d+ columns|(?:all rows|rows are) [a-z ]+|(?<=sampler, )[^:]+|"
    r"(?:first|second)(?= call: auto)|(?<=[ \"])(?:self|model|ngram|history)(?=[:\"]| is)|(?<=noise )[^:,]+|"
    r"^(?:Qwen3\.5|Falcon-H1|LFM2)|^\d+\.\d(?=: most)"
)
"""What sets the findings of one row apart."""


def read_results(folder: Path = RESULTS) -> dict[str, Result]:
    """All results of a folder by name."""
    return {path.stem: read_result(path) for path in sorted(folder.glob("*.json"))}


def rows(name: str, result: Result) -> Iterator[str]:
    """A result's claims; those that differ in a number alone, such as the batch, share a row."""
    chosen = [each for each in result.findings if re.search(CLAIMS[name], f"{each.what} / {each.baseline}")]
    groups: dict[tuple[str, str], list[Finding]] = {}
    for each in chosen:
        groups.setdefault((_PARTS.sub("…", each.what), each.baseline), []).append(each)
    for (_, baseline), same in groups.items():
        what = same[0].what if len(same) == 1 else f"{same[0].what}; then {', '.join(map(_part, same[1:]))}"
        yield f"| `{name}` | {what} | {' · '.join(map(_value, same))} | {baseline} |"


def _part(finding: Finding) -> str:
    """What sets it apart from the others of its row."""
    return " ".join(found[0] for found in _PARTS.finditer(finding.what))


def _value(finding: Finding) -> str:
    interval = interval_text(finding).replace("×", "")
    return number(finding.value, finding.unit) + f" ({interval})" * bool(interval)


def command_row(name: str, result: Result) -> str:
    """How it was made."""
    machine = result.machine
    processor = "AMD" if "AMD" in machine["cpu"] else "Xeon"
    command = result.command.removeprefix("python -m benchmarks.").replace("|", r"\|")
    facts = [
        f"{processor} {machine.get('cpu_capability', '')}".strip(), f"threads {machine['threads']}",
        f"repeats {result.repeats or '–'}", f"load {machine['load_average_1min']:.2f}", str(result.commit),
        str(machine["date"])[:10],
    ]  # fmt: skip
    return f"| `{name}` | `{command}` | {', '.join(facts)} |"


def page(results: Mapping[str, Result]) -> str:
    """The page's text."""
    claimed = usable(results)
    lines = [line for name in CLAIMS if name in claimed for line in rows(name, claimed[name])]
    reasons = {name: results[name].refusal() if name in results else "not measured" for name in CLAIMS}
    left_out = [f"* `{name}`: {why}" for name, why in reasons.items() if why] or ["* nothing"]
    commands = [command_row(name, results[name]) for name in CLAIMS if name in results]
    stages = read_stages()
    predicted = [figure for figure in figures(stages) if figure.predicted is not None]
    gpu = other_cards(stages) + table(predicted)
    parts = (HEAD + "\n".join(lines), ON_A_GPU + gpu, LEFT_OUT + "\n".join(left_out), COMMANDS + "\n".join(commands))
    return "\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    names, results = sys.argv[1:] if arguments is None else arguments, read_results()
    if unknown := [name for name in names if name not in results]:
        raise SystemExit(f"{', '.join(unknown)}: no such result; choose among {', '.join(results)}")
    if names:
        print("\n\n\n".join(text_of(results[name]) for name in names))
        return
    PAGE.write_text(page(results), encoding="utf-8")
    write_tables(results)
    print(f"written: {PAGE}, and the tables about a chat model in README.md and performance.md")


if __name__ == "__main__":
    main()
