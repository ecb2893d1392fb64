"""The way to the rooms of two papers, `efficient_rollout` and `specactor`: by name, once an option, a command or a
file that was calibrated asks for them. The default never loads them (`tests/test_imports.py`)."""

from importlib import import_module
from types import ModuleType


def load(module: str) -> ModuleType:
    """The module of this package that is named so, such as "specactor.ladder"."""
    return import_module(f"{__package__}.{module}")
