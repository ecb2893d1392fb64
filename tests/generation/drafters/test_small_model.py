"""A small model as drafter: its own ragged cache stays in step with the rows."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from spec_trl.generation.drafters.autoregressive import CATCH_UP
from spec_trl.generation.drafters.small_model import SmallModelDrafter, load_assistant
from spec_trl.generation.drafters.target_parts import check_sizes
from spec_trl.generation.engine.kv.row_memory import RowMemory
from spec_trl.generation.engine.sampling.accept import Proposal
from spec_trl.generation.planner.control import Chain
from tests.conftest import TRANSFORMERS, tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.drafters.watching import before, untouched
from tests.generation.races import Knowing, Plans
from tests.tiny_families import make


EOS = dict(eos_token_id=[7, 11, 12])


with_states = pytest.mark.skipif(TRANSFORMERS < (5, 21), reason="such families are refused")
FAMILIES = ["llama", pytest.param("qwen3_5_text", marks=with_states)]
FAMILIES += [pytest.param(name, marks=(with_states, pytest.mark.slow)) for name in ("lfm2", "jamba", "mamba2")]


@pytest.fixture(params=FAMILIES)
def target(request: pytest.FixtureRequest, tiny: PreTrainedModel) -> PreTrainedModel:
    """Of a family whose layers attend, or keep states."""
    return tiny if request.param == "llama" else make(request.param)


@pytest.mark.parametrize(
    ("draft_length", "max_batch_size", "lengths"),
    [*((*options, [5, 9, 1, 12]) for options in [(1, None), (2, 3), (5, 2), (3, 1)]), (3, None, [1, 1, 1])],
)
def test_the_target_as_its_own_assistant(
    draft_length: int, max_batch_size: int | None, lengths: list[int], target: PreTrainedModel
) -> None:
    """Everything is accepted exactly when the drafter's cache holds what the target's does, after every compaction
    and refill. One stale column, or state, would show."""
    tiny, rows = target, random_rows(lengths)
    prompts = pad_left([*rows, rows[1]])
    config = {"draft_length": draft_length, "max_batch_size": max_batch_size}
    result = generate(tiny, prompts, "model", config, assistant_model=tiny, **EOS)
    assert outputs(result) == outputs(generate(tiny, prompts, **EOS))
    assert result.statistics.acceptance_rate == 1


@pytest.mark.parametrize(
    "options",
    [
        dict(temperature=0.6, top_k=20),
        dict(repetition_penalty=1.5, no_repeat_ngram_size=2),
        dict(min_new_tokens=9, suppress_tokens=list(range(3, 30))),
        dict(prefix_allowed_tokens_fn=lambda row, prefix: [3 + (7 * row + len(prefix) + i) % 60 for i in range(12)]),
    ],
)
def test_the_drafter_applies_the_targets_processors(options: dict[str, Any], tiny: PreTrainedModel) -> None:
    """At the position and on the prefix of each draft token: else the target itself would not agree with itself."""
    prompts = pad_left(random_rows([5, 9, 1, 3]))
    result = generate(tiny, prompts, "model", {"max_batch_size": 2}, assistant_model=tiny, **EOS, **options)
    assert result.statistics.acceptance_rate == 1


@pytest.mark.parametrize("raced", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_those_of_a_plain_forward(family: str, raced: bool, tiny, tiny_assistant) -> None:
    """Greedy: each draft token is the assistant's own continuation of the row and the drafts before it, also after
    rounds in which the row took another drafter's tokens."""
    assistant = tiny_assistant if family == "llama" else make(family)
    drafter = SmallModelDrafter(assistant, tiny)
    propose, seen = drafter.propose, []

    def watched(*arguments: Any) -> Proposal:
        proposal, rows = propose(*arguments), drafter.session.rows
        for tokens, length, drafts in zip(rows.tokens, rows.lengths.tolist(), proposal.tokens, strict=False):
            seen.append((length, torch.cat([tokens[:length], drafts])))
        return proposal

    drafter.propose = watched
    rows = random_rows([5, 9, 1, 3])
    # A copy of a prompt comes in while a row that began with it is in flight.
    prompts, config = pad_left([*rows, rows[3], rows[3]]), {"draft_length": 3, "max_batch_size": 2}
    answers = outputs(generate(tiny, prompts, config=config, do_sample=False, **EOS))
    drafters = [drafter, Knowing(answers, None)][: 1 + raced]
    control = Plans(len(drafters), [[Chain(which, 5) for which in range(len(drafters))]])
    generate(tiny, prompts, "model", config, drafter=drafters, control=control, do_sample=False, **EOS)
    assert len(seen) > 8
    for length, text in seen:
        logits = assistant(text[None]).logits[0]  # [n, V]
        assert logits[length - 1 : -1].argmax(-1).tolist() == text[length:].tolist()


