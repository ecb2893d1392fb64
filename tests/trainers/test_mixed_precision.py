"""A float32 policy under `bf16=True`, which is what a model's name becomes: a tape stands in for CUDA graphs."""

from pathlib import Path
from typing import Any

import pytest
from trl import GRPOTrainer

from spec_trl import SpecGRPOTrainer
from spec_trl.generation.session import Session
from tests.generation.engine.tape import install_tape
from tests.trainers.harness import make_run, roll_out, tiny_policy


Rows = list[list[int]]


def mostly_equal(one: Rows, other: Rows) -> bool:
    """A near-tie of bfloat16 logits may fall otherwise in a forward of another shape, which changes a row's rest."""
    return len(one) == len(other) and sum(map(list.__eq__, one, other)) >= 0.75 * len(one)


@pytest.mark.parametrize("keep_graphs", [pytest.param(True, marks=pytest.mark.slow), False])
def test_rollouts_are_captured_and_follow_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_graphs: bool
) -> None:
    greedy: dict[str, Any] = dict(bf16=True, generation_kwargs={"do_sample": False}, max_completion_length=24)
    captured: dict[str, Any] = dict(runner="graph", keep_graphs=keep_graphs)
    captured |= dict(draft_kernel="reference", draft_lengths=[3])
    tape, policy = install_tape(monkeypatch), tiny_policy(num_hidden_layers=1).float()
    run = make_run(tmp_path, policy=policy, bf16=True, max_steps=2, learning_rate=0.02, **captured).train()
    assert tape.replayed > 8 and min(run.metric("rollout/acceptance_rate")) > 0.25
    assert (Session.of(policy).runner is not None) == keep_graphs
    found = {}
    for kind in (GRPOTrainer, SpecGRPOTrainer):  # with a policy that has learned in between
        found[kind] = roll_out(tmp_path, policy=policy, kind=kind, **greedy | captured).rewarded[0][1]
    untrained = tiny_policy(num_hidden_layers=1).float()
    before = roll_out(tmp_path, policy=untrained, kind=GRPOTrainer, **greedy).rewarded[0][1]
    assert mostly_equal(*found.values()) and not mostly_equal(found[SpecGRPOTrainer], before)
