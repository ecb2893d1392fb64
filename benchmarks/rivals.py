"""Tokens per second of what generates on a CPU: transformers, spec_trl, llama.cpp and OpenVINO GenAI, in turns.

One process per way holds the model, and only one of them runs at a time. Every way gets the same token ids and samples
at temperature 1 from the whole vocabulary until each row has its tokens, whatever ends a text. llama.cpp and OpenVINO
have weights of the dtype, converted by their own tools, and what was fastest of their settings: K and V in float16,
which is their default in both dtypes; llama.cpp a cache of its own for each sequence, which from 16 rows on beats one
for all, and its own sampler; OpenVINO continuous batching, which from 16 rows on beats the batch of a stateful
`LLMPipeline`, with large batches of prompts and without the prefixes of earlier calls.

They need an environment of their own, as their tools want an older transformers; the converter of llama.cpp lies in
the source of its package alone. The build takes some minutes:

    python -m venv ../rivals
    ../rivals/bin/pip download --no-deps --no-binary llama-cpp-python --dest ../rivals llama-cpp-python
    CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" ../rivals/bin/pip install \\
        ../rivals/llama_cpp_python-*.tar.gz openvino-genai optimum-intel sentencepiece
    python -m benchmarks.rivals --environment ../rivals --model ../shared/models/SmolLM2-135M-Instruct \\
        --prompts ../shared/data/gsm8k/test.jsonl
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from transformers import AutoTokenizer

from spec_trl.cli.loading import read_prompts, token_ids

from .calls import ratios, rotated
from .measure import Finding, Options, begin, shown, spread, write_result
from .rival_workers import LLAMA_WORKER, OPENVINO_WORKER, SERVE, TORCH_WORKER
from .workload import LONGEST_QUESTION, STORIES, STORY_MODEL, common_prefix


ROOT = Path(__file__).parents[1]
GENERATE, LLAMA, OPENVINO = "generate", "llama.cpp", "OpenVINO"
OURS, RIVALS = ("none", "self", "auto"), (LLAMA, OPENVINO)
WAYS = (GENERATE, *OURS, *RIVALS)
PACKAGES = ("llama-cpp-python", "openvino-genai", "openvino", "optimum-intel", "transformers", "torch")
WARM_UPS = 2  # calls of each way, of which the first packs, compiles and probes
GREEDY = 16  # tokens that show whether a way has the same model


def convert(way: str, dtype: str, model: Path, options: argparse.Namespace) -> Path:
    """The model as `way` reads it, converted by the rival's own tool unless an earlier run has."""
    if way not in RIVALS:
        return model
    path = options.converted / f"{model.name}-{dtype}{'.gguf' if way == LLAMA else '-openvino'}"
    if path.exists():
        return path
    print(f"converting {model.name} in {dtype} for {way}", flush=True)
    options.converted.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.converted) as folder:
        made = Path(folder) / path.name
        if way == LLAMA:
            source = next(options.environment.glob("llama_cpp_python-*.tar.gz"), None)
            if source is None:
                raise SystemExit(f"--environment {options.environment}: no source of llama-cpp-python; see --help")
            with tarfile.open(source) as archive:
                archive.extractall(folder, filter="data")
            (tool,) = Path(folder).glob("*/vendor/llama.cpp/convert_hf_to_gguf.py")
            kind = {"float32": "f32", "bfloat16": "bf16"}[dtype]
            command = [_python(options), str(tool), str(model), "--outtype", kind, "--outfile", str(made)]
        else:
            # The tool has no name for bfloat16, but keeps a checkpoint's; of float32 the runtime makes it.
            weights = ["--weight-format", "fp32"] if dtype == "float32" else []
            tool = options.environment / "bin/optimum-cli"
            task = ["export", "openvino", "--task", "text-generation-with-past"]
            command = [str(tool), *task, "--model", str(model), *weights, str(made)]
        ran = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
        if ran.returncode:
            raise SystemExit(f"{ran.stderr}\nthe converter of {way} failed; its error is above")
        made.rename(path)
    return path


def _python(options: argparse.Namespace) -> str:
    return str(options.environment / "bin/python")


