"""A run shows how far the sampler's log-probabilities and those of the training forward are apart, and trains as it
would without."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from spec_trl import SpecGRPOTrainer
from spec_trl.trainers import sampler_mismatch
from spec_trl.trainers.sampler_mismatch import FILTERS, SAMPLED, SamplerMismatch, changed_by
from tests.trainers.harness import Run, assert_same_training, roll_out, tiny_policy, train
from tests.trainers.tool_task import add, conversations, make_chat_tokenizer


DISTANCE, RATIO = "sampling/sampling_logp_difference/", "sampling/importance_sampling_ratio/"
# TRL sums over the vocabulary in float32, whatever the policy; the sampler in float64, and keeps float32.
ROUNDING = 2e-5


def assert_close(run: Run, count: int, prefix: str = "") -> None:
    """Every one of `count` logs says that the two agree but for rounding."""
    for name in (DISTANCE + "mean", DISTANCE + "max", RATIO + "min", RATIO + "mean", RATIO + "max"):
        logged = run.metric(prefix + name)
        expected = 0.0 if DISTANCE in name else 1.0
        assert logged == pytest.approx([expected] * count, abs=ROUNDING if DISTANCE in name else 16 * ROUNDING), name


class Watched(SpecGRPOTrainer):
    """Keeps the inputs of its losses."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.__dict__.setdefault("seen", []).append(inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"num_iterations": 2, "max_steps": 4}])
def test_sampler_and_trainer_agree_in_float64(tmp_path: Path, options: dict[str, Any]) -> None:
    """Of drafted tokens too, and where the policy has moved between rollout and loss."""
    run = train(tmp_path, kind=Watched, **options)
    assert_close(run, options.get("max_steps", 3))
    assert min(run.metric("rollout/acceptance_rate")) > 0.2
    lengths = set()
    for inputs in run.trainer.seen:
        mask, sampled = inputs["completion_mask"].bool(), inputs[SAMPLED]
        assert sampled.shape == inputs["completion_ids"].shape == mask.shape and sampled.dtype == torch.float32
        assert (sampled[mask] < 0).all() and not sampled[~mask].any()
        lengths |= set(mask.sum(1).tolist())
    assert len(lengths) > 2


def test_a_forward_that_differs_shows(tmp_path: Path) -> None:
    """TRL trains with a policy's dropout, and with learned positions that count the padding of prompts."""
    torch.manual_seed(0)
    dropouts = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    sizes = dict(vocab_size=48, n_embd=64, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2, eos_token_id=2)
    positions = GPT2LMHeadModel(GPT2Config(**sizes, **dropouts)).double()
    for policy in (tiny_policy(attention_dropout=0.3), positions):
        run = train(tmp_path, "ngram", policy=policy, max_steps=1)
        assert run.metric(DISTANCE + "mean")[0] > 0.1 and run.metric(RATIO + "min")[0] < 0.9, type(policy)


@pytest.mark.parametrize("options", [{}, {"off_policy_mask_threshold": 1e-12}])
def test_the_log_changes_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """TRL masks completions by the sampler's log-probabilities where it has them: rounding would decide, here."""
    logged = train(tmp_path / "logged", **options)
    monkeypatch.setattr(sampler_mismatch, "changed_by", lambda *_: "a test")
    alone = train(tmp_path / "alone", **options)
    assert logged.metric(DISTANCE + "mean") and not alone.metric(DISTANCE + "mean")
    assert_same_training(logged, alone)


def test_tool_turns(tmp_path: Path) -> None:
    """Log-probabilities stay beside their tokens, what tools say does not count, and completions are cut."""
    run = roll_out(
        tmp_path, "self", conversations("a3+b8", "c5"), tokenizer=make_chat_tokenizer(), max_completion_length=48,
        max_tool_calling_iterations=3, trainer={"tools": [add]}, kind=Watched,
    )  # fmt: skip
    (inputs,) = run.trainer.seen
    assert len(run.calls) > 1 and not inputs["tool_mask"].all()
    assert not inputs[SAMPLED][inputs["tool_mask"] == 0].any()
    assert_close(run, 1, "eval_")


