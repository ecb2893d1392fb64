"""The shadow: own modules over the same Parameters, in eval mode, free of what training left on the policy."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from spec_trl.generation.engine.shadow import make_shadow
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows


def test_own_modules_same_parameters(fresh: LlamaForCausalLM) -> None:
    fresh.train()
    shadow = make_shadow(fresh)
    assert type(shadow) is type(fresh)
    own, theirs = dict(fresh.named_modules()), dict(shadow.named_modules())
    assert own.keys() == theirs.keys() and not {id(m) for m in own.values()} & {id(m) for m in theirs.values()}
    assert {id(p) for p in fresh.parameters()} == {id(p) for p in shadow.parameters()}
    assert all(module.training for module in own.values()) and not any(module.training for module in theirs.values())
    assert shadow.config is not fresh.config
    assert {id(module.config) for module in theirs.values() if "config" in vars(module)} == {id(shadow.config)}


def test_editing_the_shadow_leaves_the_policy(fresh: LlamaForCausalLM) -> None:
    shadow = make_shadow(fresh)
    shadow.model.layers[0].mlp = nn.Identity()
    shadow.register_forward_hook(lambda *_: pytest.fail("a hook of the shadow ran"))
    assert not isinstance(fresh.model.layers[0].mlp, nn.Identity)
    fresh(torch.arange(3)[None])


def test_weights_are_live(fresh: LlamaForCausalLM) -> None:
    shadow = make_shadow(fresh)
    with torch.no_grad():
        fresh.lm_head.weight.mul_(2)
    assert torch.equal(shadow.lm_head.weight, fresh.lm_head.weight)
    fresh.lm_head.weight = nn.Parameter(torch.zeros_like(fresh.lm_head.weight))  # another Parameter altogether
    assert shadow.lm_head.weight is fresh.lm_head.weight
    fresh.to(torch.float32)
    assert shadow.model.norm.weight.dtype == torch.float32


def test_tied_and_repeated_modules_stay_one(fresh: LlamaForCausalLM) -> None:
    fresh.model.layers.append(fresh.model.layers[0])
    shadow = make_shadow(fresh)
    assert shadow.model.layers[2] is shadow.model.layers[0]
    tied = tiny_llama(tie_word_embeddings=True)
    shadow = make_shadow(tied)
    assert shadow.lm_head.weight is shadow.model.embed_tokens.weight


def test_patched_forwards_do_not_reach_generation(fresh: LlamaForCausalLM) -> None:
    """accelerate and TRL replace the root's forward: by a function, or by a method bound to the policy."""
    prompts = pad_left(random_rows([4, 2]))
    expected = outputs(generate(fresh, prompts, max_new_tokens=6))

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the policy's patched forward ran")

    for patch in (MethodType(broken, fresh), broken):
        fresh.forward = patch
        fresh._original_forward = patch
        assert outputs(generate(fresh, prompts, max_new_tokens=6)) == expected
        assert outputs(generate(fresh, prompts, "self", max_new_tokens=6)) == expected
        assert fresh.forward is patch


def test_methods_bound_below_the_root_are_bound_to_the_clone(fresh: LlamaForCausalLM) -> None:
    seen = []

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        seen.append(self)
        return type(self).forward(self, x)

    fresh.lm_head.forward = MethodType(forward, fresh.lm_head)
    shadow = make_shadow(fresh)
    shadow.lm_head(torch.zeros(1, 64).double())
    assert seen == [shadow.lm_head]


def test_hooks_are_kept(fresh: LlamaForCausalLM) -> None:
    """TRL's cast_lm_head_to_fp32 lives in one; the policy's output includes what its hooks do."""
    prompts = pad_left(random_rows([4]))
    plain = outputs(generate(fresh, prompts, max_new_tokens=8))
    fresh.lm_head.register_forward_hook(lambda module, args, output: -output)
    hooked = outputs(generate(fresh, prompts, max_new_tokens=8))
    assert hooked != plain
    assert outputs(generate(fresh, prompts, "self", max_new_tokens=8)) == hooked


def test_autocast_runs(fresh: LlamaForCausalLM) -> None:
    """As TRL's bf16=True has it: float32 weights under autocast."""
    model = fresh.float()
    prompts = pad_left(random_rows([4, 2]))
    with torch.autocast("cpu", torch.bfloat16):
        result = generate(model, prompts, "self", temperature=0.3)
    plain = generate(model, prompts, temperature=0.3)
    assert result.lengths.tolist() == [24, 24]
    assert result.statistics.cache_bytes < 0.6 * plain.statistics.cache_bytes
    assert result.statistics.acceptance_rate > 0.4


def compile_layers(model: LlamaForCausalLM) -> LlamaForCausalLM:
    model.model.layers = nn.ModuleList(torch.compile(layer, backend="eager") for layer in model.model.layers)
    return model


@pytest.mark.parametrize(
    "wrap", [compile_layers, lambda model: model.compile(backend="eager") or model], ids=["layers", "in place"]
)
def test_what_is_compiled_generates_and_drafts_uncompiled(wrap: Callable[[Any], Any], fresh: LlamaForCausalLM) -> None:
    torch._dynamo.utils.counters.clear()
    prompts = pad_left(random_rows([4, 6]))
    expected = outputs(generate(fresh, prompts))
    result = generate(wrap(fresh), prompts, "self")
    assert outputs(result) == expected and result.statistics.total.accepted > 0
    assert torch._dynamo.utils.counters["frames"]["total"] == 0


def test_a_compiled_assistant(tiny: LlamaForCausalLM, tiny_assistant: LlamaForCausalLM) -> None:
    assistant = torch.compile(tiny_assistant, backend="eager")
    result = generate(tiny, pad_left(random_rows([4, 6])), "model", assistant_model=assistant)
    assert result.statistics.total.accepted > 0
