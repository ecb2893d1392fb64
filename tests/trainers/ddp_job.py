"""What each rank of the two-process tests runs: ``torchrun --nproc_per_node 2 -m tests.trainers.ddp_job FOLDER``.

One pair of processes for all of them: starting it takes longer than any training here.
"""

import gc
import json
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_trl.drafter_training import adaptation
from spec_trl.drafter_training.adaptation import DrafterAdaptation
from spec_trl.drafter_training.sequence_loss import TargetView
from spec_trl.generation.options import SpeculativeConfig
from spec_trl.papers.specactor.ladder import Ladder
from spec_trl.trainers import trainer_speculator
from spec_trl.trainers.run_log import read_run
from tests.trainers import test_prompt_images, trl_trainers
from tests.trainers.harness import Run, tiny_dataset, tiny_policy, train


DISTANCE = "sampling/sampling_logp_difference/max"
ADAPTATIONS = ("plain", "loss fails on one", "step fails on one", "nothing on one")


def same_batch(rows_per_rank: int) -> dict[str, Any]:
    """A global batch of 8 rows; any number of ranks must sample the same."""
    return dict(
        max_steps=2, per_device_train_batch_size=rows_per_rank, gradient_accumulation_steps=2,
        optim="sgd", learning_rate=0.1,  # Adam turns the rounding of a vanishing gradient into a full step
    )  # fmt: skip


def train_on_each_rank(folder: Path, rows_per_rank: int) -> Run:
    """Trains and evaluates with a global batch of 8 rows."""
    options = same_batch(rows_per_rank) | dict(
        max_steps=3, per_device_eval_batch_size=rows_per_rank, draft_kernel="reference", eval_strategy="steps",
        eval_steps=2, draft_length=[2, 3, 4],
        efficient_rollout=dict(draft_length_up=0.05, draft_length_down=0.01, draft_length_patience=1),
        trainer={"eval_dataset": tiny_dataset(2)},
    )  # fmt: skip
    return train(folder, **options)


def learn_while_drafting(folder: Path, checkpoint: Path) -> dict[str, Any]:
    """Trains with Test-Time Speculation, saves, and goes on in another trainer."""
    given = same_batch(rows_per_rank=4) | dict(
        tts=dict(drafter="eagle3", learning_rate=1e-3, stride=1), assistant_model=str(checkpoint), draft_length=[3],
    )  # fmt: skip
    first = train(folder, "tts", **given, save_strategy="steps", save_steps=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rest = train(folder, "tts", folder / "checkpoint-2", **given | {"max_steps": 3})
    states = [run.calls[-1].drafters[0].state_dict() for run in (first, rest)]
    return {
        "completions": first.completions + rest.completions,
        "steps": [int(state["moments"][0]["step"]) for state in states],
        "updates": [run.metric("rollout/drafter_updates") for run in (first, rest)],
        "tensors": states[0]["tensors"],
        "warned": [str(warning.message) for warning in caught if "Test-Time" in str(warning.message)],
    }


def look(folder: Path, rows_per_rank: int) -> list[list[list[int]]]:
    """Trains on prompts with images; returns completions."""
    batch = same_batch(rows_per_rank) | {"shuffle_dataset": False}
    return test_prompt_images.run(folder, "qwen2_5_vl", "self", **batch).train().completions


def score(folder: Path) -> dict[str, Any]:
    """Fifty steps with the sampler's log-probabilities in the loss: how far they are from the sampler's, what was
    accepted, and whether drafts changed a weight."""
    batch = same_batch(rows_per_rank=4) | {"max_steps": 50, "max_completion_length": 12}
    plain, drafted = (
        train(folder / strategy, strategy, policy=tiny_policy().float(), exact_logprobs=True, **batch)
        for strategy in ("none", "self")
    )
    return {
        "distances": [plain.metric(DISTANCE), drafted.metric(DISTANCE)],
        "accepted": drafted.metric("rollout/acceptance_rate"),
        "equal": [torch.equal(weight, drafted.weights[name]) for name, weight in plain.weights.items()],
    }


def choose(folder: Path) -> dict[str, Any]:
    """Trains with a ladder that is really profiled, on the rank that does so, and saves."""
    profiled: list[int] = []
    find = trainer_speculator.find_ladder

    def profile(policy: Any, drafters: Any, config: SpeculativeConfig, *sizes: Any) -> Ladder | None:
        profiled.append(1)
        return find(policy, drafters, replace(config, sd_toggle="roofline"), *sizes)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trainer_speculator, "find_ladder", profile)
        patched.setenv("SPEC_TRL_CACHE", str(folder / "cache"))
        log = train(
            folder, "auto", **same_batch(rows_per_rank=4), draft_kernel="reference", draft_length=[3],
            save_strategy="steps", save_steps=2,
        )  # fmt: skip
    control = log.calls[-1].control
    return {
        "completions": log.completions,
        "profiled": len(profiled),
        "ledger": json.loads(json.dumps(control.state_dict())),
        "drafted_by": [log.metric(f"rollout/drafted_by_{name}") for name in ("self", "history")],
    }


