"""Test-Time Speculation in training: the policy never notices, and what was learned outlives the run."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from spec_trl import SpecGRPOConfig
from spec_trl.generation.configuration import SpeculativeConfig
from spec_trl.generation.drafters.dflash.drafter import DFlashDrafter
from spec_trl.generation.drafters.eagle3.drafter import Eagle3Drafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.drafters.small_model import SmallModelDrafter
from spec_trl.generation.drafters.tts import drafter
from spec_trl.generation.drafters.tts.drafter import DistilledDrafter
from spec_trl.generation.drafters.tts.row_adapters import RowAdam
from spec_trl.trainers.run_log import read_run
from tests.generation.drafters.test_feature_drafter import make_checkpoint
from tests.trainers.harness import (
    Run,
    assert_same_training,
    make_trainer,
    tiny_dataset,
    tiny_policy,
    train,
    train_plainly,
)


VOCABULARY = 48  # of the tiny policy
STUDENTS = {"self": SelfDrafter, "model": SmallModelDrafter, "eagle3": Eagle3Drafter, "dflash": DFlashDrafter}
FAST = dict(tts_learning_rate=1e-3, draft_lengths=[3])
STATISTICS = ("acceptance_rate", "block_efficiency", "draft_length", "drafter_updates", "target_entropy")


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """The fields that choose a kind of drafter for the tiny policy."""
    folders: dict[str, str | None] = {"self": None}

    def choose(kind: str) -> dict[str, Any]:
        if kind not in folders:
            folder = tmp_path_factory.mktemp("drafters") / kind
            if kind == "model":
                tiny_policy(seed=0, num_hidden_layers=1).save_pretrained(folder)
                folders[kind] = str(folder)
            else:
                folders[kind] = make_checkpoint(folder, kind, VOCABULARY)
        return dict(tts_drafter=kind, assistant_model=folders[kind])

    return choose


Named = Callable[[str], dict[str, Any]]


def run_tts(output_dir: Path, resume: Path | None = None, **options: Any) -> tuple[DistilledDrafter, Run, Any]:
    """The drafter after a run, the run, and the trainer."""
    trainer, run = make_trainer(output_dir, "tts", **{**FAST, **options})
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    run.weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return trainer._drafters[0], run, trainer


def learned(drafter: DistilledDrafter) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in drafter._learner.tensors]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def steps_taken(drafter: DistilledDrafter) -> int:
    """Optimizer steps since the learner began."""
    moments = drafter._learner.state_dict()["moments"]
    return int(moments["steps"].max() if "steps" in moments else moments[0]["step"])


# ---- the policy is left alone ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "asynchronous"), [("self", False), ("model", True), ("eagle3", False), ("eagle3", True), ("dflash", True)]
)
def test_the_policy_trains_as_without(kind: str, asynchronous: bool, tmp_path: Path, named: Named) -> None:
    """Completions, losses and weights, to the last bit, while the drafter learns; what learns is nothing of the
    policy's optimizer's, and is recorded."""
    none = train_plainly()
    options = dict(tts_asynchronous=asynchronous, tts_stride=2 if asynchronous else 1)
    drafter, run, trainer = run_tts(tmp_path / "tts", **options, **named(kind))
    assert_same_training(none, run)
    assert type(drafter.student) is STUDENTS[kind]
    policys = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert policys == {id(p) for p in trainer.model.parameters()}
    assert drafter._learner.tensors and not policys & {id(tensor) for tensor in drafter._learner.tensors}
    assert trainer._adaptation is None  # that is another way to learn

    log = read_run(tmp_path / "tts")
    assert log.header.strategy == "tts" and log.header.settings["tts_drafter"] == kind
    seconds, waited = run.metric("rollout/seconds"), run.metric("rollout/drafter_update_seconds")
    updates = run.metric("rollout/drafter_updates")
    assert len(updates) == len(waited) == len(run.metric("rollout/acceptance_rate")) == 3
    for record, total, wait, count in zip(log.of("train"), seconds, waited, updates, strict=True):
        assert 0 < wait < total
        # One update in each round that drafted, or in every second one.
        rounds = sum(point.rounds for point in record.points if point.draft_length)
        assert count == (math.ceil(rounds / 2) if asynchronous else rounds)
        assert record.drafter == "tts" and 0 < record.phase_seconds["learn"] < total
    assert bool(run.metric("rollout/drafter_refresh_seconds")) is (kind == "self")


def lora() -> dict[str, Any]:
    return {"peft_config": LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")}


VARIANTS: dict[str, Callable[[], dict[str, Any]]] = {
    "accumulation": lambda: dict(gradient_accumulation_steps=2, per_device_train_batch_size=4),
    "reused batches": lambda: dict(num_iterations=2, steps_per_generation=2, max_steps=4),
    "gradient checkpointing": lambda: dict(gradient_checkpointing=True),
    "LoRA": lambda: dict(trainer=lora(), learning_rate=5e-2),
    "rows that come in": lambda: dict(rollout_batch_size=3),
}  # fmt: skip


@pytest.mark.parametrize(
    ("variant", "kind", "scope"),
    [
        ("accumulation", "eagle3", "request"),
        ("reused batches", "self", "run"),
        ("gradient checkpointing", "eagle3", "run"),
        ("LoRA", "self", "run"),  # the quantized copy under the corrections takes the adapter in
        ("rows that come in", "self", "request"),
        ("rows that come in", "eagle3", "request"),
    ],
)
def test_variants_of_training(variant: str, kind: str, scope: str, tmp_path: Path, named: Named) -> None:
    none = train_plainly(**VARIANTS[variant]())
    _, run, _ = run_tts(tmp_path / kind, tts_scope=scope, **VARIANTS[variant](), **named(kind))
    assert_same_training(none, run)
    assert min(run.metric("rollout/drafter_updates")) > 0


@pytest.mark.parametrize("kind", ["self", pytest.param("dflash", marks=pytest.mark.slow)])
def test_it_learns(kind: str, tmp_path: Path, named: Named) -> None:
    """On a policy that stays: more of what it drafts is accepted than of what it would have drafted untaught."""
    options = dict(max_steps=12, learning_rate=1e-12, temperature=0.5, **named(kind))
    options |= dict(trainer={"train_dataset": tiny_dataset(2)})
    if kind == "self":
        options["draft_quantization"] = "rtn-w4-g32"
    _, run, _ = run_tts(tmp_path / "tts", **options, tts_learning_rate=3e-3)
    _, still, _ = run_tts(tmp_path / "still", **options, tts_learning_rate=1e-30, tts_stride=10**6)
    accepted, before = (sum(of.metric("rollout/acceptance_rate")[-4:]) for of in (run, still))
    assert accepted > before * (1.02 if kind == "self" else 1.3)


def test_a_failure_ends_no_training(tmp_path: Path, named: Named, monkeypatch: pytest.MonkeyPatch) -> None:
    none = train_plainly()
    monkeypatch.setattr(drafter, "distillation_loss", lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="ZeroDivisionError"):
        _, run, _ = run_tts(tmp_path / "tts", save_strategy="steps", save_steps=3, **named("dflash"))
    assert_same_training(none, run)


# ---- the policy's copy under what is learned ------------------------------------------------------------------------


def test_the_copy_is_refreshed_once_per_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refreshed: list[int] = []
    refresh = SelfDrafter.refresh

    def watched(drafter: SelfDrafter, statistics: Any = None) -> None:
        refreshed.append(trainer.state.global_step)
        refresh(drafter, statistics)

    monkeypatch.setattr(SelfDrafter, "refresh", watched)
    trainer, run = make_trainer(tmp_path, "tts", max_steps=4, **FAST)
    trainer.train()
    assert refreshed == [1, 2, 3]
    seconds = run.metric("rollout/drafter_refresh_seconds")
    assert len(seconds) == 4 and min(seconds) > 0
    assert trainer._drafters[0].student.refresh_seconds == 0


def test_the_copy_gets_activation_statistics(tmp_path: Path) -> None:
    drafter, _, _ = run_tts(tmp_path, max_steps=2, draft_quantization="awq-w4-g128")
    layers = drafter.student.quantized.layers.values()
    assert any(not torch.equal(layer.inverse_scales, torch.ones_like(layer.inverse_scales)) for layer in layers)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("self", {}),
        ("model", {}),
        ("self", dict(tts_asynchronous=True, tts_stride=2)),
        ("eagle3", dict(tts_asynchronous=True, tts_stride=2)),
        ("dflash", dict(tts_anchor="initial")),
    ],
    ids=str,
)
def test_resumed_run_goes_on_bit_for_bit(kind: str, how: dict[str, Any], tmp_path: Path, named: Named) -> None:
    options = how | named(kind)
    if how.get("tts_anchor"):
        options["tts_anchor_weight"] = 0.1
    saving = dict(save_strategy="steps", save_steps=2)
    whole, run, _ = run_tts(tmp_path / "whole", max_steps=4, **saving, **options)
    rest, last, _ = run_tts(tmp_path / "rest", tmp_path / "whole" / "checkpoint-2", max_steps=4, **options)
    assert equal(learned(whole), learned(rest)) and steps_taken(whole) == steps_taken(rest) > 4
    assert run.completions[2:] == last.completions
    for name in STATISTICS:
        assert run.metric(f"rollout/{name}")[2:] == last.metric(f"rollout/{name}"), name
    assert len(set(run.metric("rollout/acceptance_rate"))) > 1


def test_weights_narrower_than_what_learns(tmp_path: Path, named: Named) -> None:
    """In bfloat16 the drafter's weights are the rounded image of what is saved."""
    options = dict(bf16=True, **named("eagle3"))

    def policy() -> Any:
        return tiny_policy().to(torch.bfloat16)

    saving = dict(save_strategy="steps", save_steps=2)
    whole, run, _ = run_tts(tmp_path / "whole", max_steps=3, policy=policy(), **saving, **options)
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    rest, last, _ = run_tts(tmp_path / "rest", checkpoint, max_steps=3, policy=policy(), **options)
    assert learned(rest)[0].dtype is torch.float32 and equal(learned(whole), learned(rest))
    assert run.metric("rollout/acceptance_rate")[2:] == last.metric("rollout/acceptance_rate")


