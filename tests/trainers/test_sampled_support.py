"""Under top-p, top-k and min-p the loss's log-probabilities can be over the tokens that the sampler kept: then they
are the sampler's, of every token. Without the option the log shows how far they are apart."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig
from torch import Tensor

from spec_trl.generation.engine.sampling.support import pack
from spec_trl.json_files import read_json
from spec_trl.trainers.certificate import CERTIFICATE_FILE, Content
from spec_trl.trainers.sampled_support import SampledSupport
from tests.trainers.harness import OTHERS, Run, assert_same_training, roll_out, tiny_policy, train
from tests.trainers.tool_task import add, conversations, make_chat_tokenizer


DISTANCE, RATIO = "sampling/sampling_logp_difference/", "sampling/importance_sampling_ratio/"
OF_TRUNCATION = "sampling/truncation_logp_difference/", "sampling/truncation_ratio/"
BY_TOKEN = {"vllm_importance_sampling_mode": "token_truncate"}  # ratios of tokens are logged, not of completions
LORA = {"trainer": {"peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian")}}


def assert_alike(run: Run, count: int, within: float, prefix: str = "") -> None:
    """In each of `count` logs, every token's probability is the sampler's but for rounding."""
    assert run.metric(f"{prefix}{DISTANCE}max") == pytest.approx([0.0] * count, abs=within)
    for name in ("min", "mean", "max"):
        assert run.metric(f"{prefix}{RATIO}{name}") == pytest.approx([1.0] * count, abs=20 * within)
    assert not run.metric(f"{prefix}{OF_TRUNCATION[0]}max")


def test_top_p_in_float32(tmp_path: Path) -> None:
    """The ratio is 1 for every token with the option, of drafted ones too, and clearly not without it."""
    options = dict(top_p=0.9, **BY_TOKEN)
    drafted, plain = (
        train(tmp_path / name, name, policy=tiny_policy().float(), logprobs_over="support", **options)
        for name in ("self", "none")
    )
    over_all = train(tmp_path / "vocabulary", policy=tiny_policy().float(), **options)
    assert_same_training(drafted, plain)
    for name in ("min", "mean", "max"):
        assert drafted.metric(RATIO + name) == pytest.approx([1.0] * 3, abs=1e-5)
    assert min(drafted.metric("rollout/acceptance_rate")) > 0.2
    certificate = read_json(tmp_path / "self" / CERTIFICATE_FILE, Content, "certificate", "")
    assert certificate.distance is not None and certificate.distance < 1e-5 and certificate.accepted
    assert certificate.compared == sum(len(ids) for rows in drafted.completions for ids in rows)
    distance, ratio = OF_TRUNCATION
    assert not over_all.metric(RATIO + "mean") and not drafted.metric(ratio + "mean")
    assert max(over_all.metric(ratio + "max")) < 0.95 and 0.9 < min(over_all.metric(ratio + "min"))  # what top-p keeps
    assert min(over_all.metric(distance + "mean")) > 0.05 and over_all.metric(ratio + "far") == [0.0] * 3
    assert over_all.completions[0] == drafted.completions[0] and over_all.losses != drafted.losses


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 4, "temperature": 0.7, "num_iterations": 2, "max_steps": 4},
        {"min_p": 0.1, "beta": 0.1} | LORA,
        {"top_p": 0.8, "steps_per_generation": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
         "max_steps": 4, "pad_to_multiple_of": 8},
        {"top_p": 0.8, "mask_truncated_completions": True, "gradient_checkpointing": True},
        {"top_p": 0.8} | OTHERS["gmpo"],
        {"top_p": 0.8} | OTHERS["rloo"],
    ],
    ids=["iterations", "LoRA and a reference", "shuffled parts of a rollout", "masked", "gmpo", "rloo"],
)  # fmt: skip
def test_sampler_and_loss_are_alike(tmp_path: Path, options: dict[str, Any]) -> None:
    """In float64, of which norms are float32."""
    run = train(tmp_path, logprobs_over="support", **options)
    assert_alike(run, options.get("max_steps", 3), 1e-5)
    assert min(run.metric("rollout/acceptance_rate")) > 0.2
    if "beta" in options and "trainer" in options:  # the adapter begins as the reference
        assert run.metric("kl")[0] == pytest.approx(0, abs=1e-12)


def test_tool_turns(tmp_path: Path) -> None:
    """Supports stay beside their tokens, what tools say has none, and completions are cut."""
    run = roll_out(
        tmp_path, "self", conversations("a3+b8", "c5"), tokenizer=make_chat_tokenizer(), max_completion_length=48,
        max_tool_calling_iterations=3, trainer={"tools": [add]}, top_p=0.8, logprobs_over="support",
    )  # fmt: skip
    assert len(run.calls) > 1
    assert_alike(run, 1, 1e-5, "eval_")


def test_without_a_filter_nothing_changes(tmp_path: Path) -> None:
    over_all, over_support = (
        train(tmp_path / over, max_steps=2, logprobs_over=over) for over in ("vocabulary", "support")
    )
    assert_same_training(over_all, over_support)


@pytest.mark.parametrize("batch_size", [None, 1])
def test_the_gradient_is_that_of_the_renormalised_softmax(batch_size: int | None) -> None:
    policy, kept = tiny_policy(), torch.rand(2, 3, 48) > 0.7  # three tokens of two completions
    torch.manual_seed(0)
    ids, mask = torch.randint(3, 48, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    kept.scatter_(2, ids[:, -3:, None], True)
    mask[1, -1] = 0
    support = SampledSupport(Accelerator(cpu=True), temperature=0.7)
    support.rows = pack(kept)

    def gradient(logprobs: Tensor) -> Tensor:
        policy.zero_grad()
        (logprobs * torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])  # type: ignore[union-attr]

    found, entropies, _ = support(policy, ids, mask, 3, batch_size, compute_entropy=True)
    ours = gradient(found)
    scores = policy(input_ids=ids, attention_mask=mask).logits[:, -4:-1] / 0.7
    p = scores.exp() * kept
    p = p / p.sum(-1, keepdim=True)
    expected = p.gather(2, ids[:, -3:, None])[..., 0].log() * mask[:, -3:]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours, gradient(expected))
    torch.testing.assert_close(entropies, -(p * p.clamp(min=1e-300).log()).sum(-1) * mask[:, -3:])
