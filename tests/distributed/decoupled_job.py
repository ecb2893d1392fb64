"""One of two ranks: rank 0 generates, rank 1 drafts for it, and has the trouble that the test asks for.

python -m tests.distributed.decoupled_job RANK PORT TROUBLE
"""

import json
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
from transformers import PreTrainedModel

from spec_trl.distributed.decoupled import Channel, DraftRank, serve
from spec_trl.generation.drafters.decoupled.drafter import DecoupledDrafter
from spec_trl.generation.drafters.decoupled.worker import Kind
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.noise import RoundNoise
from spec_trl.generation.engine.verification import Proposal
from tests.conftest import tiny_llama
from tests.generation.calls import EachRound, generate, outputs
from tests.generation.races import EOS, PROMPTS


TIMEOUT = 3.0  # seconds; drafting here takes milliseconds


class Troubled(SelfDrafter):
    """Has its trouble in its third window."""

    trouble = "none"
    windows = 0

    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        self.windows += 1
        if self.windows == 3:
            match self.trouble:
                case "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "raises":
                    raise KeyError("the drafter's own trouble")
        return super().propose(draft_length, noise)


def damage(monkey: str) -> None:
    """Has the third window leave this rank damaged."""
    send, isend, count = Channel.send, dist.isend, 0

    def spoiled(self: Channel, kind: Kind, values: Tensor, seconds: float) -> None:
        nonlocal count
        count += kind == Kind.WINDOW
        if kind == Kind.WINDOW and count == 3:
            if monkey == "token":
                values = values + 1000
            elif monkey == "number":
                self.sent += 1
            elif monkey == "sum":
                dist.isend = lambda part, *to: isend(part if len(part) == 5 else part + 1, *to)  # not the head's
            elif monkey == "head":
                dist.send(torch.full((5,), 7), self.rank)
        send(self, kind, values, seconds)

    Channel.send = spoiled  # type: ignore[method-assign]


def verify() -> dict[str, Any]:
    """What rank 0 found: in each of some generations whether its tokens are those without drafts, and how it went."""
    model, link, found = tiny_llama(), DraftRank(1, timeout=TIMEOUT), []
    for options in (EOS, dict(do_sample=False), dict(temperature=0.7, top_k=20, top_p=0.9)):
        for rows in (None, 3):
            config = {"max_batch_size": rows, "draft_length": 4}
            expected = outputs(generate(model, PROMPTS, **options))
            started = time.perf_counter()
            result = generate(model, PROMPTS, drafter=DecoupledDrafter(link), config=config, **options)
            found.append(
                {
                    "same": outputs(result) == expected,
                    "seconds": time.perf_counter() - started,
                    "failure": result.statistics.drafter_failure,
                    "accepted": result.statistics.total.accepted,
                }
            )
    if found[-1]["failure"] is None:
        found.append(verify_after_an_error(model, link))
    link.close()
    return {"generations": found}


def verify_after_an_error(model: PreTrainedModel, link: DraftRank) -> dict[str, Any]:
    """The same of a generation after one that the caller's criterion broke off while a window was being drafted."""

    def fail(number: int) -> None:
        if number == 3:
            raise ArithmeticError

    drafter = DecoupledDrafter(link)
    before = generate(model, PROMPTS, drafter=drafter).statistics
    with suppress(ArithmeticError):
        generate(model, PROMPTS, drafter=drafter, stopping_criteria=[EachRound(fail)])
    after = generate(model, PROMPTS, drafter=drafter).statistics
    return {
        "same": before.total == after.total,
        "seconds": after.seconds,
        "failure": after.drafter_failure,
        "accepted": after.total.accepted,
    }


def main() -> None:
    rank, port, trouble = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    if rank == 0:
        print(json.dumps(verify()), flush=True)
        os._exit(0)  # a store whose other rank was killed would be waited for
    damage(trouble)
    model = tiny_llama()  # a drafter does not keep its policy alive
    drafter = Troubled(model, kernel="reference")
    drafter.trouble = trouble
    serve(drafter, verifier=0)
    print("closed", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
