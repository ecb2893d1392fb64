"""With `exact_logprobs` the loss's log-probabilities are the sampler's, bit for bit, and its gradient is the ordinary
one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel, TrainerCallback

from spec_trl import SpecRLOOTrainer
from spec_trl.native.native_code import compiler
from tests.generation.drafters.watching import make_checkpoint
from tests.generation.engine.test_families import build
from tests.generation.test_adapted_experts import EXPERTS
from tests.tiny_families import tiny_settings
from tests.tiny_vision import make, processor
from tests.trainers.harness import OTHERS, Run, make_run, roll_out, tiny_policy, train
from tests.trainers.test_prompt_images import task
from tests.trainers.tool_task import add, conversations, make_chat_tokenizer


pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
DISTANCE, RATIO = "sampling/sampling_logp_difference/", "sampling/importance_sampling_ratio/"
KINDS: dict[str, dict[str, Any]] = {
    "float32": {}, "bfloat16": {}, "float32 weights under autocast": {"bf16": True},
}  # fmt: skip
LORA = {"trainer": {"peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian")}}


def policy_of(kind: str, **config: Any) -> PreTrainedModel:
    """Of four layers, whose sums are long enough to show their order."""
    wide = dict(hidden_size=192, intermediate_size=256, num_hidden_layers=4, initializer_range=0.1)
    return tiny_policy(**wide | config).to(torch.bfloat16 if kind == "bfloat16" else torch.float32)


def assert_equal_bits(run: Run, count: int) -> None:
    assert run.metric(DISTANCE + "max") == run.metric(DISTANCE + "mean") == [0.0] * count
    assert run.metric(RATIO + "min") == run.metric(RATIO + "max") == [1.0] * count


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7, "gradient_checkpointing": True, "per_device_train_batch_size": 4},
        {"num_iterations": 2, "max_steps": 4, "beta": 0.1, "gradient_accumulation_steps": 2} | LORA,
        {"logprobs_over": "support", "top_p": 0.9, "top_k": 30, "temperature": 0.7, "num_iterations": 2},
    ],
    ids=["plain", "another temperature, checkpointing, groups", "LoRA, old and reference policy, accumulation",
         "over supports"],
)
def test_sampler_and_trainer_agree_in_bits(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    """Also of drafted tokens, of prompts that several rows share, and where the policy has moved since the rollout."""
    given = KINDS[kind] | {"max_completion_length": 24, "max_steps": 2} | options
    run = train(tmp_path / "exact", policy=policy_of(kind), exact_logprobs=True, **given)
    assert_equal_bits(run, given["max_steps"])
    assert min(run.metric("rollout/acceptance_rate")) > 0.2


class Compared(SpecRLOOTrainer):
    """Compares what TRL keeps of a rollout, before any step, with what was sampled."""

    apart: list[float]

    def _in_turn(self, completions: Any) -> Any:
        self.sampled = completions
        return super()._in_turn(completions)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        scores = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if not torch.is_grad_enabled():
            pairs = [
                (row[: len(one.logprobs)], torch.tensor(one.logprobs))
                for row, one in zip(scores[0], self.sampled, strict=True)
            ]
            self.apart.append(max((kept - ours).abs().max().item() for kept, ours in pairs))
        return scores


def test_other_trainers_agree_in_bits(tmp_path: Path) -> None:
    options = {"policy": policy_of("float32"), "max_completion_length": 24, "max_steps": 2, "exact_logprobs": True}
    Compared.apart = []
    train(tmp_path / "rloo", **OTHERS["rloo"] | options | {"kind": Compared})
    assert Compared.apart == [0.0, 0.0]
    train(tmp_path / "not", **OTHERS["rloo"] | options | {"kind": Compared, "exact_logprobs": False})
    assert min(Compared.apart[2:]) > 0
    assert_equal_bits(train(tmp_path / "gmpo", **OTHERS["gmpo"] | options), 2)


def test_without_the_option_they_differ(tmp_path: Path) -> None:
    for kind, options in KINDS.items():
        run = train(tmp_path / kind, policy=policy_of(kind), max_steps=1, **options)
        assert run.metric(DISTANCE + "max")[0] > 0, kind


class Gradients(TrainerCallback):
    """Keeps those of the first step, as one vector, which has the signs and sizes of all."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
        assert all(parameter.grad is not None for parameter in learned)
        self.vector = torch.cat([parameter.grad.flatten().float() for parameter in learned])


