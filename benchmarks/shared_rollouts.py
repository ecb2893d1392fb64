"""Ranks that decode one pool against ranks that decode their own rows: idle share, and seconds of the rollout.

Lengths have a long tail: one request in eight, or one prompt in eight with all its completions, is six times as long
as the others, whose lengths are even from half to one and a half times the median. Both ways decode the same requests
in turns, in the same processes of one thread each; ratios are of neighbouring turns. Nothing is known of a prompt's
lengths, as in a first epoch, unless the cell says so. In the last cell there is nothing to gain, since nearly all rows
have the longest length that is allowed: there the pool must cost nothing. Seconds of the processor tell so on a
machine that is used by others too.

    python -m benchmarks.shared_rollouts --ranks 2 4
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import LlamaConfig, LlamaForCausalLM

from spec_trl import SpeculativeConfig
from spec_trl.distributed.shared_rollouts import Sampled, SharedRollouts
from spec_trl.generation.engine.request_queue import RequestQueue
from spec_trl.generation.engine.rows import Request
from spec_trl.json_files import read_json, write_json

from .measure import Finding, add_machine_arguments, begin, shown, write_result


WAYS = ("own", "pool")
COPIES = 8  # completions of a prompt
LONG = 6  # times the median


@dataclass(frozen=True)
class Cell:
    """What is decoded: how the tail comes about, rows in flight on each rank (None: all), and what is known before."""

    tail: str  # "request", "prompt" or "none"
    rows: int | None
    known: bool = False

    def __str__(self) -> str:
        tail = "no tail" if self.tail == "none" else f"1 {self.tail} in 8 is long"
        return f"{tail}, {self.rows or 'all'} rows in flight{', lengths known by prompt' if self.known else ''}"


CELLS = (
    Cell("request", None), Cell("prompt", None), Cell("prompt", 16), Cell("prompt", 16, True), Cell("none", None),
)  # fmt: skip
NO_TAIL = 10  # times the median is the longest length without a tail
EOS = list(range(1, 13))  # one token in 683: without a tail 9 rows in 10 get as long as they may


@dataclass
class Measured:
    """One cell on some ranks; by way, one value per turn.

    Args:
        seconds: of the slowest rank.
        idle: share of all ranks' time in which they had nothing to decode.
        cpu: seconds of the processor, of all ranks together.
        rounds: of the rank that had most.
        moved: rows that changed ranks.
        same: whether both ways gave the same tokens in each turn.
    """

    cell: Cell
    ranks: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    idle: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    cpu: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    rounds: dict[str, list[int]] = field(default_factory=lambda: {way: [] for way in WAYS})
    moved: list[int] = field(default_factory=list)
    same: bool = True


def make_model(seed: int) -> LlamaForCausalLM:
    """A Llama of 33 M parameters with random weights, float32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=4096, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def lengths_of(cell: Cell, requests: int, middle: int, seed: int) -> list[int]:
    """Tokens of each request."""
    if cell.tail == "none":
        return [NO_TAIL * middle] * requests
    draw = random.Random(seed)
    base = [round(middle * draw.uniform(0.5, 1.5)) for _ in range(requests)]
    unit = COPIES if cell.tail == "prompt" else 1
    count = requests // unit
    long = set(draw.sample(range(count), count // 8))
    return [LONG * middle if index // unit in long else own for index, own in enumerate(base)]


def decode(
    model: LlamaForCausalLM, cell: Cell, sharing: SharedRollouts, prompts: list[list[int]], lengths: list[int]
) -> tuple[tuple[float, float, float, int, int], list[list[int]]]:
    """One rollout: seconds of this rank, of its work and of its processor, its rounds, rows that it took over; and the
    completions it has."""
    sharing.begin()
    turn = sharing.gather(prompts)
    rows = sharing.rows_in_flight(turn, cell.rows)
    make = sharing.make_queue(turn, rows)

    def make_queue(requests: list[Request]) -> RequestQueue:
        own = zip(requests, turn.decoded, strict=True)
        return make([replace(request, limit=len(request.prompt) + lengths[place]) for request, place in own])

    started, computed = time.perf_counter(), time.process_time()
    output = model.generate(
        torch.tensor([turn.prompts[place] for place in turn.decoded]), do_sample=True, max_new_tokens=max(lengths),
        return_dict_in_generate=True, assistant_strategy="none", eos_token_id=EOS if cell.tail == "none" else None,
        speculative_config=SpeculativeConfig(seed=0, max_batch_size=rows),
        request_ids=list(turn.decoded), make_queue=make_queue,
    )  # fmt: skip
    seconds, cpu = time.perf_counter() - started, time.process_time() - computed
    found = zip(turn.decoded, output.sequences[:, len(prompts[0]) :].tolist(), output.lengths.tolist(), strict=True)
    decoded = {place: Sampled(tokens[:length], []) for place, tokens, length in found if length}
    completions = sharing.exchange(turn, decoded)
    idle, moved = (0.0, 0) if sharing.pool is None else (sharing.pool.idle_seconds, sharing.pool.taken_over)
    figures = seconds, seconds - idle, cpu, output.statistics.rounds, moved
    return figures, [completions[place].tokens for place in turn.own]


def measure(cell: Cell, model: LlamaForCausalLM, options: argparse.Namespace) -> Measured:
    """Both ways in turns, on this rank and all others."""
    rank, ranks = PartialState().process_index, PartialState().num_processes
    found = Measured(cell, ranks)
    own = options.requests // ranks
    sharings = {way: SharedRollouts(way == "pool", rank, ranks, timeout=600) for way in WAYS}
    for turn in range(-1, options.repeats):  # the first one warms up
        seed = options.seed + turn
        generator = torch.Generator().manual_seed(seed)
        groups = torch.randint(1, 8192, (options.requests // COPIES, 32), generator=generator).tolist()
        prompts = [groups[index // COPIES] for index in range(rank * own, (rank + 1) * own)]
        lengths = lengths_of(cell, options.requests, options.median, seed)
        texts = {}
        for way in WAYS[:: 1 if turn % 2 else -1]:
            sharing = sharings[way]
            if cell.known:
                decode(model, cell, sharing, prompts, lengths)
            figures, texts[way] = decode(model, cell, sharing, prompts, lengths)
            seconds, busy, cpu, rounds, moved = zip(*gather_object([figures]), strict=True)
            if turn >= 0:
                found.seconds[way].append(max(seconds))
                found.idle[way].append(1 - fmean(busy) / max(seconds))
                found.cpu[way].append(sum(cpu))
                found.rounds[way].append(max(rounds))
                found.moved += [sum(moved)] if way == "pool" else []
        found.same &= all(gather_object([texts["own"] == texts["pool"]]))
    return found


def run_rank(options: argparse.Namespace) -> None:
    """What each process does; the first one writes what was found."""
    torch.set_num_threads(1)
    PartialState(cpu=True)
    model = make_model(options.seed)
    with torch.no_grad():
        found = [measure(cell, model, options) for cell in CELLS]
    if PartialState().is_main_process:
        write_json(options.output, [asdict(each) for each in found])
    PartialState().destroy_process_group()


def findings_of(found: Sequence[Measured]) -> list[Finding]:
    """Medians, with the lowest and the highest turn."""
    findings = []
    for each in found:
        where = f"{each.ranks} ranks, {each.cell}"
        for way in WAYS:
            idle = each.idle[way]
            findings.append(Finding(f"{where}: idle share, {way}", median(idle), "%", "", (min(idle), max(idle))))
        for what, ways in (("seconds of the rollout", each.seconds), ("seconds of the processor", each.cpu)):
            ratios = [pool / own for own, pool in zip(ways["own"], ways["pool"], strict=True)]
            findings.append(Finding(f"{where}: {what}", median(ratios), "×", "own", (min(ratios), max(ratios))))
    return findings


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 4], help="processes (default: %(default)s)")
    add("--requests", type=int, default=128, help="of all ranks (default: %(default)s)")
    add("--median", type=int, default=16, help="tokens of a request (default: %(default)s)")
    add("--repeats", type=int, default=3, help="turns (default: %(default)s)")
    add_machine_arguments(parser, "shared_rollouts")
    options = parser.parse_args(arguments)
    if "RANK" in os.environ:
        run_rank(options)
        return
    machine = begin(options) | {"threads": 1}
    found: list[Measured] = []
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "found.json"
            given = [f"--{name}={vars(options)[name]}" for name in ("requests", "median", "repeats", "seed")]
            launch = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), "-m"]
            command = [sys.executable, "-m", *launch, "benchmarks.shared_rollouts", *given, f"--output={file}"]
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            found += read_json(file, list[Measured], "measurements", "run the command again")
    write_result(
        options.output, "workers", "Ranks that share a pool",
        f"A Llama of 33 M parameters, random weights, float32, sampled without drafts; {options.requests} requests of "
        f"{COPIES} completions per prompt, median {options.median} tokens, prompts of 32 tokens; one thread per rank. "
        f"Medians of {options.repeats} turns, with the lowest and the highest. Tokens of both ways were "
        f"{'the same' if all(each.same for each in found) else 'NOT THE SAME'}.",
        machine, findings_of(found), {"options": shown(options), "cells": [asdict(each) for each in found]},
    )  # fmt: skip


if __name__ == "__main__":
    main()
