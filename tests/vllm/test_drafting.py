"""Options of a trainer as vLLM's, and its counters as ours."""

from types import SimpleNamespace
from typing import Any

import pytest

from spec_trl import SpeculativeConfig
from spec_trl.vllm.counts import Counts
from spec_trl.vllm.drafting import Drafting, drafting_of


def drafts(strategy: str, device: str = "cpu", assistant: Any = None, heads: bool = False, **options: Any) -> Drafting:
    return drafting_of(strategy, SpeculativeConfig(**options), assistant, "some/policy", heads, device)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("self", {"method": "draft_model", "model": "some/policy", "draft_sample_method": "probabilistic"}),
        ("model", {"method": "draft_model", "model": "a/model", "draft_sample_method": "probabilistic"}),
        ("eagle3", {"method": "eagle3", "model": "a/model", "draft_sample_method": "probabilistic"}),
        ("mtp", {"method": "mtp", "model": "a/model", "draft_sample_method": "probabilistic"}),
        ("ngram", {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 2}),
        ("history", {"method": "custom_class", "model": "spec_trl.vllm.history.HistoryProposer"}),
    ],
)
def test_strategies(strategy: str, expected: dict[str, Any]) -> None:
    assistant = "a/model" if expected.get("model") == "a/model" else None
    found = drafts(strategy, assistant=assistant, draft_length=4, sd_toggle="always")
    assert found.speculative == expected | {"num_speculative_tokens": 4}
    assert found.lengths == (4,) and found.is_copy == (strategy == "self")
    arguments = found.engine_arguments("cpu")
    assert "scheduler_cls" not in arguments and arguments["weight_transfer_config"] == {"backend": "spec_trl"}


def test_a_planner_chooses_among_several_lengths() -> None:
    found = drafts("self", "cuda", draft_length=[4, 8])
    assert found.lengths == (2, 4, 8) and found.speculative is not None
    assert found.speculative["num_speculative_tokens"] == 8
    assert found.speculative["quantization"] == "fp8_per_channel"
    arguments = found.engine_arguments("cuda")
    assert arguments["scheduler_cls"] == "spec_trl.vllm.scheduler.AsyncLengthScheduler"
    assert arguments["additional_config"]["spec_trl"]["draft_lengths"] == (2, 4, 8)
    on_the_host = drafts("history", "cuda").engine_arguments("cuda")
    assert on_the_host["scheduler_cls"] == "spec_trl.vllm.scheduler.LengthScheduler"


def test_auto_takes_a_head_where_the_checkpoint_has_one() -> None:
    assert drafts("auto").strategy == "self" and drafts("auto", heads=True).strategy == "mtp"


@pytest.mark.parametrize("options", [{"strategy": "none"}, {"strategy": "self", "sd_toggle": "never"}])
def test_without_drafts(options: dict[str, Any]) -> None:
    found = drafts(**options)
    assert found.speculative is None and not found.is_copy
    assert found.engine_arguments("cpu") == {"weight_transfer_config": {"backend": "spec_trl"}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "best_of_n"}, "assistant_strategy='best_of_n' does not go with use_vllm=True: use one of"),
        ({"strategy": "self", "sd_toggle": "roofline"}, 'sd_toggle="roofline" does not go with use_vllm=True'),
        ({"strategy": "model", "assistant": object()}, "assistant_model is a object; under use_vllm=True give"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        drafts(**options)


NAMES = "drafts", "draft_tokens", "accepted_tokens"
SERVER = """
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 2.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 4.0
vllm:generation_tokens_total{engine="0",model_name="m"} 99.0
"""


def test_counts() -> None:
    totals = [SimpleNamespace(name=f"vllm:spec_decode_num_{name}", value=at + 1) for at, name in enumerate(NAMES)]
    positions = SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[2, 1])
    other = SimpleNamespace(name="vllm:generation_tokens", value=7)
    before = Counts.of_metrics([*totals, positions, other])
    assert before == Counts(1, 2, 3, (2, 1)) and Counts.of_metrics([]) == Counts()
    now = Counts.of_text(SERVER)
    assert now == Counts(12, 30, 12, (8, 4))
    assert now - before == Counts(11, 28, 9, (6, 3)) and Counts() + now == now
