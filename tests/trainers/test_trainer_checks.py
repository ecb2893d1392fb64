"""A TRL or transformers whose private methods changed is refused by one sentence, before any work."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Trainer
from trl import DistillationTrainer, GRPOTrainer, RLOOTrainer

from spec_trl import SpecDistillationTrainer, SpecGMPOTrainer, SpecGRPOTrainer, SpecRLOOTrainer
from spec_trl.trainers import exact_logprobs, trainer_checks
from spec_trl.trainers.speculative_rollouts import SpeculativeRollouts
from spec_trl.trainers.trainer_checks import OVERRIDDEN, READ, check_attributes
from tests.trainers.harness import OTHERS, make_run


KINDS = (SpeculativeRollouts, SpecGRPOTrainer, SpecRLOOTrainer, SpecDistillationTrainer, SpecGMPOTrainer)


def changed(self: Any, prompts: list[Any], images: list[Any]) -> None:
    """Another `_generate`."""


def renamed(self: Any, folder: str) -> None:
    """Another `save_model`."""


def first_swapped(self: Any, inputs: Any, model: Any) -> None:
    """Another `compute_loss`."""


@pytest.mark.parametrize(
    ("of", "name", "method", "difference"),
    [
        (
            GRPOTrainer,
            "_generate",
            changed,
            r"GRPOTrainer._generate takes \(self, prompts, images\), where \(self, prompts\) is",
        ),
        (
            Trainer,
            "save_model",
            renamed,
            r"GRPOTrainer.save_model takes \(self, folder\), where \(self, output_dir, _internal_call\) is",
        ),
        (GRPOTrainer, "compute_loss", first_swapped, "GRPOTrainer.compute_loss takes"),
        (GRPOTrainer, "_tool_call_loop", None, "GRPOTrainer has no _tool_call_loop"),
        (GRPOTrainer, "_tokenize_prompts", None, "GRPOTrainer has no _tokenize_prompts"),
    ],
)
def test_a_changed_method_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: type, name: str, method: Any, difference: str
) -> None:
    monkeypatch.setattr("trl.__version__", "9.9.9")
    if method is None:
        monkeypatch.delattr(of, name)
    else:
        monkeypatch.setattr(of, name, method)
    with pytest.raises(ImportError, match=f"knows trl 1.16 .*trl 9.9.9 .*differ: {difference}.* Install trl>=1.16,<1"):
        make_run(tmp_path)


@pytest.mark.parametrize(
    ("trainer", "of", "name", "method", "difference"),
    [
        ("rloo", RLOOTrainer, "_generate", changed, r"SpecRLOOTrainer knows .* RLOOTrainer._generate takes"),
        ("rloo", RLOOTrainer, "_calculate_rewards", None, "SpecRLOOTrainer .* RLOOTrainer has no _calculate_rewards"),
        ("distillation", DistillationTrainer, "_generate_single_turn", changed, "DistillationTrainer._generate_si"),
        ("distillation", DistillationTrainer, "_tool_call_loop", None, "DistillationTrainer has no _tool_call_loop"),
        ("gmpo", GRPOTrainer, "_generate", changed, "GMPOTrainer._generate takes"),
    ],
)
def test_each_base_class_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: str, of: type, name: str, method: Any, difference: str
) -> None:
    if method is None:
        monkeypatch.delattr(of, name)
    else:
        monkeypatch.setattr(of, name, method)
    with pytest.raises(ImportError, match=difference):
        make_run(tmp_path, **OTHERS[trainer])


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_base_class_lacks_it_does_lack(tmp_path: Path, name: str) -> None:
    """So that no method that comes is left alone without notice."""
    trainer = make_run(tmp_path, **OTHERS[name]).trainer
    base = type(trainer).__mro__[type(trainer).__mro__.index(SpeculativeRollouts) + 1]
    assert not [method for method in trainer.lacking if hasattr(base, method)]
    assert not [attribute for attribute in {*trainer.lacking} & {*READ} if hasattr(trainer, attribute)]
    assert {*trainer.lacking} <= {*OVERRIDDEN, *READ}


def test_what_is_passed_on_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def more(self: Any, inputs: Any, prompts: Any, completions: Any, extra: Any = None) -> None:
        """Another `_calculate_rewards`, whose arguments the trainer does not look at."""

    monkeypatch.setattr(GRPOTrainer, "_calculate_rewards", more)
    monkeypatch.setattr("trl.__version__", "9.9.9")
    make_run(tmp_path)


def test_changed_keywords_and_attributes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError, match="a GRPOTrainer has no _dist. Install"):
        check_attributes(SimpleNamespace(**dict.fromkeys({*READ} - {"_dist"})), GRPOTrainer)
    monkeypatch.setattr(trainer_checks, "unwrap_model_for_generation", lambda model, accelerator, **_: None)
    with pytest.raises(ImportError, match="unwrap_model_for_generation takes no gather_deepspeed3_params, gener"):
        make_run(tmp_path)


def test_the_list_is_complete() -> None:
    """Each method that is in place of one of the base class, and each attribute of it that is read."""
    ours = {name for kind in KINDS for name, value in vars(kind).items() if inspect.isfunction(value)}
    assert {name for name in ours if hasattr(GRPOTrainer, name)} - {"__init__"} == {*OVERRIDDEN}
    assert len([name for name in OVERRIDDEN if name.startswith("_")]) <= 6
    source = inspect.getsource(SpeculativeRollouts)
    others = inspect.getsource(trainer_checks) + inspect.getsource(exact_logprobs)  # which are given the trainer
    for name in READ:
        assert f"self.{name}" in source or f"trainer.{name}" in others or f'"{name}"' in others, name
