"""The releases that the suite has run with are the same wherever they are named."""

import tomllib
from pathlib import Path

from spec_trl.generation.engine.requirements import TRANSFORMERS
from spec_trl.trainers.trainer_checks import KNOWN


def test_bounds_agree() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert {"torch>=2.11,<2.16", f"transformers{TRANSFORMERS}", "trl>=1.16,<1.17"} <= set(project["dependencies"])
    assert TRANSFORMERS == ">=5.17,<5.25" and KNOWN == "trl 1.16 and transformers 5.17 to 5.24"
