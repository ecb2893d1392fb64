"""Captured forwards: buckets, static buffers, lifetimes and failures, with a tape in the place of CUDA graphs."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

import spec_trl
from spec_trl.generation.drafters.small_model import SmallModelDrafter
from spec_trl.generation.engine.cuda import graph_runner
from spec_trl.generation.engine.cuda.graph_capture import Outputs, Recording, cache_rows, column_bucket, row_bucket
from spec_trl.generation.engine.cuda.graph_drafts import CapturedLoop
from spec_trl.generation.engine.forwards import runner
from spec_trl.generation.engine.network import attention, fused_layers
from spec_trl.generation.engine.sampling import processors
from spec_trl.generation.planner.control import Chain
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.races import Plans, random_plans
from tests.tiny_families import make


PROMPTS = pad_left(random_rows([5, 9, 1, 12, 7, 7, 3]))
TWENTY = pad_left(random_rows([3 + row % 7 for row in range(20)]))  # which run through 24, 16 and 8
EOS = dict(eos_token_id=[1, 2, 3, 4])


def eager(
    model: nn.Module,
    strategy: str = "none",
    config: dict[str, Any] | None = None,
    prompts: dict[str, Tensor] = PROMPTS,
    **options: Any,
) -> Any:
    return generate(
        model, prompts, strategy, {"runner": "eager"} | (config or {}), **{"max_new_tokens": 28, **options}
    )


def graph(model: nn.Module, strategy: str = "none", config: dict[str, Any] | None = None, **options: Any) -> Any:
    return eager(model, strategy, {"runner": "graph"} | (config or {}), **options)


@pytest.fixture
def unlike(tape, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Recording], Callable[[], None]]], None]:
    """Makes another replay of each recording from now on."""

    def install(replay_of: Callable[[Recording], Callable[[], None]]) -> None:
        record = tape.record

        def watch(forward: Callable[[], Outputs], apart: bool = False) -> Recording:
            recording = record(forward, apart)
            return recording._replace(replay=replay_of(recording))

        monkeypatch.setattr(tape, "record", watch)

    return install


# ---- what they compute ----------------------------------------------------------------------------------------------


def test_drafts_are_those_of_eager_forwards(tiny, drafters, tape) -> None:
    """A drafter may be wrong without changing a token: its acceptance tells whether it reads what it should. Rounds
    with one chain per row are replayed, races run eagerly, and all drafters find their own runner again."""
    names = "self", "model", "eagle3", "tts model rollout"
    expected = eager(tiny, drafter=drafters(*names), control=random_plans(4, 5)).statistics
    members = drafters(*names)
    for _ in range(2):  # captured, then kept
        result = graph(tiny, drafter=members, control=random_plans(4, 5))
        assert outputs(result) == outputs(eager(tiny))
        assert result.statistics.per_drafter == expected.per_drafter
    assert tape.replayed > 15 and expected.per_drafter["self"].accepted > 0
    spec_trl.release(tiny)


def test_buckets(tape) -> None:
    assert [cache_rows(rows) for rows in (1, 2, 3, 5, 8, 9, 16, 17, 63, 64, 65, 97)] == [
        1, 2, 4, 8, 8, 16, 16, 24, 64, 64, 96, 128,
    ]  # fmt: skip
    assert [row_bucket(rows, 128) for rows in (1, 8, 9, 17, 33, 64, 65, 97)] == [8, 8, 16, 32, 64, 64, 96, 128]
    assert [row_bucket(rows, 40) for rows in (1, 32, 33)] == [8, 32, 40] and row_bucket(1, 1) == 1
    assert [column_bucket(columns, 1280) for columns in (1, 256, 257, 512, 1025)] == [256, 256, 512, 512, 1280]
    model = tiny_llama(max_position_embeddings=600, num_hidden_layers=1)
    assert outputs(graph(model, max_new_tokens=258)) == outputs(eager(model, max_new_tokens=258))
    assert tape.recorded == 2  # up to 256 columns and up to 512


def test_a_seed_gives_the_same_bits_in_every_call(tape) -> None:
    """The first call runs eagerly what the second one replays: over as many rows and columns, or they would round
    otherwise, and a near tie would become another token."""
    model = tiny_llama(num_hidden_layers=1).float()
    three = pad_left(random_rows([5, 9, 2]))  # in a bucket of 4
    first, second = (generate(model, three, config={"runner": "graph"}, max_new_tokens=16) for _ in range(2))
    assert torch.equal(first.sequences, second.sequences) and torch.equal(first.logprobs, second.logprobs)
    assert tape.replayed > 8


# ---- lifetime -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verification", ["exact", "rejection"])
def test_kept_between_calls_while_weights_change_in_place(fresh, tape, verification: str) -> None:
    """Loops of drafts, or their single steps."""
    config = {"verification": verification, "draft_length": 3}
    statistics = graph(fresh, "self", config).statistics
    if verification == "rejection":
        logits = 8 * 1 * 64 * 8, 8 * 4 * 64 * 8  # of 8 rows, and one token or four; smaller ones lie there too
        assert (statistics.graphs, statistics.graph_bytes) == (tape.recorded, tape.bytes() + sum(logits))
    for seed in range(2):
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in fresh.parameters():
                parameter += 0.02 * torch.randn_like(parameter)
        expected, replayed = eager(fresh, "self", config), tape.replayed
        result = graph(fresh, "self", config)
        assert outputs(result) == outputs(expected) and tape.replayed > replayed + 10
        # The drafter's packed weights were refreshed under the captured forward.
        assert result.statistics.total.accepted == expected.statistics.total.accepted > 0


CHANGES: dict[str, Callable[[Any], Any]] = {
    "weight": lambda layer: setattr(layer.mlp.up_proj, "weight", nn.Parameter(layer.mlp.up_proj.weight * 0.5)),
    "hook": lambda layer: layer.mlp.register_forward_hook(lambda module, args, output: output * 0.25),
    "module": lambda layer: setattr(layer.mlp, "act_fn", nn.ReLU()),
    "attribute": lambda layer: setattr(layer.self_attn, "scaling", 2.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_the_model_is_seen(fresh, tape, change: Callable[[nn.Module], Any]) -> None:
    before = outputs(graph(fresh, max_new_tokens=16))
    change(fresh.model.layers[0])
    after = outputs(graph(fresh, max_new_tokens=16))
    assert after == outputs(eager(fresh, max_new_tokens=16)) != before


def test_more_rows_or_columns_get_a_new_cache(fresh, tape) -> None:
    graph(fresh, config={"max_batch_size": 2})
    recorded = tape.recorded
    graph(fresh, config={"max_batch_size": 2}, max_new_tokens=30)
    assert tape.recorded == recorded
    assert outputs(graph(fresh)) == outputs(eager(fresh))
    assert tape.recorded > recorded


def runners() -> int:
    gc.collect()
    return sum(isinstance(thing, graph_runner.GraphRunner) for thing in gc.get_objects())


def test_memory_is_given_back(fresh, tape) -> None:
    graph(fresh, "self", {"keep_graphs": False})
    assert runners() == 0
    model = tiny_llama()
    graph(model, "self", {"keep_graphs": "auto"})  # outside of a trainer as True
    assert runners() == 2
    del model
    assert runners() == 0


def test_an_assistants_forwards_serve_the_next_call(fresh, tiny_assistant, tape) -> None:
    """Drafters that come and go do not pile up, nor does what was captured for them."""
    first, second = (graph(fresh, "model", assistant_model=tiny_assistant, max_new_tokens=14) for _ in range(2))
    assert first.statistics.graphs <= tape.recorded < 2 * first.statistics.graphs
    assert outputs(first) == outputs(second) and runners() == 2
    others = [tiny_llama(seed) for seed in (1, 2)]
    graphs = [graph(fresh, "model", assistant_model=one, max_new_tokens=14).statistics.graphs for one in others]
    assert tape.recorded > graphs[1] and graphs[1] <= graphs[0] + 2 and runners() == 2


def test_adapters_that_are_scaled(tape) -> None:
    """`scaling` is a dict of the adapter's layers; `release` also finds a wrapped model."""
    torch.manual_seed(0)
    model = get_peft_model(tiny_llama(), LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear"))
    base = model.get_base_model()
    found = [outputs(graph(base))]
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.scale_layer(4)
    found.append(outputs(graph(base)))
    assert found[1] == outputs(eager(base)) != found[0] and runners() == 1
    spec_trl.release(model)
    assert runners() == 0


def test_wide_adapters_on_a_narrow_policy_under_autocast(tape) -> None:
    """Autocast keeps its casts of fp32 weights; a captured forward that read those would never see them change."""
    model = tiny_llama().bfloat16()
    model.lm_head.float()  # as adapters are
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        first, recorded = outputs(graph(model)), tape.recorded
    with torch.no_grad():
        model.lm_head.weight.neg_()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        second, expected = outputs(graph(model)), outputs(eager(model))
    assert tape.recorded == recorded > 0 and second == expected != first


def test_a_call_that_fails_leaves_no_nan(fresh, tape) -> None:
    """NaN that a broken forward left in the cache would outlive the repair of the weights."""
    expected = outputs(graph(fresh))
    weight = fresh.model.layers[0].self_attn.v_proj.weight
    good = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError):
        graph(fresh)
    with torch.no_grad():
        weight.copy_(good)
    assert outputs(graph(fresh)) == expected


