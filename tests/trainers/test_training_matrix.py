"""Whole trainings compared with one without drafts, to the last bit: more steps, drafters, policies, schedules and
trainers than test_training.py has. Most are slow; of those that are not, CUDA graphs are a tape."""

import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from trl import DistillationTrainer, GRPOTrainer

from spec_trl import SpecGRPOTrainer
from spec_trl.generation.engine.forwards import runner_choice
from spec_trl.generation.engine.network.swap import unwrapped
from spec_trl.generation.engine.rollout import Rollout
from spec_trl.generation.session import Session
from spec_trl.papers.test_time_speculation import distilled_drafter
from tests.conftest import STORY_MODEL
from tests.generation.drafters.watching import make_checkpoint
from tests.generation.engine.tape import Tape, install_tape
from tests.option_groups import merged
from tests.trainers import trl_trainers
from tests.trainers.conftest import Asked
from tests.trainers.harness import (
    OTHERS,
    Run,
    assert_same_training,
    hybrid_policy,
    make_run,
    roll_out,
    tiny_dataset,
    tiny_policy,
    train,
    train_plainly,
)


slow = pytest.mark.slow
Options = dict[str, Any]
FAST = dict(tts=dict(learning_rate=1e-3, stride=1), draft_length=[3])
MOVING = dict(draft_length_up=0.1, draft_length_down=0.05)
ASYNC = dict(tts=dict(asynchronous=True, stride=2))
LORA = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")
Named = Callable[[str], Options]


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Named:
    """The fields that choose a kind of drafter of "tts" for the tiny policy."""
    folder = tmp_path_factory.mktemp("drafters")
    tiny_policy(num_hidden_layers=1).save_pretrained(folder / "model")
    paths = {kind: make_checkpoint(folder / kind, kind, 48) for kind in ("eagle3", "dflash")}
    paths |= {"self": None, "model": str(folder / "model")}
    return lambda kind: dict(tts=dict(drafter=kind), assistant_model=paths[kind])


# ---- Policies that are those of a training without drafts --------------------------------------------------------


def lora(**options: Any) -> Options:
    return dict(trainer={"peft_config": LORA}, learning_rate=5e-2) | options


def stories() -> Options:
    """A trained policy; its name is known, so that TRL can load it again as the reference model."""
    prompts = [{"prompt": prompt} for prompt in ("Once upon a time", "Lily had a", "The dog", "One day, Tom")]
    return dict(
        policy=AutoModelForCausalLM.from_pretrained(STORY_MODEL, dtype=torch.float64), beta=0.1, max_steps=4,
        tokenizer=AutoTokenizer.from_pretrained(STORY_MODEL), max_completion_length=40, learning_rate=1e-3,
        trainer={"train_dataset": Dataset.from_list(prompts * 4)},
    )  # fmt: skip