def learned_positions() -> PreTrainedModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=12)).double()


@pytest.mark.parametrize(("make", "acceptance"), [
    (lambda: tiny_llama(max_position_embeddings=12), 0.0),
    (learned_positions, 0.0),  # 12 of them: beyond, it drafts anything
    (lambda: tiny_llama().bfloat16(), 0.5),
])  # fmt: skip
def test_any_context_and_dtype_drafts_and_the_assistant_is_untouched(make, acceptance: float, tiny) -> None:
    prompts, assistant = pad_left(random_rows([5, 9])), make().train()
    config = dict(vars(assistant.config))
    with untouched(assistant):
        result = generate(tiny, prompts, "model", assistant_model=assistant)
    assert outputs(result) == outputs(generate(tiny, prompts))
    assert result.statistics.drafter_failure is None and result.statistics.acceptance_rate >= acceptance
    assert assistant.training and vars(assistant.config) == config


def test_loading(tiny, tmp_path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    loaded = load_assistant(str(tmp_path), tiny)
    assert loaded.dtype == torch.float64 and not loaded.training
    assert load_assistant(tiny, tiny) is tiny
    result = generate(tiny, pad_left(random_rows([4])), "model", assistant_model=tmp_path, max_new_tokens=4)
    assert result.statistics.total.accepted > 0


def test_forwards_are_counted(target: PreTrainedModel, tiny: PreTrainedModel) -> None:
    prompts, config = pad_left(random_rows([3, 5])), {"draft_length": 3}
    result = generate(tiny, prompts, "model", config, assistant_model=target, max_new_tokens=16)
    statistics = result.statistics
    # One prefill of both prompts, and γ forwards in each round.
    fed = sum(point.rounds * point.draft_length for point in statistics.points)
    assert statistics.draft_forwards == 1 + fed
    assert statistics.target_forwards == 1 + statistics.rounds


class OneEach(Plans):
    """Rounds of one chain for each row."""

    several_chains = False


def test_catching_up_after_rounds_without_it_goes_in_pieces(target: PreTrainedModel) -> None:
    """Forty rounds autoregressively, then drafts: the cache is filled by forwards of bounded width, and holds what it
    should, so the target as its own assistant is accepted throughout."""
    tiny = target
    drafter, away = SmallModelDrafter(tiny, tiny), int(2.5 * CATCH_UP)
    widths: list[int] = []
    drafter.network.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    prompts, options = pad_left(random_rows([5, 9, 3])), dict(max_new_tokens=60)
    control = OneEach(1, [[]] * away + [[Chain(0, 15)]] + [[Chain(0, 3)]] * 60)
    result = generate(tiny, prompts, "model", drafter=drafter, control=control, **options)
    assert outputs(result) == outputs(generate(tiny, prompts, **options))
    assert result.statistics.acceptance_rate == 1
    drafted = widths[widths.index(CATCH_UP) :]
    assert drafted[:3] == [CATCH_UP, CATCH_UP, away + 2 - 2 * CATCH_UP] and max(drafted) == CATCH_UP


# ---- States -----------------------------------------------------------------------------------------------------


@with_states
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "seeded"])
def test_both_keep_states(do_sample: bool) -> None:
    """Of different kinds, and the drafts are right now and then."""
    target, assistant = make("falcon_h1"), make("qwen3_5_text")
    rows, options = random_rows([5, 9, 1, 12]), {"do_sample": do_sample, **EOS}
    prompts = pad_left([*rows, rows[1]])
    plain = outputs(generate(target, prompts, config={"max_batch_size": 2}, **options))
    members = [SmallModelDrafter(assistant, target), Knowing(plain, 0)]
    control = OneEach(2, [[Chain(0, 4)], [], [Chain(1, 3)], [Chain(0, 2, (0,)), Chain(1, 4, (1,))]])
    result = generate(target, prompts, drafter=members, control=control, config={"max_batch_size": 2}, **options)
    assert outputs(result) == plain and result.statistics.drafter_failure is None
    assert result.statistics.per_drafter["model"].drafted > 0 < result.statistics.per_drafter["custom"].accepted