def test_another_distribution_is_not_compared(tmp_path: Path) -> None:
    """The trainer's log-probabilities are those of the policy at `temperature`, over all tokens."""
    run = roll_out(tmp_path, "none", generation_kwargs={"temperature": 0.5})
    assert run.rewarded and not run.metric(f"eval_{DISTANCE}mean")
    others = (TopPLogitsWarper(0.9), MinPLogitsWarper(0.05), RepetitionPenaltyLogitsProcessor(1.1))
    half = TemperatureLogitsWarper(0.5)
    assert changed_by([half], 0.5) is changed_by([], 1.0) is None
    assert changed_by([half], 1.0) == "a temperature of 0.5 (the loss's is 1.0)"
    for other in others:
        assert changed_by([half, other], 0.5) == type(other).__name__
        assert changed_by([half, other], 0.5, FILTERS) in (None, "RepetitionPenaltyLogitsProcessor")


def metrics(mode: str = "sequence_mask", processors: Any = (), **inputs: Tensor) -> dict[str, float]:
    """Of a micro-batch of two completions, of three tokens and of one."""
    arguments: Any = SimpleNamespace(
        vllm_importance_sampling_mode=mode, temperature=1.0, logprobs_over="vocabulary"
    )
    mismatch = SamplerMismatch(Accelerator(cpu=True), arguments, processors)
    given = {
        "completion_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
        SAMPLED: torch.tensor([[-1.0, -2.0, -1.5], [-0.5, 0.0, 0.0]]),
    } | inputs
    assert (SAMPLED in mismatch.for_the_loss(given)) != mismatch.is_logged
    mismatch.forward = torch.tensor([[-1.5, -2.25, -1.5], [-0.25, -9.0, -9.0]])
    found = mismatch.metrics(given, trains=True)
    counted = int((given["completion_mask"] * given.get("tool_mask", torch.tensor(1))).sum()) if found else 0
    counted = counted if DISTANCE + "max" in found else 0  # the rest is a truncation's
    assert mismatch.take() == (found.get(DISTANCE + "max"), counted) and mismatch.take() == (None, 0)
    return found


def test_figures() -> None:
    by_sequence, by_token = metrics(), metrics("token_truncate")
    for found in (by_sequence, by_token):
        assert found[DISTANCE + "mean"] == 0.25 and found[DISTANCE + "max"] == 0.5
    logs = torch.tensor([-0.5, -0.25, 0.0, 0.25])
    rows = torch.tensor([-0.75, 0.25])
    for found, expected in ((by_token, logs.exp()), (by_sequence, rows.exp())):
        names = {name: getattr(expected, name)().item() for name in ("min", "mean", "max")}
        assert {name: found[RATIO + name] for name in names} == pytest.approx(names)


def test_a_truncation_has_names_of_its_own() -> None:
    """By token in any mode: over a completion its distances would add up."""
    found = metrics(processors=[TopPLogitsWarper(0.9)])
    ratios = torch.tensor([-0.5, -0.25, 0.0, 0.25]).exp()
    expected = {name: getattr(ratios, name)().item() for name in ("min", "mean", "max")} | {"far": 0.75}
    assert {name: found[f"sampling/truncation_ratio/{name}"] for name in expected} == pytest.approx(expected)
    assert found["sampling/truncation_logp_difference/mean"] == 0.25 and len(found) == 6


def test_what_does_not_count() -> None:
    """Tokens of tools and of completions that TRL masks."""
    tools = metrics(tool_mask=torch.tensor([[1, 0, 1], [1, 1, 1]]))
    assert tools[DISTANCE + "mean"] == 0.25 and tools[RATIO + "min"] == pytest.approx(torch.tensor(-0.5).exp().item())
    assert metrics(completion_mask=torch.tensor([[0, 0, 0], [1, 0, 0]]))[RATIO + "min"] > 1
    assert metrics(completion_mask=torch.zeros(2, 3, dtype=torch.long)) == {}
    before = torch.tensor([[-1.0, -2.0, -1.5], [-0.5, 0.0, 0.0]])
    assert metrics(old_per_token_logps=before)[DISTANCE + "max"] == 0
    assert metrics(processors=None) == {}  # a rollout_func generates