def test_an_assistant_whose_weights_move(fresh, tape) -> None:
    assistant = tiny_llama(num_hidden_layers=1)  # the target's twin
    drafter = SmallModelDrafter(assistant, fresh)
    assert graph(fresh, drafter=drafter).statistics.total.acceptance_rate == 1
    for parameter in assistant.parameters():  # as `.to()` does it
        parameter.data = parameter.data * -1
    bad = graph(fresh, drafter=drafter).statistics.total
    assert bad == eager(fresh, drafter=SmallModelDrafter(assistant, fresh)).statistics.total
    assert bad.acceptance_rate < 1


def test_rounds_that_prepare_are_not_typical(fresh, tape) -> None:
    """Those in which modules ran: on the way to a capture, or for one."""
    for config, is_typical in (({"runner": "graph"}, [False] * 3), ({"runner": "eager"}, [True] * 3)):
        control = Plans(1, [[Chain(0, 3)]])
        graph(fresh, config=config, drafter=SmallModelDrafter(tiny_llama(1), fresh), control=control)
        typical = [each["is_typical"] for each in control.rounds]
        assert typical[:3] == is_typical and sum(typical) > len(typical) // 2


def test_inference_mode_and_training(fresh, tape) -> None:
    def gradient() -> Tensor:
        fresh.zero_grad()
        fresh(PROMPTS["input_ids"], labels=PROMPTS["input_ids"]).loss.backward()
        return fresh.model.layers[0].mlp.up_proj.weight.grad.clone()

    fresh.train()
    before, expected = gradient(), outputs(eager(fresh))
    with torch.inference_mode():
        assert outputs(graph(fresh)) == expected
    assert outputs(graph(fresh, "self")) == expected
    replayed = tape.replayed
    assert outputs(graph(fresh, config={"runner": "compiled", "max_batch_size": 3})) == expected
    assert tape.replayed > replayed + 8 and torch.equal(gradient(), before) and fresh.training


