"""Certifies a model on this machine: `spec-trl certify MODEL` samples the same texts in many situations and compares
the bits of their log-probabilities, for our engine and for plain transformers."""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..hardware import instruction_set, kernel_switches, processor_name
from ..json_files import write_json
from .arguments import table
from .loading import PROMPTS, find_device, load_config, load_model, load_tokenizer, pad_left, random_ids, token_ids
from .plain_bits import first_that_differs, forced_logprobs


ROWS = 2 * len(PROMPTS)
"""Rows of the text that is compared: each prompt twice, with noise of its own."""
FEW = 4  # of them, where one is computed after the other
LONGEST = 48  # tokens of a prompt
SMALLER = {
    "AVX2": ("avx2", "AVX512"),
    "AVX512_CORE": ("avx512", "avx512_bf16"),
    "AVX512_CORE_BF16": ("avx512", "amx_bf16"),
}
"""What ONEDNN_MAX_CPU_ISA, which our C++ obeys too, bounds a CPU to; torch's name for its own kernels then, and what
:func:`instruction_set` has of a CPU with more."""


@dataclass
class Text:
    """New tokens of a row, and their log-probabilities in nats."""

    tokens: list[int]
    logprobs: Tensor  # [new] float32


@dataclass
class Line:
    """A line of the certificate: tokens that a situation computed with the bits of the reference, of how many."""

    situation: str
    equal: int = 0
    tokens: int = 0
    worst: float = 0.0  # difference of log-probabilities in nats, before a row's first other token
    drafted: int = 0
    note: str = ""


@dataclass
class Situation:
    """How the rows are computed once more: in calls of the rows in `calls`, under a strategy and its options."""

    name: str
    calls: list[list[int]]
    strategy: str = "none"
    options: dict[str, Any] = field(default_factory=dict)
    threads: int | None = None


def situations(short: bool) -> Iterator[Situation]:
    """`short`: the fewest that tell whether an instruction set is exact."""
    every = list(range(ROWS))
    always = {"sd_toggle": "always"}
    yield Situation("rows alone", [[row] for row in range(FEW)])
    yield Situation('"self", 5 tokens verified at once', [every], "self", always | {"draft_length": 4})
    if short:
        return
    for size in (2, 5):
        yield Situation(f"batches of {size}", [every[i : i + size] for i in range(0, 2 * size, size)])
    yield Situation("the other order", [every[::-1]])
    yield Situation("5 rows in flight, others wait", [every], options={"max_batch_size": 5})
    for gamma in (1, 13):
        options = always | {"draft_length": gamma}
        yield Situation(f'"self", {gamma + 1} tokens verified at once', [every], "self", options)
    yield Situation('"ngram", 1 to 9 tokens', [every], "ngram", always | {"draft_length": 8})
    yield Situation('"history", 1 to 9 tokens', [every], "history", always | {"draft_length": 8})
    racers = {"specactor": {"drafters": ["self", "ngram"]}, "draft_length": 3}
    yield Situation('"best_of_n", two drafts of a row', [every], "best_of_n", always | racers)
    yield Situation('"auto"', [every], "auto")
    for threads in (1, 2, 4):
        yield Situation(f"{threads} thread{'s' * (threads > 1)}", [every], threads=threads)


