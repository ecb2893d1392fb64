"""Losses over whole sequences: the drafter as it drafts, fed with the true tokens, counted where it should be."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
)

from spec_trl.drafter_training import sequence_loss as module
from spec_trl.drafter_training.sequence_loss import SequenceLoss, TargetHead, TargetView, sequence_loss
from spec_trl.drafter_training.whole_sequences import block_states
from spec_trl.generation.drafters.dflash.dflash_drafter import DFlashDrafter
from spec_trl.generation.drafters.eagle3.eagle3_drafter import Eagle3Drafter
from spec_trl.generation.drafters.ngram import NgramDrafter
from tests.conftest import tiny_llama
from tests.generation.drafters.dflash import reference as dflash
from tests.generation.drafters.eagle3 import reference as eagle3
from tests.generation.drafters.watching import before


LENGTHS, FIRST = [11, 7, 2], [1, 4, 1]
Drafter = Eagle3Drafter | DFlashDrafter


def view_of(target: PreTrainedModel, layers: tuple[int, ...], lengths: list[int] = LENGTHS) -> TargetView:
    generator = torch.Generator().manual_seed(0)
    width = max(lengths)
    is_real = torch.arange(width) < torch.tensor(lengths)[:, None]  # [B, T]
    tokens = torch.randint(3, 64, is_real.shape, generator=generator) * is_real  # [B, T]
    with torch.no_grad():
        states = target(tokens, output_hidden_states=True).hidden_states
    features = torch.cat([states[0][..., :0], *(states[i] for i in layers)], dim=-1)  # [B, T, F]
    return TargetView(tokens, is_real, features, states[-1], torch.tensor(FIRST[: len(lengths)]))


def make(folder: Path, name: str, target: PreTrainedModel) -> Drafter:
    """A drafter that asks for gradients where it learns; "speculators" alone is DFlash's."""
    drafter: Drafter
    if name in eagle3.CONFIGS:
        drafter = Eagle3Drafter(eagle3.make_folder(folder, eagle3.CONFIGS[name]), target)
    else:
        dflash.make_checkpoint(folder, dflash.VARIANTS[name])
        drafter = DFlashDrafter(folder, target)
    for parameter in drafter.trained(drafter.network):
        parameter.requires_grad_()
    return drafter


def gradients(loss: SequenceLoss, drafter: Drafter) -> list[Tensor]:
    return list(torch.autograd.grad(loss.cross_entropy + loss.regression, drafter.trained(drafter.network)))


def block_of(network: Any, target: PreTrainedModel, view: TargetView, row: int, anchor: int) -> Tensor:
    """`[n, H]` states of the block after `anchor`, with no other block and nothing after it."""
    tokens, features = (each[row : row + 1, : anchor + 1] for each in (view.tokens, view.features))
    return block_states(network, target, tokens, features, torch.tensor([[anchor]]))[0, 0]


# ---- what counts, and how much -------------------------------------------------------------------------------------


class Expected:
    """The means of a loss, term by term: (value, weight) each."""

    def __init__(self) -> None:
        self.terms: dict[str, list[tuple[float, float]]] = {"cross_entropy": [], "agreement": [], "regression": []}

    def add(self, logits: Tensor, target: Tensor, ids: Tensor | None = None, weight: float = 1.0) -> bool:
        """Adds one position, logits `[drafts]` against the target's `[V]`; False where it does not count."""
        kept = ids if ids is not None else torch.arange(len(target))
        if int(target.argmax()) not in kept.tolist():
            return False
        entropy = -(target[kept].softmax(0) * logits.log_softmax(0)).sum()
        self.terms["cross_entropy"].append((float(entropy), weight))
        self.terms["agreement"].append((float(kept[logits.argmax()] == target.argmax()), 1.0))
        return True

    def add_regression(self, state: Tensor, told: Tensor, weight: float = 1.0) -> None:
        self.terms["regression"].append((float(F.smooth_l1_loss(state, told)), weight))

    def check(self, loss: SequenceLoss) -> None:
        for name, terms in self.terms.items():
            mean = sum(value * weight for value, weight in terms) / (sum(weight for _, weight in terms) or 1.0)
            assert float(getattr(loss, name)) == pytest.approx(mean, abs=1e-7 if name == "agreement" else 1e-9)


def target_logits(target: PreTrainedModel, view: TargetView) -> Iterator[tuple[int, int, int, Tensor]]:
    """Row, length, first sampled token and the target's logits `[length, V]`, of each row."""
    for row, (length, first) in enumerate(zip(LENGTHS, FIRST, strict=True)):
        yield row, length, first, target(view.tokens[row : row + 1, :length]).logits[0]


