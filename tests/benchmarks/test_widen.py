"""A wide model must compute what the checkpoint does, with weights that are no mere repetition of it."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from examples.demo.widen import widen


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])  # tied; with biases; with norms of heads
def test_a_wide_model_computes_the_same_and_repeats_no_block(family: str) -> None:
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1, bos_token_id=None, eos_token_id=None,
        pad_token_id=0, tie_word_embeddings=family == "llama",
    )  # fmt: skip
    narrow = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).double().eval()
    for parameter in narrow.parameters():
        if parameter.dim() == 1:  # norms of 1 and biases of 0 would hide a wrong order
            nn.init.normal_(parameter, 1.0, 0.5)
    wide = widen(narrow, 3, seed=0)
    assert (wide.config.hidden_size, wide.config.num_key_value_heads) == (3 * 32, 6)
    assert wide.model.layers[0].self_attn.head_dim == narrow.model.layers[0].self_attn.head_dim
    ids = torch.randint(3, 64, (3, 40))  # [3, 40]
    with torch.no_grad():  # norms round to float32 in float64 too
        torch.testing.assert_close(wide(ids).logits, narrow(ids).logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(widen(narrow, 1, seed=0)(ids).logits, narrow(ids).logits, rtol=0, atol=1e-5)
    matrices = {name: module for name, module in wide.named_modules() if isinstance(module, nn.Linear)}
    assert len(matrices) == 2 * 7 + 1
    for name, module in matrices.items():
        small = narrow.get_submodule(name).weight  # [out, in]
        out, inputs = small.shape
        noise = 3 * module.weight.view(-1, out, 3, inputs) - small[:, None]  # [copies, out, 3, in]
        assert noise.sum(2).abs().max() < 1e-12, name
        assert noise.std().item() == pytest.approx(small.std().item() * (2 / 3) ** 0.5, rel=0.05), name
    assert not torch.equal(wide.lm_head.weight, widen(narrow, 3, seed=1).lm_head.weight)
