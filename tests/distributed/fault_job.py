"""One rank of a shared rollout in which another one fails: ``python -m tests.distributed.fault_job FILE WHO HOW``.

`WHO` is the rank that fails, in the middle of its rows, or -1; `HOW` is the number of the signal that it sends itself.
The others write what they have, or the error that ended them, to `FILE`.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import PartialState

from spec_trl.distributed import shared_rollouts
from spec_trl.distributed.pool import SharedPool
from spec_trl.distributed.shared_rollouts import SharedRollouts
from spec_trl.generation.engine.rollout import Rollout
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows


TIMEOUT = 6  # seconds after which silence is an error
ROWS = [row.tolist() for row in random_rows([4, 9, 6, 12, 5, 7, 10, 8])]
ENDS = {"eos_token_id": [5, 6], "max_new_tokens": 100}


def main(file: Path, who: int, how: int) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    class Failing(SharedPool):
        """Sends its process a signal after the fifth round."""

        rounds = 0

        def after_round(self, rollout: Rollout) -> None:
            self.rounds += 1
            if rank == who and self.rounds == 5:
                os.kill(os.getpid(), how)
            super().after_round(rollout)

    shared_rollouts.SharedPool = Failing  # type: ignore[misc]
    sharing = SharedRollouts(True, rank, ranks, TIMEOUT)
    each = len(ROWS) // ranks
    sharing.begin()
    turn = sharing.gather(ROWS[rank * each : (rank + 1) * each])
    prompts = pad_left([torch.tensor(prompt) for prompt in turn.prompts])
    output = generate(tiny_llama(), prompts, make_queue=sharing.make_queue(turn, each), **ENDS)
    decoded = {place: tokens for place, tokens in zip(turn.decoded, outputs(output), strict=True) if tokens}
    completions = sharing.exchange(turn, decoded)
    torch.save([completions[place] for place in turn.own], file)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    PartialState(cpu=True)
    path, who, how = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    try:
        main(path, who, how)
    except Exception as error:
        torch.save(f"{type(error).__name__}: {error}", path)
        raise
    finally:
        os._exit(0)  # gloo's threads wait for the ranks that are gone