def run(arguments: argparse.Namespace) -> None:
    """Prints the certificate and writes it as JSON.

    Raises:
        ValueError: bad arguments, or a model that cannot be loaded.
    """
    folder = arguments.output.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"--output {arguments.output}: there is no folder {folder}; make it first")
    device, config = find_device(arguments.device), load_config(arguments.model)
    tokenizer = load_tokenizer(arguments.model)
    prompts = random_ids(len(PROMPTS), LONGEST // 2, config.get_text_config().vocab_size, seed=0)
    if tokenizer is not None:
        prompts = token_ids(PROMPTS, tokenizer, LONGEST)
    certificate: dict[str, Any] = {"model": arguments.model, "machine": _machine(device), "dtypes": {}}
    for dtype in arguments.dtype:
        model = load_model(arguments.model, dtype, device)
        found = certificate["dtypes"][dtype] = certify(model, 2 * prompts, arguments.length, arguments.short)
        del model
        if not arguments.short:
            found["instructions"] = _with_fewer_instructions(arguments, dtype) if device.type == "cpu" else {}
            print(_page(dtype, found), flush=True)
    write_json(arguments.output, certificate)
    if not arguments.short:
        print(", ".join(filter(None, certificate["machine"].values())), f"written: {arguments.output}", sep="\n")


def certify(model: PreTrainedModel, prompts: list[list[int]], length: int, short: bool) -> dict[str, Any]:
    """Compares `length` sampled tokens of each prompt in all situations, or in the fewest that tell.

    Returns:
        `exact`: what the engine says of the model, or why it does not serve it; `hash` of tokens and bits; `lines`.
    """
    lines: list[Line] = []
    texts, digest = [], None
    try:
        reference, exact, _ = _sample(model, prompts, Situation("", [list(range(ROWS))]), length)
    except ValueError as error:
        exact = f"not served: {error}"
        for prompt in prompts[:FEW]:
            ids = torch.tensor([prompt], device=model.device)
            torch.manual_seed(0)
            texts.append(model.generate(ids, **_sampling(length))[0, len(prompt) :].tolist())
    else:
        digest, texts = _hash(reference), [reference[row].tokens for row in range(FEW)]
        for situation in situations(short):
            line = Line(situation.name)
            try:
                found, _, line.drafted = _sample(model, prompts, situation, length)
                _compare(line, found, reference)
            except ValueError as error:  # a strategy that does not serve the model
                line.note = str(error)
            lines.append(line)
    if not short:
        lines += _plain(model, prompts[:FEW], texts)
    return {"exact": exact, "hash": digest, "lines": list(map(asdict, lines))}


def _sample(
    model: PreTrainedModel, prompts: list[list[int]], how: Situation, length: int
) -> tuple[dict[int, Text], Any, int]:
    """Rows that are computed; the engine's verdict; the number of draft tokens."""
    rows: dict[int, Text] = {}
    exact, drafted, threads = None, 0, torch.get_num_threads()
    torch.set_num_threads(how.threads or threads)
    try:
        for ids in how.calls:
            inputs = pad_left([prompts[row] for row in ids], model.device)
            out: Any = model.generate(
                **inputs, assistant_strategy=how.strategy, request_ids=ids, return_dict_in_generate=True,
                speculative_config={"seed": 0} | how.options, **_sampling(length),
            )  # fmt: skip
            exact, width = out.statistics.exact, inputs["input_ids"].shape[1]
            drafted += out.statistics.total.drafted
            for row, tokens, logprobs in zip(ids, out.sequences[:, width:].tolist(), out.logprobs.cpu(), strict=True):
                rows[row] = Text(tokens, logprobs)
    finally:
        torch.set_num_threads(threads)
    return rows, exact, drafted


def _sampling(length: int) -> dict[str, Any]:
    """From the whole vocabulary at temperature 1, whatever the model's own settings are."""
    lengths = {"max_new_tokens": length, "min_new_tokens": length, "pad_token_id": 0}
    return lengths | {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


def _plain(model: PreTrainedModel, prompts: list[list[int]], texts: list[list[int]]) -> Iterator[Line]:
    """The same of transformers' own forward, given the first texts: what a user has without spec_trl."""
    alone = [forced_logprobs(model, [prompt], [text], 1) for prompt, text in zip(prompts, texts, strict=True)]
    reference = dict(enumerate(map(Text, texts, torch.cat(alone))))
    batch = forced_logprobs(model, prompts, texts, 1)
    line = Line(f"transformers, a batch of {len(texts)}")
    _compare(line, dict(enumerate(map(Text, texts, batch))), reference)
    yield line
    several = [forced_logprobs(model, [prompt], [text], 5) for prompt, text in zip(prompts, texts, strict=True)]
    line = Line("transformers, 5 tokens at once")
    _compare(line, dict(enumerate(map(Text, texts, torch.cat(several)))), reference)
    line.note = first_that_differs(model, prompts[0], texts[0][:5])
    yield line


def _compare(line: Line, found: dict[int, Text], reference: dict[int, Text]) -> None:
    for row, text in found.items():
        other = reference[row]
        pairs = enumerate(zip(text.tokens, other.tokens, strict=True))
        same = next((i for i, (a, b) in pairs if a != b), len(other.tokens))
        line.tokens += len(other.tokens)
        line.equal += int((text.logprobs == other.logprobs)[:same].sum())
        if same:
            line.worst = max(line.worst, float((text.logprobs - other.logprobs)[:same].abs().max()))


def _hash(texts: dict[int, Text]) -> str:
    """Of tokens and bits: two machines with one hash computed the same."""
    content = repr([(text.tokens, text.logprobs.view(torch.int32).tolist()) for text in texts.values()])
    return hashlib.sha256(content.encode()).hexdigest()


def _with_fewer_instructions(arguments: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """The short certificate of processes that are bounded to smaller instruction sets, by set."""
    found = {}
    for most, (kernels, more) in SMALLER.items():
        if more not in instruction_set().split():
            continue
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder, "certificate.json")
            command = ["certify", arguments.model, "--dtype", dtype, "--length", str(arguments.length), "--short"]
            code = "import sys; from spec_trl.cli.main import main; sys.exit(main(sys.argv[1:]))"
            ran = subprocess.run(
                [sys.executable, "-c", code, *command, "--output", str(output)], capture_output=True, text=True,
                env=os.environ | {"ONEDNN_MAX_CPU_ISA": most, "ATEN_CPU_CAPABILITY": kernels}, check=False,
            )  # fmt: skip
            if ran.returncode:
                raise ValueError(f"the process with {most} has failed: {ran.stderr[-500:]}")
            found[most] = json.loads(output.read_text())["dtypes"][dtype]
    return found


def _machine(device: torch.device) -> dict[str, str]:
    versions = {name: metadata.version(name) for name in ("spec_trl", "transformers", "torch")}
    machine = {"processor": processor_name(), "instructions": instruction_set(), "device": str(device)}
    threads = f"{torch.get_num_threads()} threads"
    return machine | {"threads": threads, "switches": " ".join(kernel_switches())} | versions


def _page(dtype: str, found: dict[str, Any]) -> str:
    rows = [_cells(each) for each in found["lines"]]
    for most, short in found.get("instructions", {}).items():
        rows += [_cells(each | {"situation": f"{most}: {each['situation']}"}) for each in short["lines"]]
    exact = "; ".join(found["exact"]) if isinstance(found["exact"], list) else found["exact"]
    header = ["situation", "equal bits", "worst, nats", "drafted", ""]
    return f"{dtype}: exact: {exact}, hash {str(found['hash'])[:16]}\n{table(header, rows)}\n"


def _cells(line: dict[str, Any]) -> list[str]:
    bits = f"{line['equal']} of {line['tokens']}" if line["tokens"] else "-"
    worst = f"{line['worst']:.1e}" if line["worst"] else "0"
    return [line["situation"], bits, worst, str(line["drafted"] or ""), line["note"]]
