"""Speculation changes no token, no loss and no weight of a training run (the lossless contract, no. 5)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from trl import GRPOTrainer

from spec_trl import SpecGRPOTrainer
from spec_trl.generation.engine import captured
from spec_trl.generation.engine.drafter import Drafter, DraftSession
from tests.conftest import STORY_MODEL
from tests.generation.engine.tape import Tape
from tests.trainers.harness import assert_same_training, tiny_policy, train, train_plainly


def test_fifty_steps_with_the_self_drafter(tmp_path: Path) -> None:
    none, drafted = (train(tmp_path, strategy, max_steps=50) for strategy in ("none", "self"))
    assert_same_training(none, drafted)
    assert len(drafted.completions) == 50
    start = tiny_policy().state_dict()
    assert all(not torch.equal(weight, start[name]) for name, weight in drafted.weights.items())
    # The drafter was at work all along, and still fits the policy after 50 updates.
    assert min(drafted.metric("rollout/acceptance_rate")) > 0.25
    assert min(drafted.metric("rollout/block_efficiency")) > 2


@pytest.mark.parametrize("keep_graphs", [True, False])
def test_captured_forwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_graphs: bool) -> None:
    """A tape stands in for CUDA graphs: it replays on the same memory while the optimizer updates the weights."""
    steps = 6 if keep_graphs else 3  # recorded anew in each
    none = train_plainly(max_steps=steps)
    monkeypatch.setattr(captured, "recorder_for", lambda device: tape)
    for strategy in ("none", "self"):
        tape = Tape()
        run = train(tmp_path, strategy, max_steps=steps, runner="graph", keep_graphs=keep_graphs)
        assert_same_training(none, run)
        assert tape.replayed > 8 * steps
    assert min(run.metric("rollout/acceptance_rate")) > 0.25


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "ngram"},
        {"strategy": "model"},
        {"strategy": "self", "draft_lengths": [2], "rollout_batch_size": 3},
        {"strategy": "self", "draft_quantization": "rtn-w8", "draft_lm_head": "packed"},
        {"strategy": "self", "draft_kernel": "reference", "draft_lengths": [9]},
        {"strategy": "self", "draft_lengths": [1, 2, 3, 5], "draft_length_up": 0.1, "draft_length_down": 0.05},
        {"strategy": "self", "draft_quantization": "awq-w4-g128"},
        {"strategy": "history"},
    ],
    ids=["ngram", "model", "self-refilled", "self-w8", "self-reference", "self-climbing", "awq", "history"],
)
def test_ten_steps_with_other_drafters(tmp_path: Path, options: dict[str, Any]) -> None:
    if options["strategy"] == "model":
        assistant = tiny_policy()
        with torch.no_grad():
            for parameter in assistant.parameters():
                parameter += 0.02 * torch.randn_like(parameter)
        assistant.save_pretrained(tmp_path / "assistant")
        options = options | {"assistant_model": str(tmp_path / "assistant")}
    none, drafted = train_plainly(max_steps=10), train(tmp_path, max_steps=10, **options)
    assert_same_training(none, drafted)
    assert max(drafted.metric("rollout/block_efficiency")) > 1


def test_toggled_rollouts(tmp_path: Path, profiles: dict[str, str]) -> None:
    """Rollouts that begin autoregressively and end with speculation, by a profile and by what rounds really take."""
    both = dict(max_steps=6, max_completion_length=48)
    none = train(tmp_path, "none", **both)
    toggled = train(tmp_path, sd_toggle="roofline", roofline_profile=profiles["pays"], **both)
    assert_same_training(none, toggled)
    assert 0 < toggled.metric("rollout/sd_on_fraction")[0] < 1
    assert "rollout/predicted_speedup" in toggled.logs[0]


def test_micro_steps_reuse_and_accumulation(tmp_path: Path) -> None:
    schedule = dict(
        max_steps=6, per_device_train_batch_size=4, gradient_accumulation_steps=2, steps_per_generation=4,
        num_iterations=2, learning_rate=1e-2,
    )  # fmt: skip
    none, drafted = (train(tmp_path, strategy, **schedule) for strategy in ("none", "self"))
    assert_same_training(none, drafted)
    assert [len(rows) for rows in drafted.completions] == [16, 16]


def test_lora(tmp_path: Path) -> None:
    def run(strategy: str) -> Any:
        torch.manual_seed(7)  # of the adapters' weights
        adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        return train(tmp_path, strategy, max_steps=5, learning_rate=5e-2, trainer={"peft_config": adapters})

    none, drafted = run("none"), run("self")
    assert_same_training(none, drafted)
    # Adapters that the refresh forgot would leave the drafter behind by five large steps.
    assert min(drafted.metric("rollout/acceptance_rate")) > 0.25


def test_dropout_and_gradient_checkpointing(tmp_path: Path) -> None:
    def run(strategy: str, dropout: float) -> Any:
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=48, n_embd=64, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2, resid_pdrop=dropout,
            embd_pdrop=dropout, attn_pdrop=dropout, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        policy = GPT2LMHeadModel(config).double()
        return train(tmp_path, strategy, policy=policy, gradient_checkpointing=True, disable_dropout=False)

    none, drafted, still = run("none", 0.3), run("self", 0.3), run("self", 0.0)
    assert_same_training(none, drafted)
    assert drafted.completions[0] == still.completions[0]  # rollouts see no dropout
    assert drafted.losses != still.losses  # training does


def test_reference_model(tmp_path: Path) -> None:
    tiny_policy().save_pretrained(tmp_path / "policy")

    def run(strategy: str) -> Any:
        policy = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float64)
        return train(tmp_path / "out", strategy, policy=policy, beta=0.1)

    none, drafted = run("none"), run("self")
    assert_same_training(none, drafted)
    assert drafted.metric("kl")[-1] > 0


def test_greedy_completions_are_those_of_trl(tmp_path: Path) -> None:
    ours, theirs = (
        train(tmp_path, kind=kind, max_steps=4, max_completion_length=40, generation_kwargs={"do_sample": False})
        for kind in (SpecGRPOTrainer, GRPOTrainer)
    )
    assert ours.completions == theirs.completions
    assert any(len(ids) < 40 for rows in ours.completions for ids in rows)  # EOS came


def test_rollouts_run_in_the_precision_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    begin = Drafter.begin

    def watch(drafter: Drafter, session: DraftSession) -> None:
        seen.append(torch.is_autocast_enabled("cpu"))
        begin(drafter, session)

    monkeypatch.setattr(Drafter, "begin", watch)
    for bf16 in (True, False):
        train(tmp_path, policy=tiny_policy().float(), bf16=bf16, max_steps=1)
    assert seen == [True, False]


def test_float32(tmp_path: Path) -> None:
    none, drafted = (train(tmp_path, strategy, policy=tiny_policy().float()) for strategy in ("none", "self"))
    assert_same_training(none, drafted)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=["autocast", "bf16-weights"])
def test_bfloat16(tmp_path: Path, weights: torch.dtype) -> None:
    def run(strategy: str) -> Any:
        # The reference kernel: the fast one leaves a batch of eight to the policy's own layers in bfloat16.
        policy = tiny_policy().to(weights)
        return train(tmp_path, strategy, policy=policy, bf16=True, draft_kernel="reference")

    none, drafted = run("none"), run("self")
    assert min(drafted.metric("rollout/acceptance_rate")) > 0.25
    # Logits of one position differ between forward shapes, and a near-tie may flip a token and so a row's tail.
    pairs = list(zip(none.completions[0], drafted.completions[0], strict=True))
    assert sum(ours == theirs for ours, theirs in pairs) >= len(pairs) // 2


def test_a_trained_model(tmp_path: Path) -> None:
    def run(strategy: str) -> Any:
        prompts = ["Once upon a time", "Lily had a", "The dog", "One day, Tom"]
        return train(
            tmp_path,
            strategy,
            policy=AutoModelForCausalLM.from_pretrained(STORY_MODEL, dtype=torch.float64),
            tokenizer=AutoTokenizer.from_pretrained(STORY_MODEL),
            trainer={"train_dataset": Dataset.from_list([{"prompt": prompt} for prompt in prompts * 4])},
            max_steps=4,
            max_completion_length=40,
            learning_rate=1e-3,
        )

    none, drafted = run("none"), run("self")
    assert_same_training(none, drafted)
    assert min(drafted.metric("rollout/block_efficiency")) > 2


def test_another_seed_samples_other_completions(tmp_path: Path) -> None:
    # Of one prompt only: a seed shuffles prompts too.
    same = Dataset.from_list([{"prompt": "a3+b8="}] * 8)
    one, again, other = (
        train(tmp_path, max_steps=1, seed=seed, trainer={"train_dataset": same}) for seed in (3, 3, 4)
    )
    assert one.completions == again.completions != other.completions