def dropping(dropout: float = 0.3) -> Options:
    """With dropout in training, and gradient checkpointing."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=48, n_embd=64, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2, resid_pdrop=dropout,
        embd_pdrop=dropout, attn_pdrop=dropout, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return dict(policy=GPT2LMHeadModel(config).double(), gradient_checkpointing=True, disable_dropout=False)


def plain(**options: Any) -> Callable[[], Options]:
    return lambda: options


SHORT = dict(gradient_accumulation_steps=2, per_device_train_batch_size=4)
TEN_STEPS = plain(max_steps=10)
TWICE = plain(num_iterations=2, steps_per_generation=2, max_steps=4)
CASES: list[tuple[str, Options, Callable[[], Options]]] = [
    ("ngram", {}, TEN_STEPS),
    ("history", {}, TEN_STEPS),
    ("self", dict(draft_length=[2], max_batch_size=3), TEN_STEPS),
    ("self", dict(draft_quantization="rtn-w8", efficient_rollout=dict(lm_head="packed")), TEN_STEPS),
    ("self", dict(draft_kernel="reference", draft_length=[9]), TEN_STEPS),
    ("self", dict(draft_length=[1, 2, 3, 5], efficient_rollout=MOVING), TEN_STEPS),
    ("self", dict(draft_quantization="awq-w4-g128"), TEN_STEPS),
    ("self", {}, plain(max_steps=50)),
    ("self", {}, plain(**SHORT, max_steps=6, steps_per_generation=4, num_iterations=2, learning_rate=1e-2)),
    # The reference kernel: the fast one leaves a batch of eight to the policy's own layers.
    ("self", dict(draft_kernel="reference"), lambda: dict(policy=tiny_policy().float())),
    ("self", {}, stories),
    ("self", {}, dropping),
    ("self", {}, lambda: lora(num_iterations=2, max_steps=4)),
    ("self", {}, lambda: dict(policy=hybrid_policy(), max_steps=50)),
    ("self", {}, lambda: lora(policy=hybrid_policy(), max_steps=50)),
    ("model", {}, TEN_STEPS),
    ("eagle3", {}, TWICE),
    ("eagle3", {}, lora),
    ("dflash", {}, lambda: lora(beta=0.1)),
    ("eagle3", {}, plain(mask_truncated_completions=True)),
    ("dflash", {}, dropping),
    ("dflash", dict(drafter_adaptation=False), dict),
    ("tts model", ASYNC, dict),
    ("tts dflash", ASYNC, dict),
    ("tts eagle3", dict(tts=dict(scope="request")), plain(**SHORT)),
    ("tts self", {}, TWICE),
    ("tts eagle3", {}, plain(gradient_checkpointing=True)),
    ("tts self", {}, lora),
    ("tts self", dict(tts=dict(scope="request"), max_batch_size=3), dict),
    ("tts eagle3", dict(tts=dict(scope="request"), max_batch_size=3), dict),
]  # fmt: skip


def autocast() -> Options:
    return dict(policy=tiny_policy().float(), bf16=True)


def checkpointed_lora() -> Options:
    return lora(gradient_checkpointing=True)


def other(name: str, training: Callable[[], Options]) -> Options:
    """A training by another trainer than SpecGRPOTrainer."""
    return OTHERS[name] | training()


OTHER_TRAINERS = [("self", {}, partial(other, name, how)) for name in OTHERS for how in (checkpointed_lora, autocast)]


@functools.cache
def train_without_drafts(training: Callable[[], Options]) -> Run:
    """Once for all cases of one `training`."""
    with TemporaryDirectory() as folder:
        return train(Path(folder), "none", **training())


@pytest.mark.parametrize(
    ("strategy", "how", "training"), [*(pytest.param(*case, marks=slow) for case in CASES), *OTHER_TRAINERS]
)
def test_the_policy_trains_as_without(
    strategy: str, how: Options, training: Callable[[], Options], tmp_path: Path, named: Named
) -> None:
    """The copy is at work all along, and still fits the policy after the last update."""
    strategy, _, student = strategy.partition(" ")
    learns, along = strategy == "tts", strategy in ("eagle3", "dflash")
    if learns:
        how = merged(FAST, how, named(student))
    elif strategy in ("model", "eagle3", "dflash"):
        adapting = dict(drafter_adaptation=dict(learning_rate=1e-3))
        how = adapting | dict(assistant_model=named(strategy)["assistant_model"]) | how
    run = train(tmp_path / "run", strategy, **training(), **how)
    assert_same_training(train_without_drafts(training), run)
    assert along or max(run.metric("rollout/block_efficiency")) > 1
    assert strategy != "self" or min(run.metric("rollout/acceptance_rate")) > 0.25
    assert all(count > 0 for count in run.metric("rollout/drafter_updates"))
    assert bool(run.metric("rollout/drafter_updates")) is learns
    assert bool(run.metric("rollout/drafter_refresh_seconds")) is ("self" in (strategy, student))
    is_taught = isinstance(run.trainer, DistillationTrainer)  # whose β has another meaning
    assert is_taught or not run.trainer.args.beta or run.metric("kl")[-1] > 0
    run.trainer.save_model(str(tmp_path / "final"))
    is_adapted = along and bool(how.get("drafter_adaptation", True))
    assert (tmp_path / "final/drafter").exists() is bool(run.metric("drafter/loss")) is is_adapted


@slow
@pytest.mark.parametrize("keep_graphs", [True, False])
def test_captured_forwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_graphs: bool) -> None:
    """A tape stands in for CUDA graphs: it replays on the same memory while the optimizer updates the weights."""
    steps = 6 if keep_graphs else 3  # recorded anew in each
    monkeypatch.setattr(runner_choice, "recorder_for", lambda device: tape)
    for strategy in ("none", "self"):
        tape, policy = Tape(), tiny_policy()
        run = train(tmp_path, strategy, policy=policy, max_steps=steps, runner="graph", keep_graphs=keep_graphs)
        assert_same_training(train_plainly(max_steps=steps), run)
        assert tape.replayed > 6 * steps
        assert (Session.of(policy).runner is not None) == keep_graphs
    assert min(run.metric("rollout/acceptance_rate")) > 0.25


@slow
def test_rollouts_that_choose_when_to_draft(tmp_path: Path, profiles: dict[str, str], level_ladder: Asked) -> None:
    """By a profile; by a ladder and what rounds really take, whatever that is; and by these rounds alone."""
    options: Options = dict(max_steps=6, max_completion_length=48, trainer={"train_dataset": tiny_dataset(8)})
    none = train(tmp_path, "none", **options)
    toggled = train(tmp_path, sd_toggle="roofline", efficient_rollout=dict(profile=profiles["pays"]), **options)
    assert_same_training(none, toggled)
    assert 0 < toggled.metric("rollout/sd_on_fraction")[0]
    assert_same_training(none, train(tmp_path, "auto", **options))
    assert_same_training(none, train(tmp_path, "self", sd_toggle="measured", **options))
    assert len(level_ladder) == 1


@slow
def test_rollouts_see_no_dropout_and_training_does(tmp_path: Path) -> None:
    drafted, still = (train(tmp_path, **dropping(dropout)) for dropout in (0.3, 0.0))
    assert drafted.completions[0] == still.completions[0] and drafted.losses != still.losses


@slow
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=["autocast", "bf16-weights"])
@pytest.mark.parametrize("bf16", [True, False])
def test_half_precision_and_single(tmp_path: Path, weights: torch.dtype, bf16: bool) -> None:
    """Fifty steps: drafts change no bit of a weight there either."""
    none, drafted = (
        train(
            tmp_path / strategy, strategy, policy=tiny_policy(hidden_size=192).to(weights), bf16=bf16, max_steps=50,
            draft_kernel="reference", draft_length=[3],
        )
        for strategy in ("none", "self")
    )  # fmt: skip
    assert min(drafted.metric("rollout/acceptance_rate")) > 0.25
    assert_same_training(drafted, none)


@slow
def test_best_model_at_the_end(tmp_path: Path) -> None:
    """Its weights are drafted for, not those of the last step."""
    run = train(
        tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        per_device_eval_batch_size=4, load_best_model_at_end=True, metric_for_best_model="eval_num_tokens",
        greater_is_better=False, trainer={"eval_dataset": tiny_dataset(1)},
    )  # fmt: skip
    assert run.trainer.state.best_global_step == 1
    copy = run.calls[0].drafters[0]
    before = [buffer.clone() for buffer in copy.network.buffers()]
    run.trainer.evaluate()
    assert any(not torch.equal(one, other) for one, other in zip(before, copy.network.buffers(), strict=True))


@slow
@pytest.mark.parametrize("adapter", [None, LoraConfig(target_modules=["q_proj"])], ids=["whole", "LoRA"])
def test_a_compiled_policy_is_drafted_for(
    tmp_path: Path, adapter: LoraConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_compiled = []

    def loss(self: Any, model: Any, inputs: Any, **_: Any) -> Any:
        is_compiled.append(model is not unwrapped(model))
        return sum(parameter.sum() for parameter in model.parameters())  # a forward would be traced for seconds

    monkeypatch.setattr(GRPOTrainer, "compute_loss", loss)
    options: Options = dict(max_steps=2, trainer={"peft_config": adapter})
    run = train(tmp_path, torch_compile=True, torch_compile_backend="eager", **options)
    assert all(is_compiled)
    assert_same_training(run, train(tmp_path, "none", **options))
    assert min(run.metric("rollout/acceptance_rate")) > 0


# ---- Test-Time Speculation ----------------------------------------------------------------------------------------


@slow
@pytest.mark.parametrize("kind", ["self", "dflash"])
def test_it_learns(kind: str, tmp_path: Path, named: Named) -> None:
    """On a policy that stays: more of what it drafts is accepted than of what it would have drafted untaught."""
    options = dict(max_steps=12, learning_rate=1e-12, temperature=0.5, draft_length=[3], **named(kind))
    options |= dict(trainer={"train_dataset": tiny_dataset(2)}, draft_quantization="rtn-w4-g32")
    run = train(tmp_path, "tts", **merged(options, dict(tts=dict(learning_rate=3e-3, stride=1))))
    still = train(tmp_path, "tts", **merged(options, dict(tts=dict(learning_rate=1e-30, stride=10**6))))
    accepted, before = (sum(of.metric("rollout/acceptance_rate")[-4:]) for of in (run, still))
    assert accepted > before * (1.02 if kind == "self" else 1.3)


@slow
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("model", {}),
        ("self", dict(tts=dict(asynchronous=True, stride=2))),
        ("eagle3", dict(tts=dict(asynchronous=True, stride=2))),
        ("eagle3", dict(bf16=True)),  # weights are the rounded image of what is saved
        ("dflash", dict(tts=dict(anchor="initial", anchor_weight=0.1))),
    ],
    ids=str,
)
def test_resumed_run_goes_on_bit_for_bit(kind: str, how: Options, tmp_path: Path, named: Named) -> None:
    def run(folder: str, **options: Any) -> Run:
        policy = tiny_policy().to(torch.bfloat16 if how.get("bf16") else torch.float64)
        return train(tmp_path / folder, "tts", policy=policy, max_steps=4, **merged(FAST, how, named(kind), options))

    whole = run("whole", save_strategy="steps", save_steps=2)
    rest = run("rest", resume=tmp_path / "whole" / "checkpoint-2")
    states = [of.calls[-1].drafters[0].state_dict() for of in (whole, rest)]
    assert all(torch.equal(one, other) for one, other in zip(*(state["tensors"] for state in states), strict=True))
    assert states[0]["tensors"][0].dtype is (torch.float32 if how.get("bf16") else torch.float64)
    assert whole.completions[2:] == rest.completions
    for name in ("acceptance_rate", "block_efficiency", "draft_length", "drafter_updates", "target_entropy"):
        assert whole.metric(f"rollout/{name}")[2:] == rest.metric(f"rollout/{name}"), name


@slow
@pytest.mark.parametrize("more", [dict, lora], ids=["whole", "LoRA"])
def test_a_policy_with_states_goes_on_bit_for_bit(more: Callable[[], Options], tmp_path: Path) -> None:
    def run(folder: str, **options: Any) -> Run:
        return train(tmp_path / folder, policy=hybrid_policy(), max_steps=4, **more(), **options)

    whole = run("whole", save_strategy="steps", save_steps=2)
    rest = run("rest", resume=tmp_path / "whole" / "checkpoint-2")
    assert whole.completions[2:] == rest.completions and whole.losses[2:] == rest.losses
    assert all(torch.equal(weight, rest.weights[name]) for name, weight in whole.weights.items())
    accepted = [of.metric("rollout/acceptance_rate") for of in (whole, rest)]
    assert accepted[0][2:] == accepted[1] and min(accepted[1]) > 0.25


@slow
def test_a_resumed_run_takes_its_own_learning_rate(tmp_path: Path, named: Named) -> None:
    """A tenth of the old one: a few updates of Adam do not move a weight as far as one with the old one did."""
    options = merged(FAST, dict(tts=dict(stride=4)), named("eagle3"))
    first = train(tmp_path, "tts", max_steps=1, save_strategy="steps", save_steps=1, **options)
    before = [tensor.clone() for tensor in first.calls[0].drafters[0].state_dict()["tensors"]]
    options = merged(options, dict(resume=tmp_path / "checkpoint-1", max_steps=2, tts=dict(learning_rate=1e-4)))
    rest = train(tmp_path, "tts", **options)
    after = rest.calls[0].drafters[0].state_dict()["tensors"]
    assert 0 < max(float((a - b).abs().max()) for a, b in zip(before, after, strict=True)) < 8e-4


@slow
def test_a_failure_ends_no_training(tmp_path: Path, named: Named, monkeypatch: pytest.MonkeyPatch) -> None:
    none = train_plainly()
    monkeypatch.setattr(distilled_drafter, "distillation_loss", lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="ZeroDivisionError"):
        run = train(tmp_path, "tts", save_strategy="steps", save_steps=3, **FAST, **named("dflash"))
    assert_same_training(none, run)


# ---- Rollouts and trainers of another kind ------------------------------------------------------------------------


Rows = list[list[int]]


def mostly_equal(one: Rows, other: Rows) -> bool:
    """A near-tie of bfloat16 logits may fall otherwise in a forward of another shape, which changes a row's rest."""
    return len(one) == len(other) and sum(map(list.__eq__, one, other)) >= 0.75 * len(one)


