"""Mixtures of experts: packed experts after a dense router."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from spec_trl.quantization.awq import ActivationStatistics
from spec_trl.quantization.experts import QuantizedExperts, matrices_of, matrix_names
from tests.quantization.conftest import addresses, all_equal, logits, quantized


COMMON = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "initializer_range": 0.1, "num_experts_per_tok": 2,
}  # fmt: skip
FAMILIES = {
    "qwen2_moe": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**COMMON, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=64)
    ),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**COMMON, num_experts=4, moe_intermediate_size=32, head_dim=16)
    ),
    "gpt_oss": lambda: GptOssForCausalLM(GptOssConfig(**COMMON, num_local_experts=4, head_dim=16)),
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **{**COMMON, "num_key_value_heads": 4}, n_routed_experts=8, n_group=2, topk_group=1, q_lora_rank=32,
            kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, moe_intermediate_size=32,
            first_k_dense_replace=1,
        )
    ),
}  # fmt: skip


def build(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    torch.manual_seed(0)
    model = FAMILIES[family]().to(dtype).eval()
    model.set_experts_implementation("eager")  # transformers' default knows no float64
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name:
                parameter.normal_(std=0.1)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_the_drafter_is_the_fake_quantized_model(family: str) -> None:
    model = build(family)
    twin = copy.deepcopy(model)
    drafter, network = quantized(model, kernel="reference", lm_head="dense")
    packed_experts = {n: layer for n, layer in network.layers.items() if isinstance(layer, QuantizedExperts)}
    assert len(packed_experts) == (1 if family == "deepseek_v3" else 2) and network.dense_layers == []
    assert not any("router" in name or name.endswith("gate") for name in network.layers)
    with torch.no_grad():
        for name, layer in network.layers.items():
            if name not in packed_experts:
                twin.get_submodule(name).weight.copy_(layer.packed.dequantize())
                continue
            experts = twin.get_submodule(name)
            for stack, packed in zip(matrix_names(experts), (layer.first, layer.second), strict=True):
                for matrix, weight in zip(matrices_of(experts, stack), packed, strict=True):
                    matrix.copy_(weight.dequantize())
    expected = logits(twin)
    torch.testing.assert_close(logits(drafter), expected, rtol=0, atol=1e-10)
    network.assert_all_called()
    assert (logits(model) - expected).std() > 0.01 * expected.std()


def test_fast_experts_agree_with_the_reference_and_many_tokens_run_the_dense_ones() -> None:
    model = build("qwen3_moe", torch.bfloat16)
    fast, reference = (
        quantized(model, kernel=kernel)[0].model.layers[0].mlp.experts for kernel in ("auto", "reference")
    )
    limit = fast.first[0].max_rows * 4 // 2  # 4 experts, 2 per token
    for tokens, packed in ((5, True), (limit, True), (limit + 1, False)):
        x, shares = torch.randn(tokens, 64).bfloat16(), torch.rand(tokens, 2).bfloat16()
        chosen = torch.randint(0, 4, (tokens, 2))
        with torch.no_grad():
            y, expected = fast(x, chosen, shares), reference(x, chosen, shares)  # [tokens, 64] each
            dense = model.model.layers[0].mlp.experts(x, chosen, shares)  # [tokens, 64]
        assert torch.equal(y, dense) is not packed
        assert not packed or (y - expected).std() < 0.02 * expected.std()


def test_refresh_follows_experts_and_adapters_in_place() -> None:
    model = build("qwen3_moe", torch.float32)
    before = copy.deepcopy(model.state_dict())
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    peft_model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], target_parameters=parameters)).eval()
    drafter, network = quantized(peft_model.get_base_model(), lm_head="dense")
    pointers, stale = addresses(network), logits(drafter)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    network.refresh()
    assert addresses(network) == pointers
    merged, _ = quantized(copy.deepcopy(peft_model).merge_and_unload(), lm_head="dense")
    torch.testing.assert_close(logits(drafter), logits(merged), rtol=0, atol=0.05)
    assert (logits(drafter) - stale).std() > 0.1 * stale.std()
    policy = peft_model.state_dict()
    for name in ("gate_up_proj", "down_proj"):
        key = next(key for key in policy if key.endswith(name))
        assert torch.equal(policy[key], before[f"model.layers.0.mlp.experts.{name}"])


def test_activation_aware_schemes_round_experts_to_nearest() -> None:
    model, experts = build("qwen2_moe"), "model.layers.0.mlp.experts"
    drafter, network = quantized(model, "awq-w4-g128", "reference", lm_head="dense")
    _, plain = quantized(model, "rtn-w4-g128", "reference", lm_head="dense")
    assert experts in network.layers and experts not in network.activation_aware_layers
    assert "model.layers.0.mlp.shared_expert.up_proj" in network.activation_aware_layers
    statistics = ActivationStatistics(model, network.activation_aware_layers)
    with statistics.collect(0):
        logits(model)
    network.refresh(statistics)
    assert all_equal([*network.layers[experts].buffers()], [*plain.layers[experts].buffers()])
    assert torch.isfinite(logits(drafter)).all()


def test_experts_of_another_kind_stay_dense_and_are_named() -> None:
    config = Llama4TextConfig(
        **COMMON, num_local_experts=4, intermediate_size_mlp=96, head_dim=16, interleave_moe_layer_step=1
    )
    with pytest.warns(UserWarning, match="feed_forward.experts .*lack transformers' experts interface"):
        _, network = quantized(Llama4ForCausalLM(config).eval())
    assert network.dense_layers == [f"model.layers.{i}.feed_forward.experts" for i in range(2)]
