"""The content of a network that matters to generation, to see whether it has changed: without marks of training, which
are ignored attributes and hooks, and forwards that only wrap that of the class.

The values of weights may change: copies of weights compare :class:`WeightState`, and captured forwards, which read
weights by address, compare :func:`addresses`.
"""

import copy
import gc
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedConfig, PreTrainedModel


T = TypeVar("T")
_TENSORS = "_parameters", "_buffers"  # a shadow has the same dicts; copies would keep removed entries alive
_CODE = {FunctionType, MethodType, partial}
_PLAIN = (bool, int, float, str)
_OF_TRAINING = ("training", "gradient_checkpointing")  # ignored by a shadow, which is in eval mode
# Objects that attributes may lead to, beside what lies in them: to look at these takes a few milliseconds.
_MOST_OBJECTS = 10_000
_VALUES = 256  # values of a weight that are compared; an optimizer step changes most of them
SNAPSHOTS: "WeakKeyDictionary[nn.Module, Snapshot]" = WeakKeyDictionary()
"""The last snapshot of each network."""


def structure(model: nn.Module) -> tuple[object, ...]:
    """Structure of `model` without its weights: modules, their hooks and plain attributes, such as which adapters are
    active, merged or scaled, and the dtypes and devices of tensors. While it is equal, a copy of `model` needs at most
    new weights."""
    return snapshot_of(model).structure(model)


def addresses(network: nn.Module) -> tuple[int, ...]:
    """Addresses of the parameters and buffers of `network`."""
    return tuple(tensor.data_ptr() for tensor in (*network.parameters(), *network.buffers()))


