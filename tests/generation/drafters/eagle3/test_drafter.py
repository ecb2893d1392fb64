"""EAGLE-3 against a straight-line implementation, in every format and flag, and through whole generations."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spec_trl.generation.drafters.autoregressive import CATCH_UP
from spec_trl.generation.drafters.checkpoints import read_checkpoint, write_checkpoint
from spec_trl.generation.drafters.eagle3.drafter import Eagle3Drafter
from spec_trl.generation.drafters.ngram import NgramDrafter
from spec_trl.scheduling.control import Chain
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.drafters.eagle3.reference import CONFIGS, IDS_KEY, Reference, make_folder, make_tensors, safeai
from tests.generation.drafters.watching import Seen, watch
from tests.generation.races import Plans


def check_drafts(seen: Seen, folder: Path, config: dict[str, Any], target: PreTrainedModel) -> None:
    """Of four or five of the rounds."""
    reference = Reference(config, read_checkpoint(folder)[1], target)
    for tokens, drafts, logits in seen[:: max(len(seen) // 4, 1)]:
        torch.testing.assert_close(logits, reference.logits(tokens, drafts), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_drafts_are_those_of_the_straight_line(name: str, tiny: PreTrainedModel, tmp_path: Path) -> None:
    """Through rounds with rejections, rows of different lengths, refills, moves and shared prompts."""
    drafter = Eagle3Drafter(make_folder(tmp_path, CONFIGS[name]), tiny)
    seen = watch(drafter)
    rows = random_rows([5, 9, 1, 3, 12])
    prompts, config = pad_left([*rows, rows[3], rows[1]]), {"draft_length": 3, "max_batch_size": 3}
    result = generate(tiny, prompts, drafter=drafter, config=config, max_new_tokens=9, eos_token_id=[7, 11, 12])
    assert result.statistics.drafter_failure is None and len(seen) > 20
    assert {len(tokens) for tokens, _, _ in seen} >= {2, 3, 5, 9, 12}
    check_drafts(seen, tmp_path, CONFIGS[name], tiny)


AWAY = int(2.5 * CATCH_UP)
PLANS: dict[str, tuple[list[int], int | None, list[tuple[Chain, ...]]]] = {
    # It goes on listening, and catches up in pieces.
    "none": ([5, 30, 1], None, [(), *[(Chain(1, 4),)] * 4, *[()] * AWAY, *[(Chain(1, 4),)] * 60]),
    # Wide rounds verify more than they commit: the bound on what is missing is loose, and must not matter.
    "another's": ([5, 30, 1], None, [*[(Chain(0, 20),)] * 3, (Chain(1, 2),)]),
    # A short row moves into a long one's place: what was cached there must not count for it.
    "another's, with moves": ([3, 60, 20, 62, 9], 2, [*[(Chain(0, 20),)] * 3, (Chain(1, 2),)]),
}


@pytest.mark.parametrize("name", PLANS)
@torch.no_grad()
def test_after_rounds_without_it(name: str, tiny: PreTrainedModel, tmp_path: Path) -> None:
    """Rounds of no drafter or of another."""
    drafter = Eagle3Drafter(make_folder(tmp_path, safeai()), tiny)
    lengths, capacity, rounds = PLANS[name]
    fed: list[list[int]] = [[]]  # number of pairs per row of each forward: of prompts first, then by round
    propose = drafter.propose

    def count(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        fed[-1].append(arguments[0].shape[1])

    drafter.network.register_forward_pre_hook(count)
    drafter.propose = lambda *arguments: fed.append([]) or propose(*arguments)
    seen = watch(drafter)
    prompts, options = pad_left(random_rows(lengths)), dict(max_new_tokens=60 if name == "none" else 36)
    result = generate(
        tiny, prompts, config={"max_batch_size": capacity}, drafter=[NgramDrafter(3), drafter],
        control=Plans(2, rounds), **options,
    )  # fmt: skip
    assert outputs(result) == outputs(generate(tiny, prompts, **options)) and len(seen) > 10
    if capacity is None:
        assert len(fed) > 4 and max(map(max, fed[1:])) <= CATCH_UP
    if name == "none":
        assert max(map(sum, fed[1:])) > 2 * CATCH_UP
    check_drafts(seen, tmp_path, safeai(), tiny)


# ---- checkpoints that are refused -----------------------------------------------------------------------------------


Change = Callable[[dict[str, Any], dict[str, Tensor]], object]
BAD: dict[str, tuple[Change, str]] = {
    "layer past the depth": (lambda c, t: c.update({IDS_KEY: [0, 1, 3]}), r"hidden states \[0, 1, 3\].*no \[3\]"),
    "default layer ids": (lambda c, t: c.pop(IDS_KEY), r"\[2, 1, -1\] does not fit"),
    "layer ids": (lambda c, t: c.update({IDS_KEY: "2"}), f"{IDS_KEY}='2'"),
    "vocabulary": (lambda c, t: c.update(vocab_size=65), "vocab_size=65, .* has 64"),
    "hidden size": (lambda c, t: c.update(target_hidden_size=32), "target_hidden_size=32, .* are 64 wide"),
    "no embedding": (lambda c, t: c.update(hidden_size=32, target_hidden_size=64), "no embed_tokens.weight"),
    "unknown key": (lambda c, t: c.update(residual_gain=0.5), "config.json has keys .*'residual_gain': 0.5"),
    "unknown eagle_config": (lambda c, t: c.update(eagle_config={"use_mtp_layernorm": True}), "use_mtp_layernorm"),
    "another speculator": (lambda c, t: c.update(speculators_model_type="dflash"), "speculators_model_type='dflash'"),
    "model type": (lambda c, t: c.update(model_type="gemma2"), "model_type='gemma2'"),
    "two layers": (lambda c, t: c.update(num_hidden_layers=2), "num_hidden_layers=2"),
    "tied head": (lambda c, t: c.update(tie_word_embeddings=True), "tie_word_embeddings=True"),
    "window": (lambda c, t: c.update(sliding_window=16), "sliding_window=16"),
    "layer type": (lambda c, t: c.update(layer_types=["sliding_attention"]), "layer_types=.*must be full"),
    "positions": (lambda c, t: c.update(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "type 'dynamic'"),
    "activation": (lambda c, t: c.update(hidden_act="snake"), "hidden_act='snake'"),
    "heads": (lambda c, t: c.update(num_key_value_heads=3), "num_key_value_heads=3 must divide"),
    "flag": (lambda c, t: c.update(norm_output="yes"), "norm_output='yes'"),
    "size": (lambda c, t: c.update(draft_vocab_size=-1), "draft_vocab_size=-1"),
    "draft vocabulary": (lambda c, t: c.update(draft_vocab_size=99), "draft_vocab_size=99 is more"),
    "a type": (lambda c, t: c.update(hidden_size="64"), "do not fit together"),
    "missing": (lambda c, t: t.pop("midlayer.hidden_norm.weight"), r"missing \['layers.0.hidden_norm.weight'\]"),
    "NaN": (lambda c, t: t["midlayer.mlp.up_proj.weight"][3, 4].fill_(torch.nan), "up_proj.weight holds NaN"),
    "no d2t": (lambda c, t: t.pop("d2t"), "draft_vocab_size=40 .* and d2t"),
    "t2d alone": (lambda c, t: (c.pop("draft_vocab_size"), t.pop("d2t"), t.update(WHOLE)), "t2d and no d2t"),
    "t2d of other tokens": (lambda c, t: t.update(t2d=~t["t2d"]), "t2d marks other tokens"),
    "d2t too large": (lambda c, t: t["d2t"][-1].fill_(64), "d2t must lead .* to 103"),
    "d2t negative": (lambda c, t: t["d2t"][0].fill_(-1), "different ones from -1"),
    "d2t twice": (lambda c, t: t["d2t"][1].copy_(t["d2t"][0] - 1), "to 39 different ones"),
    "d2t is no number": (lambda c, t: t.update(d2t=t["d2t"].double()), "d2t is stored as torch.float64"),
}
WHOLE = {"lm_head.weight": torch.zeros(64, 64)}


@pytest.mark.parametrize("change, message", BAD.values(), ids=BAD)
def test_bad_checkpoints(change: Change, message: str, tiny: PreTrainedModel, tmp_path: Path) -> None:
    config, tensors = safeai(), make_tensors(safeai())
    change(config, tensors)
    write_checkpoint(tmp_path, config, tensors)
    with pytest.raises(ValueError, match=f"assistant_model=(.|\n)*{message}"):
        Eagle3Drafter(tmp_path, tiny)
