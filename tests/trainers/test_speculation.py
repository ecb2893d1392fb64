"""`spec_trl.speculate`: trainers of TRL and loops that know nothing of spec_trl draft, and train as without drafts."""

import copy
import gc
import json
import pickle
import types
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DataParallel
from transformers import DynamicCache, LlamaForCausalLM, TrainerCallback
from transformers.generation import BaseStreamer
from trl import GRPOTrainer

import spec_trl
from spec_trl import SpecGRPOTrainer
from spec_trl.cli.main import main
from spec_trl.generation import keyword
from spec_trl.generation.engine.requirements import policy_in
from spec_trl.trainers.run_log import read_run
from spec_trl.trainers.run_verdict import verdict_of
from tests.trainers.conftest import ignore_round_times
from tests.trainers.harness import make_run, tiny_dataset, tiny_policy
from tests.trainers.trl_trainers import IDS, PROMPT, TRAINERS, assert_same, loop, losses, make_trainer, rollouts, train


slow = pytest.mark.slow


def some(*fast: str) -> list[Any]:
    """All trainers, of which these are `fast` enough for each run of the tests."""
    return [pytest.param(name, marks=[] if name in fast else [slow]) for name in TRAINERS]


@pytest.mark.parametrize("name", some("rloo", "gkd"))
def test_trainers_train_as_without_drafts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ignore_round_times(monkeypatch)  # by which "auto" decides
    plain, _ = train(name, tmp_path / "none", "none")
    efficiency = {}
    for run, strategy in (("self", "self"), ("fresh", "self"), ("auto", "auto")):
        drafted, speculation = train(name, tmp_path / run, strategy, is_fresh=run == "fresh")
        assert_same(plain, drafted)
        records = rollouts(tmp_path / run)
        assert len(records) == len(plain.generate_calls) == speculation.verdict.rollouts
        assert speculation.verdict.drafted_rounds
        efficiency[run] = [record.block_efficiency for record in records]
    assert efficiency["self"] == efficiency["fresh"], "the copy is stale"
    assert min(efficiency["self"]) > 2


VARIANTS: dict[str, dict[str, Any]] = {
    "lora": dict(trainer={"peft_config": LoraConfig(r=4, target_modules="all-linear")}, learning_rate=5e-2),
    "autocast": dict(bf16=True, learning_rate=1e-3),
    "checkpointing": dict(gradient_checkpointing=True),
    "evaluation": dict(eval_strategy="steps", eval_steps=1, trainer={"eval_dataset": tiny_dataset(4)}),
}


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        pytest.param(name, variant, marks=[] if name == "online_dpo" else [slow])
        for name in ("rloo", "gkd", "online_dpo")
        for variant in VARIANTS
        if name == "rloo" or variant != "evaluation"  # the others' evaluations do not sample
    ],
)
def test_however_they_train(name: str, variant: str, tmp_path: Path) -> None:
    options = VARIANTS[variant]
    plain, _ = train(name, tmp_path / "none", "none", **options)
    drafted, _ = train(name, tmp_path / "self", "self", **options)
    assert_same(plain, drafted)
    records = rollouts(tmp_path / "self")
    assert all(record.block_efficiency for record in records)
    assert {record.mode for record in records} == ({"train", "eval"} if variant == "evaluation" else {"train"})


