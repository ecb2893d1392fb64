"""The README's Python runs as it is, but for the model, which is the shipped one here."""

import re
from pathlib import Path

import pytest

from tests.conftest import STORY_MODEL


MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
README = (Path(__file__).parents[2] / "README.md").read_text()
SCRIPTS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("script", SCRIPTS, ids=["train", "generate"])
def test_it_runs(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MODEL in script
    monkeypatch.chdir(tmp_path)  # where the trainer's output goes
    names: dict[str, object] = {"__name__": "__main__"}
    exec(script.replace(MODEL, str(STORY_MODEL)), names)
    if "trainer" in names:
        assert (tmp_path / "out" / "rollout_log.jsonl").exists()
    else:
        assert len(names["out"].sequences) == 2
