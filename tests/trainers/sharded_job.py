"""What each rank runs where weights are sharded: ``torchrun --nproc_per_node 2 -m tests.trainers.sharded_job FOLDER
CASE...``, for instance with all of FSDP2, or all of ZERO.

accelerate shards on accelerators alone: in CPU processes it takes a configuration of FSDP and runs DDP, without a
word. Here it is told that these processes are to shard; all that follows is FSDP2 itself, over gloo.
"""

import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback
from trl.distributed import DistributedBackend

import spec_trl
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.requirements import policy_in
from spec_trl.trainers.run_log import read_run
from tests.trainers.ddp_job import same_batch
from tests.trainers.harness import make_run, tiny_dataset, tiny_policy
from tests.trainers.trl_trainers import loop, losses, make_trainer


# By name: what is trained, and how weights are sharded.
Case = tuple[dict[str, Any], dict[str, Any]]
EVALUATING = dict(eval_strategy="steps", eval_steps=2, trainer={"eval_dataset": tiny_dataset(2)})
# torch cannot load plain SGD's state, which is empty, into sharded weights.
# Ranks that decode their own rows end after different numbers of rounds.
SAVING = dict(optim="adamw_torch", save_strategy="steps", save_steps=2, rollout_sharing="own")


def fsdp2(reshard_after_forward: bool = True, **more: Any) -> dict[str, Any]:
    return {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": reshard_after_forward, **more}}


def zero(stage: int) -> dict[str, Any]:
    """By default ZeRO-3 leaves weights this small on every rank."""
    sharding = dict(
        stage=stage, stage3_param_persistence_threshold=0, stage3_gather_16bit_weights_on_model_save=True
    )  # fmt: skip
    sizes = dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"
    )
    return {"deepspeed": sizes | {"zero_optimization": sharding, "zero_allow_untested_optimizer": True}}


FSDP2: dict[str, Case] = {
    "none": ({"assistant_strategy": "none"}, fsdp2(reshard_after_forward=False)),
    "self": (EVALUATING, fsdp2()),
    "lora": ({}, fsdp2()),
    "saved": (SAVING, fsdp2()),
    "awq": ({"draft_quantization": "awq-w4-g32"}, fsdp2(activation_checkpointing=True)),
    # Profiled on one rank, while the other waits.
    "auto": ({"assistant_strategy": "auto", "draft_length": [3], "sd_toggle": "roofline"}, fsdp2()),
    "exact": ({"exact_logprobs": True, "gradient_checkpointing": True}, fsdp2()),
    "bf16": ({"bf16": True, "draft_kernel": "reference"}, fsdp2()),  # the fast kernel serves fewer rows
}
ZERO: dict[str, Case] = {
    "zero2": ({}, zero(2)),
    "zero3": (EVALUATING, zero(3)),
    "saved3": (SAVING, zero(3)),
    "auto3": (FSDP2["auto"][0], zero(3)),
}
CASES = FSDP2 | ZERO
SPECULATING: dict[str, Case] = {
    "rloo": ({}, fsdp2()),
    "gkd": ({}, fsdp2(activation_checkpointing=True)),
    "loop": ({}, {}),  # shards as the trainer before it
    "online_dpo": ({"bf16": True, "learning_rate": 1e-3}, fsdp2()),
}
"""Trainers of TRL under :func:`~.speculate`, and a loop without a trainer."""
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)


def options(name: str, rows_per_rank: int) -> dict[str, Any]:
    """Of a training with a global batch of 8 rows."""
    given = same_batch(rows_per_rank) | dict(max_steps=3, per_device_eval_batch_size=rows_per_rank, strategy="self")
    own = dict(CASES[name][0])
    return given | {"strategy": own.pop("assistant_strategy", "self")} | own


def make_policy(name: str) -> Any:
    """The policy of a case, before training."""
    policy = tiny_policy()
    if name in ("bf16", "exact"):
        policy.float()
    return get_peft_model(policy, LORA, autocast_adapter_dtype=False) if name == "lora" else policy


