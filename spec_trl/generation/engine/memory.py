"""How much memory is free, and zeros that take memory as they are written."""

import functools
import math
import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from torch import Tensor


LITTLE = 2**20
"""Bytes up to which :func:`check_memory` does not ask what is free, which takes as long as a small layer: activations
take as much."""
_NO_LIMIT = 2.0**60
"""Bytes left from which a control group has no limit: version 1 writes nearly 2^63 for none."""
_NORESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python names from 3.13 on
_UNIT = mmap.PAGESIZE  # bytes that the system gives and takes back at once


def takes_memory_late(device: torch.device) -> bool:
    """Whether :class:`LateZeros` take memory on `device` as they are written: on a CPU under Linux; elsewhere they
    take it at once."""
    return device.type == "cpu" and sys.platform == "linux"


class LateZeros:
    """Zeros `[rows, heads, columns, d]` that take memory for what is written alone, and can give it back.

    The memory management unit is the block table: the tensor is an ordinary one, a range of addresses, so nothing is
    gathered and no operation knows of blocks. A block (4 KiB, mostly) that was only read is the kernel's one block of
    zeros.
    """

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        size = math.prod(shape) * dtype.itemsize
        self.kind = shape, dtype
        self._region: mmap.mmap | None = None
        if size == 0 or not takes_memory_late(device):
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
            return
        self._region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        with suppress(OSError):  # a kernel without huge pages does not know it
            self._region.madvise(mmap.MADV_NOHUGEPAGE)
        self.tensor = torch.frombuffer(self._region, dtype=dtype).view(shape)

    def give_back(self, first: int, end: int, kept: int = 0) -> None:
        """Makes rows `first..end`, but for their first `kept` columns, zeros without memory, as far as they fill whole
        blocks."""
        if self._region is None:
            return
        _, heads, columns, size = self.tensor.shape
        column = size * self.tensor.element_size()
        spans = [(first * heads * columns, end * heads * columns)]
        if kept:
            spans = [(head * columns + kept, (head + 1) * columns) for head in range(first * heads, end * heads)]
        for start, stop in spans:
            begin, end = -(-start * column // _UNIT) * _UNIT, stop * column // _UNIT * _UNIT
            if begin < end:
                self._region.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def clear(self) -> None:
        """Makes all of it zeros."""
        if self._region is None:
            self.tensor.zero_()
        else:
            self._region.madvise(mmap.MADV_DONTNEED)

    def bytes_of(self, lengths: Sequence[int]) -> int:
        """Bytes that rows of `lengths` columns take at most, in whole blocks; all bytes where memory is taken at
        once."""
        if self._region is None:
            return self.tensor.nbytes
        _, heads, columns, size = self.tensor.shape
        column = size * self.tensor.element_size()
        shared = _UNIT if columns * column % _UNIT else 0  # its first block may hold others' columns
        whole, total = -(-heads * columns * column // _UNIT) * _UNIT + shared, 0
        for length in lengths:
            head = -(-min(length, columns) * column // _UNIT) * _UNIT + shared
            total += min(heads * head, whole)
        return total


def sent(values: Tensor, device: torch.device) -> Tensor:
    """`values` on `device`. The host does not wait for the copy, which CUDA makes from pinned memory. MPS might still
    read what the host has freed by then, so the host waits for it."""
    pins = device.type == "cuda" and values.device.type == "cpu"
    return (values.pin_memory() if pins else values).to(device, non_blocking=device.type != "mps")


def check_memory(what: str, needed: int, device: torch.device) -> None:
    """Raises ValueError where `needed` bytes for `what` are not free on `device`."""
    if needed > LITTLE and needed > (free := free_memory(device)):
        raise ValueError(
            f"{what} would not fit in memory: {needed / 2**30:.1f} GiB are needed and {free / 2**30:.1f} GiB are free "
            f"on {device}. Lower `max_new_tokens` or, for many rows, `max_batch_size` in the speculative config (rows "
            "wait their turn)."
        )


def free_memory(device: torch.device) -> int:
    """Bytes that tensors may take on `device`; what the CUDA allocator keeps for later ones counts as free."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    free: float = psutil.virtual_memory().available  # of the whole machine; so does torch
    for group in groups_of_this_process():
        free = min(free, group.left())
    return int(free)


def peak_memory(device: torch.device) -> tuple[int, int] | None:
    """Bytes that tensors on `device` took at most since :func:`forget_peak`, and those that they may take together;
    None off CUDA, where nobody counts."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return torch.cuda.max_memory_allocated(device), free + torch.cuda.memory_reserved(device)


def forget_peak(device: torch.device) -> None:
    """Has :func:`peak_memory`, and torch's own statistics, count from now on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


class LimitedGroup(NamedTuple):
    """A control group with a limit of memory: its files, and the entry of `stat` that counts cached files, which give
    way first."""

    limit: Path
    used: Path
    stat: Path
    cached: str

    def left(self) -> float:
        """Bytes that the group leaves; infinity where it has no limit."""
        with suppress(OSError, ValueError):  # no such file; "max": no limit
            free = int(self.limit.read_text()) - int(self.used.read_text())
            stat = dict(entry.split() for entry in self.stat.read_text().splitlines())
            return max(free + int(stat.get(self.cached, 0)), 0)
        return math.inf


def limited_groups(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> list[LimitedGroup]:
    """The control groups of this process, a container's or a job's, that have a limit."""
    groups = []
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            top, limit, used, cached = root, "memory.max", "memory.current", "inactive_file"
        elif controllers == "memory":  # version 1
            top, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached = "total_inactive_file"
        else:
            continue
        innermost = top / path.lstrip("/")  # in a container it may be another one's path, of which `top` alone exists
        for folder in (innermost, *innermost.parents):
            if folder.is_relative_to(top):
                groups.append(LimitedGroup(folder / limit, folder / used, folder / "memory.stat", cached))
    return [group for group in groups if group.left() < _NO_LIMIT]


groups_of_this_process = functools.cache(limited_groups)
"""Looked up once: a process stays in its groups."""
