"""Mixtures of experts: packed experts after a dense router."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from spec_trl.quantization.awq import ActivationStatistics
from spec_trl.quantization.experts import QuantizedExperts, matrices_of, matrix_names
from tests.quantization.conftest import addresses, all_equal, logits, quantized
from tests.tiny_families import make


@pytest.mark.filterwarnings("ignore:.*16 input features:UserWarning")  # deepseek's q_b_proj
@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_the_drafter_is_the_fake_quantized_model(family: str) -> None:
    model = make(family, std=0.1)
    twin = copy.deepcopy(model)
    drafter, network = quantized(model, kernel="reference", lm_head="dense")
    packed_experts = {n: layer for n, layer in network.layers.items() if isinstance(layer, QuantizedExperts)}
    assert len(packed_experts) == (1 if family == "deepseek_v3" else 2)
    assert all(name.endswith("q_b_proj") for name in network.dense_layers)
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
    # DeepSeek's router computes in float32, where a shadow sums in another order.
    torch.testing.assert_close(logits(drafter), expected, rtol=0, atol=1e-6 if family == "deepseek_v3" else 1e-10)
    network.assert_all_called()
    assert (logits(model) - expected).std() > 0.01 * expected.std()


def test_fast_experts_agree_with_the_reference_and_many_tokens_run_the_dense_ones() -> None:
    model = make("mixtral", std=0.1).bfloat16()
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
        # Where "auto" is onnxruntime's kernel, two products in a row round their activations to 8 bits.
        assert not packed or (y - expected).std() < 0.05 * expected.std()


@pytest.mark.parametrize("family, suffixes", [("mixtral", [""]), ("gpt_oss", ["", "_bias"])])
def test_refresh_follows_experts_and_adapters_in_place(family: str, suffixes: list[str]) -> None:
    model = make(family, std=0.1).float()
    before = copy.deepcopy(model.state_dict())
    parameters = [f"experts.{name}{suffix}" for name in ("gate_up_proj", "down_proj") for suffix in suffixes]
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
    model, experts = make("qwen2_moe", std=0.1), "model.layers.0.mlp.experts"
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
    with pytest.warns(UserWarning, match="feed_forward.experts .*lack transformers' experts interface"):
        _, network = quantized(make("llama4_text"))
    assert network.dense_layers == [f"model.layers.{i}.feed_forward.experts" for i in range(2)]