def shard_on_cpu() -> None:
    """Has accelerate shard in CPU processes too."""
    begin = AcceleratorState.__init__

    def shard(state: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        begin(state, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.FSDP
            state.fsdp_plugin = fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if state.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(state.mixed_precision)

    AcceleratorState.__init__ = shard


class Collectives(TorchDispatchMode):
    """Counts collective calls; what one rank sends to another is none."""

    count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "c10d" in operator.namespace and operator.name() not in ("c10d::send", "c10d::recv_")
        return operator(*args, **(kwargs or {}))


class Weights(TrainerCallback):
    """Keeps the policy's whole weights after each optimizer step, and whether a rank held all of them then."""

    def __init__(self) -> None:
        self.by_step: list[dict[str, Tensor]] = []
        self.held: list[float] = []
        self.backend: DistributedBackend

    def on_step_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
        named = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}
        local = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in named.values())
        with self.backend.gather_params(list(named.values())):  # of ZeRO-3
            whole = {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in named.items()}
        self.held.append(local / sum(weight.numel() for weight in whole.values()))
        self.by_step.append(whole)


def packed(drafter: SelfDrafter) -> dict[str, Tensor]:
    """Copies of all that the packed layers hold."""
    layers = drafter.quantized.layers.items()
    return {f"{name}.{key}": buffer.clone() for name, layer in layers for key, buffer in layer.named_buffers()}


def train_sharded(folder: Path, name: str, resume: Path | None = None) -> dict[str, Any]:
    """Trains one of the cases; what it saw of rollouts, copies and weights."""
    model, weights = make_policy(name), Weights()
    policy = policy_in(model)
    generate, refresh = policy.generate, SelfDrafter.refresh
    rounds: list[int] = []
    collectives: list[int] = []
    computing: dict[str, set[Any]] = {"rollout": set(), "training": set()}
    copies: dict[int, dict[str, Tensor]] = {}

    def watched(*args: Any, **kwargs: Any) -> Any:
        with Collectives() as counted:
            output = generate(*args, **kwargs)
        if isinstance(output, Tensor):  # of a check before training
            return output
        rounds.append(output.statistics.rounds)
        collectives.append(counted.count)
        return output

    def see(norm: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        where = "training" if norm.training else "rollout"
        computing[where].add((norm.weight.dtype, output.dtype, torch.is_autocast_enabled("cpu")))

    def keep(drafter: SelfDrafter, *args: Any) -> None:
        refresh(drafter, *args)
        copies[run.trainer.state.global_step] = packed(drafter)

    policy.generate = watched
    policy.model.norm.register_forward_hook(see)
    run = make_run(folder, policy=model, **options(name, 4), **CASES[name][1])
    weights.backend = DistributedBackend(run.trainer.accelerator)
    run.trainer.add_callback(weights)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SelfDrafter, "refresh", keep)
        run.train(resume)
    return {
        "rewarded": run.rewarded,
        "weights": weights.by_step,
        "held": weights.held,
        "rounds": rounds,
        "collectives": collectives,
        "computing": computing,
        "copies": copies,
        "accepted": run.metric("rollout/acceptance_rate"),
        "apart": run.metric("sampling/sampling_logp_difference/max"),
    }


def train_speculating(folder: Path, name: str, run: str) -> dict[str, Any]:
    """Trains one of the cases of `speculate`; what it sampled and learned, and τ of the first rank's rollouts. `run`:
    a strategy, or "fresh", which is "self" without anything of earlier rollouts."""
    strategy, is_fresh = ("self", True) if run == "fresh" else (run, False)
    if name == "loop":
        return loop("AdamW", folder, strategy, is_fresh)
    options, sharding = SPECULATING[name]
    trainer, weights = make_trainer(name, folder, is_fresh=is_fresh, **options, **sharding), Weights()
    weights.backend = DistributedBackend(trainer.accelerator)
    trainer.add_callback(weights)
    # In bfloat16 the fast kernel serves fewer rows.
    with spec_trl.speculate(trainer, strategy, sd_toggle="always", draft_length=3, draft_kernel="reference"):
        trainer.train()
    efficiency = [record.block_efficiency for record in read_run(folder).rollouts]
    return {
        "sampled": (trainer.generate_calls, losses(trainer)),
        "weights": weights.by_step,
        "held": weights.held,
        "efficiency": efficiency,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # see tests/conftest.py
    shard_on_cpu()
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    done = {}
    for name in sys.argv[2:]:
        if name in SPECULATING:
            for run in ("none", "self", "fresh"):
                done[f"{name} {run}"] = train_speculating(folder / f"{name} {run}", name, run)
            continue
        done[name] = train_sharded(folder / name, name)
        if CASES[name][0] is SAVING:
            done[f"{name} resumed"] = train_sharded(folder / name, name, folder / name / "checkpoint-2")
    torch.save(done, folder / f"rank{rank}.pt")
