"""LoRA, DoRA and several adapters: the drafter is the merged model, quantized; the policy stays unmerged."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from spec_trl.quantization import QuantizedLinear, quantize_projections
from spec_trl.quantization.source_weight import read_projection


IDS = torch.tensor([[3, 1, 4, 1], [9, 2, 6, 5]])
TARGETS = ["q_proj", "v_proj", "down_proj", "lm_head"]


def randomize(peft_model):
    """Adapters as after training: peft starts them at zero."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)


def lora(model, **kwargs):
    peft_model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **{"target_modules": TARGETS, **kwargs}))
    randomize(peft_model)
    return peft_model.eval()


def two_adapters(model):
    peft_model = get_peft_model(model, LoraConfig(r=4, target_modules=TARGETS), adapter_name="one")
    peft_model.add_adapter("two", LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    peft_model.base_model.set_adapter(["one", "two"])
    randomize(peft_model)
    return peft_model.eval()


ADAPTERS = {
    "lora": lora,
    "rank-stabilised": lambda model: lora(model, use_rslora=True),
    "dora": lambda model: lora(model, use_dora=True),
    "with bias": lambda model: lora(model, target_modules=["q_proj", "v_proj"], lora_bias=True),
    "two adapters": two_adapters,
}


@pytest.fixture
def untied(llama):
    """peft warns of adapters on a tied lm_head."""
    llama.config.tie_word_embeddings = False
    llama.lm_head.weight = torch.nn.Parameter(llama.lm_head.weight.detach().clone())
    return llama


@pytest.mark.parametrize("kind", ADAPTERS)
def test_the_drafter_is_the_merged_model_quantized(untied, make_shadow, kind):
    """And the policy stays unmerged."""
    peft_model = ADAPTERS[kind](untied.to(torch.float64))
    model, modules = peft_model.get_base_model(), [*peft_model.modules()]
    before = copy.deepcopy(peft_model.state_dict())
    merged, plain = copy.deepcopy(peft_model).merge_and_unload(), make_shadow(copy.deepcopy(peft_model).unload())
    for name, module in merged.named_modules():
        if isinstance(module, torch.nn.Linear):
            weight, bias = read_projection(model.get_submodule(name))
            assert (weight - module.weight).abs().max() <= 1e-6 and (bias is None) == (module.bias is None)
            assert bias is None or (bias - module.bias).abs().max() <= 1e-6
    expected, shadow = make_shadow(merged), make_shadow(model)
    for each in (expected, shadow, plain):
        quantize_projections(each, kernel="reference", lm_head="packed").refresh()
    with torch.no_grad():
        reference, logits = expected(IDS).logits, shadow(IDS).logits
        assert (logits - reference).abs().max() <= 1e-6
        assert (plain(IDS).logits - reference).std() > 0.1 * reference.std()  # the adapters matter
    after = peft_model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert all(now is then for now, then in zip(peft_model.modules(), modules, strict=True))
    assert not any(module.merged for module in modules if "lora_A" in module._modules)


def test_refresh_follows_the_adapters_in_place(untied, make_shadow):
    peft_model = lora(untied, target_modules=["q_proj", "v_proj"], lora_bias=True, bias="all")
    shadow = make_shadow(peft_model.get_base_model())
    quantized = quantize_projections(shadow, lm_head="dense")
    assert "model.layers.0.self_attn.q_proj" in quantized.layers and len(quantized.layers) == 14
    pointers = [buffer.data_ptr() for layer in quantized.layers.values() for buffer in layer.buffers()]
    with torch.no_grad():
        stale = shadow(IDS).logits
    randomize(peft_model)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # must not round the merge
        quantized.refresh()
    assert not any(buffer.requires_grad for layer in quantized.layers.values() for buffer in layer.buffers())
    with torch.no_grad():
        quantize_projections(fresh := make_shadow(peft_model.get_base_model()), lm_head="dense")
        assert torch.equal(shadow(IDS).logits, fresh(IDS).logits)
        assert not torch.equal(shadow(IDS).logits, stale)
    assert pointers == [buffer.data_ptr() for layer in quantized.layers.values() for buffer in layer.buffers()]


def test_disabled_adapters_are_left_out(untied, make_shadow):
    peft_model = lora(untied, target_modules=["q_proj", "v_proj"])
    quantize_projections(plain := make_shadow(copy.deepcopy(peft_model).unload()), lm_head="dense")
    with peft_model.disable_adapter():
        quantize_projections(shadow := make_shadow(peft_model.get_base_model()), lm_head="dense")
    with torch.no_grad():
        assert torch.equal(shadow(IDS).logits, plain(IDS).logits)


def test_conv1d_below_an_adapter(make_shadow):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=96, n_layer=1, n_head=4, vocab_size=64, initializer_range=0.1)).double()
    peft_model = lora(model.eval(), target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)
    merged = copy.deepcopy(peft_model).merge_and_unload()
    quantize_projections(expected := make_shadow(merged), kernel="reference", lm_head="dense")
    quantize_projections(shadow := make_shadow(peft_model.get_base_model()), kernel="reference", lm_head="dense")
    assert isinstance(shadow.transformer.h[0].attn.c_attn, QuantizedLinear)
    with torch.no_grad():
        assert (shadow(IDS).logits - expected(IDS).logits).abs().max() <= 1e-6


def test_a_trained_copy_stays_dense(untied, make_shadow):
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["up_proj", "lm_head"])
    model = get_peft_model(untied, config).get_base_model()
    with pytest.warns(UserWarning, match=r"mlp\.up_proj \(peft keeps a trained copy of it"):
        quantized = quantize_projections(shadow := make_shadow(model), lm_head="auto")
    assert quantized.dense_layers == [f"model.layers.{i}.mlp.up_proj" for i in range(2)]
    with torch.no_grad():
        shadow(IDS)
    quantized.assert_all_called()