@pytest.mark.parametrize(
    "name",
    ["safeai", "safeai, whole vocabulary", "safeai, own embedding, narrow", "speculators, all flags",
     "speculators, three layers"],
)  # fmt: skip
@torch.no_grad()
def test_eagle3_loss_term_by_term(name: str, tiny: PreTrainedModel, tmp_path: Path) -> None:
    """At every start and step: the drafter as it drafts, fed with the true tokens."""
    depth, drafter, expected = 3, make(tmp_path, name, tiny), Expected()
    view, ids, is_wide = view_of(tiny, drafter.feature_layers), drafter.target_ids, drafter.width == 64
    reference = eagle3.Reference(eagle3.CONFIGS[name], load_file(tmp_path / "model.safetensors"), tiny)
    for row, length, first, target in target_logits(tiny, view):
        tokens = view.tokens[row, :length].tolist()
        for start in range(length - 2):
            logits = reference.logits(tokens[: start + 2], [*tokens[start + 2 : start + depth + 1], 0])  # [steps, V]
            for step in range(1, depth + 1):
                if not first <= start + step + 1 < length:
                    continue
                short = logits[step - 1] if ids is None else logits[step - 1][ids]
                counted = expected.add(short, target[start + step], ids, 0.8 ** (step - 1))
                if counted and step == 1 and is_wide:
                    pairs = zip(tokens[1 : start + 2], reference.features(tokens[: start + 1]), strict=True)
                    expected.add_regression(reference.layer_output(list(pairs)), view.hidden[row, start + 1])
    expected.check(sequence_loss(drafter, tiny, view, depth=depth, with_regression=is_wide))


@pytest.mark.parametrize("name", [
    "z-lab, scales and softcap", "z-lab, causal window", "speculators, pruned", "speculators, from the anchor",
    "speculators, window to both sides",
])  # fmt: skip
@torch.no_grad()
def test_dflash_loss_term_by_term(name: str, tiny: PreTrainedModel, tmp_path: Path) -> None:
    """With as many anchors as there are, the draw does not matter."""
    drafter, expected = make(tmp_path, name, tiny), Expected()
    weights, ids = load_file(tmp_path / "model.safetensors"), drafter.target_ids
    view, network, config = view_of(tiny, drafter.feature_layers), drafter.network, drafter.network.config
    for row, length, first, target in target_logits(tiny, view):
        for anchor in range(first - 1, length - 1):
            text = view.tokens[row, : anchor + 1]  # nothing of other blocks or later tokens is seen
            logits = dflash.straight_line(tiny, weights, dflash.VARIANTS[name], text)  # [drafts, V]
            states = block_of(network, tiny, view, row, anchor)[-len(logits) :]  # [drafts, H]
            for draft in range(min(config.drafts, length - 1 - anchor)):
                weight, told = math.exp(-draft / 3.25), target[anchor + draft]  # block of 6
                if expected.add(logits[draft] if ids is None else logits[draft][ids], told, ids, weight):
                    expected.add_regression(states[draft], view.hidden[row, anchor + draft], weight)
    expected.check(sequence_loss(drafter, tiny, view, anchors=100, with_regression=True))


@torch.no_grad()
def test_position_weights_of_the_published_blocks() -> None:
    for size, decay in ((8, 4.0), (12, 5.5), (16, 7.0), (2, 1.75)):
        drafter: Any = SimpleNamespace(config=SimpleNamespace(block_size=size))
        assert DFlashDrafter.position_weights(drafter, 2) == pytest.approx([1.0, math.exp(-1 / decay)])


@pytest.mark.parametrize("name", ["safeai", "z-lab"])
def test_padding_and_nothing_to_count(name: str, tiny: PreTrainedModel, tmp_path: Path) -> None:
    drafter = make(tmp_path, name, tiny)
    view = view_of(tiny, drafter.feature_layers)
    noise = torch.where(view.is_real[..., None], 0.0, 9.0)  # [B, T, 1]
    noisy = dict(features=view.features + noise, hidden=view.hidden - noise)
    other = replace(view, tokens=torch.where(view.is_real, view.tokens, 5), **noisy)
    one, two = (
        sequence_loss(drafter, tiny, v, torch.Generator().manual_seed(0), with_regression=True) for v in (view, other)
    )
    torch.testing.assert_close(gradients(one, drafter), gradients(two, drafter), rtol=0, atol=1e-12)
    assert one.agreement == two.agreement
    loss = sequence_loss(drafter, tiny, replace(view, first=torch.tensor(LENGTHS)), with_regression=True)
    assert loss.cross_entropy.item() == loss.regression.item() == loss.agreement.item() == 0
    assert not any(gradient.any() for gradient in gradients(loss, drafter))


# ---- gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, frozen", [
    ("safeai", set()), ("safeai, own embedding, narrow", {"embed_tokens.weight"}), ("z-lab", set()),
    ("speculators, pruned", {"embed_tokens.weight", "lm_head.weight"}),
])  # fmt: skip
def test_only_the_drafter_learns(name: str, frozen: set[str], fresh: LlamaForCausalLM, tmp_path: Path) -> None:
    drafter = make(tmp_path, name, fresh)
    assert all(parameter.requires_grad for parameter in fresh.parameters())
    sequence_loss(drafter, fresh, view_of(fresh, drafter.feature_layers)).cross_entropy.backward()
    assert all(parameter.grad is None for parameter in fresh.parameters())
    assert {name for name, parameter in drafter.network.named_parameters() if parameter.grad is None} == frozen