def _environment() -> dict[str, str]:
    """Of the rivals' processes, which do not see this checkout and ask no hub."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}


@contextmanager
def worker(way: str, model: Path, dtype: str, options: argparse.Namespace) -> Iterator[subprocess.Popen[str]]:
    """The process of `way` with `model` loaded."""
    python, script, environment = sys.executable, TORCH_WORKER, dict(os.environ)
    if way in RIVALS:
        python, environment = _python(options), _environment()
        script = LLAMA_WORKER if way == LLAMA else OPENVINO_WORKER
    with tempfile.TemporaryDirectory() as cache:  # nothing of an earlier run is read
        process = subprocess.Popen(
            [python, "-c", SERVE + script, way, str(model), dtype, str(options.threads)], cwd=ROOT,
            env=environment | {"SPEC_TRL_CACHE": cache}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            _answer(process, way)
            yield process
        finally:
            process.kill()
            process.wait()


def _answer(process: subprocess.Popen[str], way: str) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the process of {way} has ended; its error is above")
    return line


def call(process: subprocess.Popen[str], way: str, work: Mapping[str, Any]) -> tuple[float, list[list[int]], float]:
    """Seconds of one call, the new tokens of each row, and the most MiB that the process has had.

    Raises:
        RuntimeError: the process has ended, or a row has not the number of tokens that was asked for.
    """
    assert process.stdin is not None
    process.stdin.write(json.dumps(work) + "\n")
    process.stdin.flush()
    seconds, rows, peak = json.loads(_answer(process, way))
    if [len(row) for row in rows] != [work["new"]] * len(work["prompts"]):
        raise RuntimeError(f"{way}: rows of {[len(row) for row in rows]} tokens, not of {work['new']}")
    return seconds, rows, peak


def measure(prompts: Sequence[list[int]], dtype: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of every way for each number of rows, and how many greedy tokens it has in common with the first way.

    Each turn goes on with the next prompts, so that no way has seen them.
    """
    model, found = options.model.absolute(), []
    with ExitStack() as stack:
        files = {way: convert(way, dtype, model, options) for way in options.ways}
        processes = {way: stack.enter_context(worker(way, files[way], dtype, options)) for way in options.ways}
        longest = max(map(len, prompts))
        fixed = {"longest": longest, "new": GREEDY, "seed": options.seed, "greedy": True, "prompts": prompts[:1]}
        texts = {way: call(process, way, fixed)[1][0] for way, process in processes.items()}
        same = {way: common_prefix(text, texts[options.ways[0]]) for way, text in texts.items()}
        print(f"{dtype}: greedy tokens of {GREEDY} that agree with {options.ways[0]}: {same}", flush=True)
        for rows in options.rows:
            cell: dict[str, Any] = {"model": model.name, "dtype": dtype, "rows": rows, "greedy": same}
            cell |= {"tokens": rows * options.tokens, "seconds": {way: [] for way in options.ways}, "MiB": {}}
            for turn in range(WARM_UPS + options.visits):
                chosen = [prompts[(turn * rows + row) % len(prompts)] for row in range(rows)]
                work = fixed | {"prompts": chosen, "new": options.tokens, "seed": turn + 1, "greedy": False}
                for way in rotated(options.ways, turn):
                    seconds, _, cell["MiB"][way] = call(processes[way], way, work)
                    if turn >= WARM_UPS:
                        cell["seconds"][way].append(seconds)
            found.append(cell)
            print(*findings([cell]), sep="\n", flush=True)
    return found


def findings(cells: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Tokens per second of every way; those of ours also over `generate`'s and over the better rival's."""
    found = []
    for cell in cells:
        seconds = cell["seconds"]
        rivals = [way for way in RIVALS if way in seconds]
        bases = {GENERATE: GENERATE} if GENERATE in seconds else {}
        if rivals:
            name = rivals[0] if len(rivals) == 1 else f"the better of {' and '.join(rivals)}"
            bases[name] = min(rivals, key=lambda way: median(seconds[way]))
        for way, own in seconds.items():
            what = f"{cell['model']}, {cell['dtype']}: {way}, {cell['rows']} rows"
            speeds = [cell["tokens"] / each for each in own]
            found.append(Finding(what, median(speeds), "tokens/s", "", spread(speeds)))
            for name, base in bases.items() if way in OURS else ():
                gains = ratios(seconds[base], own)
                found.append(Finding(what, median(gains), "×", name, spread(gains)))
        is_last = cell["rows"] == max(each["rows"] for each in cells if each["dtype"] == cell["dtype"])
        for way in OURS if GENERATE in seconds and is_last else ():
            if way in seconds:
                what = f"{cell['model']}, {cell['dtype']}: peak memory, {way}, up to {cell['rows']} rows"
                found.append(Finding(what, cell["MiB"][way] / cell["MiB"][GENERATE], "×", GENERATE))
    return found


def versions(options: argparse.Namespace) -> dict[str, str]:
    """Of the rivals' packages."""
    code = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
    command = [_python(options), "-c", code, *PACKAGES]
    printed = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=True).stdout
    return dict(zip(PACKAGES, printed.split(), strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    tiny = f"--model {STORY_MODEL} --dtypes float32 --rows 1 --tokens 2 --visits 1 --ways generate none"
    parser = Options(__doc__, "rivals", tiny)
    parser.set_defaults(device="cpu")
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="FOLDER", help="checkpoint of transformers")
    add("--environment", type=Path, metavar="FOLDER", help="of the rivals' packages, which `--ways` may leave out")
    add("--converted", type=Path, metavar="FOLDER", help="keeps what was converted; else in the environment")
    add("--prompts", type=Path, default=STORIES, metavar="FILE", help="first turns of chats, as of `spec-trl bench`")
    add("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    add("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    add("--rows", nargs="+", type=int, default=[1, 4, 16, 64])
    add("--tokens", type=int, default=96, help="that a row generates")
    add("--visits", type=int, default=3, help="timed calls of each way, in turns")
    options = parser.read(arguments, "rows", "tokens", "visits")
    others = bool(set(RIVALS) & set(options.ways))
    if others and not (options.environment and Path(_python(options)).exists()):
        parser.error(f"--environment {options.environment}: no environment with {' and '.join(RIVALS)}; see above")
    if others:
        options.environment = options.environment.absolute()
        options.converted = (options.converted or options.environment / "converted").absolute()
    machine = begin(options)
    texts = read_prompts(options.prompts)[: max(options.rows) * (WARM_UPS + options.visits)]
    prompts = token_ids(texts, AutoTokenizer.from_pretrained(options.model), LONGEST_QUESTION)
    cells = [cell for dtype in options.dtypes for cell in measure(prompts, dtype, options)]
    packages = versions(options) if others else {}
    write_result(
        options.output, "rollouts", "What a CPU's user may choose",
        f"{options.tokens} tokens a row at T = 1 without top-k and top-p; self drafts 3 tokens in every round. "
        f"Medians of {options.visits} calls in turns after {WARM_UPS}, lowest and highest; each turn has the next "
        f"prompts of {options.prompts.name}. {', '.join(f'{name} {own}' for name, own in packages.items())}".strip(),
        machine, options.visits, findings(cells), {"options": shown(options), "packages": packages, "cells": cells},
    )  # fmt: skip


if __name__ == "__main__":
    main()
