"""The memory of a rollout: under keep_graphs="auto" what it has captured outlives it where training leaves memory free
(memory is made up, a tape stands in for CUDA graphs); and FSDP2's weights are gathered for it, here in one process."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM
from trl.distributed import DistributedBackend

from spec_trl.generation.engine.network.shadow import make_shadow
from spec_trl.generation.session import Session
from spec_trl.trainers import rollout_memory
from spec_trl.trainers.rollout_memory import KeptGraphs, whole_weights
from tests.generation.engine.tape import Tape, install_tape
from tests.trainers.harness import assert_same_training, make_run, tiny_policy, train_plainly


CPU = torch.device("cpu")


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The peak in each training step to come, of 1000 bytes; without one nobody counts."""
    found: list[int] = []
    monkeypatch.setattr(rollout_memory, "peak_memory", lambda device: (found.pop(0), 1000) if found else None)
    return found


def after_each(graphs: KeptGraphs, rollouts: int, steps_after: int = 1) -> list[bool]:
    """Whether a runner of 300 bytes, 50 of them captured forwards, outlives each of the next rollouts. An optimizer
    step follows so many of them."""
    policy, found = nn.Linear(1, 1), []
    for step in range(rollouts):
        with graphs.rollout(nn.Sequential(policy), step // steps_after):  # a wrapper's
            if Session.of(policy).runner is None:
                Session.of(policy).runner = SimpleNamespace(held_bytes=300, captured=(2, 50))
        found.append(Session.of(policy).runner is not None)
    return found


def test_the_largest_peak_decides(peaks: list[int]) -> None:
    """900 of 1000 bytes may be taken. The peak of the third step is training's own 600 and a cache of 250; that of the
    fourth is 601 and the cache; the cache was gone in the fifth."""
    peaks += [600, 850, 851, 100]
    graphs = KeptGraphs("auto", CPU, in_place=True)
    assert after_each(graphs, 5) == [False, True, True, False, False] and not peaks


@pytest.mark.parametrize(
    ("setting", "in_place", "stays"), [(True, True, True), (False, True, True), ("auto", False, False)]
)
def test_who_decides_otherwise(peaks: list[int], setting: Any, in_place: bool, stays: bool) -> None:
    """A setting; and weights that are gathered elsewhere in each rollout."""
    peaks += [1] * 2
    assert after_each(KeptGraphs(setting, CPU, in_place), 3) == [stays] * 3
    assert len(peaks) == (0 if setting == "auto" else 2), "who does not need to know does not ask"


def test_nothing_is_kept_before_an_optimizer_has_stepped(peaks: list[int]) -> None:
    """Evaluation and gradient accumulation roll out before it takes the memory of its moments."""
    peaks += [1, 1, 1, 1]
    assert after_each(KeptGraphs("auto", CPU, in_place=True), 5, steps_after=3) == [False, False, False, True, True]


def test_off_cuda_nothing_is_counted() -> None:
    assert after_each(KeptGraphs("auto", CPU, in_place=True), 2) == [False, False]


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Tape:
    return install_tape(monkeypatch)


def test_a_training(tmp_path: Path, tape: Tape, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default: what the first rollout has captured is freed, the second one's serves the third."""
    monkeypatch.setattr(rollout_memory, "peak_memory", lambda device: (2**20, 2**30))
    recorded: list[int] = []
    policy = tiny_policy()
    run = make_run(tmp_path, "self", policy=policy, runner="graph")
    generate = policy.generate
    policy.generate = lambda *given, **more: (recorded.append(tape.recorded), generate(*given, **more))[1]
    run.train()
    assert recorded[0] < recorded[1] < recorded[2] == tape.recorded
    assert_same_training(train_plainly(), run)


@pytest.mark.parametrize("where", ["loss", "optimizer"])
def test_memory_that_ends_in_training(tmp_path: Path, tape: Tape, where: str) -> None:
    """What is kept is freed, and the error says so."""
    policy = tiny_policy()
    run = make_run(tmp_path, "none", policy=policy, runner="graph", keep_graphs=True)

    def no_memory(*given: Any, **more: Any) -> None:
        assert Session.of(policy).runner is not None
        raise torch.OutOfMemoryError("CUDA out of memory.")

    if where == "loss":
        run.trainer.compute_loss = no_memory
    else:
        run.trainer.create_optimizer()
        run.trainer.optimizer.step = no_memory
    with pytest.raises(torch.OutOfMemoryError) as error:
        run.train()
    assert any("keep_graphs=False frees them" in note for note in error.value.__notes__)
    assert Session.of(policy).runner is None


# ---- whole weights --------------------------------------------------------------------------------------------------


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
    (1, "none", "fsdp_version=1 does not go with SpecGRPOTrainer: .* Set fsdp_version: 2"),
    (2, "eagle3", "drafter_adaptation=True does not go with FSDP"),
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
