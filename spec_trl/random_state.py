"""Shields the global random generators from draws that are no sampling.

A call samples from one seed, drawn from torch's generator. Loading an assistant may draw too: some families initialise
weights at random before they are read.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import numpy as np
import torch


_in_use = RLock()  # a seed drawn while another thread restores the generators would be drawn again


@contextmanager
def keeping_generators() -> Iterator[None]:
    """Restores the generators of torch, numpy and `random` at the end of the block; nothing is sampled within."""
    with _in_use:
        on_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        of_torch, of_numpy, of_random = torch.get_rng_state(), np.random.get_state(), random.getstate()
        try:
            yield
        finally:
            torch.set_rng_state(of_torch)
            np.random.set_state(of_numpy)
            random.setstate(of_random)
            if on_cuda is not None:
                torch.cuda.set_rng_state_all(on_cuda)


def draw_seed() -> int:
    with _in_use:
        return int(torch.randint(2**62, ()))
