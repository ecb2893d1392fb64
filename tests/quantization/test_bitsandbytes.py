"""Policies that bitsandbytes already quantized (QLoRA): dequantized, adapters added, quantized for the drafter."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from spec_trl import release
from spec_trl.quantization import QuantizedLinear
from spec_trl.quantization.source_weight import read_projection
from tests.generation.calls import generate, pad_left, random_rows
from tests.quantization.conftest import logits, never_dense, quantized


bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")


def to_bitsandbytes(model: PreTrainedModel, bits: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Replaces the projections as transformers does on load; `dtype`: in which 4 bits are multiplied."""
    for name, module in list(model.named_modules()):
        if not name.endswith("_proj"):
            continue
        sizes = (module.in_features, module.out_features, module.bias is not None)
        if bits == 4:
            layer = bnb.nn.Linear4bit(*sizes, compute_dtype=dtype, quant_type="nf4")
        else:
            layer = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=6.0)
        layer.load_state_dict(copy.deepcopy(module.state_dict()))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.to("cpu"))
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = bits == 4, bits == 8
    return model


@pytest.mark.parametrize("bits", [4, 8])
def test_the_drafter_follows_the_dequantized_policy(llama: PreTrainedModel, bits: int) -> None:
    original = copy.deepcopy(llama)
    policy = to_bitsandbytes(llama, bits).eval()
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    drafter, network = quantized(policy, "rtn-w8", lm_head="dense")
    assert len(network.layers) == 14
    assert all(torch.equal(parameter, before[name]) for name, parameter in policy.named_parameters())
    for name in network.layers:
        module = original.get_submodule(name)
        weight, bias = read_projection(policy.get_submodule(name))
        assert weight.shape == module.weight.shape and bias is policy.get_submodule(name).bias
        assert (weight - module.weight).std() < (0.12 if bits == 4 else 0.01) * module.weight.std()
    target = logits(policy)
    assert (logits(never_dense(drafter)) - target).std() < 0.1 * target.std()


@pytest.mark.parametrize(("shape", "compress_statistics"), [((64, 128), True), ((128, 192), False)])
def test_a_weight_that_bitsandbytes_permuted_in_its_forward_is_still_read(
    shape: tuple[int, int], compress_statistics: bool
) -> None:
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
def test_adapters_are_added_without_rounding(llama: PreTrainedModel, bits: int) -> None:
    policy = to_bitsandbytes(llama, bits)
    peft_model = get_peft_model(policy, LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    layer = policy.model.layers[0].self_attn.q_proj
    base = read_projection(layer)[0]
    nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
    assert ((read_projection(layer)[0] - base) - delta).abs().max() <= 1e-6
    drafter, _ = quantized(peft_model.get_base_model(), lm_head="dense")
    assert isinstance(drafter.model.layers[0].self_attn.q_proj, QuantizedLinear)


def test_dora_on_four_bits_stays_dense(llama: PreTrainedModel) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"], use_dora=True)
    peft_model = get_peft_model(to_bitsandbytes(llama, 4), config)
    with pytest.warns(UserWarning, match="DoRA on Params4bit weights cannot be merged without rounding"):
        _, network = quantized(peft_model.get_base_model(), lm_head="dense")
    assert network.dense_layers == [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]


@pytest.mark.parametrize("training", [True, False])
def test_8_bits_in_eval_mode_are_said_to_depend_on_other_rows(llama: PreTrainedModel, training: bool) -> None:
    policy = to_bitsandbytes(llama, 8).train(training)
    for _ in range(2):  # the second verdict is read from the first one's file, where there is one
        found = generate(policy, pad_left(random_rows([4, 6])), max_new_tokens=2).statistics.exact
        assert ("outliers of other rows in Linear8bitLt" in str(found)) is not training
        release(policy)
