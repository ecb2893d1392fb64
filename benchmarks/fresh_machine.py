"""A fresh machine: the first two calls in a new process with an empty cache, compiling included.

The prompt repeats a sentence, so text is there to be copied. Processes of `generate`, `"none"` and `"auto"` take
turns, each with an empty `SPEC_TRL_CACHE` and `XDG_CACHE_HOME`; ratios are of the medians of their calls' seconds.

    python -m benchmarks.fresh_machine --model path/to/SmolLM2-135M-Instruct
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import spec_trl  # noqa: F401  (teaches `generate` the keyword)

from .calls import ratios
from .measure import Finding, Options, begin, shown, spread, stopwatch, write_result
from .models import load_model, weights_line
from .workload import STORY_MODEL


SENTENCE = "The quick brown fox jumps over the lazy dog near the quiet river bank. "
GENERATE = "generate"
WAYS = (GENERATE, "none", "auto")


def calls(options: argparse.Namespace, strategy: str) -> list[dict[str, Any]]:
    """Two calls in this process: seconds, rounds, rounds that drafted, tokens, and the reason. The text may not end
    before it has been copied."""
    loaded = load_model(str(options.model), torch.float32, options.device)
    assert loaded.tokenizer is not None
    model, inputs = loaded.model, loaded.tokenizer(SENTENCE * 4, return_tensors="pt").to(options.device)
    ours: dict[str, Any] = {} if strategy == GENERATE else {"assistant_strategy": strategy}
    found = []
    for _ in range(2):
        with stopwatch(model.device) as watch:
            out = model.generate(
                **inputs, do_sample=False, max_new_tokens=options.new_tokens, min_new_tokens=options.new_tokens,
                return_dict_in_generate=True, **ours,
            )  # fmt: skip
        facts: dict[str, Any] = {"seconds": watch.value, "tokens": out.sequences[0].tolist()}
        if ours:
            said = out.statistics
            facts |= {"rounds": said.rounds, "drafted": said.drafted_rounds, "reason": said.reason}
            facts["phases"] = said.phase_seconds
        found.append(facts)
    return found


def fresh(options: argparse.Namespace, strategy: str) -> list[dict[str, Any]]:
    """The same in a new process with an empty cache."""
    command = [sys.executable, "-m", "benchmarks.fresh_machine", "--model", str(options.model), "--child", strategy]
    command += ["--new-tokens", str(options.new_tokens), "--threads", str(options.threads), "--device", options.device]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"SPEC_TRL_CACHE": f"{folder}/own", "XDG_CACHE_HOME": f"{folder}/user"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Options(__doc__, "fresh_machine", f"--model {STORY_MODEL} --repeats 1 --new-tokens 8")
    parser.add_argument("--model", type=Path, required=True, help="folder of a model with its tokenizer")
    parser.add_argument("--new-tokens", type=int, default=120, help="of each call")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each strategy")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.read(arguments, "new_tokens", "repeats")
    machine = begin(options)
    if options.child:
        print(json.dumps(calls(options, options.child)))
        return
    runs: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in WAYS}
    for _ in tqdm(range(options.repeats), "repeats"):
        for name in WAYS:
            runs[name].append((calls if options.tiny else fresh)(options, name))  # tiny: in this process, as it is
    if len({str(call.pop("tokens")) for own in runs.values() for run in own for call in run}) > 1:
        raise SystemExit("two ways decoded different tokens")
    found = []
    for which, name in enumerate(("first", "second")):
        seconds = {way: [run[which]["seconds"] for run in runs[way]] for way in WAYS}
        for way, base in (("none", GENERATE), ("auto", GENERATE), ("auto", "none")):
            gain = statistics.median(seconds[base]) / statistics.median(seconds[way])
            found.append(Finding(f"{name} call: {way}", gain, "×", base, spread(ratios(seconds[base], seconds[way]))))
        for way, own in seconds.items():
            found.append(Finding(f"{name} call: seconds of {way}", statistics.median(own), "s", "", spread(own)))
        share = [run[which]["drafted"] / run[which]["rounds"] for run in runs["auto"]]
        what = f"{name} call: rounds of auto that drafted"
        found.append(Finding(what, statistics.median(share), "%", "", spread(share)))
    write_result(
        options.output, "never_slower", "A fresh machine",
        f"{options.model.name}, float32, a prompt that repeats a sentence four times, {options.new_tokens} greedy "
        "tokens, of which none may be the last before that; each process is new and its cache empty, so its first "
        "call compiles. The second call repeats the first, whose text the history remembers. Medians, lowest and "
        f"highest of {options.repeats} processes of each in turns."
        + weights_line(load_model(str(options.model), torch.float32, "cpu").facts),
        machine, options.repeats, found, {"options": shown(options, "child"), "runs": runs},
    )  # fmt: skip


if __name__ == "__main__":
    main()