class WeightState:
    """Addresses of the parameters of `network`, their version counters, and some of their values, since fused
    optimizers and writes through `.data` do not count versions. Such a write that changes only other values is not
    seen. Takes 3 ms with 272 parameters on a CPU."""

    def __init__(self, network: nn.Module) -> None:
        parameters = list(chain.from_iterable(map(_stored, network.parameters())))
        # Tensors made in inference mode have no counter.
        self._counters = [(each.data_ptr(), 0 if each.is_inference() else each._version) for each in parameters]
        by_device: dict[torch.device, list[Tensor]] = {}
        for parameter in parameters:
            points = round(_VALUES ** (1 / max(1, parameter.dim())))  # in a dimension: at most twice as many
            grid = tuple(slice(None, None, max(1, size // points)) for size in parameter.shape)
            values = parameter.detach()[grid].flatten().contiguous().view(torch.uint8)  # NaN, too, equals itself
            by_device.setdefault(parameter.device, []).append(values)
        self._values = [torch.cat(values) for values in by_device.values()]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, WeightState)
            and self._counters == other._counters
            and all(map(torch.equal, self._values, other._values))
        )

    __hash__ = None  # type: ignore[assignment]


def _stored(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold the numbers of `tensor`: itself, or those in a wrapper, as torchao's quantized weights."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [inner for name in names for inner in _stored(getattr(tensor, name))]


def _structure(model: Any) -> tuple[object, ...]:
    marks: list[object] = [repr(_settings(model.config.to_dict()))]
    for module in model.modules():
        marks += [id(module), type(module), getattr(type(module), "forward", None)]
        for name, value in lasting_attributes(module).items():
            if "_hooks_" in name or name in _OF_TRAINING:  # the former name hooks that take keywords
                continue
            if isinstance(value, _PLAIN):
                marks.append((name, value))
            elif name in HOOK_DICTS:
                marks += map(id, value.values())
            elif isinstance(value, list | tuple) and all(isinstance(item, _PLAIN) for item in value):
                marks.append((name, tuple(value)))
            elif isinstance(value, dict) and all(isinstance(item, _PLAIN) for item in value.values()):
                marks.append((name, tuple(value.items())))
            elif name == "forward":
                marks.append(id(value))
    tensors = (*model.parameters(), *model.buffers())
    return (*marks, *((tensor.dtype, tensor.device) for tensor in tensors))


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """A config without the entries that `save_pretrained` adds."""
    written = ("architectures", "dtype")
    return {
        name: _settings(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in written
    }


# ---- snapshots: to read all modules anew takes as long as a forward -------------------------------------------------


class Snapshot:
    """Content of the modules of `network`: classes and forwards, attributes, elements of attributes that are
    containers, configs, and kind, dtype and device of tensors, but not their identity; and without the marks of
    training.

    Attributes:
        is_complete: False for a network with hooks, methods or closures as attributes, whose effect may change unseen,
            and for a network whose attributes lead back to it: a reference would keep it alive for ever. Such a
            snapshot is empty, and serves one call.
    """

    def __init__(self, network: nn.Module) -> None:
        self._facts: dict[str, Any] = {}
        modules = list(network.modules())
        states = [_state_of(module) for module in modules]
        values = [value for state in states for value in state.values()]
        is_hooked = any(state.get(name) for state in states for name in HOOK_DICTS)
        self.is_complete = not (is_hooked or any(map(_may_change, values)) or _lead_to(network, values, modules[1:]))
        if not self.is_complete:
            return
        self._below = modules[1:]
        # A forward may be replaced.
        self._kinds = [(type(module), getattr(type(module), "forward", None)) for module in modules]
        self._states = states
        self._owners = [state.get(name) for state in states for name in _TENSORS]
        self._kinds_of_tensors = self._read_tensors()
        configs = {id(value): value for value in values if isinstance(value, PreTrainedConfig)}
        self._configs = [(config, copy.deepcopy(vars(config))) for config in configs.values()]

    def find(self, name: str, find: Callable[[], T]) -> T:
        """Returns the fact `name`, computed by `find` at the first call."""
        if name not in self._facts:
            self._facts[name] = find()
        fact: T = self._facts[name]
        return fact

    def structure(self, network: nn.Module) -> tuple[object, ...]:
        """:func:`structure` of the network."""
        return self.find("structure", partial(_structure, network))

    def holds(self, network: nn.Module) -> bool:
        """Whether nothing of it has changed."""
        try:
            for module, kind, state in zip([network, *self._below], self._kinds, self._states, strict=True):
                # Comparing identities is cheap; few modules have marks of training.
                if kind != (type(module), getattr(type(module), "forward", None)) or (
                    vars(module) != state and _state_of(module) != state
                ):
                    return False
            for config, settings in self._configs:
                if vars(config) != settings:
                    return False
            return self._read_tensors() == self._kinds_of_tensors
        except (RuntimeError, ValueError):  # a different tensor or array: its comparison has no single truth value
            return False

    def _read_tensors(self) -> list[Any]:
        tensors = chain.from_iterable(map(dict.values, filter(None, self._owners)))
        return [
            tensor if tensor is None else (type(tensor), tensor.dtype, tensor.device, strides_of(tensor))
            for tensor in tensors
        ]


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """How its numbers lie, which decides who multiplies them; () of a sparse tensor."""
    return tensor.stride() if tensor.layout == torch.strided else ()


def snapshot_of(network: nn.Module) -> Snapshot:
    """Returns the last snapshot of `network` if it still holds; else a new one."""
    snapshot = SNAPSHOTS.get(network)
    if snapshot is None or not snapshot.holds(network):
        snapshot = Snapshot(network)
        if snapshot.is_complete:
            SNAPSHOTS[network] = snapshot
    return snapshot


def _state_of(module: nn.Module) -> dict[str, Any]:
    """Content of `module`, without marks of training; containers are copied."""
    return {
        name: value.copy() if name not in _TENSORS and isinstance(value, dict | list | set) else value
        for name, value in lasting_attributes(module).items()
    }


def _may_change(value: Any) -> bool:
    """Whether `value` is code with bound values, not a plain function of a module."""
    if type(value) not in _CODE:
        return False
    if not isinstance(value, FunctionType):
        return True
    return bool(value.__closure__) or not all(isinstance(default, (*_PLAIN, type(None))) for default in held(value))


def _lead_to(network: nn.Module, values: Sequence[Any], below: Sequence[nn.Module]) -> bool:
    """Whether `values`, shared with the modules `below` the network, reference `network`, or too many objects to
    tell."""
    seen: dict[int, Any] = {id(module): module for module in below}  # holds the objects, so that ids stay unique
    left, most = list(values), len(values) + len(below) + _MOST_OBJECTS
    while left and len(seen) <= most:
        value = left.pop()
        if value is network:
            return True
        if id(value) in seen or not gc.is_tracked(value) or isinstance(value, type | ModuleType):
            continue
        seen[id(value)] = value
        left += [*held(value), vars(value)] if isinstance(value, FunctionType) else gc.get_referents(value)
    return bool(left)


# ---- marks of training -------------------------------------------------------------------------------------------


HOOK_DICTS = frozenset(name for name in vars(nn.Module()) if name.endswith("_hooks"))
_WHICH_HOOKS = frozenset(name for name in vars(nn.Module()) if "_hooks_" in name)  # take keywords
# Of gradient checkpointing, which a network in eval mode does not do: switching it on makes new ones. And the forward
# that accelerate wraps autocast around.
_MARKS = ("_gradient_checkpointing_func", "_require_grads_hook", "_require_grads_hooks", "_original_forward")
# Modules whose hooks are dropped. A forward with `output_hidden_states` leaves hooks of the first one, which
# torch.compile cannot trace. Those of FSDP2 would gather and free weights in every forward. That of ZeRO-3 on the
# root, which TRL leaves for generation, communicates with other ranks, and ranks run different numbers of forwards.
_LEFT_BEHIND = ("transformers.utils.output_capturing", "torch.distributed.fsdp", "deepspeed")


def lasting_attributes(module: nn.Module) -> dict[str, Any]:
    """Attributes of `module` that matter to generation; its dicts of hooks are copied."""
    state = {name: value for name, value in vars(module).items() if name not in _MARKS}
    if patched_forward(module) is None:  # accelerate sets the forward of the class
        state.pop("forward", None)
    if isinstance(module, PreTrainedModel):
        state.pop("generate", None)  # one that was set on the policy references it
    for name in _WHICH_HOOKS & state.keys():
        state[name] = state[name].copy()
    for name in HOOK_DICTS & state.keys():
        state[name] = state[name].copy()
        for key, hook in vars(module)[name].items():
            if _stays_behind(hook):
                del state[name][key]
    return state


def _stays_behind(hook: Any) -> bool:
    """Whether generation may ignore a hook. TRL adds one to the embedding after every rollout, so that checkpointed
    activations get gradients."""
    is_for_gradients = getattr(hook, "__name__", "").startswith("make_inputs_require_grad")
    return is_for_gradients or str(hook.__module__).startswith(_LEFT_BEHIND)


# Wraps the forward of a trained policy: autocast, which generation enters itself.
_WRAPPERS = ("torch.amp", "accelerate.utils.operations")
# Replaces it: losses that need no logits.
_LOSSES = ("trl.", "liger_kernel.")


def patched_forward(module: nn.Module) -> Any:
    """Returns the forward that was set on `module` and differs from that of its class, or None; without what
    torch.compile made of it, or of that of the class."""
    forward: Any = vars(module).get("forward")
    of_class = getattr(type(module), "forward", None)  # modules of torch.jit have none
    owner: Any = None
    if forward is None and (inside := uncompiled(of_class)) is not None:
        return MethodType(inside, module)
    while forward is not None:
        if (inside := uncompiled(forward)) is not None:
            forward = inside
            continue
        if isinstance(forward, MethodType):
            forward, owner = forward.__func__, forward.__self__
        if forward is of_class and owner in (None, module):
            return None
        home = _home(forward)
        if not home.startswith(_WRAPPERS) and not (home == "accelerate.hooks" and _only_moves_inputs(module)):
            is_loss = home.startswith(_LOSSES) and isinstance(module, PreTrainedModel)
            return None if is_loss else forward if owner is None else MethodType(forward, owner)
        forward = getattr(forward, "__wrapped__", None)
    return None


def uncompiled(function: Any) -> Any:
    """What a function made by torch.compile or torch.compiler.disable runs; None for others. `functools.wraps` copies
    the attributes to others, too."""
    if not (isinstance(function, FunctionType) and _home(function).startswith("torch._dynamo")):
        return None
    return getattr(function, "_torchdynamo_orig_callable", getattr(function, "__wrapped__", None))


def _home(function: Any) -> str:
    """Name of the Python module whose code a callable runs; `functools.wraps` copies `__module__`."""
    while isinstance(function, partial):
        function = function.func
    is_function = isinstance(function, FunctionType)  # torch.export's have no module
    return str(function.__globals__.get("__name__", "")) if is_function else type(function).__module__


def _only_moves_inputs(module: Any) -> bool:
    """Whether accelerate's hooks of a module only move its inputs to the device of the weights."""
    hook: Any = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,))
    return all(type(hook).__name__ == "AlignDevicesHook" and not hook.offload for hook in hooks)


def held(function: FunctionType) -> list[Any]:
    """The values in a function's closure and defaults."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    return [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
