"""What this checkout takes, against an earlier commit: rollouts, long prompts and one-token calls, in turns.

One process per version holds a model, and only one of them runs at a time. Each visit starts new processes, since two
processes of one version differ by up to 20 % (virtual machine, two cores). Rows have random prompts of one length and
generate a fixed number of tokens, so that both versions do the same work.

    python -m benchmarks.between_commits fb4fef4 --models ../shared/models/SmolLM2-135M-Instruct
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from .calls import ratios, rotated
from .measure import Finding, Options, begin, shown, spread, write_result
from .workload import STORY_MODEL


ROOT = Path(__file__).parents[1]
ONE_TOKEN = "a call for one token"
WARM_UPS = 2  # calls of a cell by each version, of which the first packs, compiles and probes

# Runs in the process of a version: reads one cell a line, answers with seconds and the number of draft tokens. It uses
# public names alone, which both versions have.
WORKER = """
import json, sys, time, warnings, torch, transformers, spec_trl
warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
folder, dtype, threads, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(threads)
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
vocabulary = min(model.config.get_text_config(decoder=True).vocab_size, 512)
print("ready", flush=True)
for line in sys.stdin:
    cell = json.loads(line)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocabulary, (cell["rows"], cell["prompt"]), generator=generator)
    options = {"min_new_tokens": cell["new"], "max_new_tokens": cell["new"], "pad_token_id": 0}
    if cell["strategy"] != "generate":
        config = spec_trl.SpeculativeConfig(draft_length=cell["draft_length"], sd_toggle="always")
        options |= {"assistant_strategy": cell["strategy"], "speculative_config": config}
        options["return_dict_in_generate"] = True
    torch.manual_seed(seed)
    clock = time.process_time if cell["new"] == 1 and cell["prompt"] < 100 else time.perf_counter
    started = clock()
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, **options)
    ended = clock()
    print(ended - started, out.statistics.total.drafted if "assistant_strategy" in options else 0, flush=True)
"""


@contextmanager
def version(
    tree: Path, cache: Path, model: str, dtype: str, options: argparse.Namespace
) -> Iterator[subprocess.Popen[str]]:
    """The process of the version that lies in `tree`, with `model` loaded and what it compiles in `cache`."""
    environment = os.environ | {"PYTHONPATH": str(tree), "SPEC_TRL_CACHE": str(cache)}
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, model, dtype, str(options.threads), str(options.seed)],
        cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        _answer(worker)
        yield worker
    finally:
        worker.kill()
        worker.wait()


def _answer(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise RuntimeError("the process of a version has ended; its error is above")
    return line


def call(worker: subprocess.Popen[str], cell: Mapping[str, Any]) -> tuple[float, int]:
    """Seconds of a call of `cell` in a version's process, and the tokens that it drafted."""
    assert worker.stdin is not None
    worker.stdin.write(json.dumps(cell) + "\n")
    worker.stdin.flush()
    taken, drafted = _answer(worker).split()
    return float(taken), int(drafted)


def cells_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rollouts of every number of rows, then long prompts and a one-token call of `"none"`."""
    shape = {"draft_length": options.draft_length}
    rollouts = [
        {"what": f"{strategy}, {rows} rows", "strategy": strategy, "rows": rows, "prompt": 16, "new": options.tokens}
        for strategy in options.strategies for rows in options.rows
    ]  # fmt: skip
    long = options.prompt_tokens
    prompts = [
        {"what": f"prompts of {long} tokens, {rows} rows", "strategy": "none", "rows": rows, "prompt": long, "new": 1}
        for rows in options.rows[:2]
    ]
    one = [{"what": ONE_TOKEN, "strategy": "none", "rows": 1, "prompt": 16, "new": 1}]
    return [cell | shape for cell in (*rollouts, *prompts, *one)]


def measure(folder: Path, model: str, dtype: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of every cell, by both versions in turns, and the tokens that the last call of each drafted.

    Args:
        folder: With the earlier version's code, and room for what both versions compile.
    """
    found = [
        {"model": Path(model).name, "dtype": dtype, "seconds": {"before": [], "now": []}, "drafted": {}} | cell
        for cell in cells_of(options)
    ]
    trees = {"before": folder, "now": ROOT}
    for visit in range(options.visits):
        with ExitStack() as stack:
            processes = {
                name: stack.enter_context(version(trees[name], folder / name, model, dtype, options))
                for name in rotated(list(trees), visit)
            }
            for cell in found:
                repeats = options.repeats * (10 if cell["what"] == ONE_TOKEN else 1)
                for turn in range(WARM_UPS + repeats):
                    for name in rotated(list(trees), turn):
                        taken, cell["drafted"][name] = call(processes[name], cell)
                        if turn >= WARM_UPS:
                            cell["seconds"][name].append(taken)
                print(findings([cell])[0], flush=True)
    return found


def findings(cells: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Speed of this checkout over the earlier commit's, of neighbouring runs; above 1 is faster."""
    found = []
    for cell in cells:
        gains = ratios(cell["seconds"]["before"], cell["seconds"]["now"])
        drafts = "" if cell["strategy"] in ("generate", "none") or cell["drafted"]["now"] else ", nothing drafted"
        what = f"{cell['model']}, {cell['dtype']}: {cell['what']}{drafts}"
        found.append(Finding(what, median(gains), "×", "before", spread(gains)))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    tiny = f"HEAD --models {STORY_MODEL} --dtypes float32 --strategies none --rows 1 --tokens 2 --repeats 1 --visits 1"
    parser = Options(__doc__, "between_commits", tiny)
    add = parser.add_argument
    add("commit", help="the earlier commit")
    add("--models", nargs="+", required=True, metavar="FOLDER", help="checkpoints of transformers")
    add("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16", "float16", "float64"])
    add("--strategies", nargs="+", default=["none", "self"], help="generate: no spec_trl")
    add("--rows", nargs="+", type=int, default=[1, 4, 16])
    add("--tokens", type=int, default=32, help="that a row generates")
    add("--prompt-tokens", type=int, default=1000, help="of long prompts")
    add("--draft-length", type=int, default=3, help="of strategies that draft")
    add("--repeats", type=int, default=5, help="of a cell by each version in a visit")
    add("--visits", type=int, default=4, help="each with new processes; even, as the one that starts first is faster")
    options = parser.read(arguments, "rows", "tokens", "prompt_tokens", "repeats", "visits")
    machine = begin(options)
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        command = ["git", "-C", str(ROOT), "archive", options.commit, "spec_trl"]
        archive = subprocess.run(command, capture_output=True, check=False)
        if archive.returncode:
            parser.error(f"commit {options.commit}: {archive.stderr.decode().strip()}")
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        for model in options.models:
            for dtype in options.dtypes:
                cells += measure(Path(folder), str(Path(model).absolute()), dtype, options)
    write_result(
        options.output, "rollouts", f"This checkout against {options.commit}",
        f"Random prompts, {options.tokens} tokens a row, T = 1, γ = {options.draft_length} in every round of what "
        f"drafts. Earlier over later seconds of {options.repeats} neighbouring calls in {options.visits} visits, new "
        "processes (processor seconds and ten times as many for one token): median, lowest and highest.",
        machine, options.visits, findings(cells), {"options": shown(options), "cells": cells},
    )  # fmt: skip


if __name__ == "__main__":
    main()
