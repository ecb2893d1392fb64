"""What a rank says where another one is gone."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


REMEDY = "died or hangs. Look at its output, and resume from the last checkpoint."
_OF_GLOO = re.compile("gloo|Application timeout caused pair closure")  # which has no exception of its own


@contextmanager
def naming_the_remedy(rank: int) -> Iterator[None]:
    """Has errors of collective calls that `rank` makes in it, ours or a library's, say what to do.

    Raises:
        RuntimeError: such a call failed; its own error is the cause. Other errors stay as they are.
    """
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        if REMEDY in said or not (isinstance(error, dist.DistError) or _OF_GLOO.search(said)):
            raise
        raise RuntimeError(f"rank {rank} waits for the other ranks, and one of them {REMEDY} {error}") from error
