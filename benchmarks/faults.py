"""Ranks that die or stop at a random moment of a rollout: does anything hang, and is any token wrong?

Each run forks the ranks of one rollout: "pool" and "race" have three that share a pool, the latter with a second
drafter for ranks that have nothing left; "decoupled" has a verifier and a rank that drafts for it. Once all have
begun, one of them gets SIGKILL or SIGSTOP. In "decoupled" it is the drafter's rank: `serve` by itself waits a day for
its verifier, and that is no hang; in a training ranks that draft watch the pool (tests/distributed). A rank that is
left is right if it ends with the tokens of plain decoding, or with an error that says what to do; a verifier whose
drafter is gone must have the tokens.

    python -m benchmarks.faults --runs 34
"""

import argparse
import multiprocessing
import os
import random
import signal
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from spec_trl import SpeculativeConfig
from spec_trl.distributed.decoupled import DraftRank, serve
from spec_trl.distributed.shared_rollouts import Sampled, SharedRollouts
from spec_trl.generation.drafters.decoupled.drafter import DecoupledDrafter
from spec_trl.generation.drafters.ngram import NgramDrafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.scheduling.control import AlwaysSpeculate, Candidate

from .measure import Finding, add_machine_arguments, begin, shown, write_result


KINDS = {"pool": 3, "race": 3, "decoupled": 2}  # ranks
TIMEOUT = 3.0  # seconds after which silence is an error
BOUND = 30.0  # seconds in which each run must be over: several timeouts, one after the other, and a busy machine
REQUESTS, NEW_TOKENS = 12, 120


class TwoDrafters(AlwaysSpeculate):
    """Drafts with the first drafter, and lets ranks that have nothing left race with the second one."""

    def __init__(self) -> None:
        super().__init__(Candidate("self", 3, 2.0, 1 << 30))
        self.candidates = [*self.candidates, Candidate("ngram", 3, 2.0, 1 << 30)]

    def begin(self, capacity: int, prompts: Sequence[str]) -> None:
        super().begin(capacity, prompts)
        self.tallies *= 2

    def further_method(
        self, requests: Sequence[int], helpers: Mapping[tuple[int, str], int]
    ) -> tuple[str, list[int]] | None:
        wanted = [request for request in requests if (request, "ngram") not in helpers]
        return ("ngram", wanted) if wanted else None


def make_model() -> LlamaForCausalLM:
    """A random Llama in float64, whose texts end by themselves after 40 tokens on average."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.1, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


def texts(model: LlamaForCausalLM, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """Completions; empty where another rank has them."""
    output = model.generate(
        torch.tensor(prompts), do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS, eos_token_id=[5, 6],
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    new = output.sequences[:, len(prompts[0]) :].tolist()
    return [row[:length] for row, length in zip(new, output.lengths.tolist(), strict=True)]


def work(kind: str, rank: int, prompts: list[list[int]]) -> list[list[int]]:
    """What this rank has in the end: the completions of its own prompts, or of all where it verifies alone."""
    model, ranks, config = make_model(), KINDS[kind], SpeculativeConfig(seed=0, sd_toggle="always")
    if kind == "decoupled":
        if rank:
            serve(SelfDrafter(model, kernel="reference"), verifier=0)
            return []
        link = DraftRank(1, timeout=TIMEOUT)
        return texts(
            model, prompts, assistant_strategy="self", speculative_config=config, drafter=DecoupledDrafter(link)
        )
    PartialState(cpu=True)
    sharing, each = SharedRollouts(True, rank, ranks, TIMEOUT), len(prompts) // ranks
    sharing.begin()
    turn = sharing.gather(prompts[rank * each : (rank + 1) * each])
    more: dict[str, Any] = {"assistant_strategy": "none"}
    if kind == "race":
        drafters = [SelfDrafter(model, kernel="reference"), NgramDrafter(2)]
        more = {"assistant_strategy": "best_of_n", "drafter": drafters, "control": TwoDrafters()}
    found = texts(
        model, turn.prompts, speculative_config=config, make_queue=sharing.make_queue(turn, each), **more
    )
    completions = sharing.exchange(turn, {place: Sampled(text, []) for place, text in enumerate(found) if text})
    return [completions[place].tokens for place in turn.own]


def run_rank(kind: str, rank: int, port: int, prompts: list[list[int]], report: Connection) -> None:
    """One process: says that it has begun, and then what it has, or its error."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(KINDS[kind]), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    report.send("begun")
    try:
        report.send(work(kind, rank, prompts))
    except Exception as error:
        report.send(f"{type(error).__name__}: {error}")
    os._exit(0)  # gloo's threads wait for the ranks that are gone