def test_other_scopes_leave_nothing(tmp_path: Path, named: Named, recwarn: Any) -> None:
    options = dict(tts_scope="rollout", **named("eagle3"))
    drafter, _, _ = run_tts(tmp_path, max_steps=1, save_strategy="steps", save_steps=1, **options)
    assert not list(tmp_path.glob("checkpoint-1/rollout_tts*")) and drafter.state_dict() == {}
    run_tts(tmp_path, resume=tmp_path / "checkpoint-1", max_steps=2, **options)
    assert not [warning for warning in recwarn if "Test-Time Speculation" in str(warning.message)]


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (dict(kind="dflash"), dict(kind="eagle3"), "that of a drafter of kind 'dflash'"),
        (dict(kind="self", tts_rank=4), dict(kind="self", tts_rank=6), "tensors for .* of other shapes"),
        (dict(kind="self", tts_scope="rollout"), dict(kind="self"), "it is empty"),
    ],
    ids=["another drafter", "another rank", "nothing saved"],
)
def test_a_state_that_does_not_fit(
    before: dict[str, Any], after: dict[str, Any], reason: str, tmp_path: Path, named: Named
) -> None:
    def options(given: dict[str, Any]) -> dict[str, Any]:
        rest = {name: value for name, value in given.items() if name != "kind"}
        return rest | named(given["kind"])

    run_tts(tmp_path / "out", max_steps=1, save_strategy="steps", save_steps=1, **options(before))
    with pytest.warns(UserWarning, match=f"saved state of Test-Time Spec.*kind '{after['kind']}': .*{reason}") as told:
        drafter, run, _ = run_tts(
            tmp_path / "out", resume=tmp_path / "out" / "checkpoint-1", max_steps=2, **options(after)
        )
    assert len([warning for warning in told if "Test-Time Speculation" in str(warning.message)]) == 1
    assert len(run.completions) == 1 and steps_taken(drafter) == sum(run.metric("rollout/drafter_updates"))


