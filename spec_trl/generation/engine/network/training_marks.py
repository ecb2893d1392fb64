"""Marks that training leaves on the modules of a policy: ignored attributes and hooks, and patched forwards.

A forward that is set on a module overrides that of its class. It usually calls the forward that it replaced, so it
references a method of the policy's module. A clone of the module gets a copy of the patch with the clone's method.
"""

from collections.abc import Container, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel


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


def class_forward(module: nn.Module) -> Any:
    """The forward of the class of `module`; None for modules of torch.jit, whose classes have none."""
    return getattr(type(module), "forward", None)


def patched_forward(module: nn.Module) -> Any:
    """Returns the forward that was set on `module` and differs from that of its class, or None; without what
    torch.compile made of it, or of that of the class."""
    forward: Any = vars(module).get("forward")
    owner: Any = None
    if forward is None and (inside := _uncompiled(class_forward(module))) is not None:
        return MethodType(inside, module)
    while forward is not None:
        if (inside := _uncompiled(forward)) is not None:
            forward = inside
            continue
        if isinstance(forward, MethodType):
            forward, owner = forward.__func__, forward.__self__
        if forward is class_forward(module) and owner in (None, module):
            return None
        home = _home(forward)
        if not home.startswith(_WRAPPERS) and not (home == "accelerate.hooks" and _only_moves_inputs(module)):
            is_loss = home.startswith(_LOSSES) and isinstance(module, PreTrainedModel)
            return None if is_loss else forward if owner is None else MethodType(forward, owner)
        forward = getattr(forward, "__wrapped__", None)
    return None


def unfollowed_patch(network: nn.Module) -> str | None:
    """Name of a module with a patched forward that references `network` in a way that cannot be copied."""
    modules = {id(module) for module in network.modules()}
    patches = {name: patched_forward(module) for name, module in network.named_modules() if "forward" in vars(module)}
    return next((name for name, patch in patches.items() if _hides(patch, modules, set())), None)


def rebind(clones: Mapping[int, nn.Module]) -> None:
    """Makes the patches of `clones` call the clones. Keys are the ids of the modules that were cloned."""
    for clone in clones.values():
        for name in ("forward", "_old_forward"):  # the second one is accelerate's: what its hooks surround
            if name in vars(clone):
                setattr(clone, name, _rebound(vars(clone)[name], clones, {}))


def _uncompiled(function: Any) -> Any:
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


def _rebound(value: Any, clones: Mapping[int, nn.Module], seen: dict[int, Any]) -> Any:
    """Returns `value`, or a copy in which clones replace their originals."""
    if isinstance(value, nn.Module):
        return clones.get(id(value), value)
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = value  # ends the recursion if a function references itself
    again = partial(_rebound, clones=clones, seen=seen)
    if (inside := _uncompiled(value)) is not None:
        seen[id(value)] = again(inside)
    elif isinstance(value, MethodType):
        seen[id(value)] = MethodType(again(value.__func__), again(value.__self__))
    elif isinstance(value, partial):
        keywords = {name: again(inner) for name, inner in value.keywords.items()}
        seen[id(value)] = partial(again(value.func), *map(again, value.args), **keywords)
    elif isinstance(value, FunctionType):
        swap = {id(inner): again(inner) for inner in held(value)}
        if any(swap[id(inner)] is not inner for inner in held(value)):
            seen[id(value)] = _copied(value, swap)
    return seen[id(value)]


def _copied(function: FunctionType, swap: Mapping[int, Any]) -> FunctionType:
    """A copy of a function that references `swap[id(value)]` instead of `value`."""
    cells = tuple(_swapped(cell, swap) for cell in function.__closure__ or ())
    defaults = tuple(swap[id(inner)] for inner in function.__defaults__ or ())
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, defaults or None, cells)
    copy.__kwdefaults__ = {name: swap[id(inner)] for name, inner in (function.__kwdefaults__ or {}).items()}
    return copy


def held(function: FunctionType) -> list[Any]:
    """The values in a function's closure and defaults."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    return [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _swapped(cell: CellType, swap: Mapping[int, Any]) -> CellType:
    """The same cell if its value stays, so that both functions see later writes."""
    if cell == CellType() or swap[id(cell.cell_contents)] is cell.cell_contents:
        return cell
    return CellType(swap[id(cell.cell_contents)])


def _hides(value: Any, modules: Container[int], seen: set[int]) -> bool:
    """Whether `value` leads to one of the modules, by id, through objects that :func:`_rebound` does not copy."""
    if isinstance(value, nn.Module):  # a wrapper around the network has no clone
        return id(value) not in modules and any(id(module) in modules for module in value.modules())
    if id(value) in seen or isinstance(value, type):
        return False
    seen.add(id(value))
    inner: list[Any] = []
    if (inside := _uncompiled(value)) is not None:
        inner = [inside]
    elif isinstance(value, MethodType):
        inner = [value.__func__, value.__self__]
    elif isinstance(value, partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, FunctionType):
        inner = held(value)
        named = [value.__globals__.get(name) for name in value.__code__.co_names]
        if any(_is_of(item, modules) for item in named):
            return True
    else:
        parts = _parts(value)
        parts += [inside for part in parts if isinstance(part, dict | list | tuple | set) for inside in _parts(part)]
        return any(_is_of(part, modules) for part in parts)
    return any(_hides(item, modules, seen) for item in inner)


def _parts(value: Any) -> list[Any]:
    """The items of a container, or the attributes of an object."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
    return [*items, *getattr(value, "__dict__", {}).values()]


def _is_of(value: Any, modules: Container[int]) -> bool:
    return id(value.__self__ if isinstance(value, MethodType) else value) in modules
