"""Loads modules by name, above all those of papers, when an option or a file needs them. The default loads only
their options (`tests/test_imports.py`)."""

from importlib import import_module
from types import ModuleType
from typing import Any, TypeAlias


Calibration: TypeAlias = Any
"""A profile or a ladder of a paper's room, where the core only passes it on."""


def load(module: str) -> ModuleType:
    """Imports a module of spec_trl by name, such as "papers.specactor.ladder"."""
    return import_module(f"spec_trl.{module}")
