"""The self-drafter is requantized once per optimizer step, before the first generation behind it (ER Algorithm 1)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import PreTrainedModel
from trl import GRPOTrainer

from spec_trl.generation.drafters.autoregressive import NetworkDrafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.drafter import DraftSession
from spec_trl.generation.engine.noise import RoundNoise
from spec_trl.generation.engine.verification import Proposal
from spec_trl.quantization.awq import ActivationStatistics
from tests.trainers.harness import make_trainer, tiny_dataset, tiny_policy


@dataclass
class Watch:
    """What happened, in terms of `global_step`: when rollouts were generated, refreshes done and drafters stale."""

    generations: list[int] = field(default_factory=list)
    refreshes: list[int] = field(default_factory=list)
    stale: list[int] = field(default_factory=list)


def is_fresh(drafter: SelfDrafter, policy: PreTrainedModel) -> bool:
    """Whether the drafter's packed weights are those that a new drafter of the live policy would get."""
    layers = SelfDrafter(policy).quantized.layers
    assert layers.keys() == drafter.quantized.layers.keys()
    return all(
        torch.equal(dict(drafter.quantized.layers[name].packed.named_buffers())[buffer], expected)
        for name, layer in layers.items()
        for buffer, expected in layer.packed.named_buffers()
    )


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[GRPOTrainer], Watch]]:
    """Watches a trainer; no generation of it may run with a drafter other than the present policy's."""
    seen = Watch()

    def start(trainer: GRPOTrainer) -> Watch:
        begin, refresh, draft = SelfDrafter.begin, SelfDrafter.refresh, NetworkDrafter.propose

        def watched_begin(drafter: SelfDrafter, session: DraftSession) -> None:
            seen.generations.append(trainer.state.global_step)
            begin(drafter, session)

        def watched_draft(drafter: SelfDrafter, draft_length: int, noise: RoundNoise | None) -> Proposal:
            if not is_fresh(drafter, trainer.model):
                seen.stale.append(trainer.state.global_step)
            return draft(drafter, draft_length, noise)

        def watched_refresh(drafter: SelfDrafter, statistics: ActivationStatistics | None = None) -> None:
            seen.refreshes.append(trainer.state.global_step)
            refresh(drafter, statistics)

        monkeypatch.setattr(SelfDrafter, "begin", watched_begin)
        monkeypatch.setattr(NetworkDrafter, "propose", watched_draft)
        monkeypatch.setattr(SelfDrafter, "refresh", watched_refresh)
        return seen

    yield start
    assert seen.generations
    assert seen.stale == []


@pytest.mark.parametrize(
    ("schedule", "generations"),
    [
        (dict(max_steps=4), [0, 1, 2, 3]),
        (dict(max_steps=3, gradient_accumulation_steps=2), [0, 1, 2]),
        (dict(max_steps=3, gradient_accumulation_steps=2, steps_per_generation=1), [0, 0, 1, 1, 2, 2]),
        (dict(max_steps=6, num_iterations=2), [0, 2, 4]),
        (dict(max_steps=6, gradient_accumulation_steps=2, steps_per_generation=4), [0, 2, 4]),
    ],
    ids=["each-step", "accumulation", "generations-within-a-step", "num_iterations", "steps_per_generation"],
)
def test_one_refresh_per_step_that_generates(
    tmp_path: Path, watch: Callable[[GRPOTrainer], Watch], schedule: dict[str, int], generations: list[int]
) -> None:
    trainer, _ = make_trainer(tmp_path, **schedule)
    seen = watch(trainer)
    trainer.train()
    assert seen.generations == generations
    assert seen.refreshes == sorted(set(generations) - {0})  # the drafter is made from the weights of step 0


def test_rollouts_that_never_speculate_do_not_pay_for_a_refresh(
    tmp_path: Path, watch: Callable[[GRPOTrainer], Watch], profiles: dict[str, str]
) -> None:
    trainer, run = make_trainer(tmp_path, max_steps=4, sd_toggle="roofline", roofline_profile=profiles["does not"])
    seen = watch(trainer)
    trainer.train()
    assert seen.generations == [0, 1, 2, 3] and seen.refreshes == []
    assert run.metric("rollout/drafter_refresh_seconds")[1:] == [0.0] * 3


def test_evaluation_shares_the_refresh_with_training(tmp_path: Path, watch: Callable[[GRPOTrainer], Watch]) -> None:
    trainer, _ = make_trainer(
        tmp_path, max_steps=4, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4,
        trainer={"eval_dataset": tiny_dataset(2)},
    )  # fmt: skip
    seen = watch(trainer)
    trainer.train()
    assert seen.generations == [0, 1, 2, 2, 2, 3, 4, 4]
    assert seen.refreshes == [1, 2, 3, 4]


def test_weights_that_change_without_a_step(tmp_path: Path, watch: Callable[[GRPOTrainer], Watch]) -> None:
    trainer, _ = make_trainer(tmp_path, max_steps=1)
    seen = watch(trainer)
    trainer.train()
    trainer.train()  # `global_step` starts at 0 again, where the first run generated
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter *= 1.5
    trainer.train()
    assert seen.generations == [0, 0, 0]


def test_best_model_at_the_end(tmp_path: Path, watch: Callable[[GRPOTrainer], Watch]) -> None:
    trainer, _ = make_trainer(
        tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        per_device_eval_batch_size=4, load_best_model_at_end=True, metric_for_best_model="eval_num_tokens",
        greater_is_better=False, trainer={"eval_dataset": tiny_dataset(1)},
    )  # fmt: skip
    watch(trainer)
    trainer.train()
    assert trainer.state.best_global_step == 1  # not the last one, whose drafter lies ready
    trainer.evaluate()


def test_adapters_are_merged_into_the_drafter_and_not_into_the_policy(tmp_path: Path) -> None:
    policy = tiny_policy()
    before = {name: parameter.clone() for name, parameter in policy.named_parameters()}
    adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer, _ = make_trainer(tmp_path, policy=policy, learning_rate=5e-2, trainer={"peft_config": adapters})
    trainer.train()
    base = trainer.model.get_base_model()
    for name, parameter in before.items():
        module, _, leaf = name.rpartition(".")
        module = base.get_submodule(module)
        assert torch.equal(getattr(module, "base_layer", module).get_parameter(leaf), parameter), name
    trainer.evaluate(tiny_dataset(8))
    assert is_fresh(trainer._drafters[0], base)
    assert trainer.model.peft_config  # still a policy with adapters
