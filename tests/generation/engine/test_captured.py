"""Captured forwards: the buckets, static buffers and lifetimes, with a tape in the place of CUDA graphs.

On a GPU the same tests run with CUDA graphs (`recorder` below).
"""

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

import spec_trl
from spec_trl.generation import kept
from spec_trl.generation.drafters.small_model import SmallModelDrafter
from spec_trl.generation.engine import captured, processors, rollout, runner
from spec_trl.generation.engine.captured import column_bucket, row_bucket
from spec_trl.scheduling.control import AlwaysSpeculate, Control, NeverSpeculate
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows


PROMPTS = pad_left(random_rows([5, 9, 1, 12, 7, 7, 3]))
LONG = dict(max_new_tokens=48)


def eager(model: nn.Module, strategy: str = "none", config: dict[str, Any] | None = None, **options: Any) -> Any:
    return generate(model, PROMPTS, strategy, {"runner": "eager"} | (config or {}), **(LONG | options))


def graph(model: nn.Module, strategy: str = "none", config: dict[str, Any] | None = None, **options: Any) -> Any:
    return generate(model, PROMPTS, strategy, {"runner": "graph"} | (config or {}), **(LONG | options))


# ---- identity -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("runner", "strategy", "options"),
    [
        *itertools.product(["graph"], ["none", "self", "model", "history"], [{}, {"temperature": 0.7, "top_k": 20}]),
        ("graph", "self", {"do_sample": False}),
        *itertools.product(["compiled"], ["none", "self"], [{}]),
    ],
)
def test_captured_forwards_change_no_token(fresh, tiny_assistant, tape, runner, strategy, options) -> None:
    options = options | ({"assistant_model": tiny_assistant} if strategy == "model" else {})
    result = generate(fresh, PROMPTS, strategy, {"runner": runner, "draft_length": 3}, **(LONG | options))
    assert outputs(result) == outputs(eager(fresh, **{k: v for k, v in options.items() if k != "assistant_model"}))
    assert tape.replayed > 20
    assert result.statistics.graphs == tape.recorded and result.statistics.graph_bytes == tape.bytes()


@pytest.mark.parametrize("strategy", ["none", "self"])
def test_rows_that_pad_a_bucket_disturb_nobody(fresh, tape, strategy) -> None:
    """3 rows in a bucket of 4, with refill: what the fourth writes must be gone when a prompt moves in."""
    result = graph(fresh, strategy, {"max_batch_size": 3}, eos_token_id=[1, 2])
    assert outputs(result) == outputs(eager(fresh, eos_token_id=[1, 2]))
    assert tape.replayed > 20


def test_drafts_are_those_of_eager_forwards(fresh, tape) -> None:
    """A drafter may be wrong without changing a token: its acceptance tells whether it reads what it should."""
    for verification in ("exact", "rejection"):
        config = {"verification": verification, "draft_length": 4}
        expected, result = eager(fresh, "self", config), graph(fresh, "self", config)
        assert outputs(result) == outputs(expected)
        assert result.statistics.total.accepted == expected.statistics.total.accepted > 0


def test_output_longer_than_a_column_bucket(tape) -> None:
    model = tiny_llama(max_position_embeddings=600)
    options = dict(max_new_tokens=300)
    assert outputs(graph(model, **options)) == outputs(eager(model, **options))
    assert tape.recorded == 2  # up to 256 columns and up to 512


def test_buckets() -> None:
    assert [row_bucket(rows) for rows in (1, 2, 3, 5, 8, 9, 16, 17, 63, 64, 65, 97)] == [
        1, 2, 4, 8, 8, 16, 16, 24, 64, 64, 96, 128,
    ]  # fmt: skip
    assert [column_bucket(columns, 1280) for columns in (1, 256, 257, 512, 1025)] == [256, 256, 512, 512, 1280]


def test_a_seed_gives_the_same_bits_in_every_call(tape) -> None:
    """The first call runs eagerly what the second one replays: over as many rows and columns, or they would round
    otherwise, and a near tie would become another token."""
    model = tiny_llama(num_hidden_layers=1).float()
    three = pad_left(random_rows([5, 9, 2]))  # in a bucket of 4
    first, second = (generate(model, three, config={"runner": "graph"}, max_new_tokens=16) for _ in range(2))
    assert torch.equal(first.sequences, second.sequences) and torch.equal(first.logprobs, second.logprobs)
    assert tape.replayed > 8


# ---- lifetime -------------------------------------------------------------------------------------------------------


