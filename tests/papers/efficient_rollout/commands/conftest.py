"""The fixtures of the command line's tests."""

from tests.cli.conftest import files, folder, model, profile  # noqa: F401
