"""`spec_trl.speculate`: trainers of TRL and loops that know nothing of spec_trl draft, and train as without drafts."""

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig
from torch.nn.parallel import DataParallel
from transformers import DynamicCache, GenerationConfig, LlamaForCausalLM, TrainerCallback
from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.a2po import A2POConfig, A2POTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.experimental.gold import GOLDConfig, GOLDTrainer
from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.experimental.sdft import SDFTConfig, SDFTTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

import spec_trl
from examples.demo.task import build_tokenizer
from spec_trl.cli.main import main
from spec_trl.trainers.run_log import RolloutRecord, read_run
from tests.trainers.harness import PROMPTS, make_run, tiny_dataset, tiny_policy


slow = pytest.mark.slow
GROUPS = dict(num_generations=4, per_device_train_batch_size=4)
MESSAGES = Dataset.from_list(
    [{"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": "11"}]} for p in PROMPTS]
)
TOLD = Dataset.from_list([{"prompt": prompt, "privileged_context": "a1"} for prompt in PROMPTS])


def count_digits(completions: list[Any], **_: Any) -> list[float]:
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [sum(letter.isdigit() for letter in text) / (1 + len(text)) for text in texts]


def some_digits(completions: list[Any], **_: Any) -> list[float]:
    return [float("1" in text) for text in completions]


def rewarded(kind: Any, reward: Callable[..., list[float]] = count_digits) -> Callable[..., Any]:
    return lambda **given: kind(reward_funcs=reward, **given)


def taught(kind: Any) -> Callable[..., Any]:
    return lambda **given: kind(teacher_model=stored(tiny_policy(1), Path(given["args"].output_dir) / "of"), **given)


def stored(model: LlamaForCausalLM, folder: Path) -> LlamaForCausalLM:
    """Some trainers load a model, or its tokenizer, again."""
    build_tokenizer().save_pretrained(folder)
    model.save_pretrained(folder)  # of several ranks, the first one does
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    model.config._name_or_path = model.name_or_path = str(folder)
    return model


TRAINERS: dict[str, tuple[Callable[..., Any], Any, Dataset, dict[str, Any]]] = {
    "rloo": (rewarded(RLOOTrainer), RLOOConfig, tiny_dataset(8), GROUPS),
    "grpo": (rewarded(GRPOTrainer), GRPOConfig, tiny_dataset(8), GROUPS),
    "gmpo": (rewarded(GMPOTrainer), GMPOConfig, tiny_dataset(8), GROUPS),
    "online_dpo": (rewarded(OnlineDPOTrainer), OnlineDPOConfig, tiny_dataset(8), dict(max_new_tokens=16)),
    "distillation": (taught(DistillationTrainer), DistillationConfig, tiny_dataset(8), {}),
    "gkd": (taught(GKDTrainer), GKDConfig, MESSAGES, dict(max_new_tokens=16, lmbda=1.0)),
    "gold": (taught(GOLDTrainer), GOLDConfig, MESSAGES, dict(lmbda=1.0, use_extended_uld=False)),
    "iw_opd": (taught(IWOPDTrainer), IWOPDConfig, MESSAGES, dict(lmbda=1.0)),
    "sdft": (SDFTTrainer, SDFTConfig, TOLD, GROUPS | dict(distillation_topk=8)),
    "sdpo": (rewarded(SDPOTrainer), SDPOConfig, tiny_dataset(8), GROUPS | dict(success_reward_threshold=0.1)),
    "a2po": (rewarded(A2POTrainer, some_digits), A2POConfig, tiny_dataset(8), dict(filter_all_incorrect=False)),
}


def make_trainer(
    name: str, folder: Path, trainer: dict[str, Any] | None = None, is_fresh: bool = False, **options: Any
) -> Any:  # fmt: skip
    """`is_fresh`: rollouts find nothing of earlier ones."""
    kind, config, dataset, needed = TRAINERS[name]
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    settings = dict(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=4, learning_rate=3e-3, logging_steps=1,
        report_to="none", save_strategy="no", use_cpu=True, bf16=False, gradient_checkpointing=False, seed=3,
        disable_tqdm=True,
    )  # fmt: skip
    length = {} if {"max_new_tokens"} & needed.keys() else {"max_completion_length": 16}
    policy, args = stored(tiny_policy(), folder / "policy"), config(**(settings | length | needed | options))
    made = kind(model=policy, args=args, train_dataset=dataset, processing_class=tokenizer, **(trainer or {}))
    made.generate_calls = watch(spec_trl.generation.engine.requirements.policy_in(made.model), is_fresh)
    return made


