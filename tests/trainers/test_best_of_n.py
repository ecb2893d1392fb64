"""Best-of-N in training: the policy never notices, and what was learned of the drafters outlives the run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spec_trl import SpecGRPOConfig
from spec_trl.generation.drafters.ngram import NgramDrafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.drafters.small_model import SmallModelDrafter
from spec_trl.generation.engine.drafter import Drafter
from spec_trl.scheduling.best_of_n import BestOfN
from spec_trl.scheduling.ladder import Ladder
from spec_trl.scheduling.race_judge import RaceJudge
from spec_trl.scheduling.toggle import SpeculationToggle
from tests.trainers.conftest import Asked
from tests.trainers.harness import Run, assert_same_training, make_trainer, tiny_dataset, tiny_policy, train


RACING = dict(best_of_n_budget=1000, draft_lengths=[2, 3], max_completion_length=24)


@pytest.fixture(autouse=True)
def profiled(level_ladder: Asked, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Everybody drafts and races."""
    monkeypatch.setattr(SpeculationToggle, "_judge", lambda toggle: None)
    monkeypatch.setattr(RaceJudge, "_judge", lambda judge, batch: None)
    return level_ladder


def run_best_of_n(output_dir: Path, resume: Path | None = None, **options: Any) -> tuple[Any, Run]:
    """The trainer after a run, and the run."""
    trainer, run = make_trainer(output_dir, "best_of_n", **options)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    run.weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return trainer, run


def test_training_is_that_of_none(tmp_path: Path, profiled: Asked) -> None:
    options: dict[str, Any] = dict(max_steps=5, trainer={"train_dataset": tiny_dataset(8)}, **RACING)
    trainer, run = run_best_of_n(tmp_path, **options)
    options = {name: value for name, value in options.items() if not name.startswith("best_of_n")}
    assert_same_training(run, train(tmp_path, "none", **options))
    assert profiled == [(["self", "history", "ngram"], 8, [2, 3])]  # once
    assert Ladder.load(tmp_path / "roofline_profile.ladder.json").methods == ("self", "history", "ngram")
    wins = {name: run.metric(f"rollout/race_wins_{name}") for name in ("self", "history", "ngram")}
    assert all(len(counts) == 5 for counts in wins.values())
    assert sum(sum(counts) for counts in wins.values()) > 0
    assert trainer._acceptance.state_dict()["rollout"] == 5


def test_resumed_run_goes_on_with_what_it_knew(
    tmp_path: Path, steady_clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = dict(save_strategy="steps", save_steps=2, trainer={"train_dataset": tiny_dataset(8)}, **RACING)
    begun: list[tuple[dict[str, Any], list[tuple[int, float]]]] = []
    begin = BestOfN.begin

    def watch(control: BestOfN, capacity: int, prompts: list[str]) -> None:
        state = control.history.state_dict()
        begin(control, capacity, prompts)
        begun.append((state, [(c.draft_length, c.block_efficiency) for c in control.candidates]))

    monkeypatch.setattr(BestOfN, "begin", watch)
    _, whole = run_best_of_n(tmp_path / "whole", max_steps=4, **saving)
    uninterrupted, begun[:] = list(begun), []
    _, first = run_best_of_n(tmp_path / "out", max_steps=2, **saving)
    saved = json.loads((tmp_path / "out" / "checkpoint-2" / "rollout_acceptance_0.json").read_text())
    _, rest = run_best_of_n(tmp_path / "out", tmp_path / "out" / "checkpoint-2", max_steps=4, **saving)
    assert whole.completions == first.completions + rest.completions
    # What rounds of the first two rollouts took is not saved, so the last one may choose otherwise.
    assert len(begun) == 4 and begun[:3] == uninterrupted[:3]
    assert begun[2][0] == saved and saved["methods"]
    assert any(further_judged for *_, further_judged in saved["methods"].values())


@pytest.fixture
def run_one_step(tmp_path: Path) -> Callable[..., tuple[list[Drafter], Run]]:
    def run(**options: Any) -> tuple[list[Drafter], Run]:
        trainer, run = run_best_of_n(tmp_path, **{"max_steps": 2} | RACING | options)
        return trainer._drafters, run

    return run


OneStep = Callable[..., tuple[list[Drafter], Run]]


def test_effect_of_best_of_n_drafters(run_one_step: OneStep) -> None:
    drafters, _ = run_one_step(best_of_n_drafters=["ngram", "self"])
    assert [type(drafter) for drafter in drafters] == [NgramDrafter, SelfDrafter]


def test_effect_of_best_of_n_assistants(run_one_step: OneStep, tmp_path: Path) -> None:
    path = str(tmp_path / "assistant")
    tiny_policy(seed=1, num_hidden_layers=1).save_pretrained(path)
    for given in ({"best_of_n_assistants": {"model": path}}, {"assistant_model": path}):
        drafters, _ = run_one_step(best_of_n_drafters=["ngram", "model"], **given)
        assert [type(drafter) for drafter in drafters] == [NgramDrafter, SmallModelDrafter]


def wins(run: Run) -> float:
    return sum(sum(run.metric(f"rollout/race_wins_{name}")) for name in ("self", "history", "ngram"))


def test_effect_of_best_of_n_budget(run_one_step: OneStep) -> None:
    assert wins(run_one_step()[1]) > 0 == wins(run_one_step(best_of_n_budget=1)[1])


def test_effect_of_best_of_n_race(run_one_step: OneStep) -> None:
    assert wins(run_one_step(best_of_n_race=False)[1]) == 0


def test_effect_of_best_of_n_tolerance(run_one_step: OneStep, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    make = BestOfN.__init__
    monkeypatch.setattr(BestOfN, "__init__", lambda self, *args: asked.append(args) or make(self, *args))
    run_one_step(best_of_n_tolerance=0.25, max_steps=1)
    assert asked[0][5] == 0.25


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"best_of_n_drafters": ["self", "auto"]}, r"best_of_n_drafters=\['self', 'auto'\] must be one or more"),
        ({"best_of_n_drafters": ["model"]}, r"assistant_model=None with best_of_n_drafters=\['model'\]"),
        ({"assistant_model": "some/drafter"}, "assistant_model serves exactly one of them"),
        ({"verification": "rejection"}, 'verification="rejection" does not go with assistant_strategy="best_of_n"'),
        (
            {"best_of_n_drafters": ["eagle3", "dflash"], "best_of_n_assistants": {"eagle3": "a", "dflash": "b"}},
            r"has \['eagle3', 'dflash'\], and drafter_adaptation=True trains one drafter",
        ),
    ],
)
def test_bad_values(tmp_path: Path, bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpecGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, assistant_strategy="best_of_n", **bad)
