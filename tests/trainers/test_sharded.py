"""Two processes that shard the policy, by FSDP2 or by DeepSpeed, sample and learn what one process would."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.requirements import policy_in
from tests.trainers.harness import Run, train
from tests.trainers.sharded_job import FSDP2, SPECULATING, ZERO, make_policy, options, packed


pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
has_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
zero = [pytest.param(name, marks=has_deepspeed) for name in ZERO]
Ranks = list[dict[str, Any]]


def run_ranks(folder: Path, names: list[str]) -> Ranks:
    """What each of two gloo ranks left of these cases."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.trainers.sharded_job", str(folder), *names],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "SPEC_TRL_CACHE": str(folder / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    measured = [path.parent.name for path in folder.glob("*/roofline_profile.ladder.json")]
    assert measured == [name for name in names if name.startswith("auto")]  # on one rank, while the other waited
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Of FSDP2 and, where it is installed, of DeepSpeed; two starts, for one process can only have one of them."""
    one, other = run_ranks(tmp_path_factory.mktemp("fsdp2"), [*FSDP2, *SPECULATING])
    if find_spec("deepspeed") is not None:
        more = run_ranks(tmp_path_factory.mktemp("zero"), list(ZERO))
        one, other = one | more[0], other | more[1]
    return [one, other]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The same global batch in one process, whose weights nobody shards."""
    names = ["self", "lora"]
    return {n: train(tmp_path_factory.mktemp(n), policy=make_policy(n), **options(n, 8)) for n in names}


def training(rewarded: list[tuple[str, list[list[int]]]]) -> list[list[list[int]]]:
    return [rows for mode, rows in rewarded if mode == "train"]


@pytest.mark.parametrize("name", ["none", "self", "lora", "awq", "auto", *(zero[i] for i in (0, 1, 3))])
def test_ranks_sample_and_learn_what_one_process_does(name: str, ranks: Ranks, alone: dict[str, Run]) -> None:
    one, other = (rank[name] for rank in ranks)
    expected = alone["lora" if name == "lora" else "self"]
    pairs = zip(training(one["rewarded"]), training(other["rewarded"]), strict=True)
    assert [mine + theirs for mine, theirs in pairs] == expected.completions
    assert one["weights"][-1].keys() == expected.weights.keys()
    for key, weight in one["weights"][-1].items():
        assert torch.equal(weight, other["weights"][-1][key])
        torch.testing.assert_close(weight, expected.weights[key], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", [*FSDP2, *zero])
def test_a_rollout_waits_for_nobody(name: str, ranks: Ranks) -> None:
    """Its forwards call no collective, so that ranks may end after different numbers of rounds."""
    one, other = (rank[name] for rank in ranks)
    assert one["collectives"] == other["collectives"] == [0] * len(one["rounds"])
    if name in ("saved", "saved3"):
        assert one["rounds"] != other["rounds"]
    # Between rollouts each rank holds its shard alone; stage 2 shards no weights.
    assert one["held"] == [1.0 if name == "zero2" else pytest.approx(0.5 if name in FSDP2 else 0.0)] * 3


@pytest.mark.parametrize("name", ["self", "lora", "saved", "bf16", *zero[:3]])
def test_copies_follow_the_gathered_weights(name: str, ranks: Ranks) -> None:
    """After each step they hold what a new copy of the whole weights would."""
    one, other = (rank[name] for rank in ranks)
    assert [*one["copies"]] == [*other["copies"]] and len(one["copies"]) >= 2
    kept: list[dict[str, Tensor]] = []
    for step, copy in one["copies"].items():
        model = make_policy(name)
        if step:  # the first copy is of the weights before training
            model.load_state_dict(one["weights"][step - 1])
        policy = policy_in(model)
        if name == "bf16":
            policy.bfloat16()
        expected = packed(SelfDrafter(policy, **({"kernel": "reference"} if name == "bf16" else {})))
        assert copy.keys() == expected.keys() and copy
        for key, buffer in expected.items():
            assert torch.equal(copy[key], buffer), f"{key} after step {step}"
            assert torch.equal(copy[key], other["copies"][step][key])
        kept.append(copy)
    assert any(not torch.equal(kept[0][key], kept[1][key]) for key in kept[0])


def test_awq_learns_from_the_ranks_own_activations(ranks: Ranks) -> None:
    for rank in ranks:
        later = [copy for step, copy in rank["awq"]["copies"].items() if step]  # the first loss has not run before
        assert later
        for copy in later:
            scales = [buffer for key, buffer in copy.items() if key.endswith("inverse_scales")]
            assert scales and all(bool((scale != 1).any()) for scale in scales)


@pytest.mark.parametrize("name", [*FSDP2, *zero])
def test_rollouts_compute_in_the_precision_of_the_loss(name: str, ranks: Ranks) -> None:
    dtype = {"bf16": torch.bfloat16, "exact": torch.float32}.get(name, torch.float64)
    for rank in ranks:
        seen = rank[name]["computing"]
        assert seen["rollout"] == seen["training"] == {(dtype, dtype, name == "bf16")}


def test_losses_have_the_bits_of_the_sampler(ranks: Ranks) -> None:
    one, other = (rank["exact"] for rank in ranks)
    assert one["apart"] == [0.0] * 3 and min(one["accepted"]) > 0.2
    assert all(torch.equal(weight, other["weights"][-1][key]) for key, weight in one["weights"][-1].items())
    assert ranks[0]["self"]["apart"] != [0.0] * 3


@pytest.mark.parametrize("name", ["saved", pytest.param("saved3", marks=has_deepspeed)])
def test_a_resumed_run_goes_on(name: str, ranks: Ranks) -> None:
    for rank in ranks:
        whole, rest = rank[name], rank[f"{name} resumed"]
        assert rest["rewarded"] == whole["rewarded"][-1:]
        assert rest["accepted"] == whole["accepted"][-1:]
        for key, weight in whole["weights"][-1].items():
            assert torch.equal(rest["weights"][-1][key], weight)


@pytest.mark.parametrize("name", SPECULATING)
def test_speculate_serves_sharded_weights(name: str, ranks: Ranks) -> None:
    for rank in ranks:
        plain, drafted, fresh = (rank[f"{name} {run}"] for run in ("none", "self", "fresh"))
        assert plain["sampled"] and plain["sampled"] == drafted["sampled"]
        assert min(drafted["efficiency"]) > 2 and drafted["efficiency"] == fresh["efficiency"], "the copy is stale"
        if name != "loop":
            assert plain["held"] == drafted["held"] == [0.5] * 4
            for weights, others in zip(plain["weights"], drafted["weights"], strict=True):
                assert all(torch.equal(weights[key], others[key]) for key in weights)
    assert [rank["loop self"]["has_log"] for rank in ranks] == [True, False]
