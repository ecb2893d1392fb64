"""Families whose layers keep states of convolutions or scans: tokens, rounds, states, and what is refused."""

import gc
import math
from collections.abc import Sequence
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spec_trl import release
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.forwards.runner import EagerRunner
from spec_trl.generation.engine.kv import memory, row_memory
from spec_trl.generation.engine.kv.row_memory import RowMemory, RowNeeds, kv_bytes
from spec_trl.generation.engine.kv.states import States, state_bytes
from spec_trl.generation.engine.network import cpu_states, scans
from spec_trl.generation.engine.network.family import Family
from spec_trl.generation.engine.network.shadow import make_shadow
from spec_trl.generation.engine.requirements import check_model
from spec_trl.generation.planner.control import Chain
from spec_trl.native.native_code import compiler
from spec_trl.trainers.read_completions import read_completions
from tests.conftest import TRANSFORMERS, tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows, reference_outputs
from tests.generation.races import Knowing, Plans
from tests.tiny_families import make


if TRANSFORMERS < (5, 21):
    pytest.skip("before 5.21 mixers read their states elsewhere, and are refused", allow_module_level=True)

# One of each kind of scan and convolution, and of each way in. The first one's scan takes seconds in transformers.
FAMILIES = ["kimi_linear", "qwen3_5_text", "lfm2", "falcon_h1", "nemotron_h", "zamba2", "jamba", "mamba", "mamba2"]
ROWS = random_rows([5, 9, 1, 12, 7, 3])
PROMPTS = pad_left([*ROWS, ROWS[3]])  # a prompt of one token, and two copies
NEW = 16


class OneChain(Plans):
    """Rounds of one chain for each row: of the copy, of one who knows for some rows, and none."""

    several_chains = False

    def __init__(self) -> None:
        super().__init__(2, [[Chain(0, 4)], [], [Chain(1, 7)], [Chain(0, 2, (0, 2)), Chain(1, 3, (1,))], []])


@pytest.fixture
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps in C++ where there is a compiler, or families' functions."""
    if request.param == "torch":
        monkeypatch.setattr(cpu_states, "serves", lambda state: False)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make("qwen3_5_text")