def adapt(folder: Path, checkpoint: Path, rank: int, case: str) -> dict[str, Any]:
    """Trains a drafter on this rank's rows; on rank 1 things may go wrong."""
    local: list[list[Tensor]] = []
    stepped: list[list[Tensor]] = []
    learn, step, loss = DrafterAdaptation.learn_from, DrafterAdaptation.step, adaptation.sequence_loss

    def remember_own(adaptation: DrafterAdaptation, seen: Any) -> Any:
        found = learn(adaptation, seen)
        local.append([gradient.clone() for gradient in found[3]])
        return found

    def remember_mean(adaptation: DrafterAdaptation, gradients: list[Tensor]) -> None:
        stepped.append([gradient.clone() for gradient in gradients])
        if rank == 1 and case == "step fails on one":
            raise RuntimeError("out of luck")
        step(adaptation, gradients)

    def fail(*args: Any, **kwargs: Any) -> Any:
        if rank == 1 and case == "loss fails on one" and len(local) == 2:
            raise RuntimeError("out of luck")
        return loss(*args, **kwargs)

    view = adaptation.target_view

    def blind(*args: Any) -> TargetView:
        found = view(*args)
        if rank == 1 and case == "nothing on one":
            found.first.copy_(found.is_real.sum(dim=1))  # no token counts
        return found

    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings(record=True) as caught:
        patched.setattr(DrafterAdaptation, "learn_from", remember_own)
        patched.setattr(DrafterAdaptation, "step", remember_mean)
        patched.setattr(adaptation, "sequence_loss", fail)
        patched.setattr(adaptation, "target_view", blind)
        warnings.simplefilter("always")
        log = train(
            folder / f"rank{rank}", "dflash", assistant_model=str(checkpoint), max_steps=3,
            per_device_train_batch_size=4, gradient_accumulation_steps=2, drafter_adaptation=dict(learning_rate=1e-3),
        )  # fmt: skip
    return {
        "local": local,
        "stepped": stepped,
        "drafter": list(log.calls[-1].drafters[0].network.state_dict().values()),
        "warned": [str(warning.message) for warning in caught if "adapted no further" in str(warning.message)],
        "metrics": log.metric("drafter/loss"),
        "steps": log.trainer.state.global_step,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # see tests/conftest.py
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    run = train_on_each_rank(folder / f"rank{rank}", rows_per_rank=4)
    done = {"plainly": {"rewarded": run.rewarded, "logs": run.logs, "weights": run.weights}}
    done["tts"] = learn_while_drafting(folder / "tts", folder / "eagle3")
    done["auto"] = choose(folder / "auto")
    done["images"] = look(folder / "images", rows_per_rank=4)
    done["exact"] = score(folder / "exact")
    for strategy in ("none", "self"):
        for name in ("rloo", "gkd"):
            trainer, speculation = trl_trainers.train(name, folder / f"{name} {strategy}", strategy)
            efficiency = speculation.log and [one.block_efficiency for one in read_run(speculation.log.path).rollouts]
            done[f"{name} {strategy}"] = trainer.generate_calls, trl_trainers.losses(trainer), efficiency
    done |= {case: adapt(folder / case, folder / "dflash", rank, case) for case in ADAPTATIONS}
    torch.save(done, folder / f"rank{rank}.pt")
