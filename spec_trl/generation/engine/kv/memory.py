"""Free memory, and zeros that take memory only when written."""

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
"""Bytes up to which :func:`check_memory` does not query free memory, which takes as long as a small layer: activations
take as much."""
_NO_LIMIT = 2.0**60
"""A control group with more bytes left has no limit: version 1 writes nearly 2^63 for no limit."""
_NORESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python names from 3.13 on
_UNIT = mmap.PAGESIZE  # bytes that the system maps and frees at once


def takes_memory_late(device: torch.device) -> bool:
    """Whether :class:`LateZeros` take memory on `device` only when written: on a CPU under Linux."""
    return device.type == "cpu" and sys.platform == "linux"


class LateZeros:
    """Zeros `[rows, heads, columns, d]` that take memory only for written parts, and can free it.

    The memory management unit is the block table: the tensor is an ordinary range of addresses, so nothing is gathered
    and operations need no blocks. A block (usually 4 KiB) that was only read is the kernel's shared block of zeros.
    """

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        size = math.prod(shape) * dtype.itemsize
        self.kind = shape, dtype
        self._region: mmap.mmap | None = None
        if size == 0 or not takes_memory_late(device):
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
            return
        self._region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        with suppress(OSError):  # unknown to kernels without huge pages
            self._region.madvise(mmap.MADV_NOHUGEPAGE)
        self.tensor = torch.frombuffer(self._region, dtype=dtype).view(shape)

    def give_back(self, first: int, end: int, kept: int = 0) -> None:
        """Turns rows `first..end`, except their first `kept` columns, into zeros without memory, as far as they fill
        whole blocks."""
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
        """Sets all to zero."""
        if self._region is None:
            self.tensor.zero_()
        else:
            self._region.madvise(mmap.MADV_DONTNEED)

    def bytes_of(self, lengths: Sequence[int]) -> int:
        """Most bytes of rows of `lengths` columns, in whole blocks; all bytes if memory is taken at once."""
        if self._region is None:
            return self.tensor.nbytes
        _, heads, columns, size = self.tensor.shape
        column = size * self.tensor.element_size()
        shared = _UNIT if columns * column % _UNIT else 0  # its first block may hold columns of another row
        whole, total = -(-heads * columns * column // _UNIT) * _UNIT + shared, 0
        for length in lengths:
            head = -(-min(length, columns) * column // _UNIT) * _UNIT + shared
            total += min(heads * head, whole)
        return total


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Copies `values` to `device`. The host does not wait for the copy, which CUDA makes from pinned memory. On MPS it
    waits, since the copy might read memory that the host has freed."""
    pins = device.type == "cuda" and values.device.type == "cpu"
    return (values.pin_memory() if pins else values).to(device, non_blocking=device.type != "mps")


def check_memory(what: str, needed: int, device: torch.device) -> None:
    """Raises ValueError if `needed` bytes for `what` are not free on `device`."""
    if needed > LITTLE and needed > (free := free_memory(device)):
        raise ValueError(
            f"{what} would not fit in memory: {needed / 2**30:.1f} GiB are needed and {free / 2**30:.1f} GiB are free "
            f"on {device}. Lower `max_new_tokens` or, for many rows, `max_batch_size` in the speculative config (rows "
            "wait their turn)."
        )


def free_memory(device: torch.device) -> int:
    """Bytes that tensors may take on `device`; memory cached by the CUDA allocator counts as free."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    free: float = psutil.virtual_memory().available  # of the whole machine, as in torch
    for group in groups_of_this_process():
        free = min(free, group.left())
    return int(free)


def peak_memory(device: torch.device) -> tuple[int, int] | None:
    """Peak bytes of tensors on `device` since :func:`forget_peak`, and total bytes that they may take; None if
    `device` is not CUDA."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return torch.cuda.max_memory_allocated(device), free + torch.cuda.memory_reserved(device)


def forget_peak(device: torch.device) -> None:
    """Resets :func:`peak_memory`, and torch's statistics."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


class LimitedGroup(NamedTuple):
    """A control group with a memory limit: its files, and the entry of `stat` that counts cached files."""

    limit: Path
    used: Path
    stat: Path
    cached: str

    def left(self) -> float:
        """Bytes left in the group; infinity without a limit."""
        with suppress(OSError, ValueError):  # no such file; "max": no limit
            free = int(self.limit.read_text()) - int(self.used.read_text())
            stat = dict(entry.split() for entry in self.stat.read_text().splitlines())
            return max(free + int(stat.get(self.cached, 0)), 0)
        return math.inf


def limited_groups(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> list[LimitedGroup]:
    """The control groups of this process (container, job) that have a limit."""
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
        innermost = top / path.lstrip("/")  # in a container it may be a path of the host, of which only `top` exists
        for folder in (innermost, *innermost.parents):
            if folder.is_relative_to(top):
                groups.append(LimitedGroup(folder / limit, folder / used, folder / "memory.stat", cached))
    return [group for group in groups if group.left() < _NO_LIMIT]


groups_of_this_process = functools.cache(limited_groups)
"""Cached: a process stays in its groups."""