def test_a_run_resumes(tmp_path: Path) -> None:
    options = dict(max_steps=4, save_strategy="steps", save_steps=2)
    whole, _ = train("rloo", tmp_path, "self", **options)
    rest, _ = train("rloo", tmp_path, "self", tmp_path / "checkpoint-2", **options)
    assert rest.generate_calls == whole.generate_calls[2:]
    run = read_run(tmp_path)
    assert len(run.headers) == 2 and all(record.block_efficiency for record in run.rollouts)
    assert [(one.rollout, one.step) for one in run.rollouts] == [(step, step) for step in range(4)]
    assert [one.step for one in run.steps] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "model", "strategy", "options"),
    [("gkd", "teacher_model", "model", dict(lmbda=0.0, seq_kd=True)), ("a2po", "ref_model", "self", {})],
)
def test_other_models_of_a_trainer(
    name: str, model: str, strategy: str, options: dict[str, Any], tmp_path: Path
) -> None:  # fmt: skip
    """The teacher that writes the sequences of `seq_kd`, for which the student drafts; A2PO's reference model."""
    trained = []
    for run in ("none", strategy):
        trained.append(trainer := make_trainer(name, tmp_path / run, **options))
        assistant = trainer.model if run == "model" else None
        with spec_trl.speculate(getattr(trainer, model), run, assistant, tmp_path / run, sd_toggle="always"):
            trainer.train()
    plain, drafted = trained
    assert losses(plain) and losses(plain) == losses(drafted)
    assert all(map(torch.equal, plain.model.parameters(), drafted.model.parameters()))
    assert all(record.acceptance_rate for record in rollouts(tmp_path / strategy))


