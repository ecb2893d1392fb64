"""Trainings that conftest.py makes once: speculation changes no token, no loss and no weight, the drafter follows the
policy, and a run goes on from a checkpoint as if it had never stopped (the lossless contract, no. 5)."""

import copy
import json
import math
import os
import shutil
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from trl import GRPOTrainer

from spec_trl import SpecGRPOTrainer
from spec_trl.generation.drafters.autoregressive import NetworkDrafter
from spec_trl.generation.drafters.eagle3.drafter import Eagle3Drafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.noise import RoundNoise
from spec_trl.generation.engine.verification import Proposal
from spec_trl.scheduling.best_of_n import BestOfN
from spec_trl.scheduling.ladder import Ladder
from spec_trl.trainers import checkpoint
from spec_trl.trainers.run_log import read_run
from tests.trainers.conftest import CLIMBING, STEPS, Trained, run_training
from tests.trainers.harness import assert_same_training, make_trainer, tiny_dataset, tiny_policy, train


def is_fresh(drafter: SelfDrafter, policy: PreTrainedModel) -> bool:
    """Whether the drafter's packed weights are those that a new drafter of the live policy would get."""
    layers = SelfDrafter(policy).quantized.layers
    return layers.keys() <= drafter.quantized.layers.keys() and all(
        torch.equal(dict(drafter.quantized.layers[name].packed.named_buffers())[buffer], expected)
        for name, layer in layers.items()
        for buffer, expected in layer.packed.named_buffers()
    )


