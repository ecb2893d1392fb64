"""EAGLE-3 and DFlash draft what implementations without cache, batch or vectors say, in every format and flag."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spec_trl.generation.drafters.autoregressive import CATCH_UP
from spec_trl.generation.drafters.ngram import NgramDrafter
from spec_trl.generation.planner.control import Chain
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.drafters.watching import (
    CONFIGS,
    KINDS,
    PRUNED,
    check_drafts,
    make_checkpoint,
    untouched,
    watch,
    write_random,
)
from tests.generation.races import Plans


EOS = dict(eos_token_id=[7, 11, 12])


NAMED = [("mtp", "Qwen's"), *((kind, name) for kind, configs in CONFIGS.items() for name in configs)]


@pytest.mark.parametrize(("kind", "name"), NAMED)
@torch.no_grad()
def test_drafts(kind: str, name: str, tiny: PreTrainedModel, tmp_path: Path) -> None:
    """Ragged rows that share prompts, come in late and move, rounds with rejections and rounds that draft nothing: a
    stale, missing or shifted column of what a drafter keeps would show."""
    folder = make_checkpoint(tmp_path, kind) if kind == "mtp" else write_random(kind, tmp_path, CONFIGS[kind][name])
    drafter = KINDS[kind](folder, tiny)
    seen = watch(drafter)
    rows = random_rows([5, 9, 1, 3, 12, 4])
    prompts = pad_left([rows[1], rows[0], rows[1], *rows[2:], rows[5]])  # two share a prompt, at once and later
    options, control = dict(max_new_tokens=12, **EOS), Plans(1, [[Chain(0, 4)], [Chain(0, 4)], []])
    result = generate(tiny, prompts, config={"max_batch_size": 3}, drafter=drafter, control=control, **options)
    assert outputs(result) == outputs(generate(tiny, prompts, **options))
    assert result.statistics.drafter_failure is None
    assert len(seen) > 20 and len({len(tokens) for tokens, *_ in seen}) > 8
    check_drafts(seen, kind, tmp_path, tiny)


@pytest.mark.parametrize(("draft_length", "name"), [(1, "z-lab"), (11, "z-lab"), (11, "speculators, from the anchor")])
@torch.no_grad()
def test_greedy_drafts_of_blocks(draft_length: int, name: str, tiny: PreTrainedModel, tmp_path: Path) -> None:
    """The largest logits of the slots, as many as there are slots: no more than γ, and no more than a block drafts."""
    drafter = KINDS["dflash"](write_random("dflash", tmp_path, CONFIGS["dflash"][name]), tiny)
    seen, prompts = watch(drafter), pad_left(random_rows([5, 9, 1]))
    generate(tiny, prompts, config={"draft_length": draft_length}, drafter=drafter, do_sample=False, **EOS)
    assert len(seen) > 8 and max(len(drafts) for _, drafts, _ in seen) == min(draft_length, drafter.config.drafts)
    assert all(drafts == logits.argmax(-1).tolist() for _, drafts, logits in seen)
    check_drafts(seen, "dflash", tmp_path, tiny)


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
def test_eagle3_after_rounds_without_it(name: str, tiny: PreTrainedModel, tmp_path: Path) -> None:
    """Rounds of no drafter or of another."""
    drafter = KINDS["eagle3"](write_random("eagle3", tmp_path, PRUNED["eagle3"]), tiny)
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
    check_drafts(seen, "eagle3", tmp_path, tiny)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_target_is_read_live_and_left_alone(kind: str, fresh: PreTrainedModel, tmp_path: Path) -> None:
    """Embedding and head are the policy's own, read at each draft: an optimizer step in between shows."""
    drafter = KINDS[kind](make_checkpoint(tmp_path, kind), fresh)
    owned = {tensor.data_ptr() for tensor in drafter.network.state_dict().values()}
    assert not owned & {tensor.data_ptr() for tensor in fresh.parameters()}
    for module in (fresh.get_input_embeddings(), fresh.get_output_embeddings()):
        module.weight += torch.randn(module.weight.shape, dtype=torch.float64)
    seen = watch(drafter)
    with untouched(fresh, drafter.network):
        generate(fresh, pad_left(random_rows([5])), drafter=drafter, max_new_tokens=8)
    check_drafts(seen, kind, tmp_path, fresh)
