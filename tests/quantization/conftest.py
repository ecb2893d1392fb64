"""Small models, and drafters that are their quantized copies."""

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from spec_trl.generation.engine.network.shadow import share_weights
from spec_trl.quantization import quantize_projections
from spec_trl.quantization.kernels import LayerSpec, PackedWeight
from spec_trl.quantization.kernels.reference import ReferenceInt4
from spec_trl.quantization.quantized_copy import QuantizedNetwork
from spec_trl.quantization.rtn import RoundToNearest


HAS_ONNXRUNTIME, HAS_BITSANDBYTES = (bool(importlib.util.find_spec(name)) for name in ("onnxruntime", "bitsandbytes"))
needs_onnxruntime = pytest.mark.skipif(not HAS_ONNXRUNTIME, reason="onnxruntime is not installed")
needs_nf4 = pytest.mark.skipif(
    not (HAS_BITSANDBYTES and torch.cpu._is_avx512_bf16_supported()), reason="no bitsandbytes, or no AVX-512"
)
IDS = torch.tensor([[3, 1, 4, 1], [9, 2, 6, 5]])


def layer_spec(
    out_features: int, in_features: int = 256, group: int = 128, bits: int = 4, device: str = "cpu",
    dtype: torch.dtype = torch.float32, activation_dtype: torch.dtype | None = None,
) -> LayerSpec:  # fmt: skip
    return LayerSpec(out_features, in_features, bits, group, dtype, activation_dtype, torch.device(device))


def as_kernel(name: str, **members: Any) -> type[PackedWeight]:
    """The reference kernel by another name, and otherwise different in `members`."""
    return type(name, (ReferenceInt4,), {"name": name, **members})


def on_gpu(name: str, refuses: int = 0) -> type[PackedWeight]:
    """The reference kernel as one for GPUs, whose tensors lie on the CPU; `refuses` so many output features."""
    return as_kernel(
        name,
        device_type="cuda",
        unsupported=classmethod(lambda kernel, layer: "refused" if layer.out_features == refuses else None),
        __init__=lambda packed, layer: ReferenceInt4.__init__(packed, replace(layer, device=torch.device("cpu"))),
    )


def pack(kernel: type[PackedWeight], layer: LayerSpec, weight: Tensor) -> Any:
    """`weight`, rounded to nearest, in a kernel's layout."""
    packed = kernel(layer)
    RoundToNearest().quantize_(weight, packed)
    return packed


def quantized(policy: nn.Module, *scheme_and_kernel: str, **options: Any) -> tuple[Any, QuantizedNetwork]:
    """A drafter over the Parameters of `policy`, and what is packed in it: 4 bits, if nothing else is said."""
    drafter = share_weights(policy)
    return drafter, quantize_projections(drafter, *(scheme_and_kernel or ("rtn-w4-g128",)), **options)


def never_dense(drafter: nn.Module) -> nn.Module:
    """The drafter, which from now on multiplies with packed weights for any number of rows."""
    for module in drafter.modules():
        if isinstance(module, PackedWeight):
            module.max_rows = 1_000_000
    return drafter


def logits(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(ids).logits  # [B, T, V]


def packed_buffers(network: QuantizedNetwork) -> list[Tensor]:
    """Codes, scales and zero points of all layers."""
    weights = [packed for layer in network.layers.values() for packed in layer.packed_weights]
    return [buffer for packed in weights for buffer in packed.buffers()]


def addresses(network: QuantizedNetwork) -> list[int]:
    return [buffer.data_ptr() for layer in network.layers.values() for buffer in layer.buffers()]


def all_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def randomize_adapters(peft_model: nn.Module) -> None:
    """As after training: peft starts them at zero."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)


@pytest.fixture
def llama() -> LlamaForCausalLM:
    """Two layers; rows of 128 (q, k, v, o, gate, up) and 192 (down): groups of 128 and 64; tied lm_head."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=160, attention_bias=True, tie_word_embeddings=True, initializer_range=0.1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()  # zeros would hide a lost bias
    return model


@pytest.fixture
def untied(llama: LlamaForCausalLM) -> LlamaForCausalLM:
    """With a weight of its own in lm_head: peft warns of adapters on a tied one."""
    llama.config.tie_word_embeddings = False
    llama.lm_head.weight = nn.Parameter(llama.lm_head.weight.detach().clone())
    return llama


@pytest.fixture
def gpt2() -> GPT2LMHeadModel:
    """Conv1D layers, whose weights are [in, out]."""
    torch.manual_seed(0)
    config = GPT2Config(n_embd=96, n_layer=1, n_head=4, vocab_size=64, n_positions=32, initializer_range=0.1)
    return GPT2LMHeadModel(config).double().eval()
