"""Results of the TTS benchmark on disk, cell by cell: a run that is killed keeps the cells it finished."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class Store:
    """The cells of one result file, written after each of them, whole or not at all.

    Args:
        path: of the JSON file.
        settings: what all cells have in common and what decides their content.
        fresh: forget what is there.

    Raises:
        ValueError: the file holds cells that were made with other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], fresh: bool = False) -> None:
        self.path, self.settings = path, dict(settings)
        self.cells: dict[str, Any] = {}
        if fresh or not path.exists():
            return
        kept = json.loads(path.read_text())
        plain = json.loads(json.dumps(self.settings))  # tuples are lists in a file
        names = sorted({*kept["settings"], *plain})
        changed = [name for name in names if kept["settings"].get(name) != plain.get(name)]
        if changed:
            then = {name: kept["settings"].get(name) for name in changed}
            raise ValueError(
                f"{path.name} holds results with other settings, {then} instead of "
                f"{ {name: plain.get(name) for name in changed} }: give the same ones, another --suffix, or --fresh."
            )
        self.cells = kept["cells"]

    def cell(self, key: str, made_with: str, make: Callable[[], Any]) -> Any:
        """The cell `key`: the one that is kept, or what `make` returns, kept from now on.

        Args:
            key: its place.
            made_with: everything else that decides its content; a kept cell that was made with something else goes.
            make: makes it, as plain data.
        """
        digest = hashlib.sha256(made_with.encode()).hexdigest()[:16]
        if key not in self.cells or self.cells[key]["made_with"] != digest:
            self.cells[key] = {"made_with": digest, "data": make()}
            self.write({})
        return self.cells[key]["data"]

    def write(self, more: Mapping[str, Any]) -> None:
        """Writes settings, cells and `more`."""
        head = json.dumps({**more, "settings": self.settings}, indent=1)
        cells = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in self.cells.items())
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_name(f".{self.path.name}.new")
        fresh.write_text(f'{head[:-2]},\n "cells": {{\n{cells}\n }}\n}}\n')
        os.replace(fresh, self.path)