def test_a_resumed_run_takes_its_own_learning_rate(tmp_path: Path, named: Named) -> None:
    """A tenth of the old one: one update of Adam does not move as far as that."""
    options = dict(tts_stride=1000, **named("eagle3"))
    first, _, _ = run_tts(tmp_path, max_steps=1, save_strategy="steps", save_steps=1, **options)
    before = learned(first)
    resumed = dict(resume=tmp_path / "checkpoint-1", max_steps=2, tts_learning_rate=1e-4)
    drafter, _, _ = run_tts(tmp_path, **options | resumed)
    moved = max(float((a - b).abs().max()) for a, b in zip(before, learned(drafter), strict=True))
    assert 0 < moved < 2e-4


@pytest.mark.parametrize("kind", ["self", "dflash"])
def test_what_is_not_used_yet_is_saved_again(kind: str, tmp_path: Path, named: Named) -> None:
    """A state waits for the next generation, which makes the learner; what was given stays as it was."""
    drafter, _, trainer = run_tts(tmp_path, max_steps=1, **named(kind))
    state, steps = copy.deepcopy(drafter.state_dict()), steps_taken(drafter)
    before = copy.deepcopy(state)
    drafter.load_state_dict(state)
    kept = drafter.state_dict()
    assert kept.keys() == {"student", "tensors", "moments"} and equal(kept["tensors"], before["tensors"])
    trainer.evaluate(tiny_dataset(2))
    assert steps_taken(drafter) > steps
    assert equal(kept["tensors"], before["tensors"])
    for name in ("tensors", "moments"):
        torch.testing.assert_close(state[name], before[name], rtol=0, atol=0)