class Reporting(TrainerCallback):
    """Sees what is logged, as W&B's callback does."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        self.logs.append(rollout_metrics(logs))


def rollout_metrics(logs: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in logs.items() if "rollout/" in name}


def test_trainers_log_what_spec_grpo_trainer_logs(tmp_path: Path) -> None:
    reporting, evaluates = Reporting(), dict(eval_strategy="steps", eval_steps=2)
    ours = make_run(tmp_path / "ours", **evaluates, trainer={"eval_dataset": tiny_dataset(4)}).train()
    given = {"eval_dataset": tiny_dataset(4), "callbacks": [reporting]}
    trainer, speculation = train("rloo", tmp_path / "rloo", "self", trainer=given, logging_steps=2, **evaluates)
    names = {name for logs in ours.logs for name in rollout_metrics(logs)}
    logs = [logs for logs in reporting.logs if logs]
    assert names == {name for one in logs for name in one}
    assert logs == [one for entry in trainer.state.log_history if (one := rollout_metrics(entry))]
    run = read_run(tmp_path / "rloo")
    values = [value for one in logs for name, value in one.items() if name.endswith("rollout/block_efficiency")]
    at = [[record.block_efficiency or 0.0 for record in run.of(mode)] for mode in ("train", "eval")]
    assert values == [fmean(of_mode[part]) for part in (slice(2), slice(2, 4)) for of_mode in at]
    assert [step.step for step in run.steps] == [1, 2, 3, 4]
    for step, record in zip(run.steps, run.of("train"), strict=True):
        assert step.seconds > record.seconds >= step.phases["rollout"] > record.refresh_seconds  # one in another
    # The evaluation before the third step requantizes the copy for it.
    assert [record.refresh_seconds > 0 for record in run.of("train")] == [True, True, False, True]
    assert main(["report", str(tmp_path / "rloo")]) == 0
    trainer.evaluate()
    assert not reporting.logs[-1] and len(read_run(tmp_path / "rloo").rollouts) == len(run.rollouts)


def test_a_trainer_trains_twice_and_evaluates_when_a_callback_asks(tmp_path: Path) -> None:
    class Evaluating(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            trainer.evaluate()

    given = {"eval_dataset": tiny_dataset(1), "callbacks": [Evaluating()]}
    trainer = make_trainer("rloo", tmp_path, given, max_steps=2, save_strategy="steps", save_steps=1)
    with spec_trl.speculate(trainer, "self", sd_toggle="always") as speculation:
        trainer.train()
        whole = list(trainer.generate_calls)
        trainer.train(str(tmp_path / "checkpoint-1"))
    assert trainer.generate_calls[len(whole) :] == whole[2:]
    run = read_run(tmp_path)
    assert len(run.headers) == 2 and speculation.verdict.rollouts == 1
    assert [[(one.rollout, one.step) for one in run.of(mode)] for mode in ("train", "eval")] == [
        [(0, 0), (1, 1)], [(0, 1), (1, 2)],
    ]  # fmt: skip
    assert all(record.block_efficiency for record in run.rollouts)
    logged = [{name.split("/")[0] for name in rollout_metrics(entry)} for entry in trainer.state.log_history]
    assert logged == [{"eval_rollout"}, {"eval_rollout"}, set()]  # such a step has no log of its own


# ---- loops of one's own -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["AdamW", "AdamW8bit"])
def test_a_loop_drafts_with_a_fresh_copy(kind: str, tmp_path: Path) -> None:
    """No version counter moves; with a copy of the first weights τ would fall to 1.5."""
    none, drafted = (loop(kind, tmp_path / strategy, strategy) for strategy in ("none", "self"))
    fresh = loop(kind, tmp_path / "fresh", "self", is_fresh=True)
    assert none["sampled"] == drafted["sampled"]
    assert drafted == fresh and min(drafted["efficiency"]) > 2


class Streamed(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


ONE: dict[str, Any] = {"input_ids": IDS[1:]}  # assisted decoding of transformers takes no more
WITH_LOGITS = dict(output_logits=True, return_dict_in_generate=True)
UNSERVED: dict[str, Callable[[LlamaForCausalLM], dict[str, Any]]] = {
    "num_beams": lambda _: PROMPT | dict(num_beams=2, num_return_sequences=2),
    "output_scores": lambda _: PROMPT | dict(output_scores=True, return_dict_in_generate=True),
    "output_logits": lambda _: ONE | WITH_LOGITS | dict(streamer=Streamed()),
    "prompt_lookup_num_tokens": lambda _: ONE | dict(prompt_lookup_num_tokens=2),
    "assistant_model": lambda _: ONE | dict(assistant_model=tiny_policy(1)),
    "past_key_values": lambda _: PROMPT | dict(past_key_values=DynamicCache()),
    "inputs_embeds": lambda policy: dict(inputs_embeds=policy.get_input_embeddings()(IDS)),
}


@pytest.mark.parametrize("name", UNSERVED)
def test_what_it_cannot_serve_is_plain(name: str, tmp_path: Path) -> None:
    """Calls of callbacks, for instance. The verdict and the log say how many there were, and why."""
    policy = tiny_policy()

    def sample(call: dict[str, Any]) -> tuple[list[list[int]], list[int]]:
        torch.manual_seed(0)
        output = policy.generate(**call, do_sample=True, max_new_tokens=8)
        streamed = call["streamer"].tokens if "streamer" in call else []
        return (output if isinstance(output, torch.Tensor) else output.sequences).tolist(), streamed

    plain = sample(UNSERVED[name](policy))
    assert plain[1] or name != "output_logits"
    with spec_trl.speculate(policy, "self", output_dir=tmp_path, sd_toggle="always") as speculation:
        with pytest.warns(UserWarning, match=name) as warned:
            mixed = [sample(UNSERVED[name](policy)) for _ in range(2)]
        assert speculation.verdict.rollouts == 0
        said = str(speculation.verdict)
        assert said.startswith("no training rollout was logged: 2 calls of generate did not speculate (")
        assert name in said and str(verdict_of(read_run(tmp_path))[0]) == said
        _, streamed = sample(ONE | dict(streamer=Streamed()))
    assert mixed == [plain, plain]
    assert len([one for one in warned if "does not speculate" in str(one.message)]) == 1
    assert speculation.verdict.drafted_rounds and len(streamed) == 6 + 8 + 1


def test_errors_of_a_rollout_are_no_refusals() -> None:
    """Not to be hidden by a second, plain call."""

    failures = [ValueError("mine")]

    def fail(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if failures:
            raise failures.pop()
        return scores

    policy = tiny_policy()
    with spec_trl.speculate(policy, "self"), pytest.raises(ValueError, match="mine"):
        policy.generate(**PROMPT, max_new_tokens=8, logits_processor=[fail])


def test_a_model_with_a_generate_of_its_own() -> None:
    class Completing(LlamaForCausalLM):
        def generate(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            return super().generate(input_ids, **kwargs)[:, input_ids.shape[1] :]

    policy = tiny_policy()
    policy.__class__ = Completing
    plain = policy.generate(**PROMPT, max_new_tokens=8)
    with spec_trl.speculate(DataParallel(policy), "self", sd_toggle="always") as speculation:
        assert policy.generate(**PROMPT, max_new_tokens=8).tolist() == plain.tolist()
        cache = DynamicCache()
        with pytest.warns(UserWarning, match="past_key_values"):
            policy.generate(**PROMPT, max_new_tokens=8, past_key_values=cache)
    assert speculation.verdict.rollouts == 1 and speculation.verdict.drafted_rounds and cache.get_seq_length() > 8


compiled = partial(torch.compile, backend="eager")
LORA = LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian")


class WithoutTruth(LlamaForCausalLM):
    def __bool__(self) -> bool:
        raise TypeError("has no truth")


def without_truth(policy: LlamaForCausalLM) -> LlamaForCausalLM:
    policy.__class__ = WithoutTruth
    return policy


@pytest.mark.parametrize(
    "wrappers",
    [
        [without_truth], [compiled], [compiled, DataParallel], [DataParallel, compiled],
        [lambda policy: get_peft_model(policy, LORA), compiled],
    ],
    ids=["a class without truth", "compiled", "compiled, parallel", "parallel, compiled", "LoRA, compiled"],
)  # fmt: skip
def test_wrapped_models(wrappers: list[Callable[[Any], Any]]) -> None:
    """As the model, and as the assistant."""
    for wrapped, options in ((True, {"strategy": "self"}), (False, {"strategy": "model"})):
        policy, outer = tiny_policy(), tiny_policy()
        for wrap in wrappers:
            outer = wrap(outer)
        if wrapped:
            policy = policy_in(outer)
        else:
            options["assistant_model"] = outer
        plain = policy.generate(**PROMPT, max_new_tokens=8, do_sample=False).tolist()
        with spec_trl.speculate(outer if wrapped else policy, **options, sd_toggle="always") as speculation:
            assert policy.generate(**PROMPT, max_new_tokens=8, do_sample=False).tolist() == plain
        assert speculation.verdict.rollouts == 1 and speculation.verdict.drafted_rounds


@pytest.mark.parametrize(("strategy", "toggle"), [("tts", "always"), ("best_of_n", "measured")])
def test_other_strategies(strategy: str, toggle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ignore_round_times(monkeypatch)
    policy = tiny_policy()
    plain = policy.generate(**PROMPT, max_new_tokens=64)
    with spec_trl.speculate(policy, strategy, sd_toggle=toggle) as speculation:
        for _ in range(3):
            assert policy.generate(**PROMPT, max_new_tokens=64).tolist() == plain.tolist()
    assert speculation.verdict.rollouts == 3 and speculation.verdict.drafted_rounds


def test_it_ends() -> None:
    policy = tiny_policy()
    first, second = spec_trl.speculate(policy, "none"), spec_trl.speculate(policy, "self", sd_toggle="always")
    first.stop()  # the second has taken its place
    policy.generate(**PROMPT, max_new_tokens=8)
    assert (first.verdict.rollouts, second.verdict.rollouts) == (0, 1)
    copy.deepcopy(policy).generate(**PROMPT, max_new_tokens=8)
    assert second.verdict.rollouts == 1

    class Stopping(Streamed):
        def put(self, value: torch.Tensor) -> None:
            second.stop()
            super().put(value)

    drafted, streamer = second.verdict.drafted_rounds, Stopping()
    ids = policy.generate(**ONE, max_new_tokens=8, streamer=streamer)
    assert second.verdict.drafted_rounds > drafted and streamer.tokens == [*ids[0].tolist(), -1]
    second.stop()
    assert policy.generate(**ONE, max_new_tokens=8).tolist() == ids.tolist()
    assert second.verdict.rollouts == 2


@pytest.mark.parametrize("stops", [True, False])
def test_a_trainer_and_its_policy_are_freed(stops: bool, tmp_path: Path) -> None:
    trainer = make_trainer("rloo", tmp_path, max_steps=1)
    spec_trl.speculate(trainer, "self")
    speculation = spec_trl.speculate(trainer, "self", sd_toggle="always")  # stops the first
    trainer.train()
    assert speculation.verdict.rollouts == 1 and speculation.verdict.drafted_rounds
    lines = (tmp_path / "rollout_log.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["header", "rollout", "step"]
    assert pickle.loads(pickle.dumps(trainer.state)).log_history == trainer.state.log_history
    if stops:
        speculation.stop()
    left = weakref.ref(trainer), weakref.ref(trainer.model)
    del trainer
    gc.collect()
    assert [one() for one in left] == [None, None]


@pytest.mark.parametrize(
    ("option", "named"),
    [
        (dict(use_transformers_continuous_batching=True), "use_transformers_continuous_batching=True"),
        (dict(generation_kwargs={"num_beams": 2}), "num_beams"),
    ],
)
def test_what_a_trainer_asks_for_is_refused_at_once(option: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=named):
        spec_trl.speculate(make_trainer("rloo", tmp_path, **option))


def test_a_trainer_of_trl_with_our_config(tmp_path: Path) -> None:
    """Decodes plainly, says so, and then drafts as `speculate` says."""
    message = "args is a SpecGRPOConfig, and a GRPOTrainer reads none of .*Use SpecGRPOTrainer, or call"
    with pytest.warns(UserWarning, match=message) as warned:
        run = make_run(tmp_path, kind=GRPOTrainer, max_steps=1)
        run.trainer.args.get_process_log_level()  # as some scripts do
    assert len([one for one in warned if "reads none" in str(one.message)]) == 1
    with spec_trl.speculate(run.trainer, "self", sd_toggle="always") as speculation:
        run.train()
    assert speculation.verdict.rollouts == 1 and speculation.verdict.drafted_rounds


@pytest.mark.parametrize("kind", ["ours", "speculate"])
def test_settings_that_change_no_token(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under each door; the model's are said too, and all of them once."""
    monkeypatch.setattr(keyword, "_said", set())
    policy = tiny_policy(use_cache=False)
    assert policy.generation_config.use_cache is False, "a model without a generation config takes it from its config"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = make_run(
            tmp_path, policy=policy, kind=SpecGRPOTrainer if kind == "ours" else GRPOTrainer, max_steps=2,
            cache_implementation="static", generation_kwargs={"num_assistant_tokens": 3},
        )  # fmt: skip
        if kind == "speculate":
            spec_trl.speculate(run.trainer, "self", sd_toggle="always")
        run.train()
    parts = [str(each.message).partition(" is overridden, which changes no token") for each in caught]
    place = "(trainer.generation_config, as of generation_kwargs or cache_implementation)"
    assert sorted(said for said, holds, _ in parts if holds) == [
        f"cache_implementation='static' {place}", f"num_assistant_tokens=3 {place}", "use_cache=False (model.config)",
    ]  # fmt: skip
    assert [bool(record.block_efficiency) for record in rollouts(tmp_path)] == [True, True]


def test_a_trainer_that_samples_on_a_server_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer("rloo", tmp_path)
    trainer.args = types.SimpleNamespace(vllm_server_base_url="http://localhost:8000")  # as AsyncGRPOTrainer's
    with pytest.raises(ValueError, match="RLOOTrainer, which samples on a vLLM server, does not"):
        spec_trl.speculate(trainer)


def test_arguments_are_checked_at_once(tmp_path: Path) -> None:
    for given, named in (
        (dict(strategy="slef"), "slef"),
        (dict(draft_length=0), "draft_length"),
        (dict(strategy="model"), "assistant_model"),
        (dict(strategy="self", ngram_size=5), "ngram_size"),
        (dict(strategy="ngram", verification="rejection"), "needs draft probabilities"),
        (dict(seed=3), "seed=3"),
    ):
        with pytest.raises(ValueError, match=named):
            spec_trl.speculate(tiny_policy(), **given)
    with pytest.raises(ValueError, match="target is a str"):
        spec_trl.speculate("model")
    with pytest.raises(ValueError, match="target is a Linear"):
        spec_trl.speculate(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="SpecGRPOTrainer speculates by itself"):
        spec_trl.speculate(make_run(tmp_path).trainer)
