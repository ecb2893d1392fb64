"""The self-drafter: kept between calls, refreshed, rebuilt, and never a change to the policy or a second cache."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch.testing._internal.two_tensor import TwoTensor
from transformers import LlamaForCausalLM, PreTrainedModel

import spec_trl
from spec_trl import SpeculativeConfig
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.network.snapshot import WeightState
from spec_trl.generation.session import Session
from spec_trl.generation.strategies import make_drafters
from tests.conftest import tiny_llama
from tests.generation.calls import Prompts, generate, outputs, pad_left, random_rows
from tests.generation.drafters.watching import before, untouched
from tests.quantization.conftest import needs_nf4, needs_onnxruntime


OPTIONS = ("auto", "reference", "auto")


def config_of(quantization: str, kernel: str, lm_head: str) -> SpeculativeConfig:
    head = {"lm_head": lm_head}
    return SpeculativeConfig(draft_quantization=quantization, draft_kernel=kernel, efficient_rollout=head)


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return pad_left(random_rows([4, 7, 2]))


def drafter_of(policy: PreTrainedModel, *options: str) -> SelfDrafter:
    """That of a call, which drafts and ends at once."""
    with Session.lend(policy) as session:
        (drafter,) = make_drafters(session, "self", policy, None, config_of(*(options or OPTIONS)))
        drafter.refresh_if_stale()
    return drafter


def packed_of(drafter: SelfDrafter) -> list[torch.Tensor]:
    return [buffer.clone() for layer in drafter.quantized.layers.values() for buffer in layer.packed.buffers()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_kept_between_calls(fresh: LlamaForCausalLM) -> None:
    drafter = drafter_of(fresh)
    assert drafter_of(fresh) is drafter
    assert drafter_of(tiny_llama()) is not drafter
    assert drafter_of(fresh, "rtn-w8", *OPTIONS[1:]) is not drafter
    assert drafter_of(fresh, *OPTIONS[:2], "packed") is not drafter
    drafter = drafter_of(fresh)
    assert drafter_of(fresh.bfloat16()) is not drafter


def test_packed_when_something_is_drafted(fresh: LlamaForCausalLM, prompts: Prompts) -> None:
    drafter = SelfDrafter.make(fresh, None, config_of(*OPTIONS))
    empty = packed_of(drafter)
    generate(fresh, prompts, drafter=drafter, max_new_tokens=1)  # no room for a draft
    assert equal(empty, packed_of(drafter)) and drafter.waited == 0
    result = generate(fresh, prompts, drafter=drafter, max_new_tokens=12)
    assert equal(packed_of(drafter), packed_of(SelfDrafter(fresh, *OPTIONS))) and drafter.waited > 0
    assert result.statistics.acceptance_rate > 0.5


def step(policy: LlamaForCausalLM, optimizer: type[torch.optim.Optimizer], **options: Any) -> None:
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer(policy.parameters(), lr=0.5, **options).step()


def write(policy: LlamaForCausalLM, place: str, values: Callable[[torch.Tensor], torch.Tensor]) -> None:
    parameter = policy.get_parameter(place)
    parameter.data = values(parameter)


UP_PROJ, NORM = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
WRITES: dict[str, Callable[[LlamaForCausalLM, torch.Tensor], Any]] = {
    "an optimizer": lambda policy, flat: step(policy, torch.optim.SGD),
    "no_grad": lambda policy, flat: policy.get_parameter(UP_PROJ).mul_(-1.0),
    "new storage": lambda policy, flat: write(policy, UP_PROJ, torch.neg),
    "a norm": lambda policy, flat: policy.get_parameter(NORM).mul_(1.0),
    # Version counters do not move.
    "a fused optimizer": lambda policy, flat: step(policy, torch.optim.AdamW, fused=True),
    "data": lambda policy, flat: policy.get_parameter(UP_PROJ).data.mul_(1.01),
    "a flat buffer": lambda policy, flat: flat.mul_(1.01),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", WRITES)
@torch.no_grad()
def test_refreshed_once_when_weights_change(change: str, dtype: torch.dtype, fresh: LlamaForCausalLM) -> None:
    """Into the same buffers, which captured graphs read."""
    policy = fresh.to(dtype)
    parameters = list(policy.parameters())
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    for parameter, part in zip(parameters, flat.split([parameter.numel() for parameter in parameters]), strict=True):
        parameter.data = part.view_as(parameter)  # as DeepSpeed lays them
    drafter, refreshed = drafter_of(policy), []
    before(drafter, "refresh", lambda *_: refreshed.append(1))
    layers = [layer.packed for layer in drafter.quantized.layers.values()]
    addresses = [buffer.data_ptr() for packed in layers for buffer in packed.buffers()]
    for count in range(1, 3):
        packed = packed_of(drafter)
        WRITES[change](policy, flat)
        for _ in range(2):
            assert drafter_of(policy) is drafter and len(refreshed) == count
        assert equal(packed, packed_of(drafter)) == (change == "a norm")
    assert equal(packed_of(drafter), packed_of(SelfDrafter(policy, *OPTIONS)))
    assert addresses == [buffer.data_ptr() for packed in layers for buffer in packed.buffers()]


def test_weights_of_any_kind_are_compared(fresh: LlamaForCausalLM) -> None:
    odd = torch.nn.Module()
    odd.narrow = torch.nn.Parameter(torch.zeros(64, 64).to(torch.float8_e4m3fn), requires_grad=False)
    odd.packed = torch.nn.Parameter(torch.zeros(64, dtype=torch.uint8), requires_grad=False)
    odd.broken = torch.nn.Parameter(torch.full((8, 8), torch.nan))
    odd.expanded = torch.nn.Parameter(torch.zeros(8, 1).expand(8, 8))
    odd.empty = torch.nn.Parameter(torch.zeros(0, 8))
    with torch.inference_mode():
        odd.inference = torch.nn.Parameter(torch.zeros(8))
    before_ = WeightState(odd)
    assert before_ == WeightState(odd)
    odd.packed.data[0] = 1
    assert before_ != WeightState(odd)


def test_changes_inside_wrapped_weights_are_seen() -> None:
    """As torchao's quantized weights are, some of which refuse to be sliced."""
    layer, inner = torch.nn.Linear(64, 32, bias=False), [torch.randn(32, 64) for _ in range(2)]
    layer.weight = torch.nn.Parameter(NoSlices(*inner))
    before_ = WeightState(layer)
    assert before_ == WeightState(layer)
    inner[1].data.mul_(2)
    assert before_ != WeightState(layer)


