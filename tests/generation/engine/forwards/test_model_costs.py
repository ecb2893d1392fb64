"""Constants of models, read off the modules of real configurations."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.forwards.model_costs import model_constants
from tests.conftest import tiny_llama


def costs(config: PreTrainedConfig) -> Any:
    """Of a model on the meta device: shapes without weights."""
    with torch.device("meta"):
        return model_constants(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("config", "published"),
    [("Qwen2.5-7B-Instruct", "qwen257b"), ("Llama-3.1-8B-Instruct", "llama318binstruct")],
)
def test_published_constants(shared: Callable[[str], Path], config: str, published: str) -> None:
    folder = shared(f"configs/target/{config}")
    theirs = json.loads(shared(f"data/efficientrollout/model_constants_{published}.json").read_text())
    ours = costs(AutoConfig.from_pretrained(folder))
    assert (ours.dense_flops, ours.attention_flops) == (theirs["C_dense"], theirs["C_attn"])
    assert ours.kv_bytes == theirs["kappa_theoretical"]
    assert ours.weight_bytes == pytest.approx(theirs["W_t"], rel=2e-5)  # theirs leave the biases out


def test_drafter_bytes_are_those_of_the_packed_layers() -> None:
    policy = tiny_llama(hidden_size=256, intermediate_size=512).to(torch.bfloat16)
    drafter = SelfDrafter(policy, kernel="reference", lm_head="dense")
    constants = model_constants(policy, drafter.quantized)
    packed = sum(layer.weight_count for layer in drafter.quantized.layers.values())
    saved = constants.weight_bytes - constants.draft_weight_bytes
    assert saved == 2 * packed - drafter.quantized.packed_bytes
    assert constants.weight_bytes == sum(2 * p.numel() for p in policy.parameters())
    assert model_constants(policy).draft_weight_bytes == 0


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_are_one_weight_and_one_product(tied: bool) -> None:
    policy = tiny_llama(tie_word_embeddings=tied)
    constants, table = model_constants(policy), 64 * 64
    body = sum(p.numel() for name, p in policy.named_parameters() if "embed" not in name and "lm_head" not in name)
    norms = sum(p.numel() for p in policy.parameters() if p.ndim == 1)
    assert constants.weight_bytes == 8 * (body + table * (1 if tied else 2))
    assert constants.dense_flops == 2 * (body - norms + table)  # the head's product, never the table's


def test_tables_of_learned_positions_are_not_multiplied() -> None:
    constants = costs(GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=100, n_positions=32))
    assert constants.dense_flops == 2 * (2 * (64 * 192 + 64 * 64 + 2 * 64 * 256) + 64 * 100)
    assert constants.kv_bytes == 2 * 2 * 64 * 2


@pytest.mark.parametrize(("config", "experts", "used"), [(MixtralConfig, 8, 2), (Qwen3MoeConfig, 128, 8)])
def test_experts_count_by_use_in_products_and_all_in_bytes(config: Any, experts: int, used: int) -> None:
    sizes = dict(
        hidden_size=64, intermediate_size=128, moe_intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=100, decoder_sparse_step=1, num_local_experts=experts, num_experts=experts,
        num_experts_per_tok=used,
    )  # fmt: skip
    one, two = (costs(config(num_hidden_layers=layers, **sizes)) for layers in (1, 2))
    assert (one.experts, one.experts_per_token) == (experts, used)
    matrices, attention = 3 * 64 * 128, 2 * 64 * 64 + 2 * 64 * 32
    assert one.expert_bytes == 2 * experts * matrices
    assert two.dense_flops - one.dense_flops == 2 * (used * matrices + attention + 64 * experts)  # and the router
    assert one.kv_bytes == 2 * 2 * 16 * 2