@with_states
def test_states_of_rows_that_leave_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed again from the whole text; the target as its own assistant is accepted throughout."""
    target, prompts = make("qwen3_5_text"), pad_left(random_rows([5, 9, 1]))
    calls = iter([False] * 2 + [True] * 3)
    monkeypatch.setattr(RowMemory, "leaving", lambda *_: [1] if next(calls, False) else [])
    result = generate(target, prompts, "model", {"draft_length": 3}, assistant_model=target)
    assert result.statistics.preemptions == 3 and result.statistics.acceptance_rate == 1
    assert outputs(result) == outputs(generate(target, prompts))


def test_nothing_of_a_generation_outlives_it(tiny: PreTrainedModel) -> None:
    drafter = SmallModelDrafter(tiny_llama(seed=1), tiny)
    caches: list[weakref.ref] = []
    before(drafter, "admit", lambda _: caches.append(weakref.ref(drafter.cache)))
    generate(tiny, pad_left(random_rows([5, 9])), "model", drafter=drafter, max_new_tokens=4)
    gc.collect()
    assert caches and not any(cache() for cache in caches) and "session" not in vars(drafter)


# ---- One tokenizer, vocabularies of two sizes -----------------------------------------------------------------------


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "model": ("model", {}),
    "compiled": ("model", {"runner": "auto"}),
    "rejection": ("model", {"verification": "rejection"}),
    "tts": ("tts", {"tts": {"drafter": "model", "stride": 1, "scope": "rollout", "learning_rate": 1e-3}}),
    "tts, requests": ("tts", {"tts": {"drafter": "model", "stride": 1}}),
    "decoupled": ("model", {"specactor": {"decoupled_execution": "always"}}),
    "best_of_n": ("best_of_n", {"specactor": {"drafters": ["ngram", "model"]}}),
    "auto": ("auto", {}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("size", "wanted"), [(70, 128), (128, 70)])
def test_a_padded_vocabulary(size: int, wanted: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of the target that the drafter has no row for stand in prompts and outputs."""
    target, assistant = tiny_llama(vocab_size=wanted), tiny_llama(seed=0, vocab_size=size)
    shared = min(size, wanted)
    for module, other in zip(assistant.modules(), target.modules(), strict=True):
        if isinstance(other, torch.nn.Linear | torch.nn.Embedding):
            module.weight.data[:shared] = other.weight.data[:shared]
    prompts = pad_left(random_rows([5, 9, 3], vocabulary=wanted))
    strategy, config = WAYS[way]
    drafted = []
    propose = SmallModelDrafter.propose

    def watched(drafter: SmallModelDrafter, *arguments: Any) -> Proposal:
        proposal = propose(drafter, *arguments)
        assert int(proposal.tokens.max()) < shared
        drafted.append(proposal.tokens.numel())
        return proposal

    monkeypatch.setattr(SmallModelDrafter, "propose", watched)
    options: dict[str, Any] = {"eos_token_id": None} if way == "rejection" else EOS
    races = {"best_of_n": [Chain(0, 3), Chain(1, 3)], "auto": [Chain(0, 3), Chain(2, 3)]}
    if way in races:
        options = options | {"control": Plans(3, [races[way]])}
    result = generate(target, prompts, strategy, config, assistant_model=assistant, **options)
    assert result.statistics.drafter_failure is None
    if way != "rejection":
        assert outputs(result) == outputs(generate(target, prompts, **EOS))
    elif size < wanted:
        assert int(result.sequences.max()) >= shared  # they are sampled too
    assert sum(drafted) > 0 and result.statistics.total.accepted > 0
    if strategy == "tts":
        assert result.statistics.learning.updates > 0


@pytest.mark.parametrize(("size", "wanted"), [(151_936, 152_064), (152_064, 151_936), (50_304, 50_688), (64, 64)])
def test_sizes_of_one_tokenizer(size: int, wanted: int) -> None:
    check_sizes("assistant_model", size, wanted)


@pytest.mark.parametrize(("size", "wanted"), [(32_000, 32_768), (128_000, 128_256), (256_000, 262_144), (65, 64)])
def test_sizes_of_two_tokenizers(size: int, wanted: int) -> None:
    with pytest.raises(ValueError, match=f"assistant_model has a vocabulary of {size} .* of {wanted}; a drafter must"):
        check_sizes("assistant_model", size, wanted)


# ---- Wrapped assistants ---------------------------------------------------------------------------------------------


def test_an_assistant_with_an_adapter(tiny: PreTrainedModel, tmp_path: Path) -> None:
    """As a module and from its folder, as in transformers' own assistance; the adapter is heard."""
    tiny_assistant = tiny_llama(seed=1, num_hidden_layers=1)
    tiny_assistant.save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    prompts = pad_left(random_rows([5, 9, 3]))
    expected = outputs(generate(tiny, prompts))
    bare = generate(tiny, prompts, "model", assistant_model=base).statistics.total
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    adapted = get_peft_model(base, config)
    adapted.save_pretrained(tmp_path / "adapter")
    counts = []
    for assistant in (adapted, str(tmp_path / "adapter")):
        for strategy, options in (("model", {}), ("tts", {"tts": {"drafter": "model"}})):
            result = generate(tiny, prompts, strategy, options, assistant_model=assistant)
            assert outputs(result) == expected and result.statistics.total.drafted > 0
            counts.append((result.statistics.total.accepted, result.statistics.total.drafted))
    assert len(set(counts)) == 1 and counts[0] != (bare.accepted, bare.drafted)
