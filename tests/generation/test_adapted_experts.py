"""LoRA on the stacked experts of a mixture: peft parametrizes their weights during its forward."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.families import left_padded, row_by_row
from tests.generation.calls import generate
from tests.tiny_families import make


NEW = 12
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
ALL = {"target_modules": "all-linear"}
BIASES = {"target_parameters": [*EXPERTS["target_parameters"], "mlp.experts.gate_up_proj_bias"]}


def adapted(family: str, settings: dict[str, Any], adapters: int = 1) -> Any:
    """A float32 mixture with random adapters, all of them active."""
    peft_model = get_peft_model(make(family).float(), LoraConfig(r=4, **settings))
    for index in range(1, adapters):
        peft_model.add_adapter(str(index), LoraConfig(r=4, **settings))
    peft_model.base_model.set_adapter(list(peft_model.peft_config))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    return peft_model.eval()


@pytest.mark.parametrize(
    "family, settings, adapters",
    [
        ("qwen3_moe", ALL, 1), ("mixtral", EXPERTS, 2), ("gpt_oss", EXPERTS | BIASES, 1),
        ("qwen3_5_moe_text", EXPERTS, 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("qwen3_moe", EXPERTS, 2), ("mixtral", ALL, 1), ("gpt_oss", ALL, 1), ("qwen3_5_moe_text", ALL, 1),
        )),
    ],
)  # fmt: skip
def test_tokens_are_those_of_generate(family: str, settings: dict[str, Any], adapters: int) -> None:
    policy = adapted(family, settings, adapters)
    expected = row_by_row(policy.get_base_model(), NEW)
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    sampled = None
    for strategy in ("none", "self", "ngram"):
        config = {"draft_length": 3, "draft_quantization": "rtn-w8"}
        greedy = generate(policy, left_padded(), strategy, config, do_sample=False, max_new_tokens=NEW)
        assert greedy.sequences[:, -NEW:].tolist() == expected
        result = generate(policy, left_padded(), strategy, config, max_new_tokens=NEW)
        sampled = result if sampled is None else sampled
        assert torch.equal(result.sequences, sampled.sequences)
        if result.statistics.exact is True:
            assert torch.equal(result.logprobs, sampled.logprobs)
        for total in (greedy.statistics.total, result.statistics.total):
            assert (total.drafted > 0) is (strategy != "none")
            # 8 bits of the merged weights: a copy without the adapters is accepted in half of the cases at most.
            assert strategy != "self" or total.accepted > 0.7 * total.drafted
    after = dict(policy.named_parameters())
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
