"""Files of a checkpoint: whole or not there, readable as older versions wrote them; a damaged one is refused by name
where completions depend on it, else a warning names it. Runs go on from them in later epochs, and after a save that
was killed; `test_training.py` has runs that go on within their first epoch, with all that they had learned."""

import json
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import spec_trl
from spec_trl.generation.drafters.history import HistoryDrafter
from spec_trl.generation.planner.acceptance import Drafts
from spec_trl.generation.planner.clock import VERSION, Clock
from spec_trl.trainers.checkpoint import STATE_FILE, DraftLengthState, RankState, RolloutState, find_checkpoint
from tests.generation.drafters.watching import make_checkpoint
from tests.trainers.harness import Run, tiny_dataset, train


STATE = RolloutState({"train": 3, "eval": 1}, {"self": DraftLengthState(7, 5.5, [5.25, 5.5])})
TIMES = Clock(lambda *_: 1.0).state_dict()
LEDGER = json.loads(json.dumps({"times": TIMES, **Drafts(["self"], [False]).state_dict()}))


def history() -> dict[str, Any]:
    drafter = HistoryDrafter(100)
    drafter.remember([1, 2], [3, 4, 5])
    return drafter.state_dict()


@pytest.mark.parametrize(
    "place",
    [
        "spec_grpo_config.SpecGRPOConfig", "spec_rloo_trainer.SpecRLOOConfig", "spec_gmpo_trainer.SpecGMPOConfig",
        "spec_distillation_trainer.SpecDistillationConfig", "spec_grpo_trainer.SpecGRPOTrainer",
    ],
)  # fmt: skip
def test_training_args_of_earlier_releases_find_their_class(place: str) -> None:
    module, name = place.split(".")
    assert pickle.loads(f"cspec_trl.trainers.{module}\n{name}\n.".encode()) is getattr(spec_trl, name)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    STATE.save(tmp_path)
    assert RolloutState.load(tmp_path) == STATE
    memories: dict[str, Any] = {"history": history(), "tts": {"student": "eagle3"}}
    RankState(memories, LEDGER).save(tmp_path, rank=1)
    found = RankState.load(tmp_path, rank=1)
    assert found.ledger == LEDGER and found.memories["tts"] == memories["tts"]
    assert len(memories["history"]["texts"]) == 3
    for name, part in memories["history"].items():
        assert torch.equal(found.memories["history"][name], part)
    assert {path.name for path in tmp_path.iterdir()} == {
        STATE_FILE, "rollout_acceptance_1.json", "rollout_history_1.pt", "rollout_tts_1.pt",
    }  # fmt: skip
    assert RankState.load(tmp_path, rank=0) == RankState({}, None)  # each rank has its own


def test_older_files(tmp_path: Path) -> None:
    """As json.dumps wrote them, the oldest without draft lengths; a ledger without times."""
    draft_lengths = {"self": {"draft_length": 7, "block_efficiency": 5.5, "window": [5.25, 5.5]}}
    (tmp_path / STATE_FILE).write_text(json.dumps({"rollouts": STATE.rollouts, "draft_lengths": draft_lengths}))
    old = {"version": 2, "methods": {"self": [1.0, 2.0, 3.0, 4.0]}, "prompts": [["k", {"self": [9, 1, 2, 3, 4]}]]}
    (tmp_path / "rollout_acceptance_0.json").write_text(json.dumps(old))
    assert RolloutState.load(tmp_path) == STATE
    assert RankState.load(tmp_path, 0).ledger == old
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
def test_a_damaged_count_is_refused(tmp_path: Path, content: str, message: str) -> None:
    """What is sampled depends on it."""
    (tmp_path / STATE_FILE).write_text(content)
    with pytest.raises(ValueError, match=message):
        RolloutState.load(tmp_path)


def test_a_lost_count_is_said(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=f"{STATE_FILE} does not exist.*counted from 0 again"):
        assert RolloutState.load(tmp_path) is None


DAMAGES: dict[str, Any] = {"half": None, "empty": b"", "garbage": b"\x00garbage" * 9, "{}": b"{}", "[1]": b"[1]"}


