"""Policies that bitsandbytes already quantized (QLoRA): dequantized, adapters added, quantized for the drafter."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from spec_trl.quantization import QuantizedLinear, quantize_projections
from spec_trl.quantization.source_weight import read_projection


bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

IDS = torch.tensor([[3, 1, 4, 1], [9, 2, 6, 5]])


def to_bitsandbytes(model, bits):
    """Replace the projections as transformers does on load."""
    for name, module in list(model.named_modules()):
        if not name.endswith("_proj"):
            continue
        if bits == 4:
            layer = bnb.nn.Linear4bit(
                module.in_features, module.out_features, module.bias is not None,
                compute_dtype=torch.float32, quant_type="nf4",
            )  # fmt: skip
        else:
            layer = bnb.nn.Linear8bitLt(
                module.in_features, module.out_features, module.bias is not None, has_fp16_weights=False, threshold=6.0
            )
        layer.load_state_dict(copy.deepcopy(module.state_dict()))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.to("cpu"))
    return model


@pytest.mark.parametrize("bits", [4, 8])
def test_the_drafter_follows_the_dequantized_policy(llama, make_shadow, never_dense, bits):
    original = copy.deepcopy(llama)
    policy = to_bitsandbytes(llama, bits).eval()
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    quantized = quantize_projections(shadow := make_shadow(policy), scheme="rtn-w8", lm_head="dense")
    assert len(quantized.layers) == 14
    assert all(torch.equal(parameter, before[name]) for name, parameter in policy.named_parameters())
    for name, module in original.named_modules():
        if name.endswith("_proj"):
            weight, bias = read_projection(policy.get_submodule(name))
            assert weight.shape == module.weight.shape and bias is policy.get_submodule(name).bias
            assert (weight - module.weight).std() < (0.12 if bits == 4 else 0.01) * module.weight.std()
    with torch.no_grad():
        drafted, target = never_dense(shadow)(IDS).logits, policy(IDS).logits
        assert (drafted - target).std() < 0.1 * target.std()


@pytest.mark.parametrize("compress_statistics", [True, False])
@pytest.mark.parametrize("shape", [(64, 128), (128, 192)])
def test_a_weight_that_bitsandbytes_permuted_in_its_forward_is_still_read(shape, compress_statistics):
    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(
        shape[1], shape[0], False, torch.float32, compress_statistics=compress_statistics, quant_type="nf4"
    )
    layer.load_state_dict({"weight": torch.randn(shape)})
    layer = layer.to("cpu").eval()
    before = read_projection(layer)[0]
    with torch.no_grad():
        layer(torch.randn(1, shape[1]))  # on a CPU with AVX-512 this permutes the weight in place
    torch.testing.assert_close(read_projection(layer)[0], before, rtol=2**-8, atol=1e-6)  # block maxima in bfloat16


@pytest.mark.parametrize("bits", [4, 8])
def test_adapters_are_added_without_rounding(llama, make_shadow, bits):
    policy = to_bitsandbytes(llama, bits)
    policy.is_loaded_in_4bit, policy.is_loaded_in_8bit = bits == 4, bits == 8
    peft_model = get_peft_model(policy, LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    base = read_projection(policy.model.layers[0].self_attn.q_proj)[0]
    layer = policy.model.layers[0].self_attn.q_proj
    nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
    assert ((read_projection(layer)[0] - base) - delta).abs().max() <= 1e-6
    quantize_projections(shadow := make_shadow(peft_model.get_base_model()), lm_head="dense")
    assert isinstance(shadow.model.layers[0].self_attn.q_proj, QuantizedLinear)


def test_dora_on_four_bits_stays_dense(llama, make_shadow):
    policy = to_bitsandbytes(llama, 4)
    policy.is_loaded_in_4bit = True
    peft_model = get_peft_model(policy, LoraConfig(r=4, target_modules=["q_proj"], use_dora=True))
    with pytest.warns(UserWarning, match="DoRA on Params4bit weights cannot be merged without rounding"):
        quantized = quantize_projections(make_shadow(peft_model.get_base_model()), lm_head="dense")
    assert quantized.dense_layers == [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]
