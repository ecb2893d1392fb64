"""Linear layers of other libraries that store something in a forward in eval mode, as bitsandbytes' do on a CPU."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from spec_trl.generation.engine.network import foreign_layers
from spec_trl.generation.engine.network.shadow import make_shadow
from tests.generation.calls import generate, outputs, pad_left, random_rows, reference_outputs


PROMPTS = pad_left(random_rows([4, 7, 5]))


class Packs(nn.Linear):
    """Rounds its weight in the first forward in eval mode, and notes it on the Parameter."""

    def forward(self, x: Tensor) -> Tensor:
        state: Any = self.weight
        if not self.training and not hasattr(state, "scale"):
            state.scale = self.weight.detach().abs().max()
            self.weight.data = (self.weight.data / state.scale * 7).round() * state.scale / 7
        return super().forward(x)


class Counts(Packs):
    """Stores the number of its forwards, in eval mode, where tensors of a layer may lie."""

    def __init__(self, *sizes: Any, place: str, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.register_buffer("calls", torch.zeros(()))
        self.place, self.state = place, {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.place == "buffer":
            self.calls += 1
        elif not self.training and self.place == "new tensor":
            self._buffers["calls"] = self.calls + 1
        elif not self.training and self.place == "attribute of a Parameter":
            self.weight.calls = getattr(self.weight, "calls", 0) + 1
        elif not self.training:
            self.state["calls"] += 1
        return nn.Linear.forward(self, x)


def with_layers(model: LlamaForCausalLM, kind: type[nn.Linear], **options: Any) -> LlamaForCausalLM:
    for layer in model.model.layers:
        old = layer.mlp.up_proj
        layer.mlp.up_proj = kind(old.in_features, old.out_features, bias=False, dtype=old.weight.dtype, **options)
        layer.mlp.up_proj.load_state_dict(old.state_dict(), strict=False)
    return model


def state_of(model: nn.Module) -> list[Any]:
    return [value for module in model.modules() for value in foreign_layers.stored(module)]


PLACES = ["buffer", "new tensor", "attribute of a Parameter", "object"]


@pytest.mark.parametrize(("kind", "place"), [(Packs, None), *((Counts, place) for place in PLACES)])
def test_a_policy_in_train_mode_stays_as_it_is(
    fresh: LlamaForCausalLM, kind: type[nn.Linear], place: str | None
) -> None:
    model = with_layers(fresh, kind, **({} if place is None else {"place": place})).train()
    before, expected = state_of(model), reference_outputs(model, PROMPTS)
    assert foreign_layers.alike(before, state_of(model)), "generate stores nothing either"
    for strategy in ("none", "self"):
        result = generate(model, PROMPTS, strategy, do_sample=False)
        assert outputs(result) == expected and (result.statistics.total.accepted > 0) is (strategy == "self")
        assert foreign_layers.alike(before, state_of(model)), strategy
    assert not any(m.training for m in make_shadow(model).modules() if not isinstance(m, Packs))


def test_a_policy_in_eval_mode_is_changed_as_by_generate(fresh: LlamaForCausalLM) -> None:
    model = with_layers(fresh, Packs).eval()
    stock, before = copy.deepcopy(model), state_of(model)
    expected = reference_outputs(stock, PROMPTS)
    result = generate(model, PROMPTS, "self", do_sample=False)
    assert outputs(result) == expected and result.statistics.total.accepted > 0
    assert foreign_layers.alike(state_of(model), state_of(stock))
    assert not foreign_layers.alike(state_of(model), before)


@pytest.mark.parametrize("place", PLACES)
def test_what_each_forward_changes_is_refused_by_name(
    fresh: LlamaForCausalLM, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_layers, "rewriting", {})
    model = with_layers(fresh, Counts, place=place).eval()
    before = state_of(model)
    with pytest.raises(ValueError, match=r"'model.layers.0.mlp.up_proj' \(Counts\) changes .* eval .*model.train\(\)"):
        generate(model, PROMPTS)
    assert foreign_layers.alike(before, state_of(model))


def test_weights_that_the_first_forward_decompresses_are_decompressed_in_the_policy(fresh: LlamaForCausalLM) -> None:
    """By a hook that removes itself, as compressed-tensors has it."""
    expected = reference_outputs(fresh, PROMPTS)
    layers = [layer.mlp.up_proj for layer in fresh.model.layers]
    for layer in layers:
        layer.register_parameter("weight_packed", nn.Parameter(layer.weight.data.clone(), requires_grad=False))
        del layer.weight

    def ct_decompress_hook(model: nn.Module, args: Any) -> None:
        handle.remove()
        for layer in model.model.layers:
            layer.mlp.up_proj.weight = nn.Parameter(layer.mlp.up_proj.weight_packed.data)
            del layer.mlp.up_proj.weight_packed

    handle = fresh.register_forward_pre_hook(ct_decompress_hook)
    with torch.inference_mode():
        for strategy in ("none", "self"):
            result = generate(fresh, PROMPTS, strategy, do_sample=False)
            assert outputs(result) == expected and (result.statistics.total.accepted > 0) is (strategy == "self")
    assert not fresh._forward_pre_hooks and not any(layer.weight.is_inference() for layer in layers)
