"""Files of a checkpoint: whole or not there, readable as older versions wrote them, refused by name when damaged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_trl.trainers.checkpoint import STATE_FILE, DraftLengthState, RankState, RolloutState


STATE = RolloutState({"train": 3, "eval": 1}, {"self": DraftLengthState(7, 5.5, [5.25, 5.5])})


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    STATE.save(tmp_path)
    assert RolloutState.load(tmp_path) == STATE
    memories: dict[str, Any] = {"history": {"texts": [torch.tensor([1, 2])]}, "tts": {"student": "eagle3"}}
    RankState(memories, {"rollout": 2, "methods": {}}).save(tmp_path, rank=1)
    found = RankState.load(tmp_path, rank=1)
    assert found.ledger == {"rollout": 2, "methods": {}} and found.memories["tts"] == memories["tts"]
    assert torch.equal(found.memories["history"]["texts"][0], memories["history"]["texts"][0])
    assert {path.name for path in tmp_path.iterdir()} == {
        STATE_FILE, "rollout_acceptance_1.json", "rollout_history_1.pt", "rollout_tts_1.pt",
    }  # fmt: skip
    assert RankState.load(tmp_path, rank=0) == RankState({}, None)  # each rank has its own
    assert RolloutState.load(tmp_path / "elsewhere") is None


def test_older_files(tmp_path: Path) -> None:
    """As json.dumps wrote them, the oldest without draft lengths."""
    draft_lengths = {"self": {"draft_length": 7, "block_efficiency": 5.5, "window": [5.25, 5.5]}}
    (tmp_path / STATE_FILE).write_text(json.dumps({"rollouts": STATE.rollouts, "draft_lengths": draft_lengths}))
    (tmp_path / "rollout_acceptance_0.json").write_text(json.dumps({"version": 2, "rollout": 4}))
    assert RolloutState.load(tmp_path) == STATE
    assert RankState.load(tmp_path, 0).ledger == {"version": 2, "rollout": 4}
    (tmp_path / STATE_FILE).write_text(json.dumps({"rollouts": STATE.rollouts}))
    assert RolloutState.load(tmp_path) == RolloutState(STATE.rollouts, {})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"rollouts": {"tra', f"{STATE_FILE} is not a valid state of rollouts: .*; resume from another checkpoint"),
        ('{"rollouts": {"train": "3"}}', "rollouts.train: .*found '3'"),
        ('{"rollouts": {}, "draft_lengths": {"self": {"draft_length": 5}}}', "draft_lengths.self.block_efficiency"),
    ],
)
def test_damaged_files(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / STATE_FILE).write_text(content)
    with pytest.raises(ValueError, match=message):
        RolloutState.load(tmp_path)
    (tmp_path / "rollout_acceptance_0.json").write_text("[1]")
    with pytest.raises(ValueError, match="rollout_acceptance_0.json is not a valid ledger of rounds"):
        RankState.load(tmp_path, 0)
