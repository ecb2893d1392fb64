"""Offline training: what is sampled, how it is cut, that drafters get better, and that a broken off run goes on."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from spec_trl.drafter_training.offline import (
    STATE_FILE,
    Samples,
    Trainee,
    TrainingOptions,
    cut,
    learned_trainee,
    model_trainee,
    sample_sequences,
    train,
)
from spec_trl.drafter_training.untrained import write_dflash, write_eagle3
from spec_trl.generation.drafters.dflash.drafter import DFlashDrafter
from spec_trl.generation.drafters.eagle3.drafter import Eagle3Drafter
from spec_trl.generation.engine.shadow import observe
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.drafters.watching import before, untouched


PROMPTS = random_rows([3, 4, 9, 3, 5])


@pytest.fixture(scope="module")
def samples() -> Samples:
    return sample_sequences(tiny_llama(), PROMPTS, 40, 24)


def make(kind: str, folder: Path, target: PreTrainedModel) -> Trainee:
    """An untrained drafter, the same each time."""
    if kind == "eagle3":
        write_eagle3(folder, target)
        return learned_trainee(Eagle3Drafter(folder, target))
    if kind == "dflash":
        write_dflash(folder, target, layers=1, block_size=4)
        return learned_trainee(DFlashDrafter(folder, target))
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    return model_trainee(LlamaForCausalLM(LlamaConfig(vocab_size=64, pad_token_id=0, **sizes)).double())


def options(**changes: Any) -> TrainingOptions:
    return replace(TrainingOptions(steps=6, learning_rate=3e-3, batch_size=4, depth=3, save_every=2), **changes)


# ---- samples -------------------------------------------------------------------------------------------------------


def test_samples_are_what_the_engine_samples(tiny: PreTrainedModel, samples: Samples) -> None:
    """Each under its own noise, in whatever batch it was drawn."""
    assert samples.prompts.tolist() == [3, 4, 9, 3, 5] * 8
    for i in (0, 2, 7):
        prompt, size = PROMPTS[i % 5], len(PROMPTS[i % 5])
        new = int(samples.lengths[i]) - size
        alone = generate(tiny, pad_left([prompt]), request_ids=[i], max_new_tokens=new)
        assert samples.tokens[i, : size + new].tolist() == prompt.tolist() + outputs(alone)[0]
        assert not samples.tokens[i, size + new :].any()
    assert int(samples.lengths.max()) == 24 and int(samples.lengths.min()) >= 21
    assert len({tuple(row) for row in samples.tokens.tolist()}) == 40


def test_samples_end_with_eos() -> None:
    target = tiny_llama()
    target.generation_config.eos_token_id = [7, 11, 12]
    ended = sample_sequences(target, PROMPTS, 20, 24)
    for row, length, prompt in zip(ended.tokens.tolist(), ended.lengths.tolist(), ended.prompts.tolist(), strict=True):
        assert not {7, 11, 12} & set(row[prompt : length - 1])
        assert row[length - 1] in (7, 11, 12) or length > 20
        assert not any(row[length:])
    assert int(ended.lengths.min()) < 20


def test_samples_are_kept(samples: Samples, tmp_path: Path) -> None:
    samples.save(tmp_path)
    assert all(map(torch.equal, vars(samples).values(), vars(Samples.load(tmp_path)).values()))
    with pytest.raises(ValueError, match="there is no training to resume"):
        Samples.load(tmp_path / "elsewhere")


def test_cut() -> None:
    tokens = torch.arange(1, 23).view(2, 11)
    made = Samples(
        tokens * (torch.arange(11) < torch.tensor([[11], [5]])), torch.tensor([11, 5]), torch.tensor([2, 5])
    )
    windows = cut(made, 4)
    assert windows.tokens.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 0]]  # nothing of row 2 was sampled
    assert windows.lengths.tolist() == [4, 4, 3] and windows.first.tolist() == [2, 1, 1]
    whole = cut(made)
    assert whole.tokens.tolist() == [list(range(1, 12))] and whole.first.tolist() == [2]
    assert torch.equal(cut(made, 100).tokens, whole.tokens)


def test_observe_tells_what_transformers_tells(tiny: PreTrainedModel) -> None:
    tokens = torch.stack(random_rows([7, 7]))
    states = tiny(tokens, output_hidden_states=True).hidden_states
    features, hidden = observe(tiny, tokens, (2, 0))
    torch.testing.assert_close(features, torch.cat([states[2], states[0]], dim=-1), rtol=0, atol=1e-12)
    torch.testing.assert_close(hidden, states[2], rtol=0, atol=1e-12)
    assert observe(tiny, tokens, ())[0].shape == (2, 7, 0)
    assert tiny(tokens).logits.shape == (2, 7, 64)  # no hook stays behind


# ---- training ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["eagle3", "dflash", pytest.param("model", marks=pytest.mark.slow)])
def test_training_helps(kind: str, samples: Samples, tmp_path: Path) -> None:
    """More drafts of held-out prompts are accepted than before, and the target stays as it was."""
    target = tiny_llama()
    held_out = pad_left(random_rows([4, 6, 3, 3], seed=1))

    def efficiency(folder: Path) -> float:
        result = generate(target, held_out, kind, assistant_model=str(folder), max_new_tokens=40)
        assert result.statistics.drafter_failure is None
        return result.statistics.block_efficiency

    trainee = make(kind, tmp_path, target)
    trainee.save(tmp_path)
    untrained = efficiency(tmp_path)
    how = options(steps=80, batch_size=12, learning_rate=1e-2)
    with untouched(target):
        progress = train(target, trainee, cut(samples, 12), how, tmp_path)
    assert float(progress.cross_entropy[-10:].mean()) < float(progress.cross_entropy[:3].mean()) - 0.1
    assert efficiency(tmp_path) > untrained + 0.2


class Stopped(Exception):
    pass


@pytest.mark.parametrize(("kind", "after"), [("eagle3", 0), ("dflash", 3), ("model", 3)])
def test_resumed_training_ends_in_the_same_bits(
    kind: str, after: int, samples: Samples, tiny: PreTrainedModel, tmp_path: Path
) -> None:
    windows = cut(samples, 12)
    once = make(kind, tmp_path / "once", tiny)
    progress = train(tiny, once, windows, options(), tmp_path / "once")
    broken = make(kind, tmp_path / "twice", tiny)
    losses: list[int] = []

    def stop(*_: Any) -> None:
        losses.append(1)
        if len(losses) > after:
            raise Stopped

    before(broken, "loss", stop)
    with pytest.raises(Stopped):
        train(tiny, broken, windows, options(), tmp_path / "twice")
    resumed = make(kind, tmp_path / "other", tiny)
    again = train(tiny, resumed, windows, options(), tmp_path / "twice", resume=True)
    assert all(torch.equal(a, b) for a, b in zip(once.parameters, resumed.parameters, strict=True))
    assert torch.equal(progress.cross_entropy, again.cross_entropy) and bool(again.cross_entropy.all())
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "once" / file).read_bytes() == (tmp_path / "twice" / file).read_bytes()


def test_every_window_comes_once_in_each_pass(samples: Samples, tiny: PreTrainedModel, tmp_path: Path) -> None:
    seen: list[list[int]] = []
    trainee, windows = make("model", tmp_path, tiny), cut(samples, 24)
    before(trainee, "loss", lambda target, view, *rest: seen.extend(view.tokens.tolist()))
    count = len(windows.tokens)
    train(tiny, trainee, windows, options(steps=2 * count // 4), tmp_path)
    rows = sorted(map(tuple, (row + [0] * (24 - len(row)) for row in seen)))
    assert rows[::2] == rows[1::2] == sorted(map(tuple, windows.tokens.tolist()))
    assert seen[:count] != seen[count:]


def test_a_loss_that_is_no_number_ends_training(samples: Samples, tiny: PreTrainedModel, tmp_path: Path) -> None:
    trainee = make("eagle3", tmp_path, tiny)
    windows = cut(samples, 12)
    train(tiny, trainee, windows, options(), tmp_path)
    saved = (tmp_path / STATE_FILE).read_bytes()
    with torch.no_grad():
        trainee.parameters[0].fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="the loss is nan at step 1 of 6: lower learning_rate=0.003"):
        train(tiny, trainee, windows, options(), tmp_path / "other")
    assert (tmp_path / STATE_FILE).read_bytes() == saved


# ---- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, value", [
    ("steps", 0), ("batch_size", 0), ("depth", 0), ("save_every", 0), ("learning_rate", 0.0),
    ("learning_rate", math.nan), ("warmup", 1.0), ("anchors", 0),
])  # fmt: skip
def test_options_out_of_range(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}"):
        options(**{name: value})


def test_bad_samples(samples: Samples, tiny: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="window=1"):
        cut(samples, 1)
    with pytest.raises(ValueError, match="no window of 24 tokens holds a sampled token"):
        cut(replace(samples, prompts=samples.lengths))
    for wrong in (0, 257, 1):
        with pytest.raises(ValueError, match=f"length={wrong}; give at least 1 sequence of 2 to 256 tokens"):
            sample_sequences(tiny, PROMPTS, 1, wrong)
    with pytest.raises(ValueError, match=r"5 prompts, of which 2 .*prompts of \[5, 9\] tokens"):
        sample_sequences(tiny, PROMPTS, 1, 5)


def test_training_that_cannot_begin(samples: Samples, fresh: PreTrainedModel, tmp_path: Path) -> None:
    windows, trainee = cut(samples, 12), make("eagle3", tmp_path / "drafter", fresh)
    with pytest.raises(ValueError, match="has no training_state.pt"):
        train(fresh, trainee, windows, options(), tmp_path, resume=True)
    train(fresh, trainee, windows, options(steps=1), tmp_path)
    with pytest.raises(ValueError, match=r"other options, \{'steps': \(1, 6\)\}"):
        train(fresh, trainee, windows, options(), tmp_path, resume=True)
    with pytest.raises(ValueError, match="the target is in train mode"):
        train(fresh.train(), trainee, windows, options(), tmp_path)
