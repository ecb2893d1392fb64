"""A learned drafter that follows the policy: what it learns from, what it must leave alone, where it goes on from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from spec_trl.drafter_training import adaptation
from spec_trl.drafter_training.adaptation import DrafterAdaptation, check_adaptation, target_view
from spec_trl.drafter_training.sequence_loss import SequenceLoss, TargetView
from spec_trl.generation.drafters.dflash.drafter import DFlashDrafter
from spec_trl.generation.drafters.eagle3.drafter import Eagle3Drafter
from spec_trl.trainers.run_log import read_run
from tests.generation.drafters.eagle3 import reference
from tests.generation.drafters.test_feature_drafter import STRATEGIES, make_checkpoint
from tests.trainers.harness import (
    Run,
    assert_same_training,
    make_trainer,
    tiny_dataset,
    tiny_policy,
    train,
    train_plainly,
)


ROOT = Path(__file__).parents[2]
VOCABULARY = 48  # of the tiny policy
FAST = dict(drafter_learning_rate=1e-3)
KINDS = {"eagle3": Eagle3Drafter, "dflash": DFlashDrafter}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Random drafters for the tiny policy, by strategy."""
    return {strategy: make_checkpoint(tmp_path_factory.mktemp(strategy), strategy, VOCABULARY) for strategy in KINDS}


def weights(drafter: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in drafter.network.state_dict().items()}


def differ(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    assert one.keys() == other.keys()
    return {name for name in one if not torch.equal(one[name], other[name])}


def trained(output_dir: Path, strategy: str, checkpoint: str, **options: Any) -> tuple[Any, Run]:
    """The drafter after a run, and the run."""
    trainer, run = make_trainer(output_dir, strategy, assistant_model=checkpoint, **{**FAST, **options})
    trainer.train()
    run.weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return trainer._drafters[0], run


@pytest.fixture
def views(monkeypatch: pytest.MonkeyPatch) -> list[TargetView]:
    """What each update learned from, rehearsals left out."""
    seen: list[TargetView] = []
    original = adaptation.target_view

    def remember(*args: Any) -> TargetView:
        seen.append(original(*args))
        return seen[-1]

    monkeypatch.setattr(adaptation, "target_view", remember)
    return seen


# ---- the policy is left alone ---------------------------------------------------------------------------------------


def lora() -> dict[str, Any]:
    return {"peft_config": LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")}


VARIANTS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "accumulation": lambda: dict(gradient_accumulation_steps=2, per_device_train_batch_size=4),
    "reused batches": lambda: dict(num_iterations=2, steps_per_generation=2, max_steps=6),
    "gradient checkpointing": lambda: dict(gradient_checkpointing=True),
    "reentrant": lambda: dict(
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}
    ),
    "LoRA": lambda: dict(trainer=lora(), learning_rate=5e-2),
    "reference model": lambda: dict(beta=0.1, trainer=lora()),
    "truncated left out": lambda: dict(mask_truncated_completions=True),
}  # fmt: skip


@pytest.mark.parametrize(("strategy", "variant"), [(STRATEGIES[i % 2], name) for i, name in enumerate(VARIANTS)])
def test_the_policy_trains_as_without(
    strategy: str, variant: str, tmp_path: Path, checkpoints: dict[str, str], views: list[TargetView]
) -> None:
    """Completions, losses and weights, to the last bit, while the drafter learns from every micro-batch."""
    options = [dict(max_steps=3) | VARIANTS[variant]() for _ in range(2)]  # a LoRA config is written to
    none = train_plainly(**options[0])
    drafter, run = trained(tmp_path / "adapted", strategy, checkpoints[strategy], **options[1])
    assert_same_training(none, run)
    before = weights(KINDS[strategy](checkpoints[strategy], tiny_policy()))
    assert len(differ(before, weights(drafter))) > 8
    assert len(views) == options[1]["max_steps"] * options[1].get("gradient_accumulation_steps", 1)