def difference_of_gradients(folder: Path, make: Callable[[bool], PreTrainedModel], **options: Any) -> float:
    """Of a step with the option from a step without, in parts of the gradient's length."""
    found: list[Tensor] = []
    for exact in (False, True):
        run, gradients = (
            make_run(folder / str(exact), "ngram", make(exact), max_steps=1, exact_logprobs=exact, **options),
            Gradients(),
        )
        run.trainer.add_callback(gradients)
        run.train()
        found.append(gradients.vector)
    ordinary, ours = found
    assert ordinary.norm() > 0
    return float((ordinary - ours).norm() / ordinary.norm())


@pytest.mark.parametrize(
    "options", [{}, {"gradient_checkpointing": True}, LORA, {"loss_type": "grpo", "top_entropy_quantile": 0.5},
     {"top_p": 0.9, "logprobs_over": "support"}],
    ids=["all weights", "checkpointing", "LoRA", "entropies", "over supports"],
)  # fmt: skip
def test_gradients_are_the_ordinary_ones(tmp_path: Path, options: dict[str, Any]) -> None:
    assert 0 < difference_of_gradients(tmp_path, lambda _: policy_of("float32"), **options) < 1e-4


def test_gradients_under_autocast(tmp_path: Path) -> None:
    """Rounding alone makes this difference: TRL's eager attention is as far from SDPA."""
    computed_in = set()

    def make(_: bool) -> PreTrainedModel:
        policy = policy_of("float32")
        policy.model.layers[0].mlp.register_forward_pre_hook(
            lambda *_: computed_in.add(torch.is_autocast_enabled("cpu") if torch.is_grad_enabled() else None)
        )
        return policy

    assert 0 < difference_of_gradients(tmp_path, make, bf16=True) < 0.1
    assert computed_in == {None, True}  # rollouts, and what has a gradient


def test_learned_positions_count_from_the_prompt(tmp_path: Path) -> None:
    """TRL's count the padding, unless somebody says them."""

    def add(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = kwargs["attention_mask"]
        return args, kwargs | ({"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if mask.dim() == 2 else {})

    def make(exact: bool) -> PreTrainedModel:
        policy = build("gpt2", vocab_size=48, num_hidden_layers=3).float()
        if not exact:
            policy.transformer.register_forward_pre_hook(add, with_kwargs=True)
        return policy

    assert 0 < difference_of_gradients(tmp_path, make) < 1e-4


DO_MORE = "falcon_h1", "gptj", "gemma4_text", "zamba2"
"""Families whose layers return tuples, or more than hidden states, or get more than the layer before returned."""


def tiny_family(name: str) -> PreTrainedModel:
    """One of the families that `build` does not have."""
    kind = CONFIG_MAPPING[name]
    torch.manual_seed(0)
    settings = tiny_settings(kind) | dict(vocab_size=48, eos_token_id=2, attention_dropout=0.0)
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "resid_dropout", "embed_dropout"), 0.0)
    return AutoModelForCausalLM.from_config(kind(**settings | dropouts), dtype=torch.bfloat16)


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "qwen3", "gpt_oss", *DO_MORE])
def test_families(tmp_path: Path, family: str) -> None:
    policy = tiny_family(family) if family in DO_MORE else build(family, vocab_size=48).to(torch.bfloat16)
    run = train(tmp_path, "self", policy=policy, exact_logprobs=True, max_steps=2)
    assert_equal_bits(run, 2)
    assert min(run.metric("rollout/acceptance_rate")) > 0.2
    assert bool(run.metric("aux_loss")) == (family == "gpt_oss")


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", DO_MORE)
def test_gradients_of_layers_that_do_more(tmp_path: Path, family: str, checkpointing: bool) -> None:
    options = {"gradient_checkpointing": checkpointing}
    assert 0 < difference_of_gradients(tmp_path, lambda _: tiny_family(family).float(), **options) < 1e-4


def test_experts_with_lora(tmp_path: Path) -> None:
    """And the loss that balances a mixture, which reads what routers compute."""
    config = LoraConfig(r=4, **EXPERTS, init_lora_weights=False)
    policy = build("qwen3_moe", vocab_size=48).float()
    options: dict[str, Any] = {"trainer": {"peft_config": config}, "router_aux_loss_coef": 0.1}
    run = train(tmp_path / "run", policy=policy, exact_logprobs=True, max_steps=2, **options)
    assert_equal_bits(run, 2)
    assert min(run.metric("rollout/acceptance_rate")) > 0.2 and min(run.metric("aux_loss")) > 0
    difference = difference_of_gradients(tmp_path, lambda _: build("qwen3_moe", vocab_size=48).float(), **options)
    assert 0 < difference < 1e-4