def same_tensors(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---- Speculation changes nothing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["drafted", "learned", "raced"])
def test_the_policy_trains_as_without_drafts(name: str, none: Trained, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(name).run
    assert_same_training(none.run, run)
    assert run.rewarded == none.run.rewarded  # those of evaluations too
    assert len(run.completions) == STEPS and any(run.losses)
    assert min(run.metric("rollout/block_efficiency")) > 1
    start = tiny_policy().state_dict()
    assert all(not torch.equal(weight, start[name]) for name, weight in run.weights.items())


def test_adapters(adapters: dict[str, Trained]) -> None:
    """Merged into the copy at each refresh, and never into the policy."""
    one, other = adapters["none"].run, adapters["self"].run
    assert_same_training(one, other)
    # With adapters that the refresh forgot, few drafts would be accepted after such large steps.
    assert min(other.metric("rollout/acceptance_rate")) > 0.25
    start = tiny_policy().state_dict()
    kept = {name: weight for name, weight in other.weights.items() if "lora" not in name}
    assert kept and all(
        torch.equal(weight, start[name.removeprefix("base_model.model.").replace("base_layer.", "")])
        for name, weight in kept.items()
    )
    trained = adapters["self"]
    assert [call.step for call in trained.run.calls] == [0, 2] and trained.refreshed == [2]  # a batch is used twice
    trained.trainer.evaluate(tiny_dataset(1))
    base = trained.trainer.model.get_base_model()
    assert is_fresh(trained.run.calls[-1].drafters[0], base)


def test_greedy_completions_are_those_of_trl(tmp_path: Path) -> None:
    ours, theirs = (
        train(
            tmp_path, kind=kind, max_steps=2, max_completion_length=40, generation_kwargs={"do_sample": False},
            trainer={"train_dataset": tiny_dataset()},
        )
        for kind in (SpecGRPOTrainer, GRPOTrainer)
    )  # fmt: skip
    assert ours.completions == theirs.completions
    assert any(len(ids) < 40 for rows in ours.completions for ids in rows)  # EOS came


def test_rollouts_run_in_the_precision_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    begin = SelfDrafter.begin
    monkeypatch.setattr(
        SelfDrafter, "begin", lambda *args: seen.append(torch.is_autocast_enabled("cpu")) or begin(*args)
    )
    for bf16 in (True, False):
        make_trainer(tmp_path, policy=tiny_policy().float(), bf16=bf16)[0].evaluate(tiny_dataset(1))
    assert seen == [True, False]


# ---- Noise ---------------------------------------------------------------------------------------------------------


def test_no_two_requests_share_noise(drafted: Trained, none: Trained) -> None:
    """Ids are (mode, rollout, turn, row): evaluations count apart, so they change nothing that training samples."""
    calls = drafted.run.calls
    ids = [request for call in calls for request in call.request_ids]
    assert len(set(ids)) == len(ids) and all(0 <= request < 2**63 for request in ids)
    assert [call.request_ids for call in none.run.calls] == [call.request_ids for call in calls]
    training = [call.request_ids for call in calls if call.request_ids[0] < 2**62]
    assert training == [[rollout << 36 | row for row in range(8)] for rollout in range(STEPS)]
    evaluation = [call.request_ids for call in calls if call.request_ids[0] >= 2**62]
    assert evaluation == [[1 << 62 | rollout << 36 | row for row in range(4)] for rollout in range(2)]


# ---- The copy follows the policy (ER Algorithm 1) -----------------------------------------------------------------


def test_one_refresh_per_step_that_generates(drafted: Trained, learned: Trained) -> None:
    assert [call.step for call in drafted.run.calls] == [0, 1, 2, 2, 3, 4]  # an evaluation shares with training
    assert drafted.refreshed == [1, 2, 3, 4]  # the drafter is made from the weights of step 0
    seconds = drafted.run.metric("rollout/drafter_refresh_seconds")
    assert [second > 0 for second in seconds] == [True, True, False, True]  # the evaluation after step 2 paid for it
    assert learned.refreshed == [] == learned.run.metric("rollout/drafter_refresh_seconds")


def test_no_rollout_drafts_with_stale_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in a second run, whose `global_step` starts at 0 again, nor after weights that were changed by hand."""
    fresh: list[bool] = []
    draft = NetworkDrafter.propose

    def watched(drafter: SelfDrafter, draft_length: int, noise: RoundNoise | None) -> Proposal:
        fresh.append(is_fresh(drafter, trainer.model))
        return draft(drafter, draft_length, noise)

    monkeypatch.setattr(NetworkDrafter, "propose", watched)
    trainer, _ = make_trainer(tmp_path, max_steps=2, gradient_accumulation_steps=2, steps_per_generation=1)
    trainer.evaluate(tiny_dataset(1))
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter *= 1.25
    trainer.train()
    trainer.train()
    assert len(fresh) > 12 and all(fresh)


def test_rollouts_that_never_speculate_do_not_pay_for_a_refresh(tmp_path: Path, profiles: dict[str, str]) -> None:
    trained = run_training(
        tmp_path, "self", max_steps=2, sd_toggle="roofline", roofline_profile=profiles["does not"], eval_strategy="no"
    )
    assert len(trained.run.calls) == 2 and trained.refreshed == []
    assert trained.run.metric("rollout/drafter_refresh_seconds")[1:] == [0.0]


# ---- Draft lengths --------------------------------------------------------------------------------------------------


def test_the_draft_length_climbs_with_training_rollouts(drafted: Trained) -> None:
    assert [call.draft_lengths for call in drafted.run.calls] == [[1], [2], [3], [3], [4], [5]]
    lengths = drafted.run.metric("rollout/draft_length")
    assert [math.ceil(length) for length in lengths] == [1, 2, 3, 4]  # rows near their end draft less


def test_with_a_ladder_each_rollout_chooses_its_draft_length(raced: Trained) -> None:
    """On a level ladder the longest is best; what moves a controller moves nothing."""
    assert isinstance(raced.run.calls[-1].control, BestOfN) and raced.run.calls[-1].draft_lengths == [3, 3, 3]
    state = json.loads((raced.folder / "checkpoint-4" / checkpoint.STATE_FILE).read_text())
    assert {saved["draft_length"] for saved in state["draft_lengths"].values()} == {2}


# ---- Going on from a checkpoint ------------------------------------------------------------------------------------


def assert_second_half(whole: Trained, rest: Trained, *metrics: str) -> None:
    assert rest.run.completions == whole.run.completions[2:] and rest.run.losses == whole.run.losses[2:]
    for name, weight in whole.run.weights.items():
        assert torch.equal(weight, rest.run.weights[name]), name
    # The evaluation after step 2 comes after the checkpoint, or before it.
    training = [[call for call in of.run.calls if call.request_ids[0] < 2**62] for of in (whole, rest)]
    before, after = ([(call.request_ids, call.draft_lengths, call.step) for call in calls] for calls in training)
    assert after == before[2:]
    for name in metrics:
        assert rest.run.metric(f"rollout/{name}") == whole.run.metric(f"rollout/{name}")[2:], name


def test_resumed_run_goes_on_as_if_never_stopped(drafted: Trained, drafted_resumed: Trained) -> None:
    assert_second_half(drafted, drafted_resumed, "draft_length", "block_efficiency", "acceptance_rate")
    state = json.loads((drafted.folder / "checkpoint-2" / checkpoint.STATE_FILE).read_text())
    assert state["rollouts"] == {"train": 2, "eval": 1} or state["rollouts"] == {"train": 2, "eval": 0}
    assert state["draft_lengths"]["self"]["draft_length"] == 3


def test_resumed_run_goes_on_with_what_its_drafter_learned(learned: Trained, learned_resumed: Trained) -> None:
    assert_second_half(learned, learned_resumed, "acceptance_rate", "block_efficiency", "drafter_updates")
    (one,), (other,) = (of.run.calls[-1].drafters for of in (learned, learned_resumed))
    state, same = one.state_dict(), other.state_dict()
    assert state["moments"][0]["step"] == same["moments"][0]["step"] > 4
    assert same_tensors(state["tensors"], same["tensors"])


def test_resumed_run_goes_on_with_what_it_knew_of_its_drafters(raced: Trained, raced_resumed: Trained) -> None:
    rest = raced_resumed
    assert rest.run.completions == raced.run.completions[2:]
    saved = json.loads((raced.folder / "checkpoint-2" / "rollout_acceptance_0.json").read_text())
    known = [call.known for call in raced.run.calls]
    assert rest.run.calls[0].known == saved and saved in known and saved["methods"]
    history = torch.load(raced.folder / "checkpoint-2" / "rollout_history_0.pt", weights_only=True)
    remembered = next(drafter for drafter in rest.run.calls[0].drafters if drafter.strategy == "history")
    assert len(remembered.history) > len(history["texts"]) > 0


def test_a_run_that_dies_while_it_saves_loses_no_checkpoint(
    tmp_path: Path, drafted: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, replaced = os.replace, []

    def die_in_the_second_checkpoint(source: str, target: str) -> None:
        if "checkpoint-4" in str(target):
            raise OSError(28, "No space left on device")
        replaced.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", die_in_the_second_checkpoint)
    with pytest.raises(OSError, match="No space left"):
        run_training(tmp_path, "self", save_total_limit=1, **CLIMBING)
    monkeypatch.undo()
    assert checkpoint.STATE_FILE in replaced
    assert not [file.name for file in (tmp_path / "checkpoint-4").iterdir() if "rollout" in file.name]
    rest = run_training(tmp_path, "self", tmp_path / "checkpoint-2", max_steps=3, **CLIMBING)
    assert rest.run.completions == drafted.run.completions[2:3]
    log = read_run(tmp_path)  # to which the rest was appended
    assert len(log.headers) == 2 and [step.step for step in log.steps] == [1, 2, 3]


def test_checkpoint_of_another_trainer_starts_the_count_anew(drafted: Trained, tmp_path: Path) -> None:
    """So does one without draft lengths, as the oldest ones are, and one of another drafter and other lengths."""
    given = drafted.folder / "checkpoint-2"
    state = json.loads((given / checkpoint.STATE_FILE).read_text())
    for change, first_id, length in (
        (None, 0, 1),
        ({"rollouts": state["rollouts"]}, 2 << 36, 1),
        ({**state, "draft_lengths": {"ngram": state["draft_lengths"]["self"]}}, 2 << 36, 1),
        (state, 2 << 36, 3),
    ):
        copied = tmp_path / "checkpoint-2"
        shutil.copytree(given, copied, dirs_exist_ok=True)
        (copied / checkpoint.STATE_FILE).unlink()
        if change is not None:
            (copied / checkpoint.STATE_FILE).write_text(json.dumps(change))
        rest = run_training(tmp_path / "out", "self", copied, max_steps=3, eval_strategy="no", **CLIMBING)
        assert [call.request_ids[0] for call in rest.run.calls] == [first_id]
        assert rest.run.calls[0].draft_lengths == [length]


# ---- A drafter that learns while it drafts ------------------------------------------------------------------------


def test_what_learns_is_nothing_of_the_policys_optimizer(learned: Trained, drafted: Trained) -> None:
    trainer, run = learned.trainer, learned.run
    (drafter,) = run.calls[-1].drafters
    assert type(drafter.student) is Eagle3Drafter
    policys = {id(parameter) for group in trainer.optimizer.param_groups for parameter in group["params"]}
    assert policys == {id(parameter) for parameter in trainer.model.parameters()}
    assert not policys & {id(tensor) for tensor in drafter.student.network.parameters()}
    log = read_run(learned.folder)
    assert log.header.strategy == "tts" and log.header.settings["tts_drafter"] == "eagle3"
    for record, count in zip(log.of("train"), run.metric("rollout/drafter_updates"), strict=True):
        rounds = sum(point.rounds for point in record.points if point.draft_length)
        assert record.drafter == "tts" and record.phase_seconds["learn"] > 0 and count == rounds  # one in each
    taught = run.metric("eval_rollout/drafter_updates")
    assert len(taught) == 2 and min(taught) > 0
    steps = int(drafter.state_dict()["moments"][0]["step"])
    assert steps == sum(run.metric("rollout/drafter_updates")) + sum(taught)
    assert not drafted.run.metric("rollout/drafter_updates")


def test_other_scopes_leave_nothing_and_say_nothing(
    tmp_path: Path, learning: dict[str, Any], recwarn: pytest.WarningsRecorder
) -> None:
    options = dict(tts_scope="rollout", save_steps=1, eval_strategy="no", **learning)
    first = run_training(tmp_path, "tts", max_steps=1, **options)
    assert not list(tmp_path.glob("checkpoint-1/rollout_tts*")) and first.run.calls[0].drafters[0].state_dict() == {}
    run_training(tmp_path, "tts", tmp_path / "checkpoint-1", max_steps=2, **options)
    assert not [warning for warning in recwarn if "Test-Time Speculation" in str(warning.message)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda state: state.clear(), "it is empty"),
        (lambda state: state.update(student="dflash"), "it is of a drafter of kind 'dflash'"),
        (lambda state: state["tensors"].__setitem__(0, torch.zeros(1)), "tensors for .* of other shapes"),
    ],
    ids=["nothing saved", "another drafter", "other shapes"],
)
def test_a_state_that_does_not_fit(
    change: Callable[[dict[str, Any]], object], reason: str, learned: Trained, learning: dict[str, Any],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    load = torch.load

    def changed(path: Path, **options: Any) -> Any:
        state = load(path, **options)
        if "rollout_tts" in str(path):
            change(state)
        return state

    monkeypatch.setattr(checkpoint.torch, "load", changed)
    with pytest.warns(UserWarning, match=f"saved state of Test-Time Speculation.*: .*{reason}") as told:
        rest = run_training(
            tmp_path, "tts", learned.folder / "checkpoint-2", max_steps=3, eval_strategy="no", **learning
        )
    assert len([warning for warning in told if "Test-Time Speculation" in str(warning.message)]) == 1
    steps = int(rest.run.calls[0].drafters[0].state_dict()["moments"][0]["step"])
    assert steps == sum(rest.run.metric("rollout/drafter_updates"))


def test_what_is_not_used_yet_is_saved_again(learned_resumed: Trained) -> None:
    """A state waits for the next generation, which makes the learner; what was given stays as it was."""
    (drafter,) = learned_resumed.run.calls[-1].drafters
    state = copy.deepcopy(drafter.state_dict())
    before: dict[str, Any] = copy.deepcopy(state)
    drafter.load_state_dict(state)
    kept = drafter.state_dict()
    assert kept.keys() == {"student", "tensors", "moments"} and same_tensors(kept["tensors"], before["tensors"])
    learned_resumed.trainer.evaluate(tiny_dataset(1))
    assert drafter.state_dict()["moments"][0]["step"] > before["moments"][0]["step"]
    assert same_tensors(kept["tensors"], before["tensors"]) and same_tensors(state["tensors"], before["tensors"])


# ---- Several drafters ---------------------------------------------------------------------------------------------


def test_races(raced: Trained) -> None:
    assert raced.asked == [(["self", "history", "ngram"], 8, [2, 3])]  # profiled once
    names = ("self", "history", "ngram")
    assert Ladder.load(raced.folder / "roofline_profile.ladder.json").methods == names
    wins, shares = (
        {name: raced.run.metric(f"rollout/{of}_{name}") for name in names} for of in ("race_wins", "drafted_by")
    )
    assert all(len(values) == STEPS for values in (*wins.values(), *shares.values()))
    assert sum(map(sum, wins.values())) > 0 and sum(map(sum, shares.values())) > 0
    assert [call.known["rollout"] for call in raced.run.calls] == list(range(len(raced.run.calls)))
    assert [len(list(group)) for _, group in groupby(id(call.control) for call in raced.run.calls)] == [6]