# ---- evaluation, metrics, records -----------------------------------------------------------------------------------


def test_evaluation_teaches_too_and_changes_no_training(tmp_path: Path, named: Named) -> None:
    def evaluated() -> dict[str, Any]:
        trainer = {"eval_dataset": tiny_dataset(4)}
        return dict(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4, trainer=trainer)

    none = train(tmp_path / "none", "none", **evaluated())
    drafter, run, _ = run_tts(tmp_path / "tts", **evaluated(), **named("eagle3"))
    assert_same_training(none, run)
    in_training, in_evaluation = run.metric("rollout/drafter_updates"), run.metric("eval_rollout/drafter_updates")
    assert len(in_evaluation) == 3 and min(in_evaluation) > 0
    assert steps_taken(drafter) > sum(in_training)  # eval metrics are means over its rollouts


def test_no_such_metrics_without(tmp_path: Path) -> None:
    run = train(tmp_path, "self", max_steps=1)
    assert not run.metric("rollout/drafter_updates") and not run.metric("rollout/drafter_update_seconds")


# ---- fields ---------------------------------------------------------------------------------------------------------


def test_defaults_are_those_of_generate_but_for_the_scope(tmp_path: Path) -> None:
    config = SpecGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False).speculative_config()
    ours, theirs = vars(config), vars(SpeculativeConfig())
    own = [name for name in theirs if name.startswith("tts_")]
    assert len(own) == 9 and (ours.pop("tts_scope"), theirs.pop("tts_scope")) == ("run", "request")
    assert all(ours[name] == theirs[name] for name in own if name != "tts_scope")


def test_effect_of_tts_learning_rate(tmp_path: Path, named: Named) -> None:
    rate, options = 1e-5, named("eagle3")
    drafter, _, _ = run_tts(tmp_path, max_steps=1, tts_stride=1000, tts_learning_rate=rate, **options)
    first = Eagle3Drafter(options["assistant_model"], tiny_policy())
    pairs = zip(learned(drafter), first.trained(first.network), strict=True)
    moved = max(float((now - then.detach()).abs().max()) for now, then in pairs)
    assert moved == pytest.approx(rate, rel=1e-3)  # Adam's first step


def test_effect_of_tts_scope(tmp_path: Path, named: Named) -> None:
    def run(scope: str) -> tuple[DistilledDrafter, list[float]]:
        drafter, run, _ = run_tts(tmp_path, max_steps=2, tts_scope=scope, **named("eagle3"))
        return drafter, run.metric("rollout/drafter_updates")

    drafter, updates = run("run")
    assert steps_taken(drafter) == sum(updates) and drafter._learner.rows == 1
    drafter, updates = run("rollout")
    assert steps_taken(drafter) == updates[-1] and drafter._learner.rows == 1
    drafter, updates = run("request")
    assert drafter._learner.rows >= 8


def test_effect_of_tts_stride(tmp_path: Path, named: Named) -> None:
    def updates(stride: Any) -> tuple[float, int]:
        folder = tmp_path / str(stride)
        _, run, _ = run_tts(folder, max_steps=1, max_completion_length=48, tts_stride=stride, **named("eagle3"))
        (record,) = read_run(folder).of("train")
        rounds = sum(point.rounds for point in record.points if point.draft_length)
        return run.metric("rollout/drafter_updates")[0], rounds

    for stride, every in (("4", 4), ("adaptive", 5)):  # an adaptive one starts there
        count, rounds = updates(stride)
        assert rounds > 5 and count == math.ceil(rounds / every)


