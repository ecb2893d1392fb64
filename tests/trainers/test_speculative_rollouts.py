"""RLOO, distillation and GMPO roll out speculatively, train as without drafts, and go on from checkpoints."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOTrainer

import spec_trl
from spec_trl import SpecDistillationTrainer, SpecGRPOTrainer, SpecRLOOTrainer
from tests.generation.drafters.watching import make_checkpoint
from tests.trainers.conftest import STEPS, schedule
from tests.trainers.harness import OTHERS, Run, assert_same_training, make_run, tiny_dataset, train
from tests.trainers.tool_task import add, conversations, make_chat_tokenizer


each_trainer = pytest.mark.parametrize("name", OTHERS)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Each without drafts; two micro-steps in a step, evaluations in between."""
    return {
        name: train(tmp_path_factory.mktemp(name), "none", **schedule(**options, save_strategy="no"))
        for name, options in OTHERS.items()
    }


def drafted(run: Run) -> int:
    """Number of draft tokens in training rollouts."""
    return sum(depth.drafted for record in run.log.of("train") for depth in record.per_depth.values())


@each_trainer
def test_completions_losses_and_weights_are_those_without_drafts(
    plain: dict[str, Run], tmp_path: Path, name: str
) -> None:
    run = train(tmp_path / "self", **schedule(**OTHERS[name]))
    assert_same_training(run, plain[name])
    assert len(run.completions) == STEPS < len(run.rewarded)
    assert len({str(completions) for completions in run.completions}) == STEPS
    assert drafted(run) > 100 and drafted(plain[name]) == 0
    assert min(record.block_efficiency for record in run.log.of("train")) > 2  # the copy follows the policy
    assert len(run.metric("rollout/block_efficiency")) == STEPS == len(run.log.steps)
    assert len(run.metric("eval_rollout/seconds")) == len(run.log.of("eval")) == 2
    assert run.lines[-1].startswith("spec_trl verdict: ")
    assert run.log.header.settings == json.loads(json.dumps(run.trainer.args.settings()))
    resumed = train(tmp_path / "resumed", resume=run.folder / "checkpoint-2", **schedule(**OTHERS[name]))
    half = len(run.rewarded) - len(resumed.rewarded)
    assert 0 < half < len(run.rewarded) and resumed.rewarded == run.rewarded[half:]
    assert all(weight.equal(run.weights[name]) for name, weight in resumed.weights.items())


@each_trainer
def test_a_learned_drafter_is_trained_along(tmp_path: Path, name: str) -> None:
    options = dict(assistant_model=make_checkpoint(tmp_path / "eagle3", "eagle3", 48))
    found = {
        bool(how): train(tmp_path / str(bool(how)), "eagle3", drafter_adaptation=how, **OTHERS[name], **options)
        for how in ({"learning_rate": 1e-2}, False)
    }
    assert_same_training(found[True], found[False])
    assert len(found[True].metric("drafter/agreement")) == 3 and not found[False].metric("drafter/agreement")
    assert drafted(found[True]) > 0
    accepted = [run.metric("rollout/acceptance_rate") for run in found.values()]
    assert accepted[0][0] == accepted[1][0] and accepted[0] != accepted[1]  # the first rollout comes before a step


@each_trainer
def test_names(plain: dict[str, Run], name: str) -> None:
    trainer = plain[name].trainer
    args = trainer.args
    assert {"trl", name, "spec_trl"} <= {*trainer.model.model_tags}
    assert args.trainer.lower() == f"spec{name}trainer" and isinstance(trainer, getattr(spec_trl, args.trainer))
    assert type(args).__name__.lower() == f"spec{name}config" and type(args) is getattr(spec_trl, type(args).__name__)
    module, _, base = args.base_trainer.rpartition(".")
    assert isinstance(trainer, getattr(import_module(module), base))


def test_distillation_with_tools(tmp_path: Path) -> None:
    found, asked = {}, []
    for strategy in ("none", "self"):
        tokenizer = make_chat_tokenizer()
        found[strategy] = train(
            tmp_path / strategy, strategy, tokenizer=tokenizer, max_completion_length=48, max_steps=2,
            max_tool_calling_iterations=3, **OTHERS["distillation"],
            trainer={"tools": [add], "train_dataset": conversations(*["a3+b8", "c5", "k", "z9"] * 2)},
        )  # fmt: skip
        asked.append(tokenizer.asked)
    assert_same_training(found["self"], found["none"])
    turns = [call.request_ids for call in found["self"].calls]
    assert len(turns) > 2 and len({request for turn in turns for request in turn}) == sum(map(len, turns))
    assert asked[0] == asked[1] and any(asked[0]) and not all(asked[0])
    assert drafted(found["self"]) > 50


def test_what_a_loss_cannot_serve_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="exact_logprobs=True does not go with a loss without log-probabilities"
    ):
        make_run(tmp_path, exact_logprobs=True, **OTHERS["distillation"])


def test_arguments_are_those_of_trl(tmp_path: Path) -> None:
    """Positional ones too; without a config there is a default one, and one of another trainer is refused."""
    policy = make_run(tmp_path, **OTHERS["rloo"]).trainer
    given = (policy.model, lambda completions, **_: [0.0] * len(completions))
    args, processor = policy.args, policy.processing_class
    made = SpecRLOOTrainer(*given, args, tiny_dataset(), None, processor)
    assert made.train_dataset.column_names == ["prompt"] and made.args is args
    with pytest.raises(ValueError, match="args is a SpecRLOOConfig; SpecDistillationTrainer needs a SpecDistillatio"):
        SpecDistillationTrainer(policy.model, policy.model, args, tiny_dataset(), None, processor)


def test_classes_of_users_between_ours_and_those_of_trl(tmp_path: Path) -> None:
    class Counting(GRPOTrainer):
        losses = 0

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.losses += 1
            return super().compute_loss(*args, **kwargs)

    class Both(SpecGRPOTrainer, Counting):
        pass

    run = train(tmp_path, kind=Both, max_steps=1)
    assert run.trainer.losses == 1 and drafted(run) > 0