@pytest.mark.slow
def test_through_the_kernels(tape, monkeypatch) -> None:
    """What a GPU runs, as far as a CPU can: captured forwards of fused layers with span attention, drawing in one
    pass, and draft loops of both.

    The kernels run under Triton's interpreter here; float32, so a near tie could differ, and none does.
    """
    pytest.importorskip("triton")
    model = tiny_llama(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1).float()
    prompts = pad_left(random_rows([66, 3]))  # of two pages and one
    options = dict(max_new_tokens=8, temperature=0.7, top_k=20, top_p=0.9)
    expected = outputs(generate(model, prompts, "none", {"runner": "eager"}, **options))
    monkeypatch.setattr(runner, "reads_spans", lambda network: True)
    monkeypatch.setattr(fused_layers, "run_on", lambda device: True)
    monkeypatch.setattr(attention, "run_on", lambda device: True)
    monkeypatch.setattr(processors, "_is_fused", lambda logits: True)
    monkeypatch.setattr(graph_runner, "CAPTURE_AFTER", 1)
    monkeypatch.setattr(graph_runner, "WARM_UPS", 0)
    replay, loops = CapturedLoop.replay, []
    monkeypatch.setattr(CapturedLoop, "replay", lambda loop, draft: loops.append(draft) or replay(loop, draft))
    for strategy in ("none", "self"):
        config = {"runner": "graph", "draft_length": 2, "draft_kernel": "torch_int4"}
        result = generate(model, prompts, strategy, config, **options)
        assert outputs(result) == expected and result.statistics.drafter_failure is None
    assert tape.recorded >= 3 and tape.replayed > 4 and loops


