"""Cells of the TTS benchmark on disk, one by one: a run that is killed keeps the cells it finished."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spec_trl.json_files import write_atomically


class Store:
    """The cells of one result, written after each of them, whole or not at all.

    Args:
        path: of the JSON file.
        settings: what all cells have in common and what decides their content.
        fresh: forget what is there.

    Raises:
        ValueError: the file holds cells that were made with other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], fresh: bool = False) -> None:
        self.path, self.settings = path, json.loads(json.dumps(settings))  # tuples are lists in a file
        self.cells: dict[str, Any] = {}
        if fresh or not path.exists():
            return
        kept = json.loads(path.read_text())
        before, names = kept["settings"], {*kept["settings"], *self.settings}
        changed = sorted(name for name in names if before.get(name) != self.settings.get(name))
        if changed:
            then, now = ({name: each.get(name) for name in changed} for each in (before, self.settings))
            raise ValueError(
                f"{path.name} holds results with other settings, {then} instead of {now}: give the same ones, another "
                "--suffix, or --fresh."
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
            write_atomically(self.path, json.dumps({"settings": self.settings, "cells": self.cells}))
        return self.cells[key]["data"]