def test_a_drafter_that_stays_as_it_is(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    options = dict(save_strategy="steps", save_steps=1, max_steps=1, drafter_adaptation=False)
    drafter, run = trained(tmp_path, "dflash", checkpoints["dflash"], **options)
    assert_same_training(train_plainly(max_steps=1), run)
    assert not differ(weights(DFlashDrafter(checkpoints["dflash"], tiny_policy())), weights(drafter))
    assert not [name for entry in run.logs for name in entry if name.startswith("drafter/")]
    assert not list(tmp_path.glob("checkpoint-1/drafter*"))


def test_dropout(tmp_path: Path) -> None:
    """In the policy's own forward it is live, and its random numbers are not drawn from."""

    def policy() -> GPT2LMHeadModel:
        torch.manual_seed(0)
        sizes = dict(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2)
        tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
        return GPT2LMHeadModel(GPT2Config(**sizes, **tokens, resid_pdrop=0.3)).double()

    checkpoint = make_checkpoint(tmp_path / "drafter", "dflash", VOCABULARY)
    options = dict(disable_dropout=False)
    none = train(tmp_path, "none", policy=policy(), **options)
    _, run = trained(tmp_path, "dflash", checkpoint, policy=policy(), **options)
    assert_same_training(none, run)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_of_it_is_left_on_the_policy(strategy: str, tmp_path: Path, checkpoints: dict[str, str]) -> None:
    """No hook, in the backward pass either: gradient checkpointing runs the forward a second time there. And the
    optimizers are apart."""
    left: list[int] = []
    trainer, _ = make_trainer(tmp_path, strategy, assistant_model=checkpoints[strategy], max_steps=2)

    def count() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in trainer.model.modules())

    before = count()
    trainer.model.lm_head.weight.register_hook(lambda _: left.append(count()))
    trainer.train()
    assert left == [before] * 2
    policys = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    own = {id(p) for p in trainer._drafters[0].network.parameters()}
    drafters = {id(p) for group in trainer._adaptation._optimizer.param_groups for p in group["params"]}
    assert policys == {id(p) for p in trainer.model.parameters()}
    assert drafters <= own and not drafters & policys
    assert type(trainer._adaptation._optimizer) is torch.optim.AdamW


# ---- what it learns from --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "checkpointing"), [("eagle3", False), ("dflash", True)])
def test_the_view_is_what_the_policy_sees_of_each_sequence(
    strategy: str, checkpointing: bool, tmp_path: Path, checkpoints: dict[str, str], views: list[TargetView]
) -> None:
    policy = tiny_policy()
    drafter, run = trained(
        tmp_path, strategy, checkpoints[strategy], policy=policy, max_steps=1, gradient_checkpointing=checkpointing
    )
    (view,) = views
    before = tiny_policy()  # the weights that the forward ran with
    completions = sorted(run.completions[0])
    assert view.tokens.shape[0] == len(completions) == 8 and view.first.unique().numel() > 1
    found = []
    for row in range(8):
        length, first = int(view.is_real[row].sum()), int(view.first[row])
        assert view.is_real[row].tolist() == [True] * length + [False] * (view.tokens.shape[1] - length)
        tokens = view.tokens[row, :length]
        found.append(tokens[first:].tolist())
        with torch.no_grad():
            # Norms and rotations are float32 in Llama, at other positions behind padding.
            states = before.model(tokens[None], output_hidden_states=True).hidden_states  # of [1, length, H]
        features = torch.cat([states[index][0] for index in drafter.feature_layers], dim=-1)
        torch.testing.assert_close(view.features[row, :length], features, rtol=0, atol=1e-4)
        torch.testing.assert_close(view.hidden[row, :length], states[-1][0], rtol=0, atol=1e-4)
        assert not view.features[row, length:].any() and not view.hidden[row, length:].any()
    assert sorted(found) == completions
    assert not view.features.requires_grad and not view.hidden.requires_grad


def test_padding_that_holds_nan() -> None:
    inputs = {
        "prompt_ids": torch.tensor([[0, 5], [6, 7]]), "prompt_mask": torch.tensor([[0, 1], [1, 1]]),
        "completion_ids": torch.tensor([[8, 9], [3, 0]]), "completion_mask": torch.tensor([[1, 1], [1, 0]]),
    }  # fmt: skip
    state = torch.arange(8.0).view(2, 4, 1)
    padded = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1) == 0
    view = target_view(inputs, {1: state.masked_fill(padded[..., None], torch.nan), 2: -state}, (2, 1))
    assert view.tokens[:, :2].tolist() == [[5, 8], [6, 7]] and view.tokens.shape == (2, 3)
    assert view.features.tolist() == [[[-1, 1], [-2, 2], [-3, 3]], [[-4, 4], [-5, 5], [-6, 6]]]
    assert view.hidden[..., 0].tolist() == [[-1, -2, -3], [-4, -5, -6]]
    assert view.first.tolist() == [1, 2]