# ---- what fails -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "kinds"), [("none", 1), ("self", 2)])
def test_above_the_memory_bound_larger_ones_serve(fresh, tape, strategy: str, kinds: int) -> None:
    """Rows finish, and the smaller batch runs padded to the bucket of 24 that was captured: forward and loop."""
    bound = {"max_graph_memory": (kinds - 0.5) / 2**10}  # MiB: reached by the first capture of each kind
    given = dict(prompts=TWENTY, eos_token_id=[1, 2], max_new_tokens=120)
    with pytest.warns(UserWarning, match=r"may take, 0\.00.*Raise max_graph_memory") as seen:
        result = graph(fresh, strategy, bound, **given)
    expected = eager(fresh, strategy, **given)
    assert len(seen) == 1 and tape.recorded == result.statistics.graphs == kinds
    assert outputs(result) == outputs(expected) == outputs(eager(fresh, **given))
    assert result.statistics.total == expected.statistics.total
    assert tape.replayed > kinds * (result.statistics.rounds - 6)  # the first three, and the last, with fewer drafts


def test_a_model_that_waits_for_the_device_runs_eagerly(fresh, tape) -> None:
    class Waiting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float(x.abs().max() >= 0)

    fresh.model.layers[0].mlp = nn.Sequential(fresh.model.layers[0].mlp, Waiting())
    with pytest.warns(UserWarning, match="could not be captured.*waits for the device") as seen:
        result = graph(fresh)
    assert len(seen) == 1 and outputs(result) == outputs(eager(fresh)) and tape.replayed == 0


@pytest.mark.parametrize("does_nothing", [False, True])
def test_a_capture_that_computes_something_else_is_not_used(fresh, unlike, does_nothing: bool) -> None:
    """A capture on another device than the model's records nothing; its buffers hold the right answer all the same."""
    unlike(lambda recording: lambda: None if does_nothing else (recording.replay(), recording.logits.mul_(1.5)))
    with pytest.warns(UserWarning, match="its logits differ from an eager forward's"):
        result = graph(fresh)
    assert outputs(result) == outputs(eager(fresh))


def no_compiler(*_: Any) -> None:
    raise RuntimeError("no compiler here")


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_an_attention_kernel_that_fails_gives_way_to_masks(family: str, tape, monkeypatch) -> None:
    """At once, in the first prompt, and what is captured then attends under masks too. A prompt that is read again
    finds the states of its rows as they were."""
    kernels = pytest.importorskip("spec_trl.generation.engine.cuda.kernels.ragged_attention", exc_type=ImportError)
    model = tiny_llama().float() if family == "llama" else make(family).float()
    expected = outputs(eager(model))
    monkeypatch.setattr(runner, "reads_spans", lambda network: True)
    monkeypatch.setattr(attention, "run_on", lambda device: True)
    monkeypatch.setattr(kernels, "ragged_decode_attention", no_compiler)
    with pytest.warns(UserWarning, match="attention kernel failed.*under masks.*no compiler here") as seen:
        result = graph(model)
    assert len(seen) == 1 and outputs(result) == expected and tape.replayed > 15


