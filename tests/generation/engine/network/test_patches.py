"""Forwards that were set on the instances of modules: served as generate serves them, or refused by name."""

import functools
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module
from accelerate.utils.operations import convert_outputs_to_fp32
from torch import nn
from transformers import LlamaForCausalLM
from trl.trainer import utils as trl_utils

from spec_trl.generation.engine.network.fused_layers import _Mlp
from spec_trl.generation.engine.network.shadow import make_shadow, share_weights
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows, reference_outputs


PROMPTS = pad_left([row.repeat(3) for row in random_rows([4, 6])])


def without_even(out: Any) -> Any:
    out.logits[..., ::2] = -torch.inf
    return out


def closure_on_root(model: LlamaForCausalLM) -> None:
    old = model.forward

    @functools.wraps(old)  # which makes it look like the class's own
    def forward(*args: Any, **kwargs: Any) -> Any:
        return without_even(old(*args, **kwargs))

    model.forward = forward


def method_on_root(model: LlamaForCausalLM) -> None:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return without_even(type(self).forward(self, *args, **kwargs))

    model.forward = MethodType(forward, model)


def autocast_around_a_method(model: LlamaForCausalLM) -> None:
    method_on_root(model)
    prepared_by_accelerate(model)


def prepared_by_accelerate(model: LlamaForCausalLM) -> None:
    model._original_forward = model.forward
    function = torch.autocast("cpu", torch.bfloat16)(model.forward.__func__)
    model.forward = MethodType(convert_outputs_to_fp32(function), model)


def hook_on_root(model: LlamaForCausalLM) -> None:
    class Banning(ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return without_even(output)

    add_hook_to_module(model, Banning())


def partial_on_attention(model: LlamaForCausalLM) -> None:
    def negated(old: Any, *args: Any, **kwargs: Any) -> Any:
        output, weights = old(*args, **kwargs)
        return -output, weights

    for layer in model.model.layers:
        layer.self_attn.forward = functools.partial(negated, layer.self_attn.forward)


def defaults_on_layers(model: LlamaForCausalLM) -> None:
    for layer in model.model.layers:
        layer.forward = lambda *args, _old=layer.forward, **kwargs: 2 * _old(*args, **kwargs)


def closure_on_decoder(model: LlamaForCausalLM) -> None:
    old, decoder = model.model.forward, model.model

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = old(*args, **kwargs)
        out.last_hidden_state = decoder.norm(out.last_hidden_state.roll(1, -1))
        return out

    model.model.forward = forward


def closure_on_mlp(model: LlamaForCausalLM) -> None:
    def patch(mlp: nn.Module) -> None:
        old = mlp.forward
        mlp.forward = lambda x: old(x) * 3

    for layer in model.model.layers:
        patch(layer.mlp)


def closure_on_activation(model: LlamaForCausalLM) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn.forward = lambda x: nn.functional.gelu(x) * 2


def method_on_linear(model: LlamaForCausalLM) -> None:
    head = model.lm_head
    head.forward = MethodType(lambda self, x: nn.functional.linear(x.roll(1, -1), self.weight), head)


def method_of_another_layer(model: LlamaForCausalLM) -> None:
    model.model.layers[0].mlp.forward = model.model.layers[1].mlp.forward


CHANGING = [
    method_of_another_layer,
    closure_on_root, method_on_root, autocast_around_a_method, hook_on_root, partial_on_attention, defaults_on_layers,
    closure_on_decoder, closure_on_mlp, closure_on_activation, method_on_linear,
]  # fmt: skip


@pytest.mark.parametrize("patch", CHANGING, ids=lambda patch: patch.__name__)
def test_they_act_as_in_generate(patch: Callable[[LlamaForCausalLM], None]) -> None:
    model = tiny_llama()
    unpatched = reference_outputs(model, PROMPTS)
    patch(model)
    expected = reference_outputs(model, PROMPTS)
    assert expected != unpatched
    single = model.float()  # in which layers run fused
    assert outputs(generate(single, PROMPTS, do_sample=False)) == reference_outputs(single, PROMPTS)
    model.double()
    set_ones = {name: vars(module)["forward"] for name, module in model.named_modules() if "forward" in vars(module)}
    for strategy in ("none", "ngram", "self"):
        result = generate(model, PROMPTS, strategy, do_sample=False)
        assert outputs(result) == expected and result.statistics.drafter_failure is None
        assert strategy == "none" or result.statistics.total.drafted > 0
    assert result.statistics.acceptance_rate > 0.2, "the copy has the patch too"
    for name, forward in set_ones.items():
        assert vars(model.get_submodule(name))["forward"] is forward, "the policy is left as it was"


def hooks_that_move_inputs(model: LlamaForCausalLM) -> None:
    for module in model.modules():  # as dispatch_model does for bitsandbytes' models
        add_hook_to_module(module, AlignDevicesHook("cpu", io_same_device=module is model))


def loss_of_trl(model: LlamaForCausalLM) -> None:
    def fused(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the loss ran")

    scope = vars(trl_utils)
    model.forward = MethodType(type(fused)(fused.__code__, scope), model)


@pytest.mark.parametrize("patch", [prepared_by_accelerate, hooks_that_move_inputs, loss_of_trl])
def test_what_training_puts_around_forwards_stays_behind(patch: Callable[[LlamaForCausalLM], None]) -> None:
    model = tiny_llama()
    expected = reference_outputs(model, PROMPTS)
    patch(model)
    for shadow in (make_shadow(model), share_weights(make_shadow(model))):
        assert not [module for module in shadow.modules() if "forward" in vars(module)]
        assert isinstance(shadow.model.layers[0].mlp, _Mlp), "its kernels run"
    for strategy in ("none", "self"):
        assert outputs(generate(model, PROMPTS, strategy, do_sample=False)) == expected


OLD: Any = None


@pytest.mark.parametrize("holder", ["global", "dict", "object", "list in it", "method of it", "callable", "wrapper"])
def test_what_no_copy_can_follow_is_refused(holder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    layer = model.model.layers[1]
    monkeypatch.setattr(f"{__name__}.OLD", layer.forward)
    wrapper = nn.Sequential(model)
    held: Any = {"old": layer.forward} if holder == "dict" else SimpleNamespace(old=layer.forward)

    listing = SimpleNamespace(old=[layer.forward])

    class Callable_:
        def __init__(self) -> None:
            self.old = layer.forward

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.old(*args, **kwargs)

    layer.forward = {
        "global": lambda *args, **kwargs: OLD(*args, **kwargs),
        "dict": lambda *args, **kwargs: held["old"](*args, **kwargs),
        "object": lambda *args, **kwargs: held.old(*args, **kwargs),
        "list in it": lambda *args, **kwargs: listing.old[0](*args, **kwargs),
        "method of it": Callable_().__call__,
        "callable": Callable_(),
        "wrapper": lambda *args, **kwargs: type(layer).forward(wrapper[0].model.layers[1], *args, **kwargs),
    }[holder]
    with pytest.raises(ValueError, match="forward of 'model.layers.1' was replaced by a function.*forward_hook"):
        generate(model, PROMPTS, "self")
