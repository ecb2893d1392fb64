"""EAGLE-3 against a straight-line implementation, in every format and flag, and through whole generations."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spec_trl.generation.drafters.autoregressive import CATCH_UP
from spec_trl.generation.drafters.checkpoints import read_checkpoint, write_checkpoint
from spec_trl.generation.drafters.eagle3.drafter import Eagle3Drafter
from spec_trl.generation.drafters.ngram import NgramDrafter
from spec_trl.scheduling.control import AlwaysSpeculate, Candidate
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.drafters.eagle3.reference import CONFIGS, IDS_KEY, Reference, make_folder, make_tensors, safeai
from tests.generation.drafters.watching import Seen, fed_per_round, watch


EOS = dict(eos_token_id=[7, 11, 12])


def check_drafts(seen: Seen, folder: Path, config: dict[str, Any], target: PreTrainedModel) -> None:
    reference = Reference(config, read_checkpoint(folder)[1], target)
    for tokens, drafts, logits in seen:
        torch.testing.assert_close(logits, reference.logits(tokens, drafts), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_drafts_are_those_of_the_straight_line(name: str, tiny: PreTrainedModel, tmp_path: Path) -> None:
    """Through rounds with rejections, rows of different lengths, refills, moves and shared prompts."""
    drafter = Eagle3Drafter(make_folder(tmp_path, CONFIGS[name]), tiny)
    seen = watch(drafter)
    rows = random_rows([5, 9, 1, 3, 12])
    prompts, config = pad_left([*rows, rows[3], rows[1]]), {"draft_length": 3, "max_batch_size": 3}
    result = generate(tiny, prompts, drafter=drafter, config=config, max_new_tokens=9, **EOS)
    assert result.statistics.drafter_failure is None and len(seen) > 20
    assert {len(tokens) for tokens, _, _ in seen} >= {2, 3, 5, 9, 12}
    check_drafts(seen[:: max(len(seen) // 4, 1)], tmp_path, CONFIGS[name], tiny)


class Planned(AlwaysSpeculate):
    """Drafts in each round with the candidate and the draft length that `schedule` says."""

    def __init__(self, names: list[str], schedule: Callable[[int], tuple[int, int]]) -> None:
        super().__init__(Candidate(names[0], 20, 4.0, 100))
        self.candidates = [Candidate(name, 20, 4.0, 100) for name in names]
        self.schedule, self.rounds = schedule, 0

    def decide(self, batch: int, length: float, waiting: int) -> tuple[int, int]:
        self.rounds += 1
        return self.schedule(self.rounds)

    def record(self, draft_length: int, seconds: float, tokens: int, is_typical: bool = True) -> None:
        pass


@torch.no_grad()
def test_after_rounds_without_it(tiny: PreTrainedModel, tmp_path: Path) -> None:
    """It goes on listening, and catches up in pieces."""
    drafter = Eagle3Drafter(make_folder(tmp_path, safeai()), tiny)
    seen, fed = watch(drafter), fed_per_round(drafter)
    prompts, options = pad_left(random_rows([5, 30, 1])), dict(max_new_tokens=60)
    last = 8 + 2.5 * CATCH_UP
    control = Planned(["eagle3"], lambda rounds: (0, 0 if rounds < 5 or 8 < rounds < last else 4))
    result = generate(tiny, prompts, drafter=drafter, control=control, **options)
    assert outputs(result) == outputs(generate(tiny, prompts, **options))
    assert len(seen) > 15 and max(map(sum, fed[1:])) > 2 * CATCH_UP and max(map(max, fed[1:])) <= CATCH_UP
    check_drafts(seen[::8], tmp_path, safeai(), tiny)


@pytest.mark.parametrize("lengths, capacity", [([5, 30, 1], None), ([3, 60, 20, 62, 9], 2)])
@torch.no_grad()
def test_after_rounds_of_another_drafter(
    lengths: list[int], capacity: int | None, tiny: PreTrainedModel, tmp_path: Path
) -> None:
    """Its wide rounds verify more than they commit: the bound on what is missing is loose, and must not matter. Where
    a short row moves into a long one's place, what was cached there must not count for it."""
    drafter = Eagle3Drafter(make_folder(tmp_path, safeai()), tiny)
    seen, fed = watch(drafter), fed_per_round(drafter)
    control = Planned(["ngram", "eagle3"], lambda rounds: (0, 20) if rounds % 4 else (1, 2))
    prompts, options = pad_left(random_rows(lengths)), dict(max_new_tokens=36, config={"max_batch_size": capacity})
    result = generate(tiny, prompts, drafter=[NgramDrafter(3), drafter], control=control, **options)
    if capacity is None:
        assert len(fed) > 4 and max(map(max, fed[1:])) <= CATCH_UP
    assert outputs(result) == outputs(generate(tiny, prompts, **options)) and len(seen) > 10
    check_drafts(seen[:: max(len(seen) // 5, 1)], tmp_path, safeai(), tiny)


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


@pytest.mark.parametrize("name", BAD)
def test_bad_checkpoints(name: str, tiny: PreTrainedModel, tmp_path: Path) -> None:
    change, message = BAD[name]
    config, tensors = safeai(), make_tensors(safeai())
    change(config, tensors)
    write_checkpoint(tmp_path, config, tensors)
    with pytest.raises(ValueError, match=message) as error:
        Eagle3Drafter(tmp_path, tiny)
    assert "assistant_model=" in str(error.value)