# ---- images and tools -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(1, 2), (1, 0), (0, 0)])
@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl", "idefics3"])
def test_images(tmp_path: Path, family: str, counts: tuple[int, int]) -> None:
    """Also beside prompts without. Decoders of the second take images between layers, too."""
    options = {"trainer": {"train_dataset": task(counts)}, "max_completion_length": 12}
    policy = make(family).to(torch.bfloat16)
    run = train(tmp_path, policy=policy, tokenizer=processor(family), exact_logprobs=True, max_steps=2, **options)
    assert_equal_bits(run, 2)
    assert min(run.metric("rollout/acceptance_rate")) > 0.2


def test_gradients_with_images(tmp_path: Path) -> None:
    """Those of the modules that read the images are among them."""
    options = {"trainer": {"train_dataset": task()}, "tokenizer": processor("qwen3_vl"), "max_completion_length": 12}
    assert 0 < difference_of_gradients(tmp_path, lambda _: make("qwen3_vl").float(), **options) < 1e-4


TOOLS: dict[str, Any] = {"max_completion_length": 40, "num_iterations": 2, "max_steps": 4}


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_tools(tmp_path: Path, family: str) -> None:
    """A later turn begins with a prompt: of the tool's answer. The second family keeps states."""
    data = conversations("a3+b8", "c5+d9+e1", "f2+g2", "1+2+3+4")
    policy = tiny_policy().to(torch.bfloat16) if family == "llama" else tiny_family(family)
    run = train(
        tmp_path, "ngram", policy=policy, tokenizer=make_chat_tokenizer(), exact_logprobs=True,
        trainer={"train_dataset": data, "tools": [add]}, **TOOLS,
    )  # fmt: skip
    assert_equal_bits(run, 4)
    assert max(run.metric("rollout/acceptance_rate")) > 0 and min(run.metric("tools/call_frequency")) > 0.2


def test_a_drafter_that_learns_along(tmp_path: Path) -> None:
    """It sees the hidden states of the loss's forward."""
    losses = []
    for exact in (True, False):
        drafter = make_checkpoint(tmp_path / "drafter", "eagle3", 48)
        options = dict(assistant_model=drafter, policy=tiny_policy().float(), exact_logprobs=exact)
        run = train(tmp_path / str(exact), "eagle3", max_steps=2, **options)
        losses.append(run.metric("drafter/loss"))
        if exact:
            assert_equal_bits(run, 2)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and len(losses[0]) == 2


def test_evaluation(tmp_path: Path) -> None:
    run = roll_out(tmp_path, policy=policy_of("bfloat16"), exact_logprobs=True)
    assert run.metric(f"eval_{DISTANCE}max") == [0.0] and run.metric("eval_entropy")[0] > 0


def test_other_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="^exact_logprobs=True is not served: .* is not exact on this machine"):
        make_run(tmp_path, policy=policy_of("float32"), exact_logprobs=True, runner="eager")
    with pytest.raises(ValueError, match="exact_logprobs='yes' is"):
        make_run(tmp_path, policy=policy_of("float32"), exact_logprobs="yes")
    with pytest.raises(ValueError, match="does not go with a policy in torch.float64"):
        make_run(tmp_path, exact_logprobs=True)
    with pytest.raises(ValueError, match="does not go with SuppressTokensLogitsProcessor"):
        given = {"generation_kwargs": {"suppress_tokens": [5]}}
        make_run(tmp_path, policy=policy_of("float32"), exact_logprobs=True, **given)


def test_what_fails_fails_at_once(tmp_path: Path) -> None:
    def fail(_: Any, inputs: Any) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError("no gradient here")

    policy = policy_of("float32")
    policy.model.layers[2].mlp.register_forward_pre_hook(fail)
    reason = "a rehearsal failed with RuntimeError: no gradient here. Set exact_logprobs=False"
    with pytest.raises(ValueError, match=f"^exact_logprobs=True is not served: {reason}"):
        make_run(tmp_path, policy=policy, exact_logprobs=True)


@pytest.mark.parametrize("hook", [lambda _, __, output: output * 2, lambda _, __, ___: None])
def test_hooks_on_layers(tmp_path: Path, hook: Any) -> None:
    """What one changes is changed once, also in the gradient."""

    def make(_: bool) -> PreTrainedModel:
        policy = policy_of("float32")
        policy.model.layers[1].register_forward_hook(hook)
        return policy

    run = make_run(tmp_path / "late", policy=(policy := policy_of("float32")), exact_logprobs=True, max_steps=2)
    policy.model.layers[1].register_forward_hook(hook)
    assert_equal_bits(run.train(), 2)
    assert not any("forward" in vars(layer) for layer in policy.model.layers)
    assert 0 < difference_of_gradients(tmp_path, make) < 1e-4