class NoSlices(TwoTensor):
    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.slice.Tensor:
            raise NotImplementedError("Slicing with step != 1 is not supported")
        return super().__torch_dispatch__(function, types, args, kwargs)



def test_a_change_that_nobody_sees_costs_acceptance_alone(fresh: LlamaForCausalLM, prompts: Prompts) -> None:
    drafter = drafter_of(fresh)
    packed = packed_of(drafter)
    with torch.no_grad():
        fresh.model.layers[0].mlp.down_proj.weight.data[1, 1] = 50.0
    assert outputs(generate(fresh, prompts, "self")) == outputs(generate(fresh, prompts))
    assert drafter_of(fresh) is drafter and equal(packed, packed_of(drafter))
    spec_trl.refresh(torch.nn.Sequential(fresh))
    assert drafter_of(fresh) is drafter and not equal(packed, packed_of(drafter))


def test_kept_by_calls_and_rebuilt_when_the_structure_changes(fresh: LlamaForCausalLM, prompts: Prompts) -> None:
    found = []
    for change in (False, False, True):
        if change:
            fresh.model.layers[1] = tiny_llama(seed=3).model.layers[1]
        result = generate(fresh, prompts, "self", max_new_tokens=8)
        assert outputs(result) == outputs(generate(fresh, prompts, max_new_tokens=8))
        assert result.statistics.acceptance_rate > 0.5
        found.append(Session.of(fresh).drafters.get("self"))
    assert found[0] is found[1] is not found[2]


def adapted(model: PreTrainedModel) -> PeftModel:
    """With the adapters "a", which is active, and "b", either of which changes what the model says."""
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj", "lm_head"], init_lora_weights=False)
    torch.manual_seed(0)
    policy = get_peft_model(model, config, adapter_name="a", autocast_adapter_dtype=False)
    policy.add_adapter("b", config, autocast_adapter_dtype=False)
    return policy.to(model.dtype).eval()


def scale(policy: PeftModel) -> None:
    for layer in policy.modules():
        if isinstance(layer, LoraLayer):
            layer.scale_layer(-4.0)


def add(policy: PeftModel) -> None:
    policy.add_adapter("c", policy.peft_config["a"], autocast_adapter_dtype=False)
    policy.set_adapter("c")


CHANGES: dict[str, Callable[[PeftModel], Any]] = {
    "set": lambda policy: policy.set_adapter("b"),
    "set by the base": lambda policy: policy.base_model.set_adapter("b"),
    "both active": lambda policy: policy.base_model.set_adapter(["a", "b"]),
    "disabled": lambda policy: policy.base_model.disable_adapter_layers(),
    "scaled": scale,
    "added": add,
    "deleted": lambda policy: policy.delete_adapter("a"),
    "merged": lambda policy: policy.merge_adapter(["a", "b"]),
}


