"""One of two ranks: rank 0 generates, rank 1 drafts for it, and has the trouble that the test asks for.

python -m tests.distributed.draft_ranks_job FILE TROUBLE

Rank 0 writes to FILE, for each of some generations, whether its tokens are those without drafts, and how it went.
"""

import os
import signal
import sys
import time
import warnings
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spec_trl import SpeculativeOutput
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.sampling.accept import Proposal
from spec_trl.generation.engine.sampling.noise import RoundNoise
from spec_trl.papers.specactor.decoupled.decoupled_drafter import DecoupledDrafter
from spec_trl.papers.specactor.decoupled.worker import Kind
from spec_trl.papers.specactor.draft_ranks import Channel, DraftRank, serve
from tests.conftest import tiny_llama
from tests.generation.calls import EachRound, generate, outputs
from tests.generation.races import EOS, PROMPTS


TIMEOUT = 3.0  # seconds; drafting here takes milliseconds


class Troubled(SelfDrafter):
    """Has its trouble in its third window."""

    windows = 0

    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        self.windows += 1
        if self.windows == 3:
            match sys.argv[2]:
                case "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "raises":
                    raise KeyError("the drafter's trouble")
        return super().propose(draft_length, noise)


def damage(part: str) -> None:
    """Has the third window leave this rank damaged."""
    send, isend, count = Channel.send, dist.isend, 0

    def spoiled(self: Channel, kind: Kind, values: Tensor, seconds: float) -> None:
        nonlocal count
        count += kind == Kind.WINDOW
        if kind == Kind.WINDOW and count == 3:
            match part:
                case "token":
                    values = values + 1000
                case "number":
                    self.sent += 1
                case "sum":
                    dist.isend = lambda part, *to: isend(part if len(part) == 5 else part + 1, *to)  # not the head's
                case "head":
                    dist.send(torch.full((5,), 7), self.rank)
        send(self, kind, values, seconds)

    Channel.send = spoiled  # type: ignore[method-assign]


def verify() -> list[dict[str, Any]]:
    model, pipe, results = tiny_llama(), DraftRank(1, timeout=TIMEOUT), []

    def decode(**options: Any) -> SpeculativeOutput:
        return generate(model, PROMPTS, drafter=DecoupledDrafter(pipe), **options)

    def add(is_same: bool, output: SpeculativeOutput, seconds: float) -> None:
        found = output.statistics
        results.append(
            {"same": is_same, "seconds": seconds, "failure": found.drafter_failure, "accepted": found.total.accepted}
        )

    for options in (EOS, dict(do_sample=False), dict(temperature=0.7, top_k=20, top_p=0.9)):
        for rows in (None, 3):
            started = time.perf_counter()
            output = decode(config={"max_batch_size": rows, "draft_length": 4}, **options)
            seconds = time.perf_counter() - started
            add(outputs(output) == outputs(generate(model, PROMPTS, **options)), output, seconds)
    if results[-1]["failure"] is None:  # and of a generation after one that broke off while a window was drafted
        before = decode().statistics.total
        with suppress(ArithmeticError):
            decode(stopping_criteria=[EachRound(fail)])
        after = decode()
        add(after.statistics.total == before, after, after.statistics.seconds)
    pipe.close()
    return results


def fail(number: int) -> None:
    if number == 3:
        raise ArithmeticError


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        torch.save(verify(), sys.argv[1])
    else:
        damage(sys.argv[2])
        model = tiny_llama()  # a drafter does not keep its policy alive
        if serve(Troubled(model, kernel="reference"), verifier=0):
            torch.save("closed", f"{sys.argv[1]}.closed")
    os._exit(0)  # gloo's threads wait for the ranks that are gone
