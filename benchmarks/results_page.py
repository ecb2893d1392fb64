"""Writes benchmarks/RESULTS.md, one page of what README and docs claim, and the tables of README.md and of
docs/performance.md about a chat model, from the result files; or prints all that a result found.

    python -m benchmarks.results_page           # writes the pages
    python -m benchmarks.results_page NAME ...  # prints these results
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .chat_tables import write_tables
from .measure import RESULTS, Finding, Result, interval_text, number, read_result, text_of


PAGE = Path(__file__).parent / "RESULTS.md"
HEAD = """# Results

Made by `python -m benchmarks.results_page` from the files in [results](results): what README and docs claim, and the
command of each. `python -m benchmarks.results_page NAME` prints setup, machine and every number of a result. No GPU
has run any of this. [docs/performance.md](../docs/performance.md) says what the numbers mean.

Ratios and changes are medians over repeats, with the lowest and the highest or 95 % in brackets.

## Claims

| result | what | value | against |
|---|---|---|---|
"""
COMMANDS = """
## Commands and machines

Each begins with `python -m benchmarks.`. AMD: EPYC, 2 cores; Xeon: Intel with AMX, 2 cores; both with their threads.

| result | command | machine |
|---|---|---|
"""
CLAIMS = {
    "rollout_chat": r"ours (none|self|auto) / transformers generate$|none / transformers generate_batch",
    "rollout_chat_bfloat16": r"ours auto / transformers generate$",
    "rollout_chat_256": r"ours (self|auto) / transformers generate$",
    "end_to_end_chat": "auto, (rollout tokens|tokens/s of a whole)",
    "fresh_machine": "auto / none",
    **dict.fromkeys(("rollout_none", "rollout_continuous_450"), ""),
    "rollout_batch1": "none / |model / transformers assisted",
    **dict.fromkeys(("rollout_qwen_093", "rollout_qwen_085"), "self / ours none"),
    "rollout_qwen_fp32": "self / ours none|none / transformers generate$",
    "control_machine": r"batch \d+ / ",
    "control_machine_stories": r"(batch \d+|first call) / none",
    "control_machine_260k": r"batch \d+ / none",
    "control_machine_05b": r"(batch \d+|first call) / none",
    "control_regret": "mean over worlds|worst eight",
    "control_regret_probes": "(probe right|verify x3): time",
    **dict.fromkeys(("identity_grid", "identity_grid_bits"), "rows"),
    "identity_stories": "float32.*(other mismatches|exact verification)",
    "sampler_mismatch": ": TRL's",
    "exact_logprobs": "forward with|both with|sampler, exact_logprobs",
    "between_commits": "rows",
    "end_to_end": "(ours|lossless), rollout tokens|(lossless|γ.), time of a rollout|always on, γ = [57].*block eff",
    "end_to_end_learned": "block efficiency|time of a rollout",
    **dict.fromkeys(("cpu_attention", "dense_linear", "states"), ""),
    "kv_memory": "K/V",
    "specactor": "SpecActor over veRL;",
    **dict.fromkeys(("tts_drafters", "tts_drafters_self"), "TTS, acceptance length /"),
    "tts_defaults_run_eagle3_b1": "together|last",
    **dict.fromkeys(("tts_defaults_run_b1", "tts_defaults_run_b8"), "together"),
    "tts_run": "acceptance",
    "tts_run_S5": "",
    **dict.fromkeys(("tts_strides", "tts_strides_dflash"), "S=1, |S=(5|10), tokens"),
    **dict.fromkeys(("tts_rates", "tts_rates_eagle3"), "acceptance"),
    "tts_batch": "EAGLE-3.*acceptance",
}
"""By result: the findings that are claimed, as "what / baseline". All results are here."""
_PARTS = re.compile(
    r"^(?:float32 weights, autocast|float32|bfloat16)(?=: (?:seconds|largest))|(?<=, )\d+ rows\b|"
    r"batch \d+|\d+ layers|rows: \d+|\d+ tokens over \d+ columns|(?:all rows|rows are) [a-z ]+|(?<=sampler, )[^:]+|"
    r"(?:first|second)(?= call: auto)|(?<=[ \"])(?:self|model|ngram|history)(?=[:\"]| is)|(?<=noise )[^:,]+|"
    r"(?<=probe )[^:]+|"
    r"^(?:Qwen3\.5|Falcon-H1|LFM2)|"
    r"^(?:EAGLE-3|DFlash|small LM|adapter on the self-drafter)|T = \d|\d+ updates in \d+ calls|last \d+[a-z0-9 ]*|"
    r"(?:S|K|η)=[\d.e-]+(?: async)?|λ=[\d.]+|TTS, per (?:request|rollout)|γ = \d(?: = γ\*)?|"
    r"(?<=learned auxiliary, )(?:as it came|adapted[a-z -]*|learning[a-zA-Z ()]*)"
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
    return f"| `{name}` | `{command}` | {processor}, {machine['threads']}, {str(machine['date'])[:10]} |"


def page(results: Mapping[str, Result]) -> str:
    """The page's text."""
    lines = [line for name in CLAIMS for line in rows(name, results[name])]
    commands = [command_row(name, results[name]) for name in CLAIMS]
    return HEAD + "\n".join(lines) + "\n" + COMMANDS + "\n".join(commands) + "\n"


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
