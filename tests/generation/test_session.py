"""What is read of a model once, while it is unchanged: the second call reads little, and no change escapes it."""

import gc
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any
from weakref import ref

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from spec_trl.generation.drafters import self_copy
from spec_trl.generation.drafters.ngram import NgramDrafter
from spec_trl.generation.engine.drafter import DraftSession
from spec_trl.generation.engine.forwards import runner_choice
from spec_trl.generation.engine.kv.memory import limited_groups
from spec_trl.generation.engine.network import snapshot
from spec_trl.generation.engine.network.snapshot import snapshot_of, structure
from spec_trl.generation.session import Session, release
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.tiny_families import make


PROMPTS = pad_left(random_rows([5, 9]))
ASSISTANT = tiny_llama(1, num_hidden_layers=1).float()
ONE = {"input_ids": PROMPTS["input_ids"][1:]}
_opened: list[str] | None = None


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None:
        _opened.append(str(arguments[0]))


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """Files that are opened, by name."""
    global _opened
    if _opened is None:
        sys.addaudithook(_note)  # there is no way to take one back
    _opened = []
    yield _opened
    _opened.clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often what takes long is called."""
    counter: Counter[str] = Counter()

    def watch(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            counter[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    watch(PreTrainedConfig, "to_dict")
    watch(inspect, "signature")
    watch(runner_choice, "make_shadow")
    watch(self_copy, "make_shadow")
    watch(snapshot, "_structure")
    return counter


@pytest.mark.parametrize("strategy", ["none", "self", "auto"])
def test_what_a_second_call_reads(
    strategy: str, fresh: LlamaForCausalLM, calls: Counter[str], opened: list[str]
) -> None:
    """One token of one row: no file, no config and no signature beyond what `generate` itself reads."""
    options: dict[str, Any] = dict(max_new_tokens=1, do_sample=False, pad_token_id=0)
    for _ in range(2):
        generate(fresh, ONE, strategy, {"sd_toggle": "measured"}, **options)
    calls.clear()
    opened.clear()
    generate(fresh, ONE, strategy, {"sd_toggle": "measured"}, **options)
    ours = Counter(calls)
    assert opened == []
    calls.clear()
    fresh.generate(**ONE, **options, return_dict_in_generate=True)
    assert ours["to_dict"] == calls["to_dict"] and ours["make_shadow"] == ours["_structure"] == 0
    assert ours["signature"] <= calls["signature"] + 2, "two more, to tell our arguments from those of `_sample`"


def test_many_rows_ask_for_free_memory_and_nothing_else(fresh: LlamaForCausalLM, opened: list[str]) -> None:
    limits = {str(path) for group in limited_groups() for path in (group.limit, group.used, group.stat)}
    generate(fresh, PROMPTS)
    opened.clear()
    generate(fresh, PROMPTS)
    # How many rows fit, how many are let in, and whether some must leave; a cache of more than a MiB asks too.
    assert 0 < opened.count("/proc/meminfo") <= 4 and set(opened) <= {"/proc/meminfo", *limits}


# ---- changes --------------------------------------------------------------------------------------------------------


class Doubling(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def mlp(model: PreTrainedModel) -> Any:
    return model.model.layers[0].mlp


def patch_forward(model: PreTrainedModel) -> None:
    mlp(model).forward = MethodType(lambda self, x: 2 * type(self).forward(self, x), mlp(model))


def swap_layers(model: PreTrainedModel) -> None:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def swap_parameter(model: PreTrainedModel) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.flip(0))


def swap_module(model: PreTrainedModel) -> None:
    torch.manual_seed(1)
    model.lm_head = nn.Linear(64, 64, bias=False, dtype=model.dtype)


CHANGES: dict[str, Callable[[PreTrainedModel], object]] = {
    "patched forward": patch_forward,
    "hook": lambda model: mlp(model).register_forward_hook(lambda module, given, output: 2 * output),
    "class": lambda model: setattr(mlp(model), "__class__", Doubling),
    "attribute": lambda model: setattr(model.model.norm, "variance_epsilon", 3.0),
    "modules in another order": swap_layers,
    "another module": swap_module,
    "another parameter": swap_parameter,
    "weights in place": lambda model: model.lm_head.weight.data.copy_(model.lm_head.weight.flip(0)),
    "dtype": lambda model: model.float(),
    "window": lambda model: setattr(model.config, "sliding_window", 2),
}


def model_for(change: str) -> PreTrainedModel:
    return make("mistral").double() if change == "window" else tiny_llama()


@pytest.mark.parametrize("change", CHANGES)
def test_the_next_call_follows_a_change(change: str) -> None:
    known, unknown = model_for(change), model_for(change)
    before = [outputs(generate(known, PROMPTS)) for _ in range(2)][1]
    generate(known, PROMPTS, "self")
    for model in (known, unknown):
        CHANGES[change](model)
    found = outputs(generate(known, PROMPTS))
    assert found == outputs(generate(unknown, PROMPTS)) == outputs(generate(known, PROMPTS, "self"))
    assert (found == before) == (change == "dtype"), "or this test sees nothing"


def test_what_a_closure_holds_may_change(fresh: LlamaForCausalLM) -> None:
    """A shadow's copy of a patch holds modules of the shadow, as they were when it was made."""
    chosen = mlp(fresh)
    mlp(fresh).forward = lambda x: LlamaMLP.forward(chosen, x)
    before = outputs(generate(fresh, PROMPTS))
    chosen = fresh.model.layers[1].mlp
    found = outputs(generate(fresh, PROMPTS))
    other = tiny_llama()
    other.model.layers[0].mlp = other.model.layers[1].mlp
    assert found == outputs(generate(other, PROMPTS)) != before


