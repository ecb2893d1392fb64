"""The self-drafter: kept between calls, refreshed, rebuilt, and never a change to the policy or a second cache."""

import gc
import weakref

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from spec_trl.generation import kept
from spec_trl.generation.drafters.self_copy import SelfDrafter, self_drafter_of
from spec_trl.generation.engine.drafter import keep_drafters
from tests.conftest import tiny_llama
from tests.generation.calls import Prompts, generate, outputs, pad_left, random_rows


OPTIONS = ("rtn-w4-g128", "reference", "auto")


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return pad_left(random_rows([4, 7, 2]))


def drafter_of(policy: PreTrainedModel, *options: str) -> SelfDrafter:
    """That of a call, which ends at once."""
    drafter = self_drafter_of(policy, *options)
    keep_drafters(policy, [drafter])
    return drafter


def packed_of(drafter: SelfDrafter) -> list[torch.Tensor]:
    return [buffer.clone() for layer in drafter.quantized.layers.values() for buffer in layer.packed.buffers()]


def test_kept_between_calls(fresh: LlamaForCausalLM) -> None:
    drafter = drafter_of(fresh, *OPTIONS)
    assert drafter_of(fresh, *OPTIONS) is drafter
    assert drafter_of(tiny_llama(), *OPTIONS) is not drafter
    assert drafter_of(fresh, "rtn-w8", *OPTIONS[1:]) is not drafter
    assert drafter_of(fresh, *OPTIONS[:2], "packed") is not drafter


@pytest.mark.parametrize("change", ["optimizer", "no_grad", "data pointer"])
def test_refreshed_when_weights_change(change: str, fresh: LlamaForCausalLM) -> None:
    drafter = drafter_of(fresh, *OPTIONS)
    before = packed_of(drafter)
    layer = drafter.quantized.layers["model.layers.0.mlp.up_proj"]
    addresses = [buffer.data_ptr() for buffer in layer.packed.buffers()]
    weight = fresh.model.layers[0].mlp.up_proj.weight
    if change == "optimizer":
        optimizer = torch.optim.SGD([weight], lr=0.5)
        weight.sum().backward()
        optimizer.step()
    elif change == "no_grad":
        with torch.no_grad():
            weight.mul_(-1.0)
    else:
        weight.data = -weight.data  # new storage
    assert drafter_of(fresh, *OPTIONS) is drafter
    after = packed_of(drafter)
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    fresh_copy = packed_of(SelfDrafter(fresh, *OPTIONS))
    assert all(torch.equal(a, b) for a, b in zip(after, fresh_copy, strict=True))
    assert addresses == [buffer.data_ptr() for buffer in layer.packed.buffers()], "captured graphs read the old ones"

    def forbid(*_: object) -> None:
        raise AssertionError("one change, refreshed twice")

    drafter.refresh = forbid
    assert drafter_of(fresh, *OPTIONS) is drafter


def test_not_refreshed_when_nothing_changed(fresh: LlamaForCausalLM, monkeypatch) -> None:
    drafter_of(fresh, *OPTIONS)

    def forbid(self: SelfDrafter) -> None:
        raise AssertionError("refreshed without need")

    monkeypatch.setattr(SelfDrafter, "refresh", forbid)
    drafter_of(fresh, *OPTIONS)
    with torch.no_grad():
        fresh.model.norm.weight.mul_(1.0)
    with pytest.raises(AssertionError, match="without need"):
        drafter_of(fresh, *OPTIONS)


def test_a_change_that_nobody_sees_costs_acceptance_alone(fresh: LlamaForCausalLM, prompts: Prompts) -> None:
    drafter = drafter_of(fresh, *OPTIONS)
    before = packed_of(drafter)
    for layer in fresh.model.layers:
        layer.mlp.down_proj.weight.data.neg_()  # does not count as a new version
    assert outputs(generate(fresh, prompts, "self")) == outputs(generate(fresh, prompts))
    assert drafter_of(fresh, *OPTIONS) is drafter
    assert all(torch.equal(a, b) for a, b in zip(before, packed_of(drafter), strict=True))


