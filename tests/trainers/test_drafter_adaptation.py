"""A learned drafter that follows the policy: what it learns from, what it must leave alone, where it goes on from."""

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from spec_trl.drafter_training import adaptation
from spec_trl.drafter_training.adaptation import STATE_FILE, AdaptationOptions, DrafterAdaptation, target_view
from spec_trl.drafter_training.sequence_loss import SequenceLoss, TargetView, sequence_loss
from spec_trl.generation.drafters.dflash.dflash_drafter import DFlashDrafter
from spec_trl.generation.drafters.eagle3.eagle3_drafter import Eagle3Drafter
from tests.generation.drafters.watching import make_checkpoint
from tests.trainers.harness import assert_same_training, tiny_policy, train, train_plainly


VOCABULARY = 48  # of the tiny policy
KINDS: dict[str, Any] = {"eagle3": Eagle3Drafter, "dflash": DFlashDrafter}
each_kind = pytest.mark.parametrize("kind", KINDS)
ONE_RANK: Any = SimpleNamespace(
    device=torch.device("cpu"), process_index=0, num_processes=1, reduce=lambda tensor, _: tensor
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Random drafters for the tiny policy."""
    return {kind: make_checkpoint(tmp_path_factory.mktemp(kind), kind, VOCABULARY) for kind in KINDS}


def adapt(drafter: Any, policy: PreTrainedModel, **changes: Any) -> DrafterAdaptation:
    how = AdaptationOptions(**dict(learning_rate=1e-3) | changes)
    return DrafterAdaptation(drafter, policy, ONE_RANK, how, seed=3)


Make = Callable[..., tuple[Any, Any, DrafterAdaptation]]


@pytest.fixture
def make(checkpoints: dict[str, str]) -> Make:
    """A policy, a drafter for it, and the drafter's adaptation."""

    def make(kind: str, policy: PreTrainedModel | None = None, **changes: Any) -> tuple[Any, Any, DrafterAdaptation]:
        policy = policy or tiny_policy()
        drafter = KINDS[kind](checkpoints[kind], policy)
        return policy, drafter, adapt(drafter, policy, **changes)

    return make


def micro_batch(seed: int = 0) -> dict[str, Tensor]:
    """As TRL makes them: prompts padded left, completions right."""
    generator = torch.Generator().manual_seed(seed)
    prompts, completions = torch.tensor([3, 5, 1, 4]), torch.tensor([8, 2, 6, 5])
    return {
        "prompt_ids": torch.randint(3, VOCABULARY, (4, 5), generator=generator),
        "prompt_mask": (torch.arange(5) >= 5 - prompts[:, None]).long(),
        "completion_ids": torch.randint(3, VOCABULARY, (4, 8), generator=generator),
        "completion_mask": (torch.arange(8) < completions[:, None]).long(),
    }


def forward(policy: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The policy's loss on a micro-batch."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    return policy(input_ids=ids, attention_mask=mask, use_cache=False).logits.float().logsumexp(-1).mean()


def learn(adapted: DrafterAdaptation, policy: Any, steps: int = 1, first: int = 0, same: bool = False) -> list[Any]:
    """Micro-batches as the trainer runs them; the metrics after each."""
    found = []
    for step in range(first, first + steps):
        inputs = micro_batch(0 if same else step)
        with adapted.watch(inputs):
            loss = forward(policy, inputs)
        loss.backward()
        adapted.update()
        found.append(adapted.take_metrics())
    return found


def weights(drafter: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in drafter.network.state_dict().items()}


def differ(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    assert one.keys() == other.keys()
    return {name for name in one if not torch.equal(one[name], other[name])}


# ---- the policy is left alone, and seen as it is --------------------------------------------------------------------


def with_lora(policy: PreTrainedModel) -> Any:
    torch.manual_seed(0)
    adapted = get_peft_model(policy, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    return adapted.double()


@each_kind
def test_a_policy_that_trains_tokens(kind: str, checkpoints: dict[str, str], tmp_path: Path) -> None:
    """Its embedding is wrapped by peft, its weight no parameter; the drafter drafts and learns all the same."""
    adapter = LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[5, 6])
    options: dict[str, Any] = dict(max_steps=2, trainer={"peft_config": adapter}, learning_rate=5e-2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the drafter|the .* drafter")
        run = train(tmp_path, kind, assistant_model=checkpoints[kind], **options)
    assert len(run.metric("drafter/loss")) == 2 and min(run.metric("rollout/sd_on_fraction")) > 0.9
    assert any("trainable_tokens" in name for name in run.weights)
    assert_same_training(run, train_plainly(**options))


def with_checkpointing(policy: PreTrainedModel) -> Any:
    policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    policy.enable_input_require_grads()
    return policy.train()


@pytest.mark.parametrize(("kind", "wrap"), [
    ("eagle3", with_checkpointing), ("dflash", with_lora), ("dflash", lambda policy: policy),
])  # fmt: skip
def test_the_policy_is_left_alone_and_seen_whole(
    kind: str, wrap: Callable[[PreTrainedModel], Any], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradients and the random numbers are those without, no hook stays; the view is each sequence on its own."""
    views: list[TargetView] = []
    handles: list[RemovableHandle] = []
    look, keep = adaptation.target_view, adaptation.keep_states
    monkeypatch.setattr(adaptation, "target_view", lambda *args: views.append(look(*args)) or views[-1])
    monkeypatch.setattr(adaptation, "keep_states", lambda *args: handles.extend(found := keep(*args)) or found)
    policy, drafter, adapted = make(kind)
    first, trained, inputs = weights(drafter), wrap(policy), micro_batch()
    forward(trained, inputs).backward()
    expected = [p.grad.clone() for p in trained.parameters() if p.grad is not None]
    trained.zero_grad()
    state = torch.get_rng_state()
    with adapted.watch(inputs):
        loss = forward(trained, inputs)
    assert handles and not any(handle.id in handle.hooks_dict_ref() for handle in handles)
    loss.backward()
    adapted.update()
    found = [p.grad for p in trained.parameters() if p.grad is not None]
    assert len(found) == len(expected) > 0 and all(map(torch.equal, found, expected))
    assert torch.equal(torch.get_rng_state(), state)
    assert len(differ(first, weights(drafter))) > 8
    (view,) = views
    for row in range(4):
        prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row] == 1]
        tokens = torch.cat([prompt, inputs["completion_ids"][row][inputs["completion_mask"][row] == 1]])
        length = len(tokens)
        assert view.is_real[row].tolist() == [True] * length + [False] * (view.tokens.shape[1] - length)
        assert view.first[row] == len(prompt) and view.tokens[row, :length].equal(tokens)
        with torch.no_grad():
            states = policy.eval().model(tokens[None], output_hidden_states=True).hidden_states  # of [1, length, H]
        features = torch.cat([states[index][0] for index in drafter.feature_layers], dim=-1)
        # Norms and rotations are float32 in Llama, at other positions after padding.
        torch.testing.assert_close(view.features[row, :length], features, rtol=0, atol=1e-4)
        torch.testing.assert_close(view.hidden[row, :length], states[-1][0], rtol=0, atol=1e-4)
        assert not view.features[row, length:].any() and not view.hidden[row, length:].any()
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


# ---- learning -------------------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize("bf16", [False, True])
def test_it_learns(kind: str, bf16: bool, make: Make) -> None:
    """Also from a policy that runs under autocast."""
    given = tiny_policy().float() if bf16 else None
    policy, _, adapted = make(kind, given, learning_rate=1e-2, token_weight=1.0)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        metrics = learn(adapted, policy, steps=12, same=True)
    assert all(metric.keys() == {"loss", "agreement", "update_seconds"} for metric in metrics)
    assert sum(m["loss"] for m in metrics[-3:]) < 0.8 * sum(m["loss"] for m in metrics[:3])
    assert sum(m["agreement"] for m in metrics[-3:]) > sum(m["agreement"] for m in metrics[:3]) + 0.2
    assert min(m["update_seconds"] for m in metrics) > 0 and adapted.take_metrics() == {}


def test_each_micro_batch_has_anchors_of_its_own(make: Make) -> None:
    policy, _, adapted = make("dflash", learning_rate=1e-30)
    one, other = learn(adapted, policy, steps=2, same=True)
    assert one["loss"] != other["loss"]


def test_masked_completions_teach_nothing(make: Make) -> None:
    (policy, drafter, adapted), inputs = make("eagle3"), micro_batch()
    first = weights(drafter)
    inputs["completion_mask"].zero_()
    with adapted.watch(inputs):
        forward(policy, inputs)
    adapted.update()
    assert not differ(first, weights(drafter)) and adapted.take_metrics().keys() == {"update_seconds"}
    learn(adapted, policy)
    assert differ(first, weights(drafter))


def test_steps_too_small_for_bfloat16_add_up(make: Make, tmp_path: Path) -> None:
    """The optimizer moves float32 weights, of which the drafter's are the rounded image."""
    policy, drafter, adapted = make("dflash", tiny_policy().to(torch.bfloat16), learning_rate=1e-4)
    started = [parameter.detach().clone() for parameter in drafter.trained(drafter.network)]
    learn(adapted, policy, steps=6)
    adapted.save_state(tmp_path)
    masters = torch.load(tmp_path / STATE_FILE)["masters"]
    for parameter, start, master in zip(drafter.trained(drafter.network), started, masters, strict=True):
        assert parameter.dtype is torch.bfloat16 and master.dtype is torch.float32
        assert torch.equal(master.bfloat16(), parameter)
        moved = (master - start.float()).abs()
        assert 0 < moved.max() <= 6.1e-4  # six steps of at most a learning rate each
        if parameter is drafter.network.fc.weight:  # in most of them less than bfloat16 can tell
            assert ((moved > 0) & (parameter == start)).float().mean() > 0.3


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, dtype", [
    ("eagle3", torch.float64), ("eagle3", torch.bfloat16), ("dflash", torch.float64),
])  # fmt: skip
def test_goes_on_bit_for_bit(kind: str, dtype: torch.dtype, make: Make, tmp_path: Path) -> None:
    policy, whole, adapted = make(kind, tiny_policy().to(dtype))
    learn(adapted, policy, 2)
    adapted.save_state(tmp_path)
    expected = learn(adapted, policy, 2, first=2)
    _, rest, resumed = make(kind, policy)
    resumed.load_state(tmp_path)
    found = learn(resumed, policy, 2, first=2)
    assert not differ(weights(whole), weights(rest))
    assert [m["loss"] for m in found] == [m["loss"] for m in expected]
    _, still, slow = make(kind, policy, learning_rate=1e-30)
    slow.load_state(tmp_path)
    loaded = weights(still)
    learn(slow, policy)
    assert not differ(loaded, weights(still))  # by the learning rate of its own, not the saved one's


@pytest.mark.parametrize("change", ["no state", "another drafter"])
def test_a_checkpoint_without_its_state(change: str, make: Make, tmp_path: Path) -> None:
    if change == "another drafter":
        make("dflash")[-1].save_state(tmp_path)
    policy, drafter, adapted = make("eagle3")
    first = weights(drafter)
    with pytest.warns(UserWarning, match=f"holds no {STATE_FILE} of such a drafter: the eagle3"):
        adapted.load_state(tmp_path)
    assert not differ(first, weights(drafter)) and "loss" in learn(adapted, policy)[0]


# ---- failures -------------------------------------------------------------------------------------------------------


def not_finite(*args: Any, **kwargs: Any) -> SequenceLoss:
    found = sequence_loss(*args, **kwargs)
    return found._replace(entropies=found.entropies * torch.nan)


@pytest.mark.parametrize("kind, fault, said", [
    ("eagle3", lambda *_, **__: 1 / 0, "ZeroDivisionError: division by zero"),
    ("dflash", not_finite, "is not finite"),
    ("dflash", "step", "ZeroDivisionError"),
    ("eagle3", "unseen", "the policy's loss was not computed"),
])  # fmt: skip
def test_a_failure_ends_the_adaptation_and_nothing_else(
    kind: str, fault: Any, said: str, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, drafter, adapted = make(kind)
    learn(adapted, policy, 2)
    learned = weights(drafter)
    if fault == "step":
        monkeypatch.setattr(torch.optim.AdamW, "step", lambda *_: 1 / 0)
        learn(adapted, policy)  # of this rank alone: the others learn of it at the next micro-batch
    elif fault != "unseen":
        monkeypatch.setattr(adaptation, "sequence_loss", fault)
    with pytest.warns(UserWarning, match=f"the {kind} drafter is adapted no further.*{said}"):
        adapted.update() if fault == "unseen" else learn(adapted, policy)
    assert adapted.is_stopped
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert learn(adapted, policy) == [{}]
    assert not differ(learned, weights(drafter))
    adapted.save_state(tmp_path)


def test_a_failure_before_the_first_rollout_ends_the_adaptation_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(adaptation, "sequence_loss", lambda *_, **__: 1 / 0)
        policy, drafter, adapted = make("eagle3")
    first = weights(drafter)
    with pytest.warns(UserWarning, match="adapted no further.*ZeroDivisionError"):
        learn(adapted, policy)
    assert adapted.is_stopped and not differ(first, weights(drafter))


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_widths_that_cannot_be_compared(tmp_path: Path) -> None:
    policy, sizes = tiny_policy(), dict(hidden_size=32, head_dim=8, target_hidden_size=64)
    drafter = Eagle3Drafter(make_checkpoint(tmp_path, "eagle3", VOCABULARY, **sizes), policy)
    with pytest.raises(ValueError, match="drafter_adaptation=True with this.*hidden_weight.: 0"):
        adapt(drafter, policy)
    assert "loss" in learn(adapt(drafter, policy, hidden_weight=0.0), policy)[0]