def run(kind: str, draw: random.Random, prompts: list[list[int]], expected: list[list[int]]) -> list[str]:
    """What became of each rank of one run: "tokens", "error", "victim", "WRONG" or "HANGS"."""
    ranks = KINDS[kind]
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as a launcher has it
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        fork.Process(target=run_rank, args=(kind, rank, store.port, prompts, pipes[rank][1])) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for receiver, _ in pipes:
        assert receiver.poll(BOUND) and receiver.recv() == "begun"
    victim, ended = 1 if kind == "decoupled" else draw.randrange(ranks), time.monotonic() + BOUND
    time.sleep(draw.uniform(0.0, 1.2))
    os.kill(processes[victim].pid or 0, draw.choice([signal.SIGKILL, signal.SIGSTOP]))
    found = []
    each = len(prompts) // ranks
    for rank, (receiver, _) in enumerate(pipes):
        if rank == victim:
            found.append("victim")
            continue
        if not receiver.poll(max(ended - time.monotonic(), 0)):
            found.append("HANGS")
            continue
        left = receiver.recv()
        own = expected if kind == "decoupled" else expected[rank * each : (rank + 1) * each]
        if left == own:
            found.append("tokens")
        else:  # a verifier goes on without its drafter
            is_clear = kind != "decoupled" and isinstance(left, str) and "resume from the last checkpoint" in left
            found.append("error" if is_clear else "WRONG")
    for process in processes:
        process.kill()
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=34, help="of each kind (default: %(default)s)")
    add_machine_arguments(parser, "faults")
    options = parser.parse_args(arguments)
    machine = begin(options) | {"threads": 1}
    prompts = torch.randint(7, 64, (REQUESTS, 8), generator=torch.Generator().manual_seed(options.seed)).tolist()
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # this process must not compute before it forks
        expected = pool.apply(plain, (prompts,))
    draw, counts = random.Random(options.seed), {kind: Counter[str]() for kind in KINDS}
    for kind, count in counts.items():
        for _ in tqdm(range(options.runs), desc=kind):
            count.update(run(kind, draw, prompts, expected))
    findings = [
        Finding(f"{kind}, {options.runs} runs of {KINDS[kind]} ranks: {what}", count[name], "ranks")
        for kind, count in counts.items()
        for what, name in (
            ("right tokens", "tokens"), ("a clear error", "error"), ("wrong tokens or another error", "WRONG"),
            ("hangs", "HANGS"),
        )
    ]  # fmt: skip
    write_result(
        options.output, "lossless", "Ranks that die or stop",
        "One rank of each run gets SIGKILL or SIGSTOP at a random moment of up to 1.2 s after all have begun; silence "
        f"is an error after {TIMEOUT:g} s. Ranks that are left, by what they end with within {BOUND:g} s.",
        machine, findings, {"options": shown(options)},
    )  # fmt: skip


def plain(prompts: list[list[int]]) -> list[list[int]]:
    """The completions of plain decoding on one rank."""
    return texts(make_model(), prompts, assistant_strategy="none", speculative_config={"seed": 0})


if __name__ == "__main__":
    main()
