"""What a drafter drafts, seen through the session that it draws from; and both kinds of drafters with checkpoints."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList, PreTrainedModel

from spec_trl.drafter_training.sequence_loss import TargetView
from spec_trl.generation.drafters.checkpoints import read_checkpoint
from spec_trl.generation.drafters.dflash.dflash_drafter import DFlashDrafter
from spec_trl.generation.drafters.eagle3.eagle3_drafter import Eagle3Drafter
from spec_trl.generation.drafters.feature_drafter import FeatureDrafter
from spec_trl.generation.drafters.mtp.mtp_drafter import MtpDrafter
from spec_trl.generation.engine.drafter import Drafter, DraftSession
from spec_trl.generation.engine.network.shadow import observe
from spec_trl.generation.engine.rows import PrefixView, Rows
from spec_trl.generation.engine.sampling.accept import Proposal
from spec_trl.generation.engine.sampling.noise import RoundNoise
from spec_trl.generation.engine.sampling.processors import LogitsPipeline
from tests.conftest import tiny_llama
from tests.generation.drafters.dflash import reference as dflash
from tests.generation.drafters.eagle3 import reference as eagle3
from tests.generation.drafters.mtp import reference as mtp
from tests.generation.drafters.mtp.heads import write_alone


Seen = list[tuple[list[int], list[int], Tensor]]
KINDS: dict[str, type[FeatureDrafter]] = {"eagle3": Eagle3Drafter, "dflash": DFlashDrafter, "mtp": MtpDrafter}
CONFIGS = {"eagle3": eagle3.CONFIGS, "dflash": dflash.VARIANTS}
PRUNED = {"eagle3": eagle3.safeai(), "dflash": dflash.PRUNED}  # 40 of the target's 64 tokens


@dataclass(frozen=True)
class Watched(DraftSession):
    """Collects the logits that drafts are drawn from."""

    steps: list[Tensor] = field(default_factory=list)

    def draw(self, logits: Tensor, *arguments: Any) -> Any:
        self.steps.append(logits.clone())
        return super().draw(logits, *arguments)


def watch(drafter: FeatureDrafter) -> Seen:
    """Collects (committed tokens, drafts, logits over the target's vocabulary `[γ, V]`) of each row and round."""
    seen: Seen = []
    steps: list[Tensor] = []
    begin, propose = drafter.begin, drafter.propose

    def watched(draft_length: int, noise: RoundNoise | None) -> Proposal:
        steps.clear()
        proposal = propose(draft_length, noise)
        rows, logits = drafter.session.rows, torch.cat(steps, dim=1)  # [B, γ, V]
        for row, (length, drafted) in enumerate(zip(rows.lengths.tolist(), proposal.drafted().tolist(), strict=True)):
            if drafted:
                drafts = proposal.tokens[row, : len(steps)].tolist()
                seen.append((rows.tokens[row, :length].tolist(), drafts, logits[row]))
        return proposal

    drafter.begin = lambda session: begin(Watched(*vars(session).values(), steps))
    drafter.propose = watched
    return seen


def check_drafts(seen: Seen, kind: str, folder: Path, target: PreTrainedModel) -> None:
    """Compares four or five of the rounds with an implementation without cache, batch or vectors."""
    config, weights = read_checkpoint(folder)
    for tokens, drafts, logits in seen[:: max(len(seen) // 4, 1)]:
        if kind == "eagle3":
            expected = eagle3.Reference(config, weights, target).logits(tokens, drafts)
        elif kind == "mtp":
            expected = mtp.straight_line(target, weights, tokens, drafts)
        else:
            expected = dflash.straight_line(target, weights, config, torch.tensor(tokens))[: len(drafts)]
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)


def write_random(kind: str, folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.float64) -> Path:
    """Random weights for a target of two layers and 64 hidden dimensions."""
    if kind == "eagle3":
        eagle3.make_folder(folder, config, dtype)
    else:
        dflash.make_checkpoint(folder, config, dtype=dtype)
    return folder


def make_checkpoint(folder: Path, kind: str, vocabulary: int = 64, **changes: Any) -> str:
    """A random drafter with the target's vocabulary."""
    if kind == "mtp":
        return write_alone(folder, tiny_llama(vocab_size=vocabulary, **changes))
    config = eagle3.safeai(draft_vocab_size=vocabulary) if kind == "eagle3" else dflash.zlab()
    return str(write_random(kind, folder, config | {"vocab_size": vocabulary} | changes))


def view_of(target: PreTrainedModel, drafter: FeatureDrafter, tokens: Tensor) -> TargetView:
    """What the target sees in `tokens` `[1, T]`, all of which count."""
    features, hidden = observe(target, tokens, drafter.feature_layers)
    return TargetView(tokens, torch.ones_like(tokens).bool(), features, hidden, torch.tensor([1]))


def begin_greedy(drafter: Drafter, capacity: int, columns: int) -> Rows:
    """Begins a greedy generation that has no model; returns its rows."""
    rows = Rows(capacity, columns, torch.device("cpu"))
    rows.tokens.fill_(3)  # leftovers after a row's end, which must not be found
    pipeline = LogitsPipeline(LogitsProcessorList(), PrefixView(rows, rows.tokens), capacity)
    drafter.begin(DraftSession(rows, pipeline, True, None, False))
    return rows


def before(
    watched: object, method: str, action: Callable[..., object], patch: pytest.MonkeyPatch | None = None
) -> None:
    """Has `action` run before each call of the object's method, with the same arguments; while `patch` lasts."""
    original = getattr(watched, method)

    def replaced(*arguments: Any, **more: Any) -> Any:
        action(*arguments)
        return original(*arguments, **more)

    patch.setattr(watched, method, replaced) if patch else setattr(watched, method, replaced)


@contextmanager
def untouched(*models: nn.Module) -> Iterator[None]:
    """Nothing in the block changes their weights."""
    states = [{name: tensor.clone() for name, tensor in model.state_dict().items()} for model in models]
    yield
    for model, state in zip(models, states, strict=True):
        assert all(tensor.equal(state[name]) for name, tensor in model.state_dict().items())


def check_frequencies(counts: Tensor, p: Tensor) -> None:
    """χ² of the counts `[V]` of tokens drawn from `p` `[V]`, at four standard deviations; rare tokens count as one."""
    expected = p * counts.sum()  # [V]
    rare = expected < 5  # [V]
    wanted, found = (torch.cat([each[~rare], each[rare].sum()[None]]) for each in (expected, counts))
    freedom = len(wanted) - 1
    assert freedom >= 3
    assert float(((found - wanted) ** 2 / wanted.clamp(min=1)).sum()) < freedom + 4 * (2 * freedom) ** 0.5