def test_logits_of_all_shapes_share_memory(fresh, unlike) -> None:
    """Of what was captured since the largest; and nobody reads those of a forward after the next one."""
    recordings: list[Recording] = []

    def spoil(recording: Recording) -> Callable[[], None]:
        recordings.append(recording)

        def replay() -> None:
            recordings[0].logits.untyped_storage().fill_(255)  # NaN
            recordings[-1].logits.untyped_storage().fill_(255)
            recording.replay()

        return replay

    unlike(spoil)
    config = {"draft_length": 2, "verification": "rejection"}
    given = dict(prompts=TWENTY, eos_token_id=1)
    expected, result = eager(fresh, "self", config, **given), graph(fresh, "self", config, **given)
    assert outputs(result) == outputs(expected) and result.statistics.total == expected.statistics.total
    places = [recording.logits.data_ptr() for recording in recordings]
    assert len(set(places)) == 2 < len(places)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_shape_without_memory_spoils_no_other(fresh, tape, monkeypatch, is_first: bool) -> None:
    """The first shape of all, or one after others; the next call captures it."""
    config = {} if is_first else {"draft_length": 3}
    if not is_first:
        graph(fresh, "self")
    record, replayed = tape.record, tape.replayed

    def no_memory(forward: Callable[[], Outputs], apart: bool = False) -> Recording:
        if is_first:
            monkeypatch.setattr(tape, "record", record)
        raise torch.OutOfMemoryError("not now")

    monkeypatch.setattr(tape, "record", no_memory)
    with pytest.warns(UserWarning, match=r"could not be captured and (runs|goes) .* for \d+ rows x") as seen:
        result = graph(fresh, "self", config, prompts=TWENTY, **EOS)
    assert len(seen) == len({str(warning.message) for warning in seen})  # once for each shape
    assert outputs(result) == outputs(eager(fresh, prompts=TWENTY, **EOS)) and (tape.replayed > replayed) == is_first
    monkeypatch.setattr(tape, "record", record)
    replayed = tape.replayed
    assert outputs(graph(fresh, "self")) == outputs(eager(fresh)) and tape.replayed > replayed + 8


@pytest.mark.parametrize(
    ("mode", "said"), [("compiled", "goes on without being compiled"), ("auto", "could not be compiled")]
)
def test_what_does_not_compile_is_captured_as_it_is(fresh, tape, monkeypatch, mode: str, said: str) -> None:
    monkeypatch.setattr(graph_runner, "COMPILE_AFTER", 10)
    monkeypatch.setattr(graph_runner, "compiled_twin", no_compiler)
    with pytest.warns(UserWarning, match=f"{said}.*no compiler here") as seen:
        result = graph(fresh, config={"runner": mode})
    assert len(seen) == 1 and outputs(result) == outputs(eager(fresh)) and tape.replayed > 15


@pytest.mark.parametrize("compiled_is_faster", [True, False])
def test_auto_keeps_what_measures_faster(fresh, tape, unlike, monkeypatch, compiled_is_faster: bool) -> None:
    monkeypatch.setattr(graph_runner, "COMPILE_AFTER", 10)
    times = iter([1.0, 2.0] if compiled_is_faster else [2.0, 1.0])  # the compiled one is timed first
    monkeypatch.setattr(tape, "seconds", lambda replay: next(times))
    replays: list[int] = []

    def counted(recording: Recording) -> Callable[[], None]:
        own = len(replays)
        replays.append(0)

        def replay() -> None:
            replays[own] += 1
            recording.replay()

        return replay

    unlike(counted)
    assert outputs(graph(fresh, config={"runner": "auto"})) == outputs(eager(fresh))
    plain, compiled = replays
    chosen, other = (compiled, plain) if compiled_is_faster else (plain, compiled)
    assert chosen > 12 and other <= 13


def test_a_compiled_trial_writes_what_the_call_writes(fresh, tape, monkeypatch) -> None:
    """Rows have moved since the shape ran last, and a self-drafter's old K/V could land on the target's columns."""
    monkeypatch.setattr(graph_runner, "COMPILE_AFTER", 4)
    result, expected = graph(fresh, "self", {"runner": "auto", "draft_length": 3}, **EOS), eager(fresh, **EOS)
    assert outputs(result) == outputs(expected) and result.statistics.drafter_failure is None
    torch.testing.assert_close(result.logprobs, expected.logprobs, rtol=0, atol=1e-6)
