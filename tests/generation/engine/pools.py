"""K/V in the pages of a pool, on any device, watched: each page belongs to whom the host says, and what rows share
stays as it is."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_trl.generation.engine.forwards import runner_choice
from spec_trl.generation.engine.kv import base, cache, pages, row_memory
from spec_trl.generation.engine.kv.pages import PagedCache
from spec_trl.generation.engine.kv.row_memory import RowNeeds


def install_pool(monkeypatch: pytest.MonkeyPatch, columns: int = 4, most: int | None = None) -> list[PagedCache]:
    """Generations from now on keep K/V in pages of so many columns, `most` of them; returns their caches."""
    caches: list[PagedCache] = []
    for module in (base, cache, pages, row_memory):
        monkeypatch.setattr(module, "PAGE_COLUMNS", columns)
    for module in (runner_choice, row_memory):
        monkeypatch.setattr(module, "takes_pool", lambda *_: True)
    if most is not None:
        monkeypatch.setattr(RowNeeds, "pages_that_fit", lambda self, rows, free: most)
    make = PagedCache.__init__

    def made(self: PagedCache, *given: Any) -> None:
        make(self, *given)
        caches.append(self)

    monkeypatch.setattr(PagedCache, "__init__", made)
    shared: dict[tuple[int, int], list[Tensor]] = {}  # what pages with several owners hold, by cache and page

    def watch(name: str) -> None:
        method = getattr(PagedCache, name)

        def watched(self: PagedCache, *given: Any, **more: Any) -> None:
            check(self, shared)
            method(self, *given, **more)
            check(self, shared)

        monkeypatch.setattr(PagedCache, name, watched)

    for name in ("reserve", "copy_rows", "move_rows"):
        watch(name)
    return caches


def check(cache: PagedCache, shared: dict[tuple[int, int], list[Tensor]]) -> None:
    """What the tables say, and that a page with several owners is not written."""
    own = cache.pages
    owners = Counter(page for row in own.of_row for page in row)
    assert not {pages.EMPTY, own.waste} & set(owners) and len(owners) + own.free == own.count
    if cache.tables is not None:
        expected = torch.full_like(cache.tables, pages.EMPTY)  # [2, rows, pages]
        expected[1] = own.waste
        for row, of_row in enumerate(own.of_row):
            expected[0, row, : len(of_row)] = torch.tensor(of_row)
            expected[1, row, own.shared[row] : len(of_row)] = torch.tensor(of_row[own.shared[row] :])
        assert torch.equal(cache.tables, expected)
        written = cache.tables[1][cache.tables[1] != own.waste].tolist()
        assert len(set(written)) == len(written) and all(owners[page] == 1 for page in written)
    for key in [key for key in list(shared) if key[0] == id(cache) and owners[key[1]] < 2]:
        del shared[key]
    layers = [layer for layer in cache.layers if layer.is_initialized]
    assert not any(pool[pages.EMPTY].any() for layer in layers for pool in (layer.keys, layer.values))
    for page in [page for page, count in owners.items() if count > 1]:
        now = [pool[page].clone() for layer in layers for pool in (layer.keys, layer.values)]
        before = shared.setdefault((id(cache), page), now)
        assert all(map(torch.equal, now, before)), f"page {page} was written, which {owners[page]} rows share"