@pytest.mark.parametrize("keep_graphs", [pytest.param(True, marks=pytest.mark.slow), False])
def test_rollouts_are_captured_and_follow_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_graphs: bool
) -> None:
    """A float32 policy under `bf16=True`, which is what a model's name becomes."""
    greedy: dict[str, Any] = dict(bf16=True, generation_kwargs={"do_sample": False}, max_completion_length=24)
    captured: dict[str, Any] = dict(runner="graph", keep_graphs=keep_graphs)
    captured |= dict(draft_kernel="reference", draft_length=[3])
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


def test_a_line_in_generation_kwargs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that knows nothing of spec_trl drafts by it, without `speculate`: completions and weights stay."""
    drafted: list[int] = []
    run = Rollout.run

    def watched(rollout: Rollout) -> Any:
        completions, statistics = run(rollout)
        drafted.append(statistics.total.drafted)
        return completions, statistics

    monkeypatch.setattr(Rollout, "run", watched)
    trainers = []
    for strategy in ("none", "self"):
        options = {"seed": 5, "sd_toggle": "always", "draft_kernel": "reference"}
        given = {"assistant_strategy": strategy, "speculative_config": options}
        trainers.append(trl_trainers.make_trainer("rloo", tmp_path / strategy, generation_kwargs=given, max_steps=2))
        trainers[-1].args.to_json_string()
        trainers[-1].train()
    trl_trainers.assert_same(*trainers)
    assert drafted[:2] == [0, 0] and all(drafted[2:]) and len(drafted) == 4
