"""Who owns which page of a K/V pool: plain Python, of which the device only learns the changes."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


PAGE_COLUMNS = 64
"""Columns of a row that are counted, copied and shared at once. A power of two, as the blocks of columns that a kernel
reads: these do not cross pages."""
EMPTY = 0
"""The page that is read in the place of columns that a row does not have: zeros, since nobody writes it."""


class Change(NamedTuple):
    """What the tables say of a row's page at a `place`: where it is read, and where it is written."""

    row: int
    place: int
    read: int
    written: int


def pages_of(columns: int) -> int:
    """Pages that hold `columns`."""
    return -(-columns // PAGE_COLUMNS)


class Pages:
    """Pages 1 to `count`, and which `rows` have them, in the order of their columns. Page 0 is :data:`EMPTY`, and page
    `count + 1` the waste: what is written there nobody reads.

    Rows that begin alike share the pages of their beginning:

        row 0   7  3  5          shared: 2     page   owners
        row 1   7  3  9  2       shared: 2     7, 3   2        read by both rows, written by none any more
        row 2   4                shared: 0     5, 9, 2, 4      1

    Attributes:
        of_row: the pages of each row.
        shared: how many of its first pages a row shares, or has shared: their columns are known, and whoever computes
            them again writes to the waste.
        waste: that page.
        most: pages that were owned when there were most of them.
    """

    def __init__(self, count: int, rows: int) -> None:
        self.count, self.waste = count, count + 1
        self._free = list(range(count, EMPTY, -1))
        self._owners = [0] * (count + 1)  # rows that have each page
        self._changed: set[tuple[int, int]] = set()
        self.of_row: list[list[int]] = [[] for _ in range(rows)]
        self.shared = [0] * rows
        self.most = 0

    @property
    def free(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    def only_of(self, rows: Sequence[int]) -> int:
        """Number of pages that `rows` have and no other row."""
        found = Counter(page for row in rows for page in self.of_row[row])
        return sum(count == self._owners[page] for page, count in found.items())

    def grow(self, row: int, count: int) -> None:
        """Gives a row as many pages as it lacks of `count`.

        Raises:
            RuntimeError: too few are free.
        """
        own = self.of_row[row]
        if count - len(own) > len(self._free):
            raise RuntimeError(f"row {row} needs {count - len(own)} more pages of K/V, and {self.free} are free")
        for index in range(len(own), count):
            page = self._free.pop()
            self._owners[page] = 1
            own.append(page)
            self._changed.add((row, index))
        self.most = max(self.most, self.count - len(self._free))

    def release(self, row: int, kept: int = 0) -> None:
        """Takes all pages but its first `kept` from a row."""
        own = self.of_row[row]
        for index in range(kept, len(own)):
            self._owners[own[index]] -= 1
            if not self._owners[own[index]]:
                self._free.append(own[index])
            self._changed.add((row, index))
        del own[kept:]
        self.shared[row] = min(self.shared[row], kept)

    def share(self, source: int, destination: int, count: int) -> None:
        """Gives a row without pages the first `count` of another one."""
        self.of_row[destination] = self.of_row[source][:count]
        for index, page in enumerate(self.of_row[destination]):
            self._owners[page] += 1
            self._changed |= {(source, index), (destination, index)}
        self.shared[source] = max(self.shared[source], count)
        self.shared[destination] = count

    def move(self, source: int, destination: int) -> None:
        """Gives all pages of a row to one without pages."""
        own = self.of_row[source]
        self._changed.update((row, index) for row in (source, destination) for index in range(len(own)))
        self.of_row[destination], self.of_row[source] = own, []
        self.shared[destination], self.shared[source] = self.shared[source], 0

    def changes(self) -> list[Change]:
        """What has changed since the last call."""
        found = []
        for row, index in sorted(self._changed):
            own = self.of_row[row]
            read = own[index] if index < len(own) else EMPTY
            is_own = self.shared[row] <= index < len(own)
            found.append(Change(row, index, read, read if is_own else self.waste))
        self._changed.clear()
        return found