@pytest.mark.parametrize("name", ["safeai", "z-lab"])
def test_in_pieces(name: str, tiny: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not all logits fit, pieces are run again in the backward pass, with the same result."""
    drafter, pieces = make(tmp_path, name, tiny), []
    view = view_of(tiny, drafter.feature_layers, [40, 33])
    whole = sequence_loss(drafter, tiny, view, torch.Generator().manual_seed(0), with_regression=True)
    monkeypatch.setattr(module, "LOGITS_ALIVE", 1)
    before(module, "checkpoint", pieces.append, monkeypatch)
    parts = sequence_loss(drafter, tiny, view, torch.Generator().manual_seed(0), with_regression=True)
    assert len(pieces) > 2
    torch.testing.assert_close(parts.cross_entropy, whole.cross_entropy, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients(parts, drafter), gradients(whole, drafter), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["safeai", "z-lab"])
def test_under_autocast(name: str, tiny: PreTrainedModel, tmp_path: Path) -> None:
    drafter = make(tmp_path, name, tiny)
    drafter.network.float()
    target = tiny_llama().float()
    view = view_of(target, drafter.feature_layers)
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(sequence_loss(drafter, target, view, torch.Generator().manual_seed(0)).cross_entropy)
    assert torch.equal(*found)


def test_anchors_are_drawn_by_the_generator(tiny: PreTrainedModel) -> None:
    view = view_of(tiny, ())
    draws = [module.draw_anchors(view, 8, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert draws[0][0].equal(draws[1][0]) and not draws[0][0].equal(draws[2][0])
    anchors, is_one = draws[0]  # [B, 8] each
    for row, (length, first) in enumerate(zip(LENGTHS, FIRST, strict=True)):
        found = anchors[row][is_one[row]].tolist()
        assert len(set(found)) == len(found) == min(8, length - first)
        assert all(first - 1 <= anchor < length - 1 for anchor in found)


# ---- families and bad input ----------------------------------------------------------------------------------------


SMALL: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, head_dim=16, pad_token_id=0, bos_token_id=None, eos_token_id=None, initializer_range=0.5,
)  # fmt: skip


@pytest.mark.parametrize("family, config", [
    (Gemma2ForCausalLM, lambda: Gemma2Config(**SMALL, final_logit_softcapping=3.0)),
    (GraniteForCausalLM, lambda: GraniteConfig(**SMALL, logits_scaling=4.0)),
    (Cohere2ForCausalLM, lambda: Cohere2Config(**SMALL, logit_scale=0.3)),
])  # fmt: skip
@torch.no_grad()
def test_what_a_family_does_to_its_logits(family: Any, config: Any) -> None:
    torch.manual_seed(0)
    model = family(config()).double().eval()
    output = model(torch.tensor([[5, 6, 7]]), output_hidden_states=True)
    logits = TargetHead(model)(output.hidden_states[-1])
    torch.testing.assert_close(logits, output.logits, rtol=0, atol=1e-12)


def test_an_unknown_family_is_refused() -> None:
    model = tiny_llama()
    model.config.logits_soft_cap = 3.0
    with pytest.raises(ValueError, match="LlamaForCausalLM has logits_soft_cap=3.0, which may change its logits"):
        TargetHead(model)


ONE_TOKEN = dict(
    tokens=torch.ones(3, 1), is_real=torch.ones(3, 1), features=torch.ones(3, 1, 192), hidden=torch.ones(3, 1, 64)
)
BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (dict(depth=0), {}, "depth=0"),
    (dict(anchors=0), {}, "anchors=0"),
    ({}, dict(features=torch.zeros(3, 11, 191)), r"view.features has shape \[3, 11, 191\]"),
    ({}, dict(hidden=torch.zeros(3, 10, 64)), r"view.hidden has shape .* and must have \[3, 11, 64\]"),
    ({}, dict(first=torch.ones(2)), r"view.first has shape \[2\] and must have \[3\]"),
    ({}, ONE_TOKEN, "at least 2 tokens"),
]


def test_bad_input(tiny: PreTrainedModel, tmp_path: Path) -> None:
    drafter = make(tmp_path / "wide", "safeai", tiny)
    view = view_of(tiny, drafter.feature_layers)
    for options, changes, message in BAD:
        with pytest.raises(ValueError, match=message):
            sequence_loss(drafter, tiny, replace(view, **changes), **options)
    narrow = make(tmp_path / "narrow", "safeai, own embedding, narrow", tiny)
    with pytest.raises(ValueError, match="with_regression=True: the drafter's states are 32 wide and the target's 64"):
        sequence_loss(narrow, tiny, view, with_regression=True)
    with pytest.raises(ValueError, match="a NgramDrafter has no loss"):
        sequence_loss(NgramDrafter(3), tiny, view)
