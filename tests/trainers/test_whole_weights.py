"""Gathering FSDP2's weights, in one process: all that does not need a second rank."""

from collections.abc import Iterator

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

from spec_trl.generation.engine.shadow import make_shadow
from spec_trl.trainers.whole_weights import check_fsdp, whole_weights
from tests.trainers.harness import tiny_policy


@pytest.fixture
def sharded() -> Iterator[LlamaForCausalLM]:
    """A float64 policy that computes in bfloat16 under FSDP2, its layers in wrappers of activation checkpointing."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    mesh = distributed.init_device_mesh("cpu", (1,))
    policy, precision = tiny_policy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for index, layer in enumerate(policy.model.layers):
        policy.model.layers[index] = fully_shard(checkpoint_wrapper(layer), mesh=mesh, mp_policy=precision)
    yield fully_shard(policy, mesh=mesh, mp_policy=precision)
    distributed.destroy_process_group()


def kinds(policy: nn.Module) -> set[type]:
    return {type(parameter.data) for parameter in policy.parameters()}


def test_fsdp1_is_refused_with_a_remedy() -> None:
    for version in (None, 2):
        check_fsdp(version)
    with pytest.raises(ValueError, match="fsdp_version=1 is not served: .* Set fsdp_version: 2"):
        check_fsdp(1)


def test_weights_are_whole_inside_and_sharded_outside(sharded: LlamaForCausalLM) -> None:
    tokens = torch.arange(4)[None]
    with pytest.raises(ValueError, match="wrapped by FSDP"):
        sharded.generate(tokens, max_new_tokens=2, assistant_strategy="none")
    with torch.no_grad():
        with whole_weights(sharded) as policy:
            assert policy is sharded and kinds(policy) == {torch.Tensor}
            shadow = make_shadow(policy)
            before = shadow(tokens).logits  # [1, 4, vocab]
            assert before.dtype == torch.bfloat16
            sharded.generate(tokens, max_new_tokens=2, assistant_strategy="self")
        assert kinds(sharded) == {DTensor}
        for parameter in sharded.parameters():
            parameter.mul_(1.5)  # as an optimizer would, on the shards
        with pytest.raises(KeyError), whole_weights(sharded):
            assert not torch.equal(shadow(tokens).logits, before)
            for mine, theirs in zip(shadow.parameters(), sharded.parameters(), strict=True):
                assert mine is theirs
            raise KeyError
    assert kinds(sharded) == {DTensor}  # after a failure too
    with pytest.raises(ValueError, match="wrapped by FSDP"):
        sharded.generate(tokens, max_new_tokens=2, assistant_strategy="none")


def test_a_shadow_has_nothing_of_fsdp(sharded: LlamaForCausalLM) -> None:
    with whole_weights(sharded):
        shadow = make_shadow(sharded)
    assert type(shadow) is LlamaForCausalLM
    for name, module in shadow.named_modules():
        assert not isinstance(module, FSDPModule) and "_checkpoint_wrapped_module" not in name
        assert not module._forward_pre_hooks and not module._forward_hooks
        assert "_is_fsdp_managed_module" not in vars(module)


def test_without_fsdp_nothing_happens() -> None:
    policy = tiny_policy()
    with whole_weights(policy) as inside:
        assert inside is policy and kinds(policy) == {torch.Tensor}
    assert "_is_fsdp_managed_module" not in vars(policy)
