"""What each kernel was measured to take on a layer of one shape, and the choice among the kernels. Plain Python."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...json_files import read_json, write_json
from ...user_cache import cache_directory, file_name


ROWS = (1, 2, 4, 8, 16, 32, 64)  # rows of x at which kernels are timed
SMALL_ROWS = (1, 2, 4, 8)  # those that count in the choice: drafting has few

Times = dict[int, float]  # rows of x → seconds


@dataclass(frozen=True)
class TableKey:
    """What a table is valid for: the GPU's name; versions of torch and of the timed kernels' packages; shape, bits,
    group and dtypes of the layer; names of the timed kernels."""

    device: str
    software: str
    layer: str
    kernels: str

    @property
    def path(self) -> Path:
        """The table's file, under a readable name that no other key has."""
        text = "_".join(dataclasses.astuple(self))
        return cache_directory() / file_name(f"{self.device}_{self.layer}", text)


@dataclass(frozen=True)
class KernelChoice:
    """A kernel's name, and the rows of x up to which it is faster than the dense layer."""

    kernel: str
    max_rows: int


@dataclass(frozen=True)
class KernelTable:
    """Seconds of one call.

    Attributes:
        key: what the table is valid for.
        dense: times of the policy's own layer.
        kernels: times of each kernel, by its name.
        version: raise it when a kernel of ours changes; older tables are then measured again.
    """

    key: TableKey
    dense: Times
    kernels: dict[str, Times]
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        for times in (self.dense, *self.kernels.values()):
            if tuple(sorted(times)) != ROWS or not all(0 < seconds < math.inf for seconds in times.values()):
                raise ValueError(f"{times} are not positive times for {list(ROWS)} rows")

    def max_rows(self, kernel: str) -> int:
        """The largest measured number of rows up to which `kernel` beats the dense layer at every number measured."""
        best = 0
        for rows in ROWS:
            if not self.kernels[kernel][rows] < self.dense[rows]:
                break
            best = rows
        return best

    def choose(self) -> KernelChoice | None:
        """The kernel that is fastest at SMALL_ROWS, in geometric mean; None where the dense layer wins at one row.

        Beyond its `max_rows` a kernel counts with the time of the dense layer, which runs there.
        """

        def small(kernel: str) -> float:
            limit = self.max_rows(kernel)
            times = [(self.kernels[kernel] if rows <= limit else self.dense)[rows] for rows in SMALL_ROWS]
            return math.fsum(map(math.log, times))

        useful = [kernel for kernel in self.kernels if self.max_rows(kernel)]
        if not useful:
            return None
        best = min(useful, key=lambda kernel: (small(kernel), -self.max_rows(kernel)))
        return KernelChoice(best, self.max_rows(best))

    def save(self) -> None:
        """Writes the table to its file; raises OSError where it cannot."""
        write_json(self.key.path, self)

    @classmethod
    def load(cls, key: TableKey) -> "KernelTable":
        """Reads the table for `key`; raises FileNotFoundError where there is none, and ValueError where its file is
        damaged, of another version, or for another key."""
        table = read_json(key.path, cls, "table of kernels", "it is measured again")
        if table.key != key:
            raise ValueError(f"{key.path} is for something else; it is measured again.")
        return table
