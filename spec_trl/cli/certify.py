"""Certifies a model on this machine: `spec-trl certify MODEL` samples the same texts in many situations and compares
the bits of their log-probabilities, for our engine and for plain transformers."""

import argparse
import gc
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..generation.drafters.mtp.mtp_drafter import has_head
from ..generation.engine.kv.row_memory import preemption
from ..generation.engine.requirements import check_model
from ..generation.engine.statistics import SpeculationStatistics
from ..generation.keyword import install
from ..generation.session import release
from ..hardware import hardware_name, instruction_set
from ..json_files import write_json
from .arguments import table
from .loading import PROMPTS, find_device, load_config, load_model, load_tokenizer, pad_left, random_ids, token_ids
from .plain_bits import first_that_differs, forced_logprobs


ROWS = 2 * len(PROMPTS)
"""Rows of the text that is compared: each prompt twice, with noise of its own."""
FEW = 4  # of them, where one is computed after the other
SEVERAL = 5  # tokens that transformers computes at once
LONGEST = 48  # tokens of a prompt
AT_ONCE = 2  # processes, each with the model: half of their time is imports and a compiler, on one core
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
    preempts: int | None = None  # a row leaves in each so many rounds, and is read again


def situations(short: bool, heads: bool = False) -> Iterator[Situation]:
    """`short`: the fewest that tell whether an instruction set is exact. `heads`: the checkpoint has an MTP head."""
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
    yield Situation("a row leaves in every third round, and is read again", [every], preempts=3)
    for gamma in (1, 13):
        options = always | {"draft_length": gamma}
        yield Situation(f'"self", {gamma + 1} tokens verified at once', [every], "self", options)
    yield Situation('"ngram", 1 to 9 tokens', [every], "ngram", always | {"draft_length": 8})
    yield Situation('"history", 1 to 9 tokens', [every], "history", always | {"draft_length": 8})
    if heads:
        yield Situation('"mtp", 5 tokens verified at once', [every], "mtp", always | {"draft_length": 4})
    yield Situation('"auto"', [every], "auto")
    for threads in (1, 2, 4):
        yield Situation(f"{threads} thread{'s' * (threads > 1)}", [every], threads=threads)


