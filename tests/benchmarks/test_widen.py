"""A wide model must compute what the checkpoint does, with weights that are no mere repetition of it."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import (
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from examples.demo.widen import widen
from tests.conftest import tiny_llama


SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1, bos_token_id=None, eos_token_id=None,
    pad_token_id=0,
)  # fmt: skip


def tiny_qwen(config: type, model: type) -> PreTrainedModel:
    """Random weights everywhere: fresh norms are all 1 and fresh biases all 0, which would hide a wrong order."""
    torch.manual_seed(0)
    narrow = model(config(**SIZES)).double().eval()
    for parameter in narrow.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0, 0.5)
    return narrow


NARROW: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: tiny_llama(tie_word_embeddings=True),
    "qwen2": lambda: tiny_qwen(Qwen2Config, Qwen2ForCausalLM),  # with biases
    "qwen3": lambda: tiny_qwen(Qwen3Config, Qwen3ForCausalLM),  # with norms of heads; head_dim is not hidden / heads
}


def assert_same_function(narrow: PreTrainedModel, wide: PreTrainedModel, tolerance: float) -> None:
    """Up to rounding; transformers' norms round to float32 in float64, too."""
    torch.manual_seed(1)
    ids = torch.randint(3, narrow.config.vocab_size, (3, 40))  # [3, 40]
    with torch.no_grad():
        difference = (narrow(ids).logits - wide(ids).logits).abs().max().item()
        greedy = [model.generate(ids[:, :8], max_new_tokens=16, do_sample=False) for model in (narrow, wide)]
    assert difference < tolerance
    assert torch.equal(*greedy)


@pytest.mark.parametrize("family", NARROW)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-5), (torch.float32, 1e-4)])
def test_a_wide_model_computes_the_same(family: str, dtype: torch.dtype, tolerance: float) -> None:
    narrow = NARROW[family]().to(dtype)
    wide = widen(narrow, 3, seed=0)
    assert (wide.config.hidden_size, wide.config.num_key_value_heads) == (3 * narrow.config.hidden_size, 6)
    assert wide.model.layers[0].self_attn.head_dim == narrow.model.layers[0].self_attn.head_dim
    assert_same_function(narrow, wide, tolerance)
    assert_same_function(narrow, widen(narrow, 1, seed=0), tolerance)


def test_no_two_blocks_are_equal() -> None:
    narrow = NARROW["qwen2"]()
    wide = widen(narrow, 3, seed=0)
    matrices = {name: module for name, module in wide.named_modules() if isinstance(module, nn.Linear)}
    assert len(matrices) == 2 * 7 + 1
    for name, module in matrices.items():
        small = narrow.get_submodule(name).weight  # [out, in]
        out, inputs = small.shape
        noise = 3 * module.weight.view(-1, out, 3, inputs) - small[:, None]  # [copies, out, 3, in]
        assert noise.sum(2).abs().max() < 1e-12, name
        assert noise.std().item() == pytest.approx(small.std().item() * (2 / 3) ** 0.5, rel=0.05), name
    assert not torch.equal(wide.lm_head.weight, widen(narrow, 3, seed=1).lm_head.weight)
