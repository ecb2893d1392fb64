"""DFlash: what the drafter drafts, against an implementation without cache, batch or vectors."""

import copy
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
)

from spec_trl.generation.drafters.checkpoints import write_checkpoint
from spec_trl.generation.drafters.dflash.drafter import DFlashDrafter
from spec_trl.generation.engine.drafter import DraftSession
from spec_trl.scheduling.control import AlwaysSpeculate, Candidate
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows, reference_outputs
from tests.generation.drafters.dflash.reference import (
    LLAMA3,
    PRUNED,
    VARIANTS,
    VOCABULARY,
    make_checkpoint,
    speculators,
    straight_line,
    zlab,
)


EOS = dict(eos_token_id=[7, 11, 12])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    def make(settings: dict[str, Any], **more: Tensor) -> Path:
        tensors = make_checkpoint(tmp_path, settings)
        write_checkpoint(tmp_path, settings, tensors | more)
        return tmp_path

    return make


# ---- drafting -------------------------------------------------------------------------------------------------------


class Sometimes(AlwaysSpeculate):
    """Drafts in two rounds of three."""

    rounds = 0

    def decide(self, batch: int, length: float, waiting: int) -> tuple[int, int]:
        self.rounds += 1
        index, draft_length = super().decide(batch, length, waiting)
        return index, draft_length if self.rounds % 3 else 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor, Tensor, int]]:
    """Of every row at every draft: committed tokens, logits over the target's vocabulary, tokens, how many count."""
    found = []
    propose, block_logits = DFlashDrafter.propose, DFlashDrafter._block_logits
    logits: list[Tensor] = []

    def watched_logits(self: DFlashDrafter, *arguments: Any) -> Tensor:
        raw = block_logits(self, *arguments)
        logits.append(self._over_target(raw))
        return raw

    def watched(self: DFlashDrafter, draft_length: int, noise: Any) -> Any:
        proposal, rows = propose(self, draft_length, noise), self.session.rows
        for row, length in enumerate(rows.lengths.tolist()):
            committed = rows.tokens[row, :length].clone()
            found.append((committed, logits[-1][row].clone(), proposal.tokens[row], int(proposal.lengths[row])))
        return proposal

    monkeypatch.setattr(DFlashDrafter, "propose", watched)
    monkeypatch.setattr(DFlashDrafter, "_block_logits", watched_logits)
    return found


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_drafts_are_those_of_the_straight_line(name: str, tiny: PreTrainedModel, tmp_path: Path, seen: list) -> None:
    """Ragged rows that share prompts, come in late and move, rounds with rejections and rounds that draft nothing: a
    stale, missing or shifted column of context would show."""
    settings = VARIANTS[name]
    weights = make_checkpoint(tmp_path, settings)
    drafter = DFlashDrafter(tmp_path, tiny)
    rows = random_rows([5, 9, 1, 3, 12, 4])
    prompts = pad_left([rows[1], rows[0], rows[1], *rows[2:], rows[5]])  # two share a prompt, at once and later
    options = dict(max_new_tokens=22, **EOS)
    control = Sometimes(Candidate("dflash", 4, 4.0, 100))
    config = {"max_batch_size": 3}
    result = generate(tiny, prompts, config=config, drafter=drafter, control=control, **options)
    assert outputs(result) == outputs(generate(tiny, prompts, **options))
    assert result.statistics.drafter_failure is None
    assert len(seen) > 40 and len({len(committed) for committed, *_ in seen}) > 12
    for committed, logits, tokens, length in seen[:: max(1, len(seen) // 20)]:
        expected = straight_line(tiny, weights, settings, committed)[: len(tokens)]  # γ falls towards a row's end
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        assert length == len(expected) and tokens[length:].eq(0).all()


@pytest.mark.parametrize(
    ("draft_length", "name"),
    [(1, "z-lab"), (3, "speculators, pruned"), (1, "speculators, from the anchor")]
    + [(11, name) for name in ("z-lab", "speculators, pruned", "speculators, from the anchor")],
)
@torch.no_grad()
def test_greedy_drafts(draft_length: int, name: str, tiny, tmp_path, seen) -> None:
    """The largest logits of the slots, as many as there are slots: no more than γ, and no more than a block drafts."""
    settings = VARIANTS[name]
    weights = make_checkpoint(tmp_path, settings)
    prompts, options = pad_left(random_rows([5, 9, 1])), dict(do_sample=False, max_new_tokens=14, **EOS)
    drafter = DFlashDrafter(tmp_path, tiny)
    generate(tiny, prompts, config={"draft_length": draft_length}, drafter=drafter, **options)
    assert len(seen) > 8
    for committed, _, tokens, length in seen:
        expected = straight_line(tiny, weights, settings, committed).argmax(-1)[: len(tokens)]
        assert length == len(expected) and tokens[:length].equal(expected)


@torch.no_grad()
def test_a_whole_forward_without_cache(tiny: PreTrainedModel, tmp_path: Path) -> None:
    """What training differentiates is what drafting computes; context at or behind the anchor is not seen."""
    for name in ("z-lab, causal window", "speculators, window to both sides", "speculators, pruned"):
        settings = VARIANTS[name]
        weights = make_checkpoint(tmp_path, settings)
        drafter = DFlashDrafter(tmp_path, tiny)
        network, config = drafter.network, drafter.config
        text = random_rows([17])[0]
        states = tiny(text[None], output_hidden_states=True).hidden_states
        features = torch.cat([states[i] for i in config.target_layers], dim=-1)  # [1, 17, features]
        anchors = torch.tensor([0, 4, 11])
        tokens = torch.full((3, config.block_size), config.mask_token)
        tokens[:, 0] = text[anchors]
        embedded = network.embed(tokens, tiny.get_input_embeddings())  # [3, n, H]
        positions = torch.arange(17).expand(3, -1)
        hidden = network(features.expand(3, -1, -1), positions, embedded, anchors)  # [3, n, H]
        logits = drafter._over_target(network.logits(hidden, tiny.get_output_embeddings()))  # [3, n, V]
        for row, anchor in enumerate(anchors.tolist()):
            expected = straight_line(tiny, weights, settings, text[: anchor + 1])
            torch.testing.assert_close(logits[row, -len(expected) :], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("sampling", [dict(do_sample=False), dict(), dict(temperature=0.7, top_k=9)])
@pytest.mark.parametrize("name", ["z-lab", "speculators, pruned"])
def test_tokens_are_those_of_none(name, sampling, batch, tiny, tmp_path) -> None:
    make_checkpoint(tmp_path, VARIANTS[name])
    prompts = pad_left(random_rows([5, 9, 1, 3, 12, 4, 2, 7][:batch]))
    result = generate(tiny, prompts, drafter=DFlashDrafter(tmp_path, tiny), **EOS, **sampling)
    assert outputs(result) == outputs(generate(tiny, prompts, **EOS, **sampling))
    assert result.statistics.drafter_failure is None and result.statistics.draft_forwards > 0


class TwoOnly(LogitsProcessor):
    """Leaves two tokens, by the length of the prefix; a pruned vocabulary lacks both of them now and then."""

    prefix_only = True

    def allowed(self, width: int) -> list[int]:
        return [3 + (7 * width + i) % 60 for i in range(2)]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        masked = torch.full_like(scores, -torch.inf)
        masked[:, self.allowed(input_ids.shape[1])] = scores[:, self.allowed(input_ids.shape[1])]
        return masked


@pytest.mark.parametrize("verification", ["exact", "rejection"])
@pytest.mark.parametrize("processor", [TwoOnly(), NoRepeatNGramLogitsProcessor(2)])
@pytest.mark.parametrize("name", ["z-lab", "speculators, pruned"])
def test_processors_that_read_the_prefix(name, processor, verification, tiny, tmp_path, seen) -> None:
    """They act on each draft token with the ones before it in place. Where they leave nothing that the drafter's
    vocabulary has, a row drafts no further."""
    make_checkpoint(tmp_path, VARIANTS[name])
    drafter, prompts = DFlashDrafter(tmp_path, tiny), pad_left(random_rows([5, 9, 1]))
    options = dict(logits_processor=LogitsProcessorList([processor]))
    result = generate(tiny, prompts, config={"verification": verification}, drafter=drafter, **options)
    assert result.statistics.drafter_failure is None
    if verification == "exact":
        assert outputs(result) == outputs(generate(tiny, prompts, **options))
    for committed, _, tokens, length in seen:
        prompt = next(row for row in random_rows([5, 9, 1]) if committed[: len(row)].equal(row))
        width = 9 - len(prompt) + len(committed)  # as `generate` pads
        text = [0] * (9 - len(prompt)) + committed.tolist()
        for step in range(length):
            if isinstance(processor, TwoOnly):
                assert tokens[step] in processor.allowed(width + step)
            else:
                assert (text[-1], int(tokens[step])) not in set(pairwise(text))
            text.append(int(tokens[step]))
    cut_short = any(length < min(len(tokens), 5) for *_, tokens, length in seen)
    assert cut_short == (name != "z-lab" and isinstance(processor, TwoOnly))


def test_rejection_keeps_the_distribution(tiny: PreTrainedModel, tmp_path: Path) -> None:
    """A bad drafter under rejection: the second token's frequencies are the target's."""
    make_checkpoint(tmp_path, PRUNED)
    prompt = random_rows([5])[0]
    count = 3000
    options = dict(max_new_tokens=3, top_k=4)
    result = generate(
        tiny, pad_left([prompt] * count), config={"verification": "rejection"},
        drafter=DFlashDrafter(tmp_path, tiny), **options,
    )  # fmt: skip
    assert result.statistics.drafter_failure is None
    tokens = torch.tensor(outputs(result))  # [count, 3]
    first = tokens[:, 0].mode().values
    found = tokens[tokens[:, 0] == first, 1].bincount(minlength=VOCABULARY).double()
    with torch.no_grad():
        logits = tiny(torch.cat([prompt, first[None]])[None]).logits[0, -1]
    p = logits.masked_fill(logits < logits.topk(4).values[-1], -torch.inf).softmax(0)
    expected = p * found.sum()
    chi2 = ((found - expected).square() / expected)[p > 0].sum()
    assert found[p == 0].sum() == 0 and chi2 < 16.3  # 3 degrees of freedom, p = 0.001


# ---- a drafter that has learned something ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def simple() -> PreTrainedModel:
    """A target whose next token depends on the last one alone: what can be learned in seconds."""
    target = tiny_llama(seed=3)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return target


@pytest.fixture(scope="module", params=[zlab(), speculators(sample_from_anchor=True)])
def trained(request: Any, simple: PreTrainedModel, tmp_path_factory: Any) -> tuple[Path, dict[str, Any]]:
    """A drafter trained for seconds on the target's own greedy outputs, by the network's plain forward."""
    folder = tmp_path_factory.mktemp("trained")
    settings = request.param
    make_checkpoint(folder, settings, gain=0.4)
    drafter = DFlashDrafter(folder, simple)
    network, config = drafter.network, drafter.config
    prompts = pad_left(random_rows([6] * 200, seed=1))
    text = simple.generate(**prompts, do_sample=False, max_new_tokens=26, pad_token_id=0)  # [200, 32]
    with torch.no_grad():
        states = simple(text, output_hidden_states=True).hidden_states
        features = torch.cat([states[i] for i in config.target_layers], dim=-1).float()  # [200, 32, features]
    network.float().requires_grad_(True)
    shift = 1 if config.sample_from_anchor else 0
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(0)
    target = copy.deepcopy(simple).float()
    head, table = target.get_output_embeddings(), target.get_input_embeddings()
    for _ in range(250):
        rows = torch.randint(len(text), (64,), generator=generator)
        anchors = torch.randint(2, 32 - config.block_size, (64,), generator=generator)
        slots = anchors[:, None] + torch.arange(config.block_size)  # [64, n]
        tokens = torch.full_like(slots, config.mask_token)
        tokens[:, 0] = text[rows, anchors]
        hidden = network(features[rows], torch.arange(32).expand(64, -1), network.embed(tokens, table), anchors)
        logits = network.logits(hidden, head)[:, 1 - shift :]  # [64, drafts, V]
        labels = text[rows[:, None], slots + shift][:, 1 - shift :]  # [64, drafts]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    drafter.save(folder)
    return folder, settings


@torch.no_grad()
def test_acceptance_is_that_of_the_straight_line(trained, simple: PreTrainedModel) -> None:
    """Round by round, on the same text, the engine accepts what the straight line would have, and that is a lot: both
    would lose it if slots, positions or features were shifted by one."""
    folder, settings = trained
    drafter, weights = DFlashDrafter(folder, simple), load_file(folder / "model.safetensors")
    prompts = pad_left(random_rows([6, 6, 6], seed=9))
    options = dict(do_sample=False, max_new_tokens=20)
    rounds: list[list[int]] = [[], [], []]
    propose = drafter.propose

    def watched(draft_length: int, noise: Any) -> Any:
        rows = drafter.session.rows
        for request, length in zip(rows.requests.tolist(), rows.lengths.tolist(), strict=True):
            rounds[request].append(length - 6)
        return propose(draft_length, noise)

    drafter.propose = watched  # type: ignore[method-assign]
    result = generate(simple, prompts, config={"draft_length": 5}, drafter=drafter, **options)
    expected = reference_outputs(simple, prompts, max_new_tokens=20)
    assert outputs(result) == expected
    for prompt, new, starts in zip(prompts["input_ids"], expected, rounds, strict=True):
        start, straight = 0, []
        while start < 20 - 1:
            straight.append(start)
            row = torch.cat([prompt, torch.tensor(new[:start], dtype=torch.int64)])
            drafts = straight_line(simple, weights, settings, row).argmax(-1)[:5].tolist()
            wanted = new[start : start + 5]
            accepted = next((i for i, (a, b) in enumerate(zip(drafts, wanted, strict=False)) if a != b), len(wanted))
            start += min(accepted, 20 - start - 1) + 1
        assert starts[: len(straight)] == straight
    assert result.statistics.acceptance_rate > 0.3


# ---- formats --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["z-lab, biases, RoPE of Llama 3", "speculators, pruned"])
def test_saved_as_it_came(name: str, dtype: torch.dtype, tiny: PreTrainedModel, tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "saved"
    stored = make_checkpoint(source, VARIANTS[name], dtype=dtype)
    text = json.dumps(VARIANTS[name], indent=4) + "\n\n"  # not as this package would write it
    (source / "config.json").write_text(text)
    drafter = DFlashDrafter(source, tiny, dtype=torch.bfloat16)
    assert drafter.network.fc.weight.dtype == torch.bfloat16
    drafter.save(folder)
    assert (folder / "config.json").read_text() == text
    saved = load_file(folder / "model.safetensors")
    assert saved.keys() == stored.keys()
    assert all(saved[key].dtype == stored[key].dtype and saved[key].equal(stored[key]) for key in stored)


@pytest.mark.slow
def test_a_real_config_loads_drafts_and_saves(shared: Callable[[str], Path], tmp_path: Path) -> None:
    """Random weights, real shapes."""
    settings = json.loads(shared("configs/drafter/specforge_qwen2.5-0.5b-dflash.json").read_text())
    torch.manual_seed(0)
    target = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=settings["vocab_size"], hidden_size=896, intermediate_size=16, num_hidden_layers=24,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True,
        )
    ).to(torch.bfloat16).eval()  # fmt: skip
    stored = make_checkpoint(tmp_path, settings, features=5 * 896, dtype=torch.bfloat16)
    drafter = DFlashDrafter(tmp_path, target)
    prompts, options = pad_left(random_rows([5, 9])), dict(do_sample=False, max_new_tokens=6)
    result = generate(target, prompts, config={"draft_length": 15}, drafter=drafter, **options)
    assert result.statistics.draft_forwards > 0 and result.statistics.drafter_failure is None
    drafter.save(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == stored.keys() and all(saved[key].equal(stored[key]) for key in stored)
    assert (tmp_path / "saved" / "config.json").read_bytes() == (tmp_path / "config.json").read_bytes()


# ---- what is kept, and what is refused ------------------------------------------------------------------------------


def test_spare_tensors_are_kept(tiny: PreTrainedModel, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    spare = torch.randn(5, 3)
    folder = checkpoint(speculators(), **{"verifier_lm_head.weight": spare})
    DFlashDrafter(folder, tiny).save(tmp_path / "saved")
    assert load_file(tmp_path / "saved" / "model.safetensors")["verifier_lm_head.weight"].equal(spare)


def test_rows_past_scaled_rope(tiny: PreTrainedModel, checkpoint: Callable[..., Path]) -> None:
    """Plain RoPE goes on past max_position_embeddings; scaled RoPE is refused there."""
    prompts, options = pad_left(random_rows([5])), dict(max_new_tokens=24)
    expected = outputs(generate(tiny, prompts, **options))
    plain = DFlashDrafter(checkpoint(zlab(max_position_embeddings=16)), tiny)
    result = generate(tiny, prompts, drafter=plain, **options)
    assert outputs(result) == expected and result.statistics.drafter_failure is None
    scaled = DFlashDrafter(checkpoint(zlab(max_position_embeddings=16, rope_scaling=LLAMA3)), tiny)
    with pytest.raises(ValueError, match=r"rows can reach \d+ tokens.*positions reach 16"):
        generate(tiny, prompts, drafter=scaled, **options)


def test_transformers_own_loop_is_refused(tiny: PreTrainedModel, checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="needs the target's hidden states"):
        DFlashDrafter(checkpoint(zlab()), tiny).prepare_assisted_decoding(5, 20, False, [])  # type: ignore[arg-type]


# ---- life within a generation ---------------------------------------------------------------------------------------


def test_the_target_is_shared_live(fresh: PreTrainedModel, tmp_path: Path, seen: list) -> None:
    """Embedding and head are the policy's own, read at each draft: an optimizer step in between shows."""
    weights = make_checkpoint(tmp_path, zlab())
    drafter = DFlashDrafter(tmp_path, fresh)
    owned = {tensor.data_ptr() for tensor in drafter.network.state_dict().values()}
    assert not owned & {tensor.data_ptr() for tensor in fresh.parameters()}
    with torch.no_grad():
        for module in (fresh.get_input_embeddings(), fresh.get_output_embeddings()):
            module.weight += torch.randn(module.weight.shape, dtype=torch.float64)
    before = {name: tensor.clone() for name, tensor in fresh.state_dict().items()}
    generate(fresh, pad_left(random_rows([5])), drafter=drafter, do_sample=False, max_new_tokens=8)
    with torch.no_grad():
        for committed, _, tokens, length in seen:
            assert tokens[:length].equal(straight_line(fresh, weights, zlab(), committed).argmax(-1)[:length])
    assert all(tensor.equal(before[name]) for name, tensor in fresh.state_dict().items())


@pytest.mark.parametrize("where", ["remember", "refine", "NaN"])
def test_a_drafter_that_fails_changes_no_output(where: str, tiny, tmp_path, monkeypatch) -> None:
    make_checkpoint(tmp_path, zlab())
    drafter = DFlashDrafter(tmp_path, tiny)

    def broken(*_: Any) -> None:
        raise RuntimeError("out of order")

    if where == "NaN":
        drafter.network.norm.weight.fill_(torch.nan)
    else:
        monkeypatch.setattr(drafter.network, where, broken)
    prompts = pad_left(random_rows([5, 9]))
    with pytest.warns(UserWarning, match="NaN logits" if where == "NaN" else "out of order"):
        result = generate(tiny, prompts, drafter=drafter, **EOS)
    assert outputs(result) == outputs(generate(tiny, prompts, **EOS))


def test_nothing_of_a_generation_outlives_it(tiny: PreTrainedModel, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, zlab())
    drafter = DFlashDrafter(tmp_path, tiny)
    begin, targets = drafter.begin, []

    def watched(session: DraftSession) -> None:
        begin(session)
        targets.append(session.target)

    drafter.begin = watched  # type: ignore[method-assign]
    for _ in range(2):
        result = generate(tiny, pad_left(random_rows([5, 9])), drafter=drafter)
        assert not {"session", "_cache", "_broken_off"} & vars(drafter).keys()
        assert targets[-1]._listeners == []
        target_only = generate(tiny, pad_left(random_rows([5, 9]))).statistics.cache_bytes
        assert result.statistics.cache_bytes > target_only
        assert result.statistics.draft_forwards == drafter.forwards == result.statistics.rounds - _undrafted(result)


def _undrafted(result: Any) -> int:
    spans = [*result.statistics.speculating, (result.statistics.rounds, 0)]
    return sum(until - since for (since, gamma), (until, _) in zip(spans, spans[1:], strict=False) if not gamma)
