"""LoRA, DoRA and several adapters: the drafter is the merged model, quantized; the policy stays unmerged."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from spec_trl.quantization.source_weight import read_projection
from tests.quantization.conftest import addresses, logits, quantized, randomize_adapters


TARGETS = ["q_proj", "v_proj", "down_proj", "lm_head"]


def lora(model: nn.Module, **options: Any) -> Any:
    peft_model = get_peft_model(model, LoraConfig(**(dict(r=4, lora_alpha=8, target_modules=TARGETS) | options)))
    randomize_adapters(peft_model)
    return peft_model.eval()


def two_adapters(model: nn.Module) -> Any:
    peft_model = get_peft_model(model, LoraConfig(r=4, target_modules=TARGETS), adapter_name="one")
    peft_model.add_adapter("two", LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    peft_model.base_model.set_adapter(["one", "two"])
    randomize_adapters(peft_model)
    return peft_model.eval()


ADAPTERS = {
    "lora": lora,
    "dora": lambda model: lora(model, use_dora=True),
    "with bias": lambda model: lora(model, target_modules=["q_proj", "v_proj"], lora_bias=True),
    "two adapters": two_adapters,
    "Conv1D": lambda model: lora(model, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_the_drafter_is_the_merged_model_quantized(
    untied: PreTrainedModel, gpt2: PreTrainedModel, kind: str
) -> None:
    """And the policy stays unmerged."""
    peft_model, lm_head = ADAPTERS[kind](gpt2 if kind == "Conv1D" else untied.double()), "packed"
    if kind == "Conv1D":
        lm_head = "dense"  # it is tied
    model, modules = peft_model.get_base_model(), [*peft_model.modules()]
    before = copy.deepcopy(peft_model.state_dict())
    merged, bare = copy.deepcopy(peft_model).merge_and_unload(), copy.deepcopy(peft_model).unload()
    for name, module in merged.named_modules():
        if isinstance(module, nn.Linear):
            weight, bias = read_projection(model.get_submodule(name))
            assert (weight - module.weight).abs().max() <= 1e-6 and (bias is None) == (module.bias is None)
            assert bias is None or (bias - module.bias).abs().max() <= 1e-6
    found, expected, plain = (
        logits(quantized(policy, kernel="reference", lm_head=lm_head)[0]) for policy in (model, merged, bare)
    )
    assert (found - expected).abs().max() <= 1e-6
    assert (plain - expected).std() > 0.1 * expected.std()  # the adapters matter
    after = peft_model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert all(now is then for now, then in zip(peft_model.modules(), modules, strict=True))
    assert not any(module.merged for module in modules if hasattr(module, "lora_A"))


def test_refresh_follows_the_adapters_in_place(untied: PreTrainedModel) -> None:
    peft_model = lora(untied, target_modules=["q_proj", "v_proj"], lora_bias=True, bias="all")
    drafter, network = quantized(peft_model.get_base_model(), lm_head="dense")
    assert "model.layers.0.self_attn.q_proj" in network.layers and len(network.layers) == 14
    pointers, stale = addresses(network), logits(drafter)
    randomize_adapters(peft_model)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # must not round the merge
        network.refresh()
    assert not any(buffer.requires_grad for layer in network.layers.values() for buffer in layer.buffers())
    fresh, _ = quantized(peft_model.get_base_model(), lm_head="dense")
    assert torch.equal(logits(drafter), logits(fresh)) and not torch.equal(logits(drafter), stale)
    assert addresses(network) == pointers


def test_disabled_adapters_are_left_out(untied: PreTrainedModel) -> None:
    peft_model = lora(untied, target_modules=["q_proj", "v_proj"])
    plain, _ = quantized(copy.deepcopy(peft_model).unload(), lm_head="dense")
    with peft_model.disable_adapter():
        drafter, _ = quantized(peft_model.get_base_model(), lm_head="dense")
    assert torch.equal(logits(drafter), logits(plain))


def test_a_trained_copy_stays_dense(untied: PreTrainedModel) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["up_proj", "lm_head"])
    model = get_peft_model(untied, config).get_base_model()
    with pytest.warns(UserWarning, match=r"mlp\.up_proj \(peft keeps a trained copy of it"):
        drafter, network = quantized(model, lm_head="auto")
    assert network.dense_layers == [f"model.layers.{i}.mlp.up_proj" for i in range(2)]
    logits(drafter)
    network.assert_all_called()