def run(arguments: argparse.Namespace) -> None:
    """Prints the certificate and writes it as JSON.

    Raises:
        ValueError: bad arguments, or a model that cannot be loaded.
    """
    output, folder = arguments.output, arguments.output.absolute().parent
    if not folder.is_dir() or output.is_dir():
        reason = "it is a folder; name a file" if output.is_dir() else f"there is no folder {folder}; make it first"
        raise ValueError(f"--output {output}: {reason}")
    if arguments.length <= SEVERAL:
        raise ValueError(f"--length {arguments.length} must be at least {SEVERAL + 1}: {SEVERAL} run at once.")
    device, config = find_device(arguments.device), load_config(arguments.model)
    tokenizer = load_tokenizer(arguments.model)
    prompts = random_ids(len(PROMPTS), LONGEST // 2, config.get_text_config().vocab_size, seed=0)
    if tokenizer is not None:
        prompts = token_ids(PROMPTS, tokenizer, LONGEST)
    install()  # as `import spec_trl` would
    certificate: dict[str, Any] = {"model": arguments.model, "machine": _machine(device), "dtypes": {}}
    if not arguments.short:
        print(*(f"{name} {value}" for name, value in certificate["machine"].items()), sep=", ", flush=True)
    for dtype in arguments.dtype:
        model = load_model(arguments.model, dtype, device)
        among = situations(arguments.short, has_head(model, {}))
        found = certify(model, 2 * prompts, arguments.length, among, plain=not arguments.short)
        certificate["dtypes"][dtype] = found
        release(model)
        del model
        gc.collect()  # before it is loaded again
        write_json(output, certificate)
    if arguments.short:
        return
    if device.type == "cpu" and found["hash"] is not None:
        for most, by_dtype in _with_fewer_instructions(arguments).items():
            for dtype, own in by_dtype.items():
                certificate["dtypes"][dtype].setdefault("instructions", {})[most] = own
        write_json(output, certificate)
    pages = (f"\n{page(dtype, own)}" for dtype, own in certificate["dtypes"].items())
    print(*pages, f"\nwritten: {output}", sep="\n")


def certify(
    model: PreTrainedModel, prompts: list[list[int]], length: int, among: Iterable[Situation], plain: bool = False
) -> dict[str, Any]:
    """Compares `length` sampled tokens of each of the `ROWS` prompts in the situations `among`; if `plain`, those of
    transformers too.

    Returns:
        `exact`: what the engine says of the model, or why it does not serve it; `hash` of tokens and bits, or None;
        `lines` of the engine, and those of `transformers`.
    """
    lines: list[Line] = []
    digest, texts = None, []
    try:
        check_model(model)
    except ValueError as error:
        exact: Any = f"not served: {error}"
        for prompt in prompts[:FEW]:
            torch.manual_seed(0)
            ids = torch.tensor([prompt], device=model.device)
            texts.append(model.generate(ids, **_sampling(length))[0, len(prompt) :].tolist())
    else:
        reference, statistics = _sample(model, prompts, Situation("", [list(range(ROWS))]), length)
        exact = statistics[-1].exact
        digest, texts = _hash(reference), [reference[row].tokens for row in range(FEW)]
        for situation in among:
            line = Line(situation.name)
            try:
                found, statistics = _sample(model, prompts, situation, length)
                compare(line, found, reference)
                line.drafted = sum(each.total.drafted for each in statistics)
                if situation.strategy != "none" and not line.drafted:
                    line.note = "nothing was drafted"
                if situation.preempts and not any(each.preemptions for each in statistics):
                    line.note = "no row left"
            except (ValueError, FloatingPointError) as error:  # a strategy that does not serve the model
                line.note = str(error)
            lines.append(line)
    others = _plain(model, prompts[:FEW], texts) if plain else []
    return {"exact": exact, "hash": digest} | {
        name: list(map(asdict, each)) for name, each in (("lines", lines), ("transformers", others))
    }


def _sample(
    model: PreTrainedModel, prompts: list[list[int]], how: Situation, length: int
) -> tuple[dict[int, Text], list[SpeculationStatistics]]:
    """Rows that are computed, and the statistics of each call."""
    rows, statistics = dict[int, Text](), list[SpeculationStatistics]()
    threads = torch.get_num_threads()
    torch.set_num_threads(how.threads or threads)
    try:
        for ids in how.calls:
            inputs = pad_left([prompts[row] for row in ids], model.device)
            with preemption(how.preempts) if how.preempts else nullcontext():
                out: Any = model.generate(
                    **inputs, assistant_strategy=how.strategy, request_ids=ids, return_dict_in_generate=True,
                    speculative_config={"seed": 0} | how.options, **_sampling(length),
                )  # fmt: skip
            statistics.append(out.statistics)
            width = inputs["input_ids"].shape[1]
            for row, tokens, logprobs in zip(ids, out.sequences[:, width:].tolist(), out.logprobs.cpu(), strict=True):
                rows[row] = Text(tokens, logprobs)
    finally:
        torch.set_num_threads(threads)
    return rows, statistics


def _sampling(length: int) -> dict[str, Any]:
    """From the whole vocabulary at temperature 1."""
    lengths = {"max_new_tokens": length, "min_new_tokens": length, "pad_token_id": 0}
    return lengths | {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}


def _plain(model: PreTrainedModel, prompts: list[list[int]], texts: list[list[int]]) -> Iterator[Line]:
    """The same of transformers' own forward, given the first texts: what a user has without spec_trl."""
    batch, several = Line(f"a batch of {len(texts)}"), Line(f"{SEVERAL} tokens at once")
    try:
        pairs = list(zip(prompts, texts, strict=True))
        alone = torch.cat([forced_logprobs(model, [prompt], [text], 1) for prompt, text in pairs])
        reference = dict(enumerate(map(Text, texts, alone)))
        compare(batch, dict(enumerate(map(Text, texts, forced_logprobs(model, prompts, texts, 1)))), reference)
        found = torch.cat([forced_logprobs(model, [prompt], [text], SEVERAL) for prompt, text in pairs])
        compare(several, dict(enumerate(map(Text, texts, found))), reference)
        first = first_that_differs(model, prompts[0], texts[0][:SEVERAL])
        several.note = f"first other bits: {first}" if first else ""
    except Exception as error:  # of a family whose forward takes other arguments
        several.note = f"{type(error).__name__}: {error}"
    yield from (batch, several)


def compare(line: Line, found: dict[int, Text], reference: dict[int, Text]) -> None:
    """Adds rows to `line`. After a row's first other token, its numbers are other ones."""
    for row, text in found.items():
        other = reference[row]
        pairs = enumerate(zip(text.tokens, other.tokens, strict=True))
        same = next((i for i, (a, b) in pairs if a != b), len(other.tokens))
        line.tokens += len(other.tokens)
        line.equal += int((text.logprobs == other.logprobs)[:same].sum())
        changes = (text.logprobs - other.logprobs)[:same][(text.logprobs != other.logprobs)[:same]].abs()
        line.worst = max(line.worst, *changes.nan_to_num(nan=torch.inf).tolist(), 0.0)


def _hash(texts: dict[int, Text]) -> str:
    """Of tokens and bits: two machines with one hash computed the same."""
    content = repr([(text.tokens, text.logprobs.view(torch.int32).tolist()) for text in texts.values()])
    return hashlib.sha256(content.encode()).hexdigest()


def _with_fewer_instructions(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The short certificates of processes that are bounded to smaller instruction sets, by set and dtype."""
    sets = [most for most, (_, more) in SMALLER.items() if more in instruction_set().split()]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(sets, pool.map(partial(_bounded, arguments), sets), strict=True))


def _bounded(arguments: argparse.Namespace, most: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "certificate.json")
        command = [sys.executable, "-m", "spec_trl_command", "certify", arguments.model, "--device", "cpu"]
        command += ["--short", "--length", str(arguments.length), "--output", str(output)]
        command += ["--dtype", *arguments.dtype]
        threads = str(max(1, torch.get_num_threads() // AT_ONCE))
        bounds = {"ONEDNN_MAX_CPU_ISA": most, "ATEN_CPU_CAPABILITY": SMALLER[most][0], "OMP_NUM_THREADS": threads}
        ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | bounds, check=False)
        if not ran.returncode:
            return json.loads(output.read_text())["dtypes"]
        failed = asdict(Line("its process", note=ran.stderr.strip()[-500:]))
        return {name: {"exact": None, "hash": None, "lines": [failed]} for name in arguments.dtype}


def _machine(device: torch.device) -> dict[str, str]:
    versions = {name: metadata.version(name) for name in ("spec_trl", "transformers", "torch")}
    instructions = {"with": instruction_set()} if device.type == "cpu" else {}
    return {"on": hardware_name(device)} | instructions | versions


def page(dtype: str, found: dict[str, Any]) -> str:
    """What is printed of `found`, a result of :func:`certify`."""
    blocks = [("", found["exact"], found["hash"], found["lines"])]
    blocks += [
        (f"{most}: ", short["exact"], short["hash"], short["lines"])
        for most, short in found.get("instructions", {}).items()
    ]
    heads = [
        f"{most}{dtype}: {_verdict(exact)}" + (f", hash {digest[:16]}" if digest else "")
        for most, exact, digest, _ in blocks
    ]
    blocks.append(("transformers: ", None, None, found["transformers"]))
    lines = [line | {"situation": most + line["situation"]} for most, *_, lines in blocks for line in lines]
    notes = [f"{line['situation']}: {line['note']}" for line in lines if line["note"]]
    rows = table(["situation", "equal bits", "worst, nats", "drafted"], list(map(_cells, lines)))
    return "\n".join([*heads, rows, *notes])


def _verdict(exact: Any) -> str:
    if isinstance(exact, str):
        return exact
    return f"not exact: {'; '.join(exact)}" if isinstance(exact, list) else "exact" if exact else "exactness not tried"


def _cells(line: dict[str, Any]) -> list[str]:
    bits = f"{line['equal']} of {line['tokens']}" if line["tokens"] else "-"
    worst = f"{line['worst']:.1e}" if line["worst"] else "0" if line["tokens"] else "-"
    return [line["situation"], bits, worst, str(line["drafted"] or "")]
