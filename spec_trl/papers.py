"""Loads modules of the two paper folders, `efficient_rollout` and `specactor`, by name, when an option, a command or a
calibrated file needs them. The default never loads them (`tests/test_imports.py`)."""

from importlib import import_module
from types import ModuleType


def load(module: str) -> ModuleType:
    """Imports a module of this package by name, such as "specactor.ladder"."""
    return import_module(f"{__package__}.{module}")