def test_kept_between_calls_while_weights_change_in_place(fresh, tape) -> None:
    def captured_ids() -> set[int]:
        runner = kept.look(fresh, "runner")
        return {id(graph) for each in (runner, runner._beside[0].runner) for graph in each._graphs.values()}

    graph(fresh, "self")
    before_change = captured_ids()
    assert len(before_change) == tape.recorded >= 2  # draft and verify
    for seed in range(2):
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in fresh.parameters():
                parameter += 0.02 * torch.randn_like(parameter)
        before = outputs(eager(fresh))
        result = graph(fresh, "self")
        assert outputs(result) == before
        # The drafter's packed weights were refreshed under the captured forward.
        assert result.statistics.total.accepted == eager(fresh, "self").statistics.total.accepted
    assert captured_ids() >= before_change


def _replace_a_weight(model: nn.Module) -> None:
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(model.model.layers[0].mlp.up_proj.weight * 0.5)


def _hook_the_head(model: nn.Module) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: output * 0.25)


def _replace_a_module(model: nn.Module) -> None:
    model.model.layers[1].mlp.act_fn = nn.ReLU()


def _set_an_attribute(model: nn.Module) -> None:
    model.model.layers[0].self_attn.scaling *= 2


def _change_the_config(model: nn.Module) -> None:
    model.config.rms_norm_eps = 1.0
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1.0


@pytest.mark.parametrize(
    "change", [_replace_a_weight, _hook_the_head, _replace_a_module, _set_an_attribute, _change_the_config]
)
def test_a_change_of_the_model_is_seen(fresh, tape, change: Callable[[nn.Module], None]) -> None:
    before = outputs(graph(fresh))
    change(fresh)
    after = outputs(graph(fresh))
    assert after == outputs(eager(fresh)) != before


def test_more_rows_or_columns_get_a_new_cache(fresh, tape) -> None:
    graph(fresh, config={"max_batch_size": 2})
    recorded = tape.recorded
    graph(fresh, config={"max_batch_size": 2}, max_new_tokens=30)
    assert tape.recorded == recorded
    assert outputs(graph(fresh)) == outputs(eager(fresh))
    assert tape.recorded > recorded


def test_memory_is_given_back(fresh, tape) -> None:
    def runners() -> int:
        gc.collect()
        return sum(isinstance(thing, captured.GraphRunner) for thing in gc.get_objects())

    graph(fresh, "self", {"keep_graphs": False})
    assert runners() == 0
    graph(fresh, "self")
    assert runners() == 2
    spec_trl.release(fresh)
    assert runners() == 0
    model = tiny_llama()
    graph(model, "self")
    assert runners() == 2
    del model
    assert runners() == 0


def test_drafters_that_come_and_go_do_not_pile_up(fresh, tiny_assistant, tape) -> None:
    for _ in range(3):
        graph(fresh, "model", assistant_model=tiny_assistant)
    gc.collect()
    assert sum(isinstance(thing, captured.GraphRunner) for thing in gc.get_objects()) == 2


