"""`"auto"` in training: the policy never notices, and what was learned of the drafters outlives the run."""

import json
from pathlib import Path
from typing import Any

import pytest

from spec_trl.measuring import fill_ladder
from spec_trl.measuring import profile_cache as profiles_module
from spec_trl.scheduling.best_of_n import BestOfN
from spec_trl.scheduling.ladder import LadderCosts
from spec_trl.scheduling.roofline import Roofline
from spec_trl.scheduling.toggle import SpeculationToggle
from tests.trainers.conftest import Asked
from tests.trainers.harness import assert_same_training, make_trainer, tiny_dataset, train


@pytest.fixture
def eager(level_ladder: Asked, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What rounds of the tiny policy take has no say."""
    monkeypatch.setattr(SpeculationToggle, "_judge", lambda toggle: None)
    return level_ladder


def test_training_is_that_of_none(tmp_path: Path, level_ladder: Asked) -> None:
    """Rounds have their say here: whatever they make of it."""
    options: dict[str, Any] = dict(max_steps=10, max_completion_length=48, trainer={"train_dataset": tiny_dataset(8)})
    assert_same_training(train(tmp_path, "auto", **options), train(tmp_path, "none", **options))
    assert level_ladder == [(["self", "history"], 8, [5, 7, 9, 11])]  # once


def test_metrics(tmp_path: Path, eager: Asked) -> None:
    run = train(tmp_path, "auto", max_steps=4, draft_lengths=[2, 3], trainer={"train_dataset": tiny_dataset(8)})
    shares = {name: run.metric(f"rollout/drafted_by_{name}") for name in ("self", "history")}
    assert all(len(values) == 4 for values in shares.values())
    assert sum(map(sum, shares.values())) > 0
    assert not any("race_wins" in name for entry in run.logs for name in entry)


def test_each_rollout_chooses_its_draft_length(tmp_path: Path, eager: Asked) -> None:
    """By the ladder alone, on which the longest is best; what moves a controller moves nothing."""
    options = dict(draft_lengths=[1, 4], initial_draft_length=1, draft_length_down=0.9, draft_length_patience=1)
    trainer, _ = make_trainer(tmp_path, "auto", save_strategy="steps", save_steps=3, **options)
    trainer.train()
    assert [candidate.draft_length for candidate in trainer._control.candidates] == [4, 4]
    state = json.loads((tmp_path / "checkpoint-3" / "rollout_state.json").read_text())
    assert {saved["draft_length"] for saved in state["draft_lengths"].values()} == {1}


def test_resumed_run_goes_on_with_what_it_knew(
    tmp_path: Path, eager: Asked, steady_clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = dict(
        save_strategy="steps", save_steps=2, trainer={"train_dataset": tiny_dataset(8)}, draft_lengths=[2, 3]
    )
    known: list[dict[str, Any]] = []
    begin = BestOfN.begin

    def watch(control: BestOfN, capacity: int, prompts: list[str]) -> None:
        known.append(control.history.state_dict())
        begin(control, capacity, prompts)

    monkeypatch.setattr(BestOfN, "begin", watch)
    whole = train(tmp_path / "whole", "auto", max_steps=4, **saving)
    uninterrupted, known[:] = list(known), []
    first = train(tmp_path / "out", "auto", max_steps=2, **saving)
    rest = train(tmp_path / "out", "auto", tmp_path / "out" / "checkpoint-2", max_steps=4, **saving)
    assert whole.completions == first.completions + rest.completions
    assert known == uninterrupted and known[2]["methods"]


@pytest.mark.parametrize(("toggle", "kind"), [("roofline", Roofline), ("always", LadderCosts)])
def test_effect_of_sd_toggle(
    tmp_path: Path, level_ladder: Asked, profiles: dict[str, str], toggle: str, kind: type
) -> None:
    """Who predicts rounds; a ladder there is in both cases."""
    profile = {"roofline_profile": profiles["pays"]} if toggle == "roofline" else {}
    trainer, _ = make_trainer(tmp_path, "auto", max_steps=1, sd_toggle=toggle, **profile)
    trainer.train()
    assert {type(candidate.roofline) for candidate in trainer._control.candidates} == {kind}
    assert len(level_ladder) == 1


def test_never_profiles_nothing(tmp_path: Path, level_ladder: Asked) -> None:
    run = train(tmp_path, "auto", sd_toggle="never")
    assert_same_training(run, train(tmp_path, "none"))
    assert level_ladder == []


def test_rollouts_fill_the_ladder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default nothing is profiled; once each drafter was tried, acceptance by prompt chooses."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("something was profiled before the first token")

    monkeypatch.setattr(profiles_module, "calibrate", fail)
    monkeypatch.setattr(fill_ladder, "build_ladder", fail)
    options: dict[str, Any] = dict(max_steps=8, max_completion_length=48, trainer={"train_dataset": tiny_dataset(8)})
    trainer, run = make_trainer(tmp_path, "auto", sd_toggle="measured", **options)
    assert type(trainer.args).sd_toggle == "measured"
    trainer.train()
    assert isinstance(trainer._control, BestOfN)
    assert run.completions == train(tmp_path, "none", **options).completions