@pytest.mark.parametrize("strategy", ["self", "tts"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:Adapter cannot be set", "ignore:.*lm_head", "ignore:.*tie")
def test_follows_what_decides_the_weights(change: str, strategy: str, fresh: Any, prompts: Prompts) -> None:
    """By the counts of a copy made anew, of a call through the base model."""
    policy = adapted(fresh)
    config = {"tts": {"scope": "run", "stride": 1}} if strategy == "tts" else {}

    def counts(model: Any = policy) -> tuple[int, int]:
        result = generate(model, prompts, strategy, config)
        assert outputs(result) == outputs(generate(model, prompts))
        return result.statistics.total.accepted, result.statistics.total.drafted

    counts()
    CHANGES[change](policy)
    found = counts()
    spec_trl.release(fresh)
    assert found == counts(policy.get_base_model()) and found[0] > 0.3 * found[1] > 0


def test_follows_adapters_there_and_back(fresh: LlamaForCausalLM, prompts: Prompts) -> None:
    policy = adapted(fresh)
    first = generate(policy, prompts, "self").statistics.acceptance_rate
    with policy.disable_adapter():
        generate(policy, prompts, "self")
    assert generate(policy, prompts, "self").statistics.acceptance_rate == first
    policy.merge_adapter()
    generate(policy, prompts, "self")
    policy.unmerge_adapter()
    assert generate(policy, prompts, "self").statistics.acceptance_rate == first > 0.3


def test_policy_is_untouched(fresh: LlamaForCausalLM, prompts: Prompts) -> None:
    def looks() -> list[Any]:
        modules = [(name, id(module)) for name, module in fresh.named_modules()]
        return modules + [(name, id(p), p.data_ptr(), p.requires_grad) for name, p in fresh.named_parameters()]

    seen = looks()
    with untouched(fresh):
        generate(fresh, prompts, "self", max_new_tokens=6)
    assert looks() == seen
    fresh(prompts["input_ids"]).logits.sum().backward()  # and still trains
    assert all(parameter.grad is not None for parameter in fresh.parameters())


def test_dies_with_its_policy(prompts: Prompts) -> None:
    policy = tiny_llama()
    generate(policy, prompts, "self", max_new_tokens=4)
    drafter = weakref.ref(Session.of(policy).drafters.get("self"))
    gone = weakref.ref(policy)
    del policy
    gc.collect()
    assert gone() is None, "the drafter that is kept for it keeps the policy alive"
    assert drafter() is None


@pytest.mark.parametrize("options", [
    ("rtn-w4-g128", "reference", "auto"), ("rtn-w4-g64", "auto", "packed"), ("rtn-w4-g32", "reference", "dense"),
    ("rtn-w8", "auto", "packed"), ("awq-w4-g32", "auto", "auto"), ("nf4", "reference", "packed"),
    pytest.param(("nf4", "bitsandbytes", "packed"), marks=needs_nf4),
    pytest.param(("rtn-w4-g128", "onnxruntime", "packed"), marks=needs_onnxruntime),
])  # fmt: skip
def test_every_quantization_drafts_without_a_cache_of_its_own(
    options: tuple[str, ...], tiny: PreTrainedModel, prompts: Prompts
) -> None:
    drafter, shared = SelfDrafter(tiny, *options), []
    before(drafter, "end", lambda: shared.append(drafter.cache is drafter.session.target.cache))
    before(drafter, "end", lambda: shared.append(drafter.cache_bytes == 0))
    result, plain = generate(tiny, prompts, drafter=drafter), generate(tiny, prompts)
    assert outputs(result) == outputs(plain) and shared == [True, True]
    assert result.statistics.acceptance_rate > (0.8 if options[0] == "rtn-w8" else 0.5)
    assert result.statistics.drafter_failure is None
    assert result.statistics.cache_bytes == plain.statistics.cache_bytes


def test_rows_beyond_the_kernel_decode_autoregressively(fresh: LlamaForCausalLM) -> None:
    prompts = pad_left(random_rows([3, 4, 5, 6]))
    stop = [tokens[3] for tokens in outputs(generate(fresh, prompts))[:2]]  # ends two rows early
    drafter = SelfDrafter(fresh, kernel="reference")
    assert drafter.max_rows > 1000
    drafter.max_rows = 2
    drafted = generate(fresh, prompts, "self", drafter=drafter, max_new_tokens=40, eos_token_id=stop)
    spans = drafted.statistics.speculating
    assert spans[0] == (0, 0, 4, None) and any(plan.draft_length for plan in spans[1:])
    assert outputs(drafted) == outputs(generate(fresh, prompts, max_new_tokens=40, eos_token_id=stop))


def test_a_copy_with_nothing_packed_never_drafts(prompts: Prompts) -> None:
    model = tiny_llama(hidden_size=40, intermediate_size=72)  # no multiple of 32
    with pytest.warns(UserWarning, match="stay dense"):
        drafted = generate(model, prompts, "self", {"efficient_rollout": {"lm_head": "dense"}})
    assert drafted.statistics.total.blocks == 0