def test_adapters_that_are_scaled_or_trained(tape) -> None:
    """`scaling` is a dict of the adapter's layers; `release` also finds a wrapped model."""
    torch.manual_seed(0)
    model = get_peft_model(tiny_llama(), LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear"))
    base = model.get_base_model()
    found = [outputs(graph(base))]
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.scale_layer(4)
    found.append(outputs(graph(base)))
    assert found[1] == outputs(eager(base)) != found[0]
    spec_trl.release(model)
    assert kept.look(base, "runner") is None


def test_wide_adapters_on_a_narrow_policy_under_autocast(tape) -> None:
    """Autocast keeps its casts of the fp32 adapter; a captured forward that read those would never see it learn."""
    model = tiny_llama().bfloat16()
    head = model.lm_head
    model.lm_head = nn.Linear(64, 64, bias=False)  # fp32, as adapters are
    model.lm_head.weight.data.copy_(head.weight)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        first = outputs(graph(model))
    assert tape.recorded > 0
    with torch.no_grad():
        model.lm_head.weight.neg_()
    recorded = tape.recorded
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        second = outputs(graph(model))
        expected = outputs(eager(model))
    assert tape.recorded == recorded and second == expected != first


def test_a_call_that_fails_leaves_nothing_behind(fresh, tape) -> None:
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
    assistant = tiny_llama()
    drafter = SmallModelDrafter(assistant, fresh)
    good = graph(fresh, drafter=drafter).statistics.total
    assert good.acceptance_rate == 1
    for parameter in assistant.parameters():  # as `.to()` does it
        parameter.data = parameter.data * -1
    bad = graph(fresh, drafter=drafter).statistics.total
    assert (
        bad.acceptance_rate
        == eager(fresh, drafter=SmallModelDrafter(assistant, fresh)).statistics.total.acceptance_rate
    )
    assert bad.acceptance_rate < 1


def test_an_assistants_forwards_serve_the_next_call(fresh, tiny_assistant, tape) -> None:
    expected = outputs(graph(fresh, "model", assistant_model=tiny_assistant))
    recorded = tape.recorded
    assert outputs(graph(fresh, "model", assistant_model=tiny_assistant)) == expected
    assert tape.recorded == recorded


@pytest.mark.parametrize("strategy", ["none", "self"])
def test_rounds_that_prepare_are_not_typical(fresh, tape, monkeypatch, strategy) -> None:
    """Those in which modules ran: on the way to a capture, or for one."""
    typical: list[bool] = []
    eagerly: list[bool] = []
    decode_round = rollout.Rollout.decode_round

    def forwards(target: runner.EagerRunner) -> int:
        others = target._beside if isinstance(target, captured.GraphRunner) else []
        return sum(each.eager_forwards for each in (target, *(beside.runner for beside in others)))

    def watch_round(rollout: rollout.Rollout, plan: Any) -> None:
        before = forwards(rollout._target)
        decode_round(rollout, plan)
        eagerly.append(forwards(rollout._target) > before)

    def watch(control: Control, draft_length: int, seconds: float, tokens: int, is_typical: bool = True) -> None:
        typical.append(is_typical)

    monkeypatch.setattr(rollout.Rollout, "decode_round", watch_round)
    monkeypatch.setattr(NeverSpeculate if strategy == "none" else AlwaysSpeculate, "record", watch)
    for _ in range(2):
        graph(fresh, strategy, {"draft_length": 3})
    assert typical == [not each for each in eagerly]
    assert typical[:3] == [False] * 3 and sum(typical) > len(typical) // 2
    typical.clear()
    graph(fresh, strategy, {"draft_length": 3, "runner": "eager"})
    assert all(typical)


def test_dropped_forwards_are_given_back_to_the_budget(fresh, tiny_assistant, tape) -> None:
    counts = {graph(fresh, "model", assistant_model=tiny_assistant).statistics.graphs for _ in range(4)}
    alive = kept.look(fresh, "runner")
    assert max(counts) == len(alive._graphs) + sum(len(each.runner._graphs) for each in alive._beside)


def test_calls_in_and_out_of_inference_mode(fresh, tape) -> None:
    expected = outputs(eager(fresh))
    with torch.inference_mode():
        assert outputs(graph(fresh)) == expected
    assert outputs(graph(fresh)) == expected


def test_training_goes_on_as_before(fresh, tape) -> None:
    def gradient() -> Tensor:
        fresh.zero_grad()
        fresh(PROMPTS["input_ids"], labels=PROMPTS["input_ids"]).loss.backward()
        return fresh.model.layers[0].mlp.up_proj.weight.grad.clone()

    fresh.train()
    before = gradient()
    for mode in ("graph", "compiled"):
        graph(fresh, "self", {"runner": mode})
    assert torch.equal(gradient(), before) and fresh.training


# ---- with the kernels of a GPU --------------------------------------------------------------------------------------


def test_through_the_kernels(tape, monkeypatch) -> None:
    """What a GPU runs, as far as a CPU can: captured forwards with span attention, and drawing in one pass.

    The kernels run under Triton's interpreter here; float32, so a near tie could differ, and none does.
    """
    pytest.importorskip("triton")
    model = tiny_llama(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1).float()
    prompts = pad_left(random_rows([5, 3]))
    options = dict(max_new_tokens=4, temperature=0.7, top_k=20)
    expected = outputs(generate(model, prompts, "none", {"runner": "eager"}, **options))
    monkeypatch.setattr(runner, "reads_spans", lambda network: True)
    monkeypatch.setattr(processors, "_is_fused", lambda logits: True)
    monkeypatch.setattr(captured, "CAPTURE_AFTER", 1)
    monkeypatch.setattr(captured, "WARM_UPS", 0)
    ran: list[tuple[torch.Size, int, bool]] = []
    run = runner.EagerRunner._run

    def watch(self: Any, tokens: Tensor, positions: Tensor, columns: int, *more: Any, **options: Any) -> Any:
        ran.append((tokens.shape, columns, options.get("spans", False)))
        return run(self, tokens, positions, columns, *more, **options)

    with monkeypatch.context() as patched:  # on the way to a capture attention is the same, over as many rows
        patched.setattr(runner.EagerRunner, "_run", watch)
        patched.setattr(captured, "CAPTURE_AFTER", 2)
        three = pad_left(random_rows([1, 1, 1]))  # nothing to prefill
        generate(model, three, "none", {"runner": "graph"}, **(options | {"max_new_tokens": 2}))
    asked, check, *others = ran
    assert check == ((3, 1), 1 + 1, False) and set(others) == {asked} and asked == ((4, 1), 256, True)
    for strategy in ("none", "self"):
        config = {"runner": "graph", "draft_length": 2, "draft_kernel": "torch_int4"}
        result = generate(model, prompts, strategy, config, **options)
        assert outputs(result) == expected
        assert result.statistics.drafter_failure is None
    assert tape.recorded >= 3 and tape.replayed > 8