def watch(policy: LlamaForCausalLM, is_fresh: bool) -> list[list[list[int]]]:
    """What each call of `generate` returned that named no strategy."""
    calls, generate = [], policy.generate

    def watched(*args: Any, **kwargs: Any) -> Any:
        if is_fresh:
            spec_trl.release(policy)
        output = generate(*args, **kwargs)
        if not {"assistant_strategy", "custom_generate"} & kwargs.keys():
            calls.append((output if isinstance(output, torch.Tensor) else output.sequences).tolist())
        return output

    policy.generate = watched  # type: ignore[method-assign]
    return calls


def train(name: str, folder: Path, strategy: str, resume: Path | None = None, **options: Any) -> tuple[Any, Any]:
    """The trainer after training, and what `speculate` returned."""
    trainer = make_trainer(name, folder, **options)
    toggle = "measured" if strategy == "auto" else "always"
    with spec_trl.speculate(trainer, strategy, sd_toggle=toggle, draft_length=3) as speculation:
        trainer.train(None if resume is None else str(resume))
    return trainer, speculation


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def assert_same(one: Any, other: Any) -> None:
    assert one.generate_calls and one.generate_calls == other.generate_calls
    assert losses(one) and losses(one) == losses(other)
    for (name, mine), theirs in zip(one.model.named_parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def rollouts(folder: Path) -> list[RolloutRecord]:
    return read_run(folder).rollouts


def some(*fast: str) -> list[Any]:
    """All trainers, of which these are `fast` enough for each run of the tests."""
    return [pytest.param(name, marks=[] if name in fast else [slow]) for name in TRAINERS]


@pytest.mark.parametrize("name", some("rloo", "gkd"))
def test_trainers_train_as_without_drafts(name: str, tmp_path: Path) -> None:
    plain, _ = train(name, tmp_path / "none", "none")
    efficiency = {}
    for run, strategy in (("self", "self"), ("fresh", "self"), ("auto", "auto")):
        drafted, speculation = train(name, tmp_path / run, strategy, is_fresh=run == "fresh")
        assert_same(plain, drafted)
        records = rollouts(tmp_path / run)
        assert len(records) == len(plain.generate_calls) == speculation.verdict.rollouts
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
    assert len(run.headers) == 2
    assert [(one.rollout, one.step) for one in run.rollouts] == [(step, step) for step in range(4)]
    assert [one.step for one in run.steps] == [1, 2, 3, 4]


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


# ---- loops of one's own -------------------------------------------------------------------------------------------


IDS = torch.tensor([[0, 0, 1, 14, 6, 40], [1, 16, 7, 40, 17, 40]])
PROMPT = {"input_ids": IDS, "attention_mask": (IDS > 0).long()}


def loop(kind: str, folder: Path, strategy: str, is_fresh: bool = False) -> dict[str, Any]:
    """Samples, and raises the likelihood of what it sampled; `is_fresh`: nothing is left of earlier calls."""
    policy, accelerator = tiny_policy().float(), Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, fused=True)
    if kind == "AdamW8bit":
        optimizer = pytest.importorskip("bitsandbytes").optim.AdamW8bit(policy.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(policy, optimizer)
    sampled = []
    torch.manual_seed(5)
    with spec_trl.speculate(model, strategy, output_dir=folder, sd_toggle="always") as speculation:
        for _ in range(6):
            if is_fresh:
                spec_trl.release(policy)
            config = GenerationConfig(do_sample=True, max_new_tokens=24, pad_token_id=0, top_k=0)
            ids = accelerator.unwrap_model(model).generate(**PROMPT, generation_config=config)
            sampled.append(ids.tolist())
            accelerator.backward(model(ids, labels=ids).loss)
            optimizer.step()
            optimizer.zero_grad()
    assert speculation.verdict.rollouts == 6
    efficiency = [record.block_efficiency for record in rollouts(folder)]
    return {"sampled": sampled, "efficiency": efficiency, "has_log": speculation.log is not None}


@pytest.mark.parametrize("kind", ["AdamW", "AdamW8bit"])
def test_a_loop_drafts_with_a_fresh_copy(kind: str, tmp_path: Path) -> None:
    """No version counter moves; with a copy of the first weights τ would fall to 1.5."""
    none, drafted = (loop(kind, tmp_path / strategy, strategy) for strategy in ("none", "self"))
    fresh = loop(kind, tmp_path / "fresh", "self", is_fresh=True)
    assert none["sampled"] == drafted["sampled"]
    assert drafted == fresh and min(drafted["efficiency"]) > 2


def test_what_it_cannot_serve_is_plain(tmp_path: Path) -> None:
    policy = tiny_policy()
    calls = [dict(num_beams=2), dict(do_sample=True, output_logits=True, return_dict_in_generate=True), {}]
    torch.manual_seed(0)
    plain = [policy.generate(**PROMPT, max_new_tokens=8, **call) for call in calls]
    with spec_trl.speculate(policy, "self", sd_toggle="always") as speculation:
        torch.manual_seed(0)
        with pytest.warns(UserWarning, match="num_beams") as warned:
            mixed = [policy.generate(**PROMPT, max_new_tokens=8, **call) for call in calls]
    assert len([one for one in warned if "does not speculate" in str(one.message)]) == 1
    assert plain[0].tolist() == mixed[0].tolist() and plain[1].sequences.tolist() == mixed[1].sequences.tolist()
    assert plain[2].tolist() == mixed[2].tolist() and speculation.verdict.rollouts == 1


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


@pytest.mark.parametrize(("strategy", "toggle"), [("tts", "always"), ("best_of_n", "measured")])
def test_other_strategies(strategy: str, toggle: str) -> None:
    policy = tiny_policy()
    plain = policy.generate(**PROMPT, max_new_tokens=64)
    with spec_trl.speculate(policy, strategy, sd_toggle=toggle) as speculation:
        for _ in range(3):
            assert policy.generate(**PROMPT, max_new_tokens=64).tolist() == plain.tolist()
    assert speculation.verdict.rollouts == 3
    assert speculation.verdict.drafted_rounds or toggle == "measured"  # by what this machine's rounds take


def test_it_ends(tmp_path: Path) -> None:
    policy = tiny_policy()
    first, second = spec_trl.speculate(policy, "none"), spec_trl.speculate(policy, "self", sd_toggle="always")
    first.stop()  # the second has taken its place
    policy.generate(**PROMPT, max_new_tokens=8)
    assert (first.verdict.rollouts, second.verdict.rollouts) == (0, 1)
    copied = copy.deepcopy(policy)
    copied.generate(**PROMPT, max_new_tokens=8)
    second.stop()
    policy.generate(**PROMPT, max_new_tokens=8)
    assert second.verdict.rollouts == 1
    spec_trl.speculate(policy, "self")
    left = weakref.ref(policy)
    del policy, copied
    gc.collect()
    assert left() is None


@pytest.mark.parametrize(
    ("option", "named"),
    [
        (dict(use_transformers_continuous_batching=True), "use_transformers_continuous_batching=True"),
        (dict(generation_kwargs={"num_beams": 2}), "num_beams"),
        (dict(cache_implementation="static"), "cache_implementation"),
    ],
)
def test_what_a_trainer_asks_for_is_refused_at_once(option: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=named):
        spec_trl.speculate(make_trainer("rloo", tmp_path, **option))


def test_arguments_are_checked_at_once(tmp_path: Path) -> None:
    for given, named in (
        (dict(strategy="slef"), "slef"),
        (dict(draft_length=0), "draft_length"),
        (dict(strategy="model"), "assistant_model"),
        (dict(strategy="self", ngram_size=5), "ngram_size"),
    ):
        with pytest.raises(ValueError, match=named):
            spec_trl.speculate(tiny_policy(), **given)
    with pytest.raises(ValueError, match="target is a str"):
        spec_trl.speculate("model")
    with pytest.raises(ValueError, match="target is a Linear"):
        spec_trl.speculate(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="SpecGRPOTrainer speculates by itself"):
        spec_trl.speculate(make_run(tmp_path).trainer)