def test_evaluation_teaches_nothing(tmp_path: Path, checkpoints: dict[str, str], views: list[TargetView]) -> None:
    trainer, run = make_trainer(
        tmp_path, "eagle3", assistant_model=checkpoints["eagle3"], max_steps=2, **FAST, eval_strategy="steps",
        eval_steps=1, per_device_eval_batch_size=4, trainer={"eval_dataset": tiny_dataset(2)},
    )  # fmt: skip
    trainer.evaluate()
    before = weights(trainer._drafters[0])
    trainer.train()
    assert len(views) == 2
    after = weights(trainer._drafters[0])
    trainer.evaluate()
    assert trainer._adaptation._seen is None
    assert differ(before, after) and not differ(after, weights(trainer._drafters[0]))
    assert not run.metric("eval_drafter/loss")


def test_masked_completions_teach_nothing(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    """Every completion is cut off and masked: no step, and no word about it."""
    options = dict(max_completion_length=2, mask_truncated_completions=True, max_steps=1)
    no_end = dict(generation_kwargs={"suppress_tokens": [2]})
    drafter, run = trained(tmp_path, "eagle3", checkpoints["eagle3"], **options, **no_end)
    assert all(len(ids) == 2 and 2 not in ids for ids in run.completions[0])
    assert not differ(weights(drafter), weights(Eagle3Drafter(checkpoints["eagle3"], tiny_policy())))
    assert run.metric("drafter/update_seconds") and not run.metric("drafter/loss")


@pytest.mark.parametrize("strategy", ["eagle3", pytest.param("dflash", marks=pytest.mark.slow)])
def test_it_learns(strategy: str, tmp_path: Path, checkpoints: dict[str, str]) -> None:
    """On a policy that stays: its loss falls, and its drafts are accepted more often."""
    options = dict(
        learning_rate=1e-12, temperature=0.5, draft_lengths=[3], drafter_learning_rate=1e-2,
        drafter_token_weight=1.0, trainer={"train_dataset": tiny_dataset(2)},
    )  # fmt: skip
    _, run = trained(tmp_path / "adapted", strategy, checkpoints[strategy], max_steps=25, **options)
    frozen = dict(max_steps=5, drafter_adaptation=False)  # as often accepted in any step
    _, still = trained(tmp_path / "frozen", strategy, checkpoints[strategy], **frozen, **options)
    losses, agreements = run.metric("drafter/loss"), run.metric("drafter/agreement")
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert sum(agreements[-5:]) > 1.5 * sum(agreements[:5])
    accepted, before = (sum(of.metric("rollout/acceptance_rate")[-5:]) for of in (run, still))
    assert accepted > 2 * before


def test_steps_too_small_for_bfloat16_add_up(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    """The optimizer moves float32 weights, of which the drafter's are the rounded image."""
    policy = tiny_policy().to(torch.bfloat16)
    trainer, _ = make_trainer(
        tmp_path, "dflash", policy=policy, assistant_model=checkpoints["dflash"], max_steps=6, bf16=True,
        learning_rate=1e-12, drafter_learning_rate=1e-4,
    )  # fmt: skip
    trainer.train()
    before, adaptation = DFlashDrafter(checkpoints["dflash"], policy), trainer._adaptation
    started = dict(before.network.named_parameters())
    for name, parameter in trainer._drafters[0].network.named_parameters():
        index = next((i for i, p in enumerate(adaptation._parameters) if p is parameter), None)
        assert parameter.dtype is torch.bfloat16 and index is not None
        master = adaptation._masters[index]
        assert master.dtype is torch.float32 and torch.equal(master.bfloat16(), parameter)
        moved = (master - started[name].float()).abs()
        assert 0 < moved.max() <= 6.1e-4  # six steps of at most a learning rate each
        if name.endswith("fc.weight"):  # in most of them less than bfloat16 can tell
            assert ((moved > 0) & (parameter == started[name])).float().mean() > 0.3


def test_under_autocast(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    policy = tiny_policy().float()
    _, run = trained(tmp_path, "eagle3", checkpoints["eagle3"], policy=policy, bf16=True)
    assert len(run.metric("drafter/loss")) == 3


# ---- metrics --------------------------------------------------------------------------------------------------------


def test_metrics_and_log(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    _, run = trained(
        tmp_path, "eagle3", checkpoints["eagle3"], max_steps=4, gradient_accumulation_steps=2,
        per_device_train_batch_size=4,
    )  # fmt: skip
    names = {name for entry in run.logs for name in entry if name.startswith("drafter/")}
    assert names == {"drafter/loss", "drafter/agreement", "drafter/update_seconds"}
    assert len(run.metric("drafter/loss")) == 4 and min(run.metric("drafter/loss")) > 0
    assert all(0 <= agreement <= 1 for agreement in run.metric("drafter/agreement"))
    log = read_run(tmp_path)
    assert log.header.settings["drafter_learning_rate"] == 1e-3
    for step, seconds in zip(log.steps, run.metric("drafter/update_seconds"), strict=True):
        assert 0 < seconds <= step.phases["adaptation"]
        assert sum(step.phases.values()) == pytest.approx(step.seconds, rel=0.02)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "weights_in"),
    [("eagle3", torch.float64), ("eagle3", torch.bfloat16), ("dflash", torch.float64)],
    ids=str,
)
def test_resumed_run_goes_on_bit_for_bit(
    strategy: str, weights_in: torch.dtype, tmp_path: Path, checkpoints: dict[str, str]
) -> None:
    def options(folder: str) -> dict[str, Any]:
        return dict(
            output_dir=tmp_path / folder, strategy=strategy, policy=tiny_policy().to(weights_in),
            assistant_model=checkpoints[strategy], bf16=weights_in is torch.bfloat16, **FAST,
        )  # fmt: skip

    whole, run = make_trainer(**options("whole"), max_steps=4, save_strategy="steps", save_steps=2)
    whole.train()
    rest, last = make_trainer(**options("rest"), max_steps=4)
    rest.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert not differ(weights(whole._drafters[0]), weights(rest._drafters[0]))
    for one, other in zip(whole._adaptation._masters, rest._adaptation._masters, strict=True):
        assert torch.equal(one, other)
    for name in ("drafter/loss", "drafter/agreement", "rollout/acceptance_rate"):
        assert run.metric(name)[2:] == last.metric(name)


def test_resumed_run_takes_its_own_learning_rate(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    options = dict(assistant_model=checkpoints["dflash"], save_strategy="steps", save_steps=1)
    make_trainer(tmp_path, "dflash", **options, max_steps=1)[0].train()
    trainer, _ = make_trainer(tmp_path, "dflash", **options, max_steps=2, drafter_learning_rate=3e-4)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert [group["lr"] for group in trainer._adaptation._optimizer.param_groups] == [3e-4]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_drafter_is_saved_with_the_model(strategy: str, tmp_path: Path, checkpoints: dict[str, str]) -> None:
    trainer, _ = make_trainer(
        tmp_path / "out", strategy, assistant_model=checkpoints[strategy], max_steps=2, save_strategy="steps",
        save_steps=1, **FAST,
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    original = Path(checkpoints[strategy])
    for folder in (tmp_path / "final" / "drafter", tmp_path / "out" / "checkpoint-2" / "drafter"):
        assert not differ(weights(KINDS[strategy](folder, trainer.model)), weights(trainer._drafters[0]))
        assert (folder / "config.json").read_bytes() == (original / "config.json").read_bytes()
        then, now = (load_file(path / "model.safetensors") for path in (original, folder))
        assert {name: t.dtype for name, t in then.items()} == {name: t.dtype for name, t in now.items()}
    _, run = make_trainer(tmp_path, strategy, assistant_model=str(tmp_path / "final" / "drafter"), max_steps=1)


@pytest.mark.parametrize("change", ["no state", "another drafter"])
def test_a_checkpoint_without_its_state(change: str, tmp_path: Path, checkpoints: dict[str, str]) -> None:
    saving = dict(save_strategy="steps", save_steps=1)
    other = "dflash" if change == "another drafter" else "eagle3"
    trained(tmp_path, other, checkpoints[other], max_steps=1, **saving)
    if change == "no state":
        (tmp_path / "checkpoint-1" / "drafter_adaptation.pt").unlink()
    trainer, run = make_trainer(tmp_path, "eagle3", assistant_model=checkpoints["eagle3"], max_steps=2)
    with pytest.warns(UserWarning, match="holds no drafter_adaptation.pt of such a drafter: the eagle3"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert len(run.metric("drafter/loss")) == 1


# ---- failures -------------------------------------------------------------------------------------------------------


def fail(kind: str, monkeypatch: pytest.MonkeyPatch, at: int) -> list[dict[str, Tensor]]:
    """Has the loss fail from its call number `at` on; the list gets the drafter's weights before each call."""
    calls: list[dict[str, Tensor]] = []
    original = adaptation.sequence_loss

    def broken(drafter: Any, *args: Any, **kwargs: Any) -> SequenceLoss:
        calls.append(weights(drafter))
        loss = original(drafter, *args, **kwargs)
        if len(calls) <= at:
            return loss
        if kind == "exception":
            raise RuntimeError("out of luck")
        return SequenceLoss(loss.cross_entropy * torch.nan, loss.regression, loss.agreement)

    monkeypatch.setattr(adaptation, "sequence_loss", broken)
    return calls


@pytest.mark.parametrize(
    ("strategy", "kind", "said"),
    [("eagle3", "exception", "RuntimeError: out of luck"), ("dflash", "nan", "is not finite")],
)
def test_a_failure_ends_the_adaptation_and_nothing_else(
    strategy: str, kind: str, said: str, tmp_path: Path, checkpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    none = train_plainly(max_steps=5)
    calls = fail(kind, monkeypatch, at=3)  # the rehearsal and two updates
    with pytest.warns(UserWarning, match=f"the {strategy} drafter is adapted no further.*{said}") as told:
        drafter, run = trained(tmp_path / "run", strategy, checkpoints[strategy], max_steps=5)
    assert len([warning for warning in told if "adapted no further" in str(warning.message)]) == 1
    assert len(calls) == 4 and differ(calls[0], calls[3])
    assert not differ(calls[3], weights(drafter))
    assert_same_training(none, run)
    assert len(run.metric("drafter/loss")) == 2 and len(run.metric("rollout/acceptance_rate")) == 5


def test_a_step_that_fails(tmp_path: Path, checkpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise MemoryError("no room for moments")

    monkeypatch.setattr(DrafterAdaptation, "_step", refuse)
    with pytest.warns(UserWarning, match="adapted no further.*MemoryError: no room for moments"):
        _, run = trained(tmp_path, "dflash", checkpoints["dflash"], save_strategy="steps", save_steps=3)
    assert len(run.losses) == 3
    assert (tmp_path / "checkpoint-3" / "drafter_adaptation.pt").exists()


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_widths_that_cannot_be_compared_are_refused_before_training(tmp_path: Path) -> None:
    config = reference.safeai(
        vocab_size=VOCABULARY, draft_vocab_size=VOCABULARY, hidden_size=32, head_dim=8, target_hidden_size=64
    )
    checkpoint = str(reference.make_folder(tmp_path / "narrow", config))
    with pytest.raises(ValueError, match="drafter_adaptation=True with this.*drafter_hidden_weight=0"):
        trained(tmp_path, "eagle3", checkpoint)
    _, run = trained(tmp_path, "eagle3", checkpoint, drafter_hidden_weight=0.0)
    assert len(run.metric("drafter/loss")) == 3


@pytest.mark.parametrize(
    "case, named",
    [
        (dict(torch_compile=True), "torch_compile=True"),
        (dict(data_parallel_devices=2), "torch.nn.DataParallel on 2 devices"),
        (dict(zero_stage=3), "DeepSpeed ZeRO-3"),
    ],
)
def test_what_is_not_served(case: dict[str, Any], named: str) -> None:
    served = dict(torch_compile=False, data_parallel_devices=1, zero_stage=2)
    check_adaptation(**served)
    with pytest.raises(ValueError, match=f"drafter_adaptation=True is not served with {named}.*drafter_adaptation=F"):
        check_adaptation(**served | case)


def test_compiled_policies_are_refused_at_once(tmp_path: Path, checkpoints: dict[str, str]) -> None:
    options = dict(assistant_model=checkpoints["eagle3"], torch_compile=True)
    with pytest.raises(ValueError, match="not served with torch_compile=True"):
        make_trainer(tmp_path, "eagle3", **options)
    make_trainer(tmp_path, "eagle3", **options, drafter_adaptation=False)
    make_trainer(tmp_path, "self", torch_compile=True)