IN_PLACE: dict[str, Callable[[PreTrainedModel], object]] = {
    "list": lambda model: mlp(model).marks.append("b"),
    "dict": lambda model: mlp(model).scales.update(a=2.0),
    "tensor": lambda model: setattr(mlp(model), "shift", torch.ones(3)),
    "config": lambda model: model.config.rope_parameters.update(rope_theta=5.0),
    "buffer's dtype": lambda model: setattr(model.model.rotary_emb, "inv_freq", torch.ones(8).half()),
}


@pytest.mark.parametrize("change", IN_PLACE)
def test_what_lies_in_attributes_counts(change: str, fresh: LlamaForCausalLM) -> None:
    """As active, merged and scaled adapters do; a copy is made anew."""
    mlp(fresh).marks, mlp(fresh).scales, mlp(fresh).shift = ["a"], {"a": 1.0}, torch.zeros(3)
    snapshot, before = snapshot_of(fresh), structure(fresh)
    assert snapshot.holds(fresh) and structure(fresh) is before
    IN_PLACE[change](fresh)
    assert not snapshot.holds(fresh)
    assert (structure(fresh) == before) == (change == "tensor")


def checkpoint(model: PreTrainedModel, use_reentrant: bool) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.gradient_checkpointing_disable()


def checkpoint_adapters(model: PreTrainedModel) -> None:
    """What both do for a model with an adapter."""
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.gradient_checkpointing_disable()
    model.disable_input_require_grads()


def require_grads(model: PreTrainedModel) -> None:
    model.enable_input_require_grads()
    model.disable_input_require_grads()


TRAINING: dict[str, Callable[[PreTrainedModel], object]] = {
    "checkpointing": lambda model: checkpoint(model, use_reentrant=False),
    "reentrant checkpointing": lambda model: checkpoint(model, use_reentrant=True),
    "of adapters": checkpoint_adapters,
    "gradients of inputs": require_grads,
    "hook for gradients": lambda model: model.enable_input_require_grads(),
    "forward of accelerate": lambda model: setattr(model, "forward", MethodType(type(model).forward, model)),
}


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("training", TRAINING)
def test_what_training_leaves_on_a_policy_makes_nothing_anew(
    training: str, fresh: LlamaForCausalLM, calls: Counter[str]
) -> None:
    """TRL switches checkpointing off before each rollout, and on after it, with a new function and one more hook."""
    TRAINING[training](fresh)
    before = [outputs(generate(fresh, PROMPTS, strategy)) for strategy in ("none", "self")]
    snapshot = snapshot_of(fresh)
    assert snapshot.is_complete
    calls.clear()
    for _ in range(2):
        TRAINING[training](fresh)
        assert snapshot_of(fresh) is snapshot
        assert [outputs(generate(fresh, PROMPTS, strategy)) for strategy in ("none", "self")] == before
    assert calls["make_shadow"] == calls["_structure"] == 0


class Leaving(NgramDrafter):
    """Leaves a hook on the network that the target runs."""

    def begin(self, session: DraftSession) -> None:
        super().begin(session)
        session.target.network.lm_head.register_forward_hook(lambda module, given, logits: logits.flip(-1))


def test_what_a_call_leaves_on_a_shadow_is_not_there_in_the_next(fresh: LlamaForCausalLM) -> None:
    plain = outputs(generate(fresh, PROMPTS))
    assert outputs(generate(fresh, PROMPTS, drafter=Leaving(3))) != plain
    assert outputs(generate(fresh, PROMPTS)) == plain