def test_kept_by_calls_and_rebuilt_when_the_structure_changes(fresh: LlamaForCausalLM, prompts: Prompts) -> None:
    found = []
    for change in (False, False, True):
        if change:
            fresh.model.layers[1] = tiny_llama(seed=3).model.layers[1]
        result = generate(fresh, prompts, "self", max_new_tokens=8)
        assert outputs(result) == outputs(generate(fresh, prompts, max_new_tokens=8))
        assert result.statistics.acceptance_rate > 0.5
        found.append(kept.look(fresh, "self"))
    assert found[0] is found[1] is not found[2]


def test_policy_is_untouched(fresh: LlamaForCausalLM, prompts: Prompts) -> None:
    names = {
        name: (id(parameter), parameter.data_ptr(), parameter._version) for name, parameter in fresh.named_parameters()
    }
    values = {name: tensor.clone() for name, tensor in fresh.state_dict().items()}
    modules = [id(module) for module in fresh.modules()]
    generate(fresh, prompts, "self", max_new_tokens=6)
    assert names == {
        name: (id(parameter), parameter.data_ptr(), parameter._version) for name, parameter in fresh.named_parameters()
    }
    assert modules == [id(module) for module in fresh.modules()]
    after = fresh.state_dict()
    assert after.keys() == values.keys() and all(torch.equal(after[name], values[name]) for name in values)
    assert all(parameter.requires_grad for parameter in fresh.parameters())
    fresh(prompts["input_ids"]).logits.sum().backward()  # and still trains
    assert all(parameter.grad is not None for parameter in fresh.parameters())


def test_dies_with_its_policy(prompts: Prompts) -> None:
    policy = tiny_llama()
    generate(policy, prompts, "self", max_new_tokens=4)
    drafter = weakref.ref(kept.look(policy, "self"))
    gone = weakref.ref(policy)
    del policy
    gc.collect()
    assert gone() is None, "the drafter that is kept for it keeps the policy alive"
    assert drafter() is None


@pytest.mark.parametrize(
    ("quantization", "kernel", "lm_head"),
    [
        ("rtn-w4-g128", "reference", "auto"),
        ("rtn-w4-g64", "auto", "packed"),
        ("rtn-w4-g32", "reference", "dense"),
        ("rtn-w8", "auto", "packed"),
        ("awq-w4-g32", "auto", "auto"),
    ],
)
def test_every_quantization_drafts_without_a_cache_of_its_own(
    kernel: str, lm_head: str, quantization: str, tiny: PreTrainedModel, prompts: Prompts
) -> None:
    drafter = SelfDrafter(tiny, quantization, kernel, lm_head)
    shared = []
    end = drafter.end

    def watched_end() -> None:
        shared.append(drafter.cache is drafter.session.target.cache)
        shared.append(drafter.cache_bytes == 0)
        end()

    drafter.end = watched_end
    result, plain = generate(tiny, prompts, drafter=drafter), generate(tiny, prompts)
    assert outputs(result) == outputs(plain) and shared == [True, True]
    assert result.statistics.acceptance_rate > (0.8 if quantization == "rtn-w8" else 0.5)
    assert result.statistics.drafter_failure is None
    assert result.statistics.cache_bytes == plain.statistics.cache_bytes


def test_rows_beyond_the_kernel_decode_autoregressively(fresh: LlamaForCausalLM) -> None:
    prompts = pad_left(random_rows([3, 4, 5, 6]))
    stop = [tokens[2] for tokens in outputs(generate(fresh, prompts))[:2]]  # ends two rows early
    drafter = SelfDrafter(fresh, kernel="reference")
    assert drafter.max_rows > 1000
    drafter.max_rows = 2
    drafted = generate(fresh, prompts, "self", drafter=drafter, max_new_tokens=40, eos_token_id=stop)
    spans = drafted.statistics.speculating
    assert spans[0] == (0, 0) and any(length for _, length in spans[1:])
    assert outputs(drafted) == outputs(generate(fresh, prompts, max_new_tokens=40, eos_token_id=stop))


def test_a_copy_with_nothing_packed_never_drafts(prompts: Prompts) -> None:
    model = tiny_llama(hidden_size=40, intermediate_size=72)  # no multiple of 32
    with pytest.warns(UserWarning, match="stay dense"):
        drafted = generate(model, prompts, "self", {"draft_lm_head": "dense"})
    assert drafted.statistics.total.blocks == 0
