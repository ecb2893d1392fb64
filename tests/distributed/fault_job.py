"""One rank of a shared rollout: ``python -m tests.distributed.fault_job FILE WAY WHO HOW``.

Ranks without rows get half of another rank's (`WAY` is "move"), or race for them ("race"), or the last rank only
drafts ("draft"). `WHO` is the rank that fails in the middle of its rows, or -1; `HOW` is the number of the signal that
it sends itself. The others write what they have, or the error that ended them, to `FILE`.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState

from spec_trl.distributed import pool, shared_rollouts
from spec_trl.distributed.shared_rollouts import Sampled, SharedRollouts
from spec_trl.generation.drafters.ngram import NgramDrafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.rollout import Rollout
from spec_trl.papers.specactor.draft_ranks import DraftRanks
from tests.conftest import tiny_llama
from tests.distributed.ranks import Helped, Patient, PatientRacing, unfair
from tests.generation.calls import generate, outputs, pad_left, random_rows


TIMEOUT = 6  # seconds after which silence is an error
ROWS = [row.tolist() for row in random_rows([4, 9, 6, 12, 5, 7, 10, 8])]
ENDS: dict[str, Any] = {"eos_token_id": [5, 6], "max_new_tokens": 100}


def main(way: str, who: int, how: int) -> dict[str, Any]:
    """This rank's completions, and what it did for others."""
    rank, ranks, model = dist.get_rank(), dist.get_world_size(), tiny_llama()
    prompts = pad_left([torch.tensor(row) for row in ROWS])
    order = unfair(outputs(generate(model, prompts, **ENDS)))

    class Failing(PatientRacing if way == "race" else Patient):  # type: ignore[misc]
        """Sends its process a signal after the fifth round."""

        rounds = 0

        def __init__(self, requests: Any, _: Any, rows: int, link: Any, seconds: Any) -> None:
            super().__init__(
                requests, [[own] for own in (order if who < 0 else range(len(ROWS)))], rows, link, seconds
            )
            self.link = link

        def after_round(self, rollout: Rollout) -> None:
            self.rounds += 1
            if rank == who and self.rounds == 5:
                os.kill(os.getpid(), how)
            if who < 0 and way != "draft":
                super().after_round(rollout)
            else:
                super(Patient, self).after_round(rollout)

    shared_rollouts.SharedPool = Failing  # type: ignore[misc]
    pool.rows_to_give = (lambda lengths, *_: len(lengths) // 2) if way == "move" else (lambda *_: 0)
    pool.POLL_SHARE = 1e9
    helpers = DraftRanks(int(way == "draft"), rank, ranks, TIMEOUT)
    sharing = SharedRollouts(True, rank, ranks, TIMEOUT, helpers.decoding)
    each, control = len(ROWS) // ranks, Helped()
    sharing.begin()
    turn = sharing.gather(ROWS[rank * each : (rank + 1) * each])
    if helpers.drafts:
        helpers.serve(SelfDrafter(model, kernel="reference"), torch.device("cpu"), sharing.link())
        completions = sharing.exchange(turn, {})
        return {"texts": [completions[place].tokens for place in turn.own], "helped": 0}
    more: dict[str, Any] = {"config": {"max_batch_size": each}}
    if way == "race":
        drafters = [SelfDrafter(model, kernel="reference"), NgramDrafter(2)]
        more |= {"strategy": "best_of_n", "drafter": drafters, "control": control}
    drafting = [SelfDrafter(model, kernel="reference")] if way == "draft" else []
    with helpers.ahead(drafting) as ahead:
        more |= {"drafter": ahead[0]} if ahead else {}
        output = generate(model, prompts, make_queue=sharing.make_queue(turn, each), **more, **ENDS)
    found = zip(turn.decoded, outputs(output), strict=True)
    decoded = {place: Sampled(tokens, []) for place, tokens in found if tokens}
    completions = sharing.exchange(turn, decoded)
    assert sharing.pool is not None
    helped = {
        "move": sharing.pool.taken_over, "race": control.tallies[1].rounds, "draft": output.statistics.total.accepted,
    }  # fmt: skip
    return {"texts": [completions[place].tokens for place in turn.own], "helped": helped[way]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    PartialState(cpu=True)
    path, way, who, how = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    try:
        torch.save(main(way, who, how), path)
    except Exception as error:
        torch.save(f"{type(error).__name__}: {error}", path)
        raise
    finally:
        os._exit(0)  # gloo's threads wait for the ranks that are gone
