"""Learned drafters whose vocabulary has other rows of padding than the target's (Qwen2.5: 151,936 and 152,064)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spec_trl.drafter_training.sequence_loss import sequence_loss
from spec_trl.generation.drafters.checkpoints import read_checkpoint, write_checkpoint
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.drafters.dflash import reference as dflash
from tests.generation.drafters.eagle3 import reference as eagle3
from tests.generation.drafters.watching import KINDS, view_of, write_random


TARGET = 508  # padded to 512 for the hardware
PROMPTS = pad_left(random_rows([5, 9, 2], TARGET))


CONFIGS: dict[str, tuple[str, Any]] = {
    "eagle3, pruned": ("eagle3", lambda rows: eagle3.safeai(vocab_size=rows, draft_vocab_size=400)),
    "eagle3, whole": ("eagle3", lambda rows: eagle3.safeai(vocab_size=rows, draft_vocab_size=None)),
    "dflash, target's head": ("dflash", lambda rows: dflash.zlab(vocab_size=rows)),
    # It brings embedding and head.
    "dflash, pruned": ("dflash", lambda rows: dflash.speculators({"vocab_size": rows}, draft_vocab_size=400)),
}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_llama(vocab_size=TARGET)


def draft(kind: str, folder: Path, target: PreTrainedModel) -> Any:
    result = generate(target, PROMPTS, kind, assistant_model=str(folder), max_new_tokens=16)
    assert result.statistics.drafter_failure is None and result.statistics.total.drafted > 20
    assert outputs(result) == outputs(generate(target, PROMPTS, max_new_tokens=16))
    return result.statistics.total


@pytest.mark.parametrize(("size", "rows"), [(TARGET, TARGET + 4), (TARGET + 4, TARGET)])
@pytest.mark.parametrize(("kind", "make"), CONFIGS.values(), ids=CONFIGS)
def test_drafts_and_learns(kind: str, make: Any, size: int, rows: int, tmp_path: Path) -> None:
    target = tiny_llama(vocab_size=size)
    write_random(kind, tmp_path, make(rows))
    draft(kind, tmp_path, target)
    drafter: Any = KINDS[kind](tmp_path, target)
    tokens = torch.tensor([[size - 1, 5, 6, size - 1, 7, 8, 9, 3]])  # [1, T]
    assert sequence_loss(drafter, target, view_of(target, drafter, tokens)).cross_entropy.isfinite()
    drafter.save(tmp_path / "again")
    assert read_checkpoint(tmp_path / "again")[1].keys() == read_checkpoint(tmp_path)[1].keys()


def test_rows_that_the_target_lacks_are_never_drafted(target: PreTrainedModel, tmp_path: Path) -> None:
    """Though they score highest."""
    config = eagle3.safeai(vocab_size=TARGET, draft_vocab_size=None)
    tensors: dict[str, Tensor] = eagle3.make_tensors(config)
    write_checkpoint(tmp_path / "plain", config, tensors)
    head = tensors["lm_head.weight"]
    tensors["lm_head.weight"] = torch.cat([head, 100 * head[:4]])
    write_checkpoint(tmp_path / "padded", config | {"vocab_size": TARGET + 4}, tensors)
    plain, padded = (draft("eagle3", tmp_path / name, target) for name in ("plain", "padded"))
    assert padded == plain


@pytest.mark.parametrize("rows", [480, 544])
def test_another_tokenizer_is_refused(rows: int, target: PreTrainedModel, tmp_path: Path) -> None:
    write_random("dflash", tmp_path, dflash.zlab(vocab_size=rows))
    with pytest.raises(ValueError, match=f"{rows}.* {TARGET}.*must use the target's tokenizer"):
        generate(target, PROMPTS, "dflash", assistant_model=str(tmp_path))
    with pytest.raises(ValueError, match=f"vocab_size={rows}.*must use the target's tokenizer"):
        KINDS["dflash"](tmp_path, target)
