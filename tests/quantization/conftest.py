"""Small models, and a shadow like the self-drafter's: own module objects over the same Parameters."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from spec_trl.quantization.kernels import PackedWeight


def shadow_of(module: nn.Module) -> nn.Module:
    clone = module.__class__.__new__(module.__class__)
    clone.__dict__ = module.__dict__.copy()
    clone._modules = {name: child and shadow_of(child) for name, child in module._modules.items()}
    clone.training = False
    return clone


@pytest.fixture
def make_shadow() -> Callable[[nn.Module], nn.Module]:
    return shadow_of


@pytest.fixture
def never_dense() -> Callable[[nn.Module], nn.Module]:
    """Makes a drafter multiply with packed weights however many rows come."""

    def change(shadow: nn.Module) -> nn.Module:
        for module in shadow.modules():
            if isinstance(module, PackedWeight):
                module.max_rows = 1_000_000
        return shadow

    return change


@pytest.fixture
def llama() -> PreTrainedModel:
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
