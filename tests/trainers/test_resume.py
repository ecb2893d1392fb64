"""Going on from checkpoints: in later epochs, with files damaged, and after a save that was killed.
`test_training.py` has runs that go on within their first epoch, with all that they had learned."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_trl.trainers.checkpoint import STATE_FILE
from tests.generation.drafters.watching import make_checkpoint
from tests.trainers.harness import Run, tiny_dataset, train


SAVING: dict[str, Any] = dict(
    save_strategy="steps", save_steps=1, max_steps=5, per_device_train_batch_size=4,
    trainer={"train_dataset": tiny_dataset(2)},
)  # fmt: skip
"""Two steps an epoch."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("whole"), "history", **SAVING)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
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
        SAVING, max_steps=2, draft_lengths=[2], assistant_model=make_checkpoint(tmp_path / "drafter", "eagle3", 48)
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