@pytest.mark.parametrize("damage", [*DAMAGES, "of something else"])
@pytest.mark.parametrize("name", ["rollout_history_0.pt", "rollout_tts_0.pt", "rollout_acceptance_0.json"])
def test_a_damaged_memory_is_left_out(tmp_path: Path, name: str, damage: str) -> None:
    """With one warning that names the file; the other files are read."""
    RankState({"history": history(), "tts": {"student": "eagle3"}}, LEDGER).save(tmp_path, rank=0)
    path = tmp_path / name
    times = {"version": VERSION, "terms": []}
    whole, other = path.read_bytes(), {"history": [1], "tts": [1], "acceptance": LEDGER | {"times": times}}
    path.write_bytes(DAMAGES.get(damage) if DAMAGES.get(damage) is not None else whole[: len(whole) // 2])
    if damage == "of something else":
        value = other[name.split("_")[1]]
        path.write_text(json.dumps(value)) if path.suffix == ".json" else torch.save(value, path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = RankState.load(tmp_path, 0)
    (said,) = [str(warning.message) for warning in caught]
    assert str(path) in said and "the run goes on without it" in said
    left = {*found.memories, *(["acceptance"] if found.ledger else [])}
    assert left == {"history", "tts", "acceptance"} - {name.split("_")[1]}


# ---- Which checkpoint a run goes on from --------------------------------------------------------------------------


def test_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    for step in (2, 10, 12):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-best").mkdir()
    for given in (None, False, str(tmp_path / "checkpoint-2"), str(tmp_path / "no folder")):
        assert find_checkpoint(given, str(tmp_path)) == given
    assert find_checkpoint(True, str(tmp_path)) == str(tmp_path / "checkpoint-12")
    assert find_checkpoint(True, str(tmp_path / "checkpoint-best")) is True  # transformers says that there is none
    whole, last = tmp_path / "checkpoint-10", tmp_path / "checkpoint-12"
    for half in ('{"epoch": 1', None):  # killed while it was written, or before
        (last / "trainer_state.json").write_text(half) if half else (last / "trainer_state.json").unlink()
        with pytest.warns(UserWarning, match="checkpoint-12 has no readable trainer_state.json.*on from .*point-10,"):
            assert find_checkpoint(True, str(tmp_path)) == str(whole)
        with pytest.raises(
            ValueError, match="checkpoint-12 has no readable .* Resume from .*checkpoint-10, the newest"
        ):
            find_checkpoint(str(last), "elsewhere")
    for step in (2, 10):
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match="checkpoint-12 has no readable .* Train from the start"):
        find_checkpoint(True, str(tmp_path))


# ---- Runs that go on ------------------------------------------------------------------------------------------------


SAVING: dict[str, Any] = dict(
    save_strategy="steps", save_steps=1, max_steps=5, per_device_train_batch_size=4,
    trainer={"train_dataset": tiny_dataset(2)},
)  # fmt: skip
"""Two steps an epoch."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("whole"), "history", **SAVING)


@pytest.mark.parametrize("step", [1, 3])
def test_later_epochs_go_on_with_their_prompts(tmp_path: Path, whole: Run, step: int) -> None:
    """TRL's sampler draws a new order in each epoch, and begins with the first epoch's in a resumed run."""
    rest = train(tmp_path, "history", resume=whole.folder / f"checkpoint-{step}", **SAVING)
    assert rest.completions == whole.completions[step:] and rest.losses == whole.losses[step:]
    assert all(torch.equal(weight, rest.weights[name]) for name, weight in whole.weights.items())
    assert rest.metric("rollout/draft_length") and whole.trainer.state.epoch == 2.5


def test_a_run_goes_on_without_damaged_memories(tmp_path: Path, whole: Run) -> None:
    checkpoint = shutil.copytree(whole.folder / "checkpoint-3", tmp_path / "checkpoint-3")
    path = checkpoint / "rollout_history_0.pt"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.warns(UserWarning, match="rollout_history_0.pt is damaged .*goes on without it"):
        rest = train(tmp_path / "rest", "history", resume=checkpoint, **SAVING)
    assert rest.completions == whole.completions[3:] and rest.losses == whole.losses[3:]
    (checkpoint / STATE_FILE).unlink()
    with pytest.warns(UserWarning, match=f"{STATE_FILE} does not exist.*counted from 0 again"):
        other = train(tmp_path / "other", "none", resume=checkpoint, **SAVING)
    assert other.completions != whole.completions[3:]


def test_a_run_goes_on_without_a_damaged_drafter(tmp_path: Path) -> None:
    options: dict[str, Any] = dict(
        SAVING, max_steps=2, draft_length=[2], assistant_model=make_checkpoint(tmp_path / "drafter", "eagle3", 48)
    )
    first = train(tmp_path / "first", "eagle3", **options)
    (first.folder / "checkpoint-1" / "drafter_adaptation.pt").write_bytes(b"PK\x03\x04 and no more")
    with pytest.warns(UserWarning, match="drafter_adaptation.pt is damaged .*goes on without it"):
        rest = train(tmp_path / "rest", "eagle3", resume=first.folder / "checkpoint-1", **options)
    assert rest.completions == first.completions[1:] and rest.metric("drafter/loss")


def test_a_checkpoint_that_was_being_saved(tmp_path: Path, whole: Run) -> None:
    """resume_from_checkpoint=True goes on from the newest whole one."""
    folder = shutil.copytree(whole.folder, tmp_path / "run")
    for name in ("checkpoint-4", "checkpoint-5"):
        (folder / name / "trainer_state.json").unlink()
    with pytest.warns(UserWarning, match="checkpoint-5 has no readable trainer_state.json.*goes on from .*point-3, "):
        rest = train(folder, "history", resume=True, **SAVING)
    assert rest.completions == whole.completions[3:]