@pytest.mark.parametrize("family", [*FAMILIES[1:], pytest.param(FAMILIES[0], marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "do_sample, steps", [(False, "compiled"), (True, "compiled"), (False, "torch")], indirect=["steps"]
)
@pytest.mark.usefixtures("steps")
def test_tokens(family: str, do_sample: bool) -> None:
    """Rows draft different numbers of tokens, of which some are accepted; they end, move and are filled again; rounds
    without drafts follow rounds with some."""
    network = make(family)
    options: dict[str, Any] = dict(config={"max_batch_size": 3}, max_new_tokens=NEW, do_sample=do_sample)
    plain = generate(network, PROMPTS, **options)
    if not do_sample:
        assert outputs(plain) == reference_outputs(network, PROMPTS, max_new_tokens=NEW)
    members = [SelfDrafter(network, kernel="reference"), Knowing(outputs(plain), 0)]
    control = OneChain()
    drafted = generate(network, PROMPTS, drafter=members, control=control, **options)
    assert outputs(drafted) == outputs(plain)
    torch.testing.assert_close(drafted.logprobs, plain.logprobs, rtol=1e-5, atol=1e-6)
    statistics = drafted.statistics
    assert statistics.drafter_failure is None and 0 < statistics.drafted_rounds < statistics.rounds
    assert all(0 < counts.accepted < counts.drafted for counts in statistics.per_drafter.values())


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("family", ["lfm2", "falcon_h1"])
def test_drafts_and_other_rows_change_no_bit(family: str) -> None:
    network = make(family).float()
    plain = generate(network, PROMPTS, max_new_tokens=NEW)
    drafted = generate(
        network, PROMPTS, drafter=Knowing(outputs(plain), 0), config={"draft_length": 3}, max_new_tokens=NEW
    )
    alone = generate(network, pad_left(ROWS[:1]), max_new_tokens=NEW)
    assert plain.statistics.exact is True and 0 < drafted.statistics.total.accepted < drafted.statistics.total.drafted
    assert torch.equal(drafted.logprobs, plain.logprobs) and torch.equal(alone.logprobs, plain.logprobs[:1])


def test_triton_computes_delta_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, verifications and commits, as on CUDA; the tokens are transformers'."""
    module = pytest.importorskip("spec_trl.generation.engine.cuda.kernels.delta_rule", reason="needs Triton")
    network, scan, written = make("qwen3_5_text"), module.delta_rule, set()

    def count(given: Any, state: Tensor, writes: bool) -> Any:
        written.add(writes)
        return scan(given, state, writes)

    monkeypatch.setattr(cpu_states, "serves", lambda state: False)
    monkeypatch.setattr(scans, "run_on", lambda device: True)
    monkeypatch.setattr(module, "delta_rule", count)
    options: dict[str, Any] = dict(config={"max_batch_size": 3}, max_new_tokens=6, do_sample=False)
    plain = outputs(generate(network, PROMPTS, **options))
    drafted = generate(network, PROMPTS, drafter=Knowing(plain, 0), **options)
    assert plain == outputs(drafted) == reference_outputs(network, PROMPTS, max_new_tokens=6)
    assert 0 < drafted.statistics.total.accepted < drafted.statistics.total.drafted and written == {True, False}


def test_fla_is_called_where_it_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule as step

    assert scans.is_slow(step) and not scans.is_slow(lambda query: query)
    (tmp_path / "fla.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert not scans.is_slow(step)


@pytest.mark.parametrize("strategy", ["self", "ngram", "history", "auto", "model", "best_of_n"])
def test_strategies(strategy: str, model: PreTrainedModel) -> None:
    expected = outputs(generate(model, PROMPTS, max_new_tokens=NEW))
    options: dict[str, Any] = {"assistant_model": tiny_llama(vocab_size=64)} if strategy == "model" else {}
    config = {"draft_length": 3, "max_batch_size": 3}
    if strategy == "best_of_n":
        config["specactor"] = {"race": False}
    for _ in range(2):  # the second call finds what the first one left
        result = generate(model, PROMPTS, strategy, config, max_new_tokens=NEW, **options)
        assert outputs(result) == expected and result.statistics.drafter_failure is None
    assert result.statistics.total.drafted > 0


def test_a_small_model_runs_ahead(model: PreTrainedModel) -> None:
    expected = outputs(generate(model, PROMPTS, max_new_tokens=NEW))
    options: dict[str, Any] = {"assistant_model": tiny_llama(vocab_size=64), "max_new_tokens": NEW}
    config = {"draft_length": 3, "specactor": {"decoupled_execution": "always"}}
    result = generate(model, PROMPTS, "model", config, **options)
    assert outputs(result) == expected and result.statistics.drafter_failure is None
    assert result.statistics.total.drafted > 0


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_prompts_of_one_token_are_read_as_prompts(family: str) -> None:
    """Nemotron-H bounds time steps in prompts, and not in steps."""
    network = make(family)
    for module in network.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (1.0, math.inf)
    short = pad_left(random_rows([1, 1, 1]))
    result = generate(network, short, config={"max_batch_size": 2}, do_sample=False, max_new_tokens=NEW)
    assert outputs(result) == reference_outputs(network, short, max_new_tokens=NEW)


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_preempted_rows_are_read_again(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt as a prompt, and what was generated token by token, as steps did it."""
    network = make(family)
    plain = generate(network, PROMPTS, max_new_tokens=NEW)
    calls = iter([False] * 4 + [True] * 3)
    monkeypatch.setattr(RowMemory, "leaving", lambda *_: [1] if next(calls, False) else [])
    result = generate(network, PROMPTS, max_new_tokens=NEW)
    assert outputs(result) == outputs(plain) and result.statistics.preemptions
    torch.testing.assert_close(result.logprobs, plain.logprobs, rtol=1e-5, atol=1e-5)


def test_completions_are_read_in_pieces(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece goes on from the states after the one before."""
    rows = random_rows([5, 9, 9])
    done = generate(model, pad_left(rows), max_new_tokens=NEW)
    monkeypatch.setattr("spec_trl.trainers.read_completions._LOGITS", 4 * 3 * 64)  # four tokens of three rows
    cache = Family.of(model).cache.for_network(model, 3, 9 + NEW)
    runner = EagerRunner(make_shadow(model), cache)
    found, _ = read_completions(runner, rows, torch.tensor(outputs(done)), [], lambda scores, *_: scores)
    assert runner.forwards == 1 + 4  # of the prompts, and of four pieces
    torch.testing.assert_close(found, done.logprobs, rtol=1e-5, atol=1e-5)


# ---- states -------------------------------------------------------------------------------------------------------


def states_of(cache: States) -> list[Tensor]:
    return [state.clone() for state in cache.states]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("steps", ["compiled", "torch"], indirect=True)
@pytest.mark.usefixtures("steps")
@torch.no_grad()
def test_a_forward_holds_and_a_commit_replays(family: str) -> None:
    shadow = make_shadow(make(family))
    tokens = torch.stack(random_rows([9, 9]))  # [2, 9]

    def fed(text: Sequence[int]) -> tuple[States, EagerRunner]:
        cache = Family.of(shadow).cache.for_network(shadow, 2, 16)
        assert isinstance(cache, States)
        runner = EagerRunner(shadow, cache)
        cache.feeds([4, 4])
        runner.prefill(tokens[:, :4], torch.arange(4).expand(2, -1), 4)
        for at in range(4, 4 + max(text)):  # token by token, as decoding does
            rows = [row for row, count in enumerate(text) if at - 4 < count]
            for row in rows:
                runner.forward(tokens[row : row + 1, at : at + 1], torch.tensor([[at]]), at + 1, row, is_step=True)
        return cache, runner

    cache, runner = fed([0, 0])
    before = states_of(cache)
    runner.forward(tokens[:, 4:8], torch.arange(4, 8).expand(2, -1), 8)
    assert all(map(torch.equal, states_of(cache), before))  # none is written by a forward that verifies
    cache.commit([3, 1])
    expected, _ = fed([3, 1])
    for state, wanted in zip(states_of(cache), states_of(expected), strict=True):
        torch.testing.assert_close(state, wanted, rtol=0, atol=1e-12 if state.dtype == torch.float64 else 1e-6)
    assert not all(map(torch.equal, states_of(cache), before))
    cache.forget([0, 1])
    assert not any(state.any() for state in states_of(cache))


@torch.no_grad()
def test_drafts_begin_at_the_committed_states_and_change_states_of_their_own(model: PreTrainedModel) -> None:
    shadow = make_shadow(model)
    cache = Family.of(shadow).cache.for_network(shadow, 2, 16)
    cache.feeds([4, 4])
    EagerRunner(shadow, cache).prefill(torch.stack(random_rows([4, 4])), torch.arange(4).expand(2, -1), 4)
    draft = cache.for_drafts()
    assert isinstance(cache, States) and isinstance(draft, States)
    committed, after = states_of(cache), list[Tensor]()
    for at in (4, 5, 4, 5):  # two rounds of two steps
        if at == 4:
            draft.begin_drafts(2)
        EagerRunner(shadow, draft).forward(torch.tensor([[5], [6]]), torch.tensor([[at], [at]]), at + 1)
        after += states_of(draft)
        assert not any(map(torch.equal, states_of(draft), committed))
        assert all(map(torch.equal, states_of(cache), committed))
    first, second = after[: len(after) // 2], after[len(after) // 2 :]
    assert all(map(torch.equal, first, second))
    cache.feeds(is_step=True)
    EagerRunner(shadow, cache).forward(torch.tensor([[5], [6]]), torch.tensor([[4], [4]]), 5, is_step=True)
    assert all(map(torch.equal, first, states_of(cache)))


def test_a_round_takes_one_forward_and_one_commit(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it reads each state twice and writes it once: a verification reads it, and a commit replays it."""
    held, forwards, reads, writes = [], [], [], []
    commit, forward, hold = States.commit, EagerRunner.forward, States.hold

    def count(cache: States, lengths: Sequence[int]) -> None:
        held.append(bool(cache.held))
        commit(cache, lengths)

    def read(cache: States, key: object, replay: Any) -> None:
        reads.append(key)
        hold(cache, key, lambda taken: writes.append(key) or replay(taken))  # type: ignore[func-returns-value]

    def run(runner: EagerRunner, *args: Any, **kwargs: Any) -> Tensor:
        if type(runner.cache) is States:
            forwards.append(runner)
        return forward(runner, *args, **kwargs)

    monkeypatch.setattr(States, "commit", count)
    monkeypatch.setattr(States, "hold", read)
    monkeypatch.setattr(EagerRunner, "forward", run)
    statistics = generate(model, PROMPTS, "self", {"draft_length": 3}, max_new_tokens=NEW).statistics
    assert sum(held) == statistics.drafted_rounds > 0 and len(forwards) == statistics.rounds
    kept = 2 * model.config.layer_types.count("linear_attention")  # a window and a recurrent state
    assert reads == writes and len(reads) == kept * statistics.drafted_rounds


def test_the_copy_packs_mixers_but_for_what_sets_decay(model: PreTrainedModel) -> None:
    layers = SelfDrafter(model, kernel="reference").quantized.layers
    names = {name.rpartition(".")[2] for name in layers if "linear_attn" in name}
    assert names == {"in_proj_qkv", "in_proj_z", "out_proj"}


def test_memory_counts_layers_that_attend(model: PreTrainedModel) -> None:
    config = model.config
    attending = config.layer_types.count("full_attention")
    assert kv_bytes(model) == 2 * attending * config.num_key_value_heads * config.head_dim * 8
    assert kv_bytes(make("mamba")) == 0


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_memory_counts_states(family: str) -> None:
    network = make(family)
    shadow = make_shadow(network)
    cache = Family.of(shadow).cache.for_network(shadow, 1, 16)
    assert isinstance(cache, States)
    cache.feeds([4])
    EagerRunner(shadow, cache).prefill(torch.tensor([[5, 6, 7, 8]]), torch.arange(4)[None], 4)
    assert state_bytes(network) == state_bytes(shadow) == cache.fixed_bytes > 0


@pytest.mark.parametrize(("strategy", "sets"), [("none", 1), ("ngram", 1), ("self", 2), ("model", 3)])
def test_what_a_call_takes_is_what_it_counts_with(strategy: str, sets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A set of states for the text, one for the copy's drafts, and a small model's two. Mamba has no K/V."""
    network, counted = make("mamba"), []
    of = RowNeeds.of

    def watched(*arguments: Any, **options: Any) -> RowNeeds:
        counted.append(of(*arguments, **options))
        return counted[-1]

    monkeypatch.setattr(RowNeeds, "of", watched)
    options: dict[str, Any] = {"assistant_model": make("mamba")} if strategy == "model" else {}
    statistics = generate(network, PROMPTS, strategy, {"max_batch_size": 3}, **options).statistics
    assert counted[0].states == sets * state_bytes(network) and counted[0].column == 0
    assert statistics.cache_bytes == 3 * counted[0].states and (strategy == "none" or statistics.total.drafted > 0)


def test_states_that_do_not_fit_are_refused(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row must fit where memory is taken as rows come, and all where it is taken at once."""
    monkeypatch.setattr(memory, "LITTLE", 0)
    monkeypatch.setattr(memory, "free_memory", lambda _: state_bytes(model) - 1)
    with pytest.raises(ValueError, match="states of 1 of 7 rows would not fit.*max_batch_size"):
        generate(model, PROMPTS)
    monkeypatch.setattr(memory, "free_memory", lambda _: 3 * state_bytes(model) - 1)
    monkeypatch.setattr(row_memory, "takes_memory_late", lambda _: False)
    with pytest.raises(ValueError, match="states of 3 of 3 rows would not fit"):
        generate(model, PROMPTS, config={"max_batch_size": 3})


def test_copies_of_a_prompt_are_read_once(model: PreTrainedModel) -> None:
    """Those that come together: the states of one that is in flight have gone on from the prompt."""
    network = make("qwen3_5_text")
    rows = [row for row in random_rows([9, 20]) for _ in range(4)]
    widths: list[tuple[int, ...]] = []
    layer = network.model.layers[0]
    layer.register_forward_pre_hook(lambda _, inputs: widths.append(tuple(inputs[0].shape[:2])))
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}
    found = outputs(generate(network, pad_left(rows), **options))
    assert [shape for shape in widths if shape[1] > 1] == [(1, 9), (1, 20)]
    assert found == reference_outputs(network, pad_left(rows), max_new_tokens=NEW)


def test_nothing_of_a_call_outlives_it() -> None:
    network = make("qwen3_5_text")
    generate(network, PROMPTS, max_new_tokens=2)
    release(network)
    left = ref(network)
    del network
    gc.collect()
    assert left() is None and not any(isinstance(each, States) for each in gc.get_objects())


# ---- refusals -----------------------------------------------------------------------------------------------------


def test_attention_without_positions_has_no_last_one() -> None:
    network, prompts = make("nemotron_h"), pad_left(random_rows([5, 60]))  # of a context of 64
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8}
    with pytest.warns(UserWarning, match="beyond the model's context of 64"):
        found = outputs(generate(network, prompts, "ngram", **options))
    assert found == reference_outputs(network, prompts, max_new_tokens=8)


@pytest.mark.parametrize("family", ["zamba", "minimax", "recurrent_gemma", "zaya"])
def test_states_in_ways_of_their_own_are_refused(family: str) -> None:
    with pytest.raises(ValueError, match=f"'{family}'.*(head by head|not known here|ways of their own)"):
        check_model(make(family))
