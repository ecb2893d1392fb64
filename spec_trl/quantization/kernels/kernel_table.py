"""What each kernel was measured to take on a layer of one shape, and the choice among the kernels. Plain Python."""

import dataclasses
import hashlib
import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ...json_files import write_atomically


VERSION = 1  # raise it when a kernel of ours changes: older tables are then measured again
ROWS = (1, 2, 4, 8, 16, 32, 64)  # rows of x at which kernels are timed
SMALL_ROWS = (1, 2, 4, 8)  # those that count in the choice: drafting has few

Times = dict[int, float]  # rows of x → seconds


def cache_directory() -> Path:
    """Where tables and compiled kernels are kept: under SPEC_TRL_CACHE, or the user's cache directory."""
    home = os.environ.get("SPEC_TRL_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "spec_trl" / "kernels"


@dataclass(frozen=True)
class TableKey:
    """What a table is valid for.

    Attributes:
        device: the GPU's name.
        software: versions of torch and of the packages that the timed kernels come from.
        layer: shape, bits, group and dtypes.
        kernels: names of the kernels that were timed.
    """

    device: str
    software: str
    layer: str
    kernels: str

    @property
    def file_name(self) -> str:
        """A readable file name that no other key has."""
        text = "_".join(dataclasses.astuple(self))
        readable = re.sub(r"[^A-Za-z0-9.+-]+", "-", f"{self.device}_{self.layer}")[:120].strip("-")
        return f"{readable}_{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"


@dataclass(frozen=True)
class KernelChoice:
    """A kernel's name, and the rows of x up to which it is faster than the dense layer."""

    kernel: str
    max_rows: int


@dataclass(frozen=True)
class KernelTable:
    """Seconds of one call.

    Attributes:
        dense: of the policy's own layer.
        kernels: of each kernel, by its name.
    """

    dense: Times
    kernels: dict[str, Times]

    def max_rows(self, kernel: str) -> int:
        """The most rows measured up to which, at each number of rows measured, `kernel` beats the dense layer."""
        best = 0
        for rows in sorted(self.dense):
            if not self.kernels[kernel][rows] < self.dense[rows]:
                break
            best = rows
        return best

    def choose(self) -> KernelChoice | None:
        """The kernel that is fastest at SMALL_ROWS, in geometric mean, where the dense layer runs beyond its max_rows.

        None where each is slower than the dense layer already with one row.
        """

        def small(kernel: str) -> float:
            limit = self.max_rows(kernel)
            return math.fsum(
                math.log(self.kernels[kernel][rows] if rows <= limit else self.dense[rows])
                for rows in SMALL_ROWS
                if rows in self.dense
            )

        useful = [kernel for kernel in self.kernels if self.max_rows(kernel)]
        if not useful:
            return None
        best = min(useful, key=lambda kernel: (small(kernel), -self.max_rows(kernel)))
        return KernelChoice(best, self.max_rows(best))

    def save(self, path: Path, key: TableKey) -> None:
        """Writes the table as JSON; a reader never sees half of it.

        Raises:
            OSError: the file cannot be written.
        """
        content = {"version": VERSION, "key": dataclasses.asdict(key)} | dataclasses.asdict(self)
        write_atomically(path, json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path, key: TableKey) -> "KernelTable":
        """Reads what `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is damaged, of another version, or for another key.
        """
        try:
            content = json.loads(path.read_text())
            if (content["version"], content["key"]) != (VERSION, dataclasses.asdict(key)):
                raise ValueError("it is of another version, or for something else")
            return cls(_times(content["dense"]), {name: _times(times) for name, times in content["kernels"].items()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a table of kernels: {error}") from None


def _times(content: dict[str, float]) -> Times:
    times = {int(rows): float(seconds) for rows, seconds in content.items()}
    if tuple(sorted(times)) != ROWS or not all(0 < seconds < math.inf for seconds in times.values()):
        raise ValueError(f"{content} are not positive times for {list(ROWS)} rows")
    return times