def test_effect_of_tts_drafter(tmp_path: Path, named: Named) -> None:
    for kind, student in STUDENTS.items():
        assert type(run_tts(tmp_path, max_steps=1, **named(kind))[0].student) is student


def test_effect_of_tts_steps(tmp_path: Path, named: Named) -> None:
    taken = [
        steps_taken(run_tts(tmp_path, max_steps=1, tts_stride=1000, tts_steps=steps, **named("dflash"))[0])
        for steps in (1, 3)
    ]
    assert taken == [1, 3]


def test_effect_of_tts_anchor_weight(tmp_path: Path, named: Named) -> None:
    plain, anchored = (
        learned(run_tts(tmp_path, max_steps=1, tts_steps=2, tts_anchor_weight=weight, **named("dflash"))[0])
        for weight in (0.0, 5.0)
    )
    assert not equal(plain, anchored)


def test_effect_of_tts_anchor(tmp_path: Path, named: Named) -> None:
    current, initial = (
        learned(run_tts(tmp_path, max_steps=1, tts_anchor_weight=5.0, tts_anchor=anchor, **named("dflash"))[0])
        for anchor in ("current", "initial")
    )
    assert not equal(current, initial)


def test_effect_of_tts_asynchronous(tmp_path: Path, named: Named) -> None:
    """At a stride of 3 an update is drafted with three rounds later: the same updates, of other canvases."""

    def after(asynchronous: bool) -> tuple[list[Tensor], list[float]]:
        options = dict(max_steps=1, tts_stride=3, tts_asynchronous=asynchronous, **named("eagle3"))
        drafter, run, _ = run_tts(tmp_path, **options)
        return learned(drafter), run.metric("rollout/drafter_updates")

    (beside, count), (between, same) = after(True), after(False)
    assert count == same and count[0] > 1 and not equal(beside, between)


def test_effect_of_tts_rank(tmp_path: Path) -> None:
    drafter, _, _ = run_tts(tmp_path, max_steps=1, tts_rank=2)
    assert isinstance(drafter._learner._adam, RowAdam)
    assert {min(tensor.shape[1:]) for tensor in learned(drafter)} == {2}


def test_verification_by_rejection(tmp_path: Path, named: Named) -> None:
    _, run, _ = run_tts(tmp_path, max_steps=1, verification="rejection", **named("eagle3"))
    assert min(run.metric("rollout/drafter_updates")) > 0


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"assistant_model": "gpt2"}, "strategy='tts', tts_drafter='self' with assistant_model='gpt2': assistant_"),
        ({"tts_drafter": "model"}, "strategy='tts', tts_drafter='model' with assistant_model=None: assistant_"),
        ({"tts_drafter": "eagle3"}, "tts_drafter='eagle3' with assistant_model=None"),
        ({"tts_drafter": "dflash"}, "tts_drafter='dflash' with assistant_model=None"),
        ({"tts_drafter": "ngram"}, r"^tts_drafter='ngram' is unknown; choose one of \['self', 'model'"),
        ({"tts_learning_rate": 0.0}, "^tts_learning_rate=0.0 is out of range"),
        ({"tts_scope": "epoch"}, r"^tts_scope='epoch' is unknown; choose one of \['request', 'rollout', 'run'\]"),
        ({"tts_steps": 0}, "^tts_steps=0 is out of range"),
        ({"tts_stride": "0"}, "^tts_stride=0 is out of range"),
        ({"tts_stride": "often"}, "^tts_stride='often'"),
        ({"tts_anchor_weight": -1.0}, "^tts_anchor_weight=-1.0 is out of range"),
        ({"tts_anchor": "best"}, r"^tts_anchor='best' is unknown; choose one of \['current', 'initial'\]"),
        ({"tts_rank": 0}, "^tts_rank=0 is out of range"),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_bad_values(tmp_path: Path, bad: dict[str, Any], message: str) -> None:
    settings = dict(output_dir=str(tmp_path), assistant_strategy="tts", use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match=message):
        SpecGRPOConfig(**settings | bad)
