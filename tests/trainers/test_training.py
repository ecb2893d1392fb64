"""Trainings that conftest.py makes once: speculation changes no token, no loss and no weight, the drafter follows the
policy, a run goes on from a checkpoint as if it had never stopped (the lossless contract, no. 5), and what it logs."""

import copy
import json
import math
import shutil
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from trl import GRPOTrainer

from spec_trl import SpecGRPOTrainer
from spec_trl.drafter_training.adaptation import STATE_FILE as ADAPTED_FILE
from spec_trl.generation.drafters.autoregressive import NetworkDrafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.sampling.accept import Proposal
from spec_trl.generation.engine.sampling.noise import RoundNoise
from spec_trl.generation.planner.planner import Planner
from spec_trl.papers.specactor.ladder import Ladder
from spec_trl.trainers import run_verdict
from spec_trl.trainers.checkpoint import STATE_FILE
from spec_trl.trainers.run_verdict import verdict_of
from tests.generation.drafters.watching import make_checkpoint
from tests.option_groups import merged
from tests.trainers.conftest import LEARNING, STEPS, Asked
from tests.trainers.harness import (
    PROMPTS,
    Call,
    Run,
    assert_same_training,
    make_run,
    roll_out,
    tiny_dataset,
    tiny_policy,
    train,
)


Raced = tuple[Run, Asked]


def in_training(run: Run) -> list[Call]:
    return [call for call in run.calls if call.request_ids[0] < 2**62]