def move_weights(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def adapters(model: PreTrainedModel) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


STAYS: dict[str, tuple[Callable[[PreTrainedModel], object], set[str]]] = {
    "nothing": (lambda model: None, {"shadow", "runner", "self", "history"}),
    "storage": (move_weights, {"self", "history"}),
    "module": (swap_module, {"history"}),
    "dtype": (lambda model: model.float(), {"history"}),
    "adapter": (lambda model: [layer.enable_adapters(False) for layer in adapters(model)], {"history"}),
    "scaling": (lambda model: [layer.scale_layer(3.0) for layer in adapters(model)], {"history"}),
}


@pytest.mark.parametrize("change", STAYS)
def test_one_fingerprint_decides_what_stays(change: str, fresh: LlamaForCausalLM, tape: object) -> None:
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False), fresh)
    fresh.double()
    makes_change, stays = STAYS[change]

    def call() -> tuple[dict[str, object], list[list[list[int]]]]:
        ways = ("self", "graph"), ("history", "eager"), ("none", "eager")
        texts = [outputs(generate(fresh, PROMPTS, strategy, {"runner": runner})) for strategy, runner in ways]
        session = Session.of(fresh)
        assert session.shadow is not None
        return {"shadow": session.shadow.network, "runner": session.runner, **session.drafters}, texts

    before, _ = call()
    makes_change(fresh)
    after, texts = call()
    assert {name for name in before if before[name] is after[name]} == stays
    release(fresh)
    assert texts == call()[1]


# ---- what is kept ---------------------------------------------------------------------------------------------------


def hold_itself(model: PreTrainedModel) -> None:
    model.again = MethodType(lambda self: None, model)


class Owner:
    """Holds a model as a trainer does."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model


def patch_with_default(model: PreTrainedModel) -> None:
    own = mlp(model)

    def forward(x: torch.Tensor, owner: PreTrainedModel = model) -> torch.Tensor:
        first: torch.Tensor = LlamaMLP.forward(owner.model.layers[0].mlp, x)
        return first

    own.forward = forward


HOLDING: dict[str, Callable[[PreTrainedModel], object]] = {
    "nothing": lambda model: None,
    "forward of accelerate": TRAINING["forward of accelerate"],
    "hook": lambda model: model.register_forward_hook(lambda *_: None if model else None),
    "method": hold_itself,
    "closure": lambda model: setattr(mlp(model), "owner", lambda: model),
    "default": patch_with_default,
    "list": lambda model: setattr(mlp(model), "owner", [model]),
    "object": lambda model: setattr(mlp(model), "owner", Owner(model)),
    "object in a dict": lambda model: setattr(mlp(model), "owner", {"trainer": (Owner(model),)}),
    "closure in a list": lambda model: setattr(mlp(model), "owners", [lambda: model]),
    "hook of a weight": lambda model: model.lm_head.weight.register_hook(lambda grad: grad if model else None),
    "config": lambda model: setattr(model.config, "owner", Owner(model)),
}


@pytest.mark.parametrize("holding", HOLDING)
def test_a_model_that_was_called_dies(holding: str) -> None:
    model = tiny_llama()
    HOLDING[holding](model)
    for _ in range(3):
        generate(model, PROMPTS)
    assert snapshot_of(model).is_complete == (holding in ("nothing", *TRAINING))
    alive = ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_a_runner_that_is_dropped_is_freed_at_once() -> None:
    """It and what it captured hold each other, and their memory is wanted."""

    class Cycle:
        def __init__(self) -> None:
            self.captured = self

    gc.disable()
    try:
        session = Session()
        session.runner = Cycle()  # type: ignore[assignment]
        left = ref(session.runner)
        session.drop_runner()
        assert left() is None
    finally:
        gc.enable()


def test_what_a_drafter_has_learned_outlives_changes_of_the_target(fresh: LlamaForCausalLM) -> None:
    """Of another network; the copy is of the policy's modules."""
    config = {"tts": {"drafter": "model", "scope": "run", "stride": 1}, "draft_length": 3}
    kept = []
    for change in (lambda: None, lambda: setattr(fresh, "note", 1), lambda: fresh.float()):
        change()
        generate(fresh, PROMPTS, "tts", config, assistant_model=ASSISTANT, max_new_tokens=8)
        kept.append(Session.of(fresh).drafters["tts"])
    assert kept[0] is kept[1] and kept[1] is not kept[2]
