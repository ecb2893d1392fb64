"""Copies of patched forwards.

A forward that is set on a module overrides that of its class. It usually calls the forward that it replaced, so it
references a method of the policy's module. A clone of the module gets a copy of the patch with the clone's method.
"""

from collections.abc import Container, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from .snapshot import held, patched_forward, uncompiled


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


def _rebound(value: Any, clones: Mapping[int, nn.Module], seen: dict[int, Any]) -> Any:
    """Returns `value`, or a copy in which clones replace their originals."""
    if isinstance(value, nn.Module):
        return clones.get(id(value), value)
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = value  # ends the recursion if a function references itself
    again = partial(_rebound, clones=clones, seen=seen)
    if (inside := uncompiled(value)) is not None:
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
    if (inside := uncompiled(value)) is not None:
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
