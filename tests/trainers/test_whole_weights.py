"""Gathering FSDP2's weights, in one process: all that does not need a second rank."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM
from trl.distributed import DistributedBackend

from spec_trl.generation.engine.shadow import make_shadow
from spec_trl.trainers.rollout_memory import whole_weights
from tests.trainers.harness import make_run, tiny_policy


@pytest.fixture
def sharded() -> Iterator[LlamaForCausalLM]:
    """A float64 policy that computes in bfloat16 under FSDP2, with CPU offloading and activation checkpointing."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    options = {
        "mesh": distributed.init_device_mesh("cpu", (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
    }
    policy = tiny_policy()
    for index, layer in enumerate(policy.model.layers):
        policy.model.layers[index] = fully_shard(checkpoint_wrapper(layer), **options)
    yield fully_shard(policy, **options)
    distributed.destroy_process_group()


def kinds(policy: nn.Module) -> set[type]:
    return {type(parameter.data) for parameter in policy.parameters()}


@pytest.mark.parametrize("version, strategy, message", [
    (1, "none", "fsdp_version=1 is not served: .* Set fsdp_version: 2"),
    (2, "eagle3", "drafter_adaptation=True is not served with FSDP"),
])  # fmt: skip
def test_what_is_refused(
    version: int, strategy: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = DistributedBackend.__init__

    def pretend(backend: DistributedBackend, accelerator: Accelerator) -> None:
        begin(backend, accelerator)
        backend.fsdp_version = version

    monkeypatch.setattr(DistributedBackend, "__init__", pretend)
    with pytest.raises(ValueError, match=message):
        make_run(tmp_path, strategy, assistant_model=None if strategy == "none" else str(tmp_path))


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