def same_tensors(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def updates_of(state: dict[str, Any]) -> int:
    """Of the copy that learns, by its saved state."""
    return int(state["moments"]["steps"].max())


def names(run: Run, prefix: str = "rollout/") -> set[str]:
    return {name.removeprefix(prefix) for entry in run.logs for name in entry if name.startswith(prefix)}


# ---- Speculation changes nothing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("drafted_by", ["one that learns", "racers, one of which is trained along"])
def test_the_policy_trains_as_without_drafts(drafted_by: str, none: Run, learned: Run, raced: Raced) -> None:
    run = learned if drafted_by == "one that learns" else raced[0]
    assert_same_training(none, run)
    assert len(run.completions) == STEPS and any(run.losses)
    assert min(run.metric("rollout/block_efficiency")) > 1
    start = tiny_policy().state_dict()
    assert all(not torch.equal(weight, start[name]) for name, weight in run.weights.items())


def test_greedy_completions_are_those_of_trl(tmp_path: Path) -> None:
    ours, theirs = (
        roll_out(tmp_path, kind=kind, max_completion_length=40, generation_kwargs={"do_sample": False})
        for kind in (SpecGRPOTrainer, GRPOTrainer)
    )
    assert ours.rewarded == theirs.rewarded
    assert any(len(ids) < 40 for _, rows in ours.rewarded for ids in rows)  # EOS came


def test_rollouts_run_in_the_precision_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    begin = SelfDrafter.begin
    monkeypatch.setattr(
        SelfDrafter, "begin", lambda *args: seen.append(torch.is_autocast_enabled("cpu")) or begin(*args)
    )
    for bf16 in (True, False):
        roll_out(tmp_path, policy=tiny_policy().float(), bf16=bf16)
    assert seen == [True, False]


def test_no_two_requests_share_noise(learned: Run, none: Run) -> None:
    """Ids are (mode, rollout, turn, row): evaluations count apart, so they change nothing that training samples."""
    ids = [call.request_ids for call in learned.calls]
    assert ids == [call.request_ids for call in none.calls]
    training = [each for each in ids if each[0] < 2**62]
    assert training == [[rollout << 36 | row for row in range(8)] for rollout in range(STEPS)]
    evaluation = [each for each in ids if each[0] >= 2**62]
    assert evaluation == [[1 << 62 | rollout << 36 | row for row in range(4)] for rollout in range(2)]


# ---- The copy follows the policy (ER Algorithm 1) -----------------------------------------------------------------


def test_one_refresh_per_step_that_generates(learned: Run) -> None:
    assert [call.step for call in learned.calls] == [0, 1, 2, 2, 3, 4]  # an evaluation shares with training
    assert learned.refreshed == [1, 2, 3, 4]  # the drafter is made from the weights of step 0
    seconds = learned.metric("rollout/drafter_refresh_seconds")
    # Making the copy is setup; the evaluation after step 2 paid for the rollout after it.
    assert [second > 0 for second in seconds] == [False, True, False, True]


def is_fresh(drafter: SelfDrafter, policy: PreTrainedModel) -> bool:
    """Whether the drafter's packed weights are those that a new drafter of the live policy would get."""
    layers = SelfDrafter(policy).quantized.layers
    return layers.keys() <= drafter.quantized.layers.keys() and all(
        torch.equal(dict(drafter.quantized.layers[name].packed.named_buffers())[buffer], expected)
        for name, layer in layers.items()
        for buffer, expected in layer.packed.named_buffers()
    )


def test_no_rollout_drafts_with_stale_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in a second run, whose `global_step` starts at 0 again, nor after weights that were changed by hand. The
    policy has an adapter, which is merged into the copy at each refresh and never into the policy."""
    fresh: dict[int, bool] = {}
    draft = NetworkDrafter.propose

    def watched(drafter: SelfDrafter, draft_length: int, noise: RoundNoise | None) -> Proposal:
        if len(run.calls) not in fresh:  # the first round of each call
            fresh[len(run.calls)] = is_fresh(drafter, run.trainer.model.get_base_model())
        return draft(drafter, draft_length, noise)

    monkeypatch.setattr(NetworkDrafter, "propose", watched)
    monkeypatch.setattr(run_verdict, "COLLAPSE", 1e6)  # acceptance need not fall
    monkeypatch.setattr(run_verdict, "COLLAPSE_ERRORS", -1e9)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    run = make_run(tmp_path, max_steps=2, num_iterations=2, learning_rate=5e-2, trainer={"peft_config": lora})
    run.trainer.evaluate(tiny_dataset(1))
    start = {name: p.detach().clone() for name, p in run.trainer.model.named_parameters() if "lora" not in name}
    with torch.no_grad():
        for name, parameter in run.trainer.model.named_parameters():
            if "lora_B" in name:
                parameter += 0.02
    run.train()
    with pytest.warns(UserWarning, match="the acceptance rate of the drafter 'self' fell"):
        run.train()
    assert fresh == dict.fromkeys([1, 2, 3], True)
    assert [call.step for call in run.calls] == [0, 0, 0] and run.refreshed == [0, 0]  # a batch is used twice
    assert all(torch.equal(run.weights[name], weight) for name, weight in start.items())
    assert [step.step for step in run.log.steps] == [1, 2] and len(run.log.headers) == 3


def test_rollouts_that_never_speculate_do_not_pay_for_a_refresh(
    tmp_path: Path, profiles: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = roll_out(tmp_path, sd_toggle="roofline", efficient_rollout=dict(profile=profiles["does not"]))
    monkeypatch.setattr(SelfDrafter, "refresh", lambda *_: 1 / 0)
    run.trainer.state.global_step = 1
    run.trainer.evaluate(tiny_dataset(1))
    assert [call.step for call in run.calls] == [0, 1]
    assert run.metric("eval_rollout/drafter_refresh_seconds")[1:] == [0.0]


# ---- Draft lengths --------------------------------------------------------------------------------------------------


def test_the_draft_length_climbs_with_training_rollouts(learned: Run) -> None:
    assert [call.draft_lengths for call in learned.calls] == [[1], [2], [3], [3], [4], [5]]
    lengths = learned.metric("rollout/draft_length")
    assert [math.ceil(length) for length in lengths] == [1, 2, 3, 4]  # rows near their end draft less


def test_a_planner_chooses_the_draft_length(raced: Raced) -> None:
    """Where drafts cost nothing the longest is best; there is no controller, and none in a checkpoint."""
    run, _ = raced
    assert isinstance(run.calls[-1].control, Planner)
    points = [point for record in run.log.of("train") for point in record.points if point.batch >= 7]
    full = [point.draft_length for point in points if point.draft_length]  # plain rounds follow a bad trial
    assert len(full) > 5 and min(full) >= 3  # of 1, 2 and 3; a race drafts twice as many
    state = json.loads((run.folder / "checkpoint-4" / STATE_FILE).read_text())
    assert state["draft_lengths"] == {}


# ---- Going on from a checkpoint ------------------------------------------------------------------------------------


def assert_second_half(whole: Run, rest: Run, *metrics: str) -> None:
    assert rest.completions == whole.completions[2:] and rest.losses == whole.losses[2:]
    assert all(torch.equal(weight, rest.weights[name]) for name, weight in whole.weights.items())
    # The evaluation after step 2 comes after the checkpoint, or before it.
    before, after = ([(call.request_ids, call.step) for call in in_training(run)] for run in (whole, rest))
    assert after == before[2:]
    for name in metrics:
        assert rest.metric(name) == whole.metric(name)[2:], name


def test_a_run_that_died_goes_on_as_if_never_stopped(learned: Run, learned_resumed: Run) -> None:
    """With what its drafter had learned. The checkpoint that was being saved holds no state of rollouts."""
    assert not [file.name for file in (learned.folder / "checkpoint-4").iterdir() if "rollout" in file.name]
    assert_second_half(
        learned, learned_resumed, "rollout/draft_length", "rollout/block_efficiency", "rollout/acceptance_rate",
        "rollout/drafter_updates",
    )  # fmt: skip
    state = json.loads((learned.folder / "checkpoint-2" / STATE_FILE).read_text())
    assert state["rollouts"]["train"] == 2 and state["draft_lengths"]["tts"]["draft_length"] == 3
    assert [call.draft_lengths for call in in_training(learned_resumed)] == [[3], [4]]
    one, other = (of.calls[-1].drafters[0].state_dict() for of in (learned, learned_resumed))
    assert updates_of(one) == updates_of(other) > 4 and same_tensors(one["tensors"], other["tensors"])


def test_resumed_races_go_on_with_what_they_knew_of_their_drafters(raced: Raced, raced_resumed: Run) -> None:
    whole, rest = raced[0], raced_resumed
    checkpoints = [whole.folder / f"checkpoint-{step}" for step in (2, 4)]
    assert_second_half(whole, rest, "drafter/loss", "drafter/agreement")
    saved = json.loads((checkpoints[0] / "rollout_acceptance_0.json").read_text())
    known = [call.known for call in whole.calls]
    assert saved in known and saved["times"]["rounds"] > 0
    for part in ("methods", "prompts"):
        assert rest.calls[0].known[part] == saved[part]
    assert rest.calls[0].known["times"]["rounds"] == saved["times"]["rounds"]
    history = torch.load(checkpoints[0] / "rollout_history_0.pt", weights_only=True)
    remembered = next(drafter for drafter in rest.calls[0].drafters if drafter.strategy == "history")
    assert len(remembered.history) > len(history["texts"]) > 0
    # The trained drafter learned from every micro-batch of the training and from none of an evaluation.
    assert [torch.load(folder / ADAPTED_FILE)["micro_batches"] for folder in checkpoints] == [4, 8]
    rest.trainer.save_model(str(rest.folder / "final"))
    folders = (*checkpoints, rest.folder / "final")
    half, end, resumed = (list(load_file(folder / "drafter/model.safetensors").values()) for folder in folders)
    assert same_tensors(end, resumed) and not same_tensors(half, end)


def test_a_resumed_planner_knows_the_rounds_and_the_acceptance_of_before(tmp_path: Path) -> None:
    options: dict[str, Any] = dict(sd_toggle="measured", max_steps=2, save_strategy="steps", save_steps=1)
    whole = train(tmp_path / "whole", "auto", **options)
    checkpoint = whole.folder / "checkpoint-1"
    rest = train(tmp_path / "rest", "auto", resume=checkpoint, **options)
    saved = json.loads((checkpoint / "rollout_acceptance_0.json").read_text())
    assert [call.step for call in rest.calls] == [1] and rest.calls[0].control is not whole.calls[0].control
    before, after, resumed = (json.loads(json.dumps(call.known)) for call in (*whole.calls, *rest.calls))
    assert after == saved and not before["times"]["rounds"]
    saved["times"]["covariance"][0][0] += 1.0  # it may be another machine, whose level is unknown
    assert resumed == saved
    ours = rest.calls[0].control
    assert isinstance(ours, Planner) and ours.clock.rounds > saved["times"]["rounds"] > 0
    (heard,) = (ours.drafts.methods[which] for which in ours.compared_lookups)
    assert any(ours.drafts.state_dict()["methods"][heard])
    assert whole.completions[1:] == rest.completions


def test_checkpoints_of_other_trainers(tmp_path: Path, learned: Run) -> None:
    """Of TRL's: the count begins anew. Of another strategy: the count goes on, draft lengths begin anew, and what
    should have been learned is missed."""
    options = LEARNING | dict(max_steps=3, eval_strategy="no")
    with pytest.warns(UserWarning, match="saved state of Test-Time Speculation.*: it is empty") as told:
        shutil.copytree(learned.folder / "checkpoint-2", tmp_path / "checkpoint-2")
        state = json.loads((tmp_path / "checkpoint-2" / STATE_FILE).read_text())
        state["draft_lengths"] = {"ngram": state["draft_lengths"].pop("tts")}
        (tmp_path / "checkpoint-2" / STATE_FILE).write_text(json.dumps(state))
        (tmp_path / "checkpoint-2" / "rollout_tts_0.pt").unlink()
        rest = train(tmp_path / "out", "tts", tmp_path / "checkpoint-2", **options)
    assert len([warning for warning in told if "Test-Time Speculation" in str(warning.message)]) == 1
    assert [(call.request_ids[0], call.draft_lengths) for call in rest.calls] == [(2 << 36, [1])]
    (tmp_path / "checkpoint-2" / STATE_FILE).unlink()
    with pytest.warns(UserWarning, match=f"{STATE_FILE} does not exist"):
        del options["tts"]  # a copy that does not learn reads none
        rest = train(tmp_path / "out", "self", tmp_path / "checkpoint-2", **options)
    assert [(call.request_ids[0], call.draft_lengths) for call in rest.calls] == [(0, [1])]


# ---- A drafter that learns while it drafts ------------------------------------------------------------------------


def test_what_learns_is_nothing_of_the_policys_optimizer(learned: Run) -> None:
    (drafter,) = learned.calls[-1].drafters
    policys = {id(each) for group in learned.trainer.optimizer.param_groups for each in group["params"]}
    assert policys == {id(parameter) for parameter in learned.trainer.model.parameters()}
    updates = learned.metric("rollout/drafter_updates")
    for record, count in zip(learned.log.of("train"), updates, strict=True):
        rounds = sum(point.rounds for point in record.points if point.draft_length)
        assert record.drafter == "tts" and record.phase_seconds["learn"] > 0 and count == rounds  # one in each
    taught = learned.metric("eval_rollout/drafter_updates")
    assert len(taught) == 2 and min(taught) > 0
    assert updates_of(drafter.state_dict()) == sum(updates) + sum(taught)


def test_states_that_do_not_fit_or_are_not_used_yet(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """A state waits for the next generation, which makes the learner, and is saved again; what was given stays as it
    was. Other scopes neither save nor load."""
    options = dict(
        tts=dict(drafter="eagle3", stride=1), assistant_model=make_checkpoint(tmp_path / "eagle3", "eagle3", 48)
    )  # fmt: skip
    other = roll_out(tmp_path, "tts", **merged(options, dict(tts=dict(scope="rollout"))))
    other.calls[0].drafters[0].load_state_dict({"student": "dflash"})
    other.trainer.evaluate(tiny_dataset(1))
    assert other.calls[0].drafters[0].state_dict() == {}
    run = roll_out(tmp_path, "tts", draft_length=[3], **options)
    (drafter,) = run.calls[0].drafters
    state: dict[str, Any] = copy.deepcopy(drafter.state_dict())
    before: dict[str, Any] = copy.deepcopy(state)
    drafter.load_state_dict(state)
    assert same_tensors(drafter.state_dict()["tensors"], before["tensors"])
    run.trainer.evaluate(tiny_dataset(1))
    assert drafter.state_dict()["moments"][0]["step"] > before["moments"][0]["step"] > 0
    assert same_tensors(state["tensors"], before["tensors"])
    assert same_tensors(*(list(of["moments"][0].values()) for of in (state, before)))
    assert not [warning for warning in recwarn if "Test-Time Speculation" in str(warning.message)]
    for change, reason in (
        ({"student": "dflash"}, "it is of a drafter of kind 'dflash'"),
        ({"tensors": [torch.zeros(1), *before["tensors"][1:]]}, "tensors for .* of other shapes"),
    ):
        drafter.load_state_dict(state | change)
        with pytest.warns(UserWarning, match=f"saved state of Test-Time Speculation.*: .*{reason}"):
            run.trainer.evaluate(tiny_dataset(1))


# ---- Several drafters ---------------------------------------------------------------------------------------------


def test_races(raced: Raced) -> None:
    run, asked = raced
    drafters = ("self", "history", "dflash")
    assert asked == [(list(drafters), 8, (1, 2, 3))]  # looked for once
    assert Ladder.load(run.folder / "roofline_profile.ladder.json").methods == drafters
    wins, shares = (
        {name: run.metric(f"rollout/{of}_{name}") for name in drafters} for of in ("race_wins", "drafted_by")
    )
    assert all(len(values) == STEPS for values in (*wins.values(), *shares.values()))
    assert sum(map(sum, wins.values())) > 0 and sum(map(sum, shares.values())) > 0
    assert [len(list(group)) for _, group in groupby(id(call.control) for call in run.calls)] == [6]
    # The copy is scaled by what the training forwards fed its projections, when it drafts next.
    copied = run.calls[-1].drafters[0]
    copied.refresh_if_stale()
    layers = copied.quantized.layers.values()
    assert any(bool((layer.inverse_scales != 1).any()) for layer in layers)


# ---- What is logged -------------------------------------------------------------------------------------------------


ALWAYS = {"seconds", "tokens_per_second", "target_entropy", "tail_seconds", "tail_rounds"}
DRAFTED = ALWAYS | {
    "block_efficiency", "acceptance_rate", "first_token_acceptance", "draft_length", "sd_on_fraction",
    "block_efficiency_from_0",
}  # fmt: skip
UPDATED = {"drafter_updates", "drafter_update_seconds"}


def test_log_has_every_rollout_and_step(learned: Run) -> None:
    log, records, steps = learned.log, learned.log.of("train"), learned.log.steps
    assert log.header.strategy == "tts" and log.header.settings["draft_length"] == [1, 2, 3, 4, 5]
    assert log.header.dtype == "float64"
    assert [record.rollout for record in records] == [record.step for record in records] == [0, 1, 2, 3]
    assert [record.step for record in steps] == [1, 2, 3, 4]
    assert [record.step for record in log.of("eval")] == [2, 4]
    for step, reward, record in zip(steps, learned.metric("reward"), records, strict=True):
        assert step.reward == pytest.approx(reward)
        # The phases make up the step, and the rollout is the one that was logged.
        assert sum(step.phases.values()) == pytest.approx(step.seconds, rel=0.02)
        assert min(step.phases.values()) >= 0 and step.phases["update"] > 0 and step.phases["reward"] > 0
        assert record.seconds <= step.phases["rollout"] <= step.seconds
    for record, completions in zip(records, learned.completions, strict=True):
        assert (record.drafter, record.draft_length, record.requests) == ("tts", record.rollout + 1, 8)
        assert record.tokens == sum(map(len, completions))
        assert record.tokens - 8 == sum(point.tokens for point in record.points), "first tokens come before all rounds"
        assert sum(point.rounds for point in record.points) == record.rounds
        assert 0 < sum(point.seconds for point in record.points) <= record.seconds
        assert record.completion_curve[-1][1] == 8 and record.per_depth[0].committed <= record.tokens
        assert record.speculating[0][:2] == (0, record.rollout + 1)
        assert sorted(timeline.request for timeline in record.timeline) == list(range(8))
        assert record.timeline[-1].ended == record.completion_curve[-1][0] <= record.seconds
        for timeline in record.timeline:  # nobody drafts for a first token
            own = ["tts"] if len(completions[timeline.request]) > 1 else []
            assert timeline.changes[0][1:] == (0, own)
        # Making the drafter is setup; at step 2 the evaluation came first and paid for the refresh.
        assert 0 <= record.refresh_seconds < record.seconds - record.setup_seconds < record.seconds
        assert (record.refresh_seconds > 0) == (record.step not in (0, 2))
        half = next(second for second, done in record.completion_curve if done >= 4)
        assert record.tail_seconds == pytest.approx(record.completion_curve[-1][0] - half)


def test_every_metric_is_logged_and_says_what_the_log_says(learned: Run, raced: Raced, none: Run) -> None:
    records = learned.log.of("train")
    expected = DRAFTED | UPDATED | {"drafter_refresh_seconds"}
    assert names(learned) == names(learned, "eval_rollout/") == expected and names(none) == ALWAYS
    assert names(raced[0], "drafter/") == {"loss", "agreement", "update_seconds"} and not names(learned, "drafter/")
    for entry in learned.logs:
        assert not ("eval_rollout/seconds" in entry and any(name.startswith("rollout/") for name in entry))
    for name in (
        "seconds", "block_efficiency", "acceptance_rate", "first_token_acceptance", "target_entropy", "sd_on_fraction",
        "tail_seconds", "tail_rounds",
    ):  # fmt: skip
        assert learned.metric(f"rollout/{name}") == pytest.approx([vars(record)[name] for record in records])
    assert learned.metric("rollout/drafter_refresh_seconds") == [record.refresh_seconds for record in records]
    assert learned.metric("rollout/tokens_per_second") == [record.tokens / record.seconds for record in records]
    # One depth bin holds all of 16 tokens.
    assert learned.metric("rollout/block_efficiency_from_0") == learned.metric("rollout/block_efficiency")
    for record, draft_length in zip(records, learned.metric("rollout/draft_length"), strict=True):
        assert 0 <= record.tail_seconds < record.seconds and 0 <= record.tail_rounds < 16
        assert 1 < record.block_efficiency <= record.draft_length + 1
        assert 0 < record.acceptance_rate < 1 and 0 < record.first_token_acceptance < 1
        assert record.rollout < draft_length == record.mean_draft_length <= record.draft_length
        assert 0.5 < record.sd_on_fraction <= 1
    log = raced[0].log
    for step, seconds in zip(log.steps, raced[0].metric("drafter/update_seconds"), strict=True):
        assert 0 < seconds <= step.phases["adaptation"]


def test_some_metrics_need_drafts_or_a_copy(tmp_path: Path) -> None:
    lookup = roll_out(tmp_path, "ngram", tiny_dataset(8), max_completion_length=80)
    assert names(lookup, "eval_rollout/") == DRAFTED | {"block_efficiency_from_64"}
    single = roll_out(tmp_path, max_completion_length=1)  # one token leaves nothing to draft
    assert single.metric("eval_rollout/sd_on_fraction") == single.metric("eval_rollout/draft_length") == [0.0]
    assert single.metric("eval_rollout/block_efficiency") == []  # nothing to report, no NaN in TRL's averages
    assert all(single.metric("eval_rollout/target_entropy"))


def test_a_run_begins_with_what_is_predicted_and_ends_with_the_verdict(none: Run, raced: Raced) -> None:
    for run in (none, raced[0]):
        assert run.lines[-1] == f"spec_trl verdict: {verdict_of(run.log)[0]}"
        assert [line for line in run.lines if "verdict" in line] == run.lines[-1:]
    assert len(none.lines) == 1 and raced[0].lines[0].startswith("spec_trl rollouts: ")
    assert {record.drafter for record in none.log.rollouts} == {None}
    (record, *_) = none.log.rollouts
    assert record.block_efficiency is record.mean_draft_length is None
    assert record.sd_on_fraction == 0 and {plan.draft_length for plan in record.speculating} == {0}


def test_target_entropy_is_the_surprise_of_what_was_sampled(tmp_path: Path) -> None:
    run = roll_out(tmp_path, temperature=0.7)
    policy, tokenizer, logprobs = tiny_policy(), run.trainer.processing_class, []
    ((_, completions),) = run.rewarded
    for row, completion in enumerate(completions):
        ids = torch.tensor([*tokenizer(PROMPTS[row // 4]).input_ids, *completion])
        with torch.no_grad():
            logits = policy(ids[None]).logits[0, -len(completion) - 1 : -1]  # [new, V]
        logprobs.append((logits / 0.7).log_softmax(-1).gather(1, ids[-len(completion) :, None]))
    entropy = -torch.cat(logprobs).mean().item()
    assert run.metric("eval_rollout/target_entropy")[0] == pytest.approx(entropy, rel=1e-5)
