"""Methods of transformers' modules with products and gates of ours, on a CPU.

A module's own products (of a router, of experts) and gates (sigmoid, softplus, SiLU that are no modules of their own)
are calls of torch, whose results for a token depend on a tensor's other tokens. A class with such calls gets a
subclass, whose methods are compiled from the family's source with our functions in their place. A mode of torch would
see these calls as well, but costs a microsecond for every operation.
"""

import ast
import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....native.cpu_products import by_registers, is_plain, multiply
from .known_code import FAMILY, is_in_source, sources_of, without_wrappers


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return multiply(x, weight, bias) if is_plain(x, weight, bias) else F.linear(x, weight, bias)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    if b.dim() == 2 and (is_plain(a, b.T) or is_plain(a, b, transposed=True)):
        return multiply(a, b.T, None)
    if a.dim() == 2 and b.dim() == 3 and is_plain(b.transpose(1, 2), a):  # [out, in] times [B, in, q]
        return multiply(b.transpose(1, 2), a, None).transpose(1, 2)
    return torch.matmul(a, b)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    if is_plain(a, b, transposed=True):
        return torch.stack([multiply(x, weight.T, None) for x, weight in zip(a, b, strict=True)])
    return torch.bmm(a, b)


def _gate(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, *args, **kwargs: by_registers(lambda x: function(x, *args, **kwargs), x)


_OURS: dict[str, Callable[..., Tensor]] = {
    "linear": _linear, "matmul": _matmul, "bmm": _bmm, "sigmoid": _gate(torch.sigmoid), "softplus": _gate(F.softplus),
    "silu": _gate(F.silu), "logsigmoid": _gate(F.logsigmoid), "gelu": _gate(F.gelu),
}  # fmt: skip
_OURS["activation"] = lambda function, x: by_registers(function, x)  # of one that a forward looks up
_PREFIX = "_spec_trl_"
_MODULES = ("torch", "F", "nn.functional", "torch.nn.functional")
_OF_TENSORS = {"sigmoid": 0, "matmul": 1}  # methods, and how many arguments they have


def is_rewritten_class(kind: Any) -> bool:
    """Whether :func:`rewritten_class` changes a class of transformers' models."""
    return kind.__module__.startswith("transformers.models.") and FAMILY not in vars(kind) and bool(_methods(kind))


def rewritten_class(kind: Any) -> Any:
    """A subclass of `kind` with the methods."""
    return _subclass(kind, tuple(_methods(kind).items()))


@functools.cache
def _subclass(kind: Any, methods: tuple[tuple[str, FunctionType], ...]) -> Any:
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, FAMILY: kind} | dict(methods))


def _methods(kind: Any) -> dict[str, FunctionType]:
    """Found anew for each shadow: a program may have replaced a method of a class."""
    found: dict[str, FunctionType] = {}
    for base in reversed(kind.__mro__):
        found = {name: method for name, method in found.items() if name not in vars(base)}
        if base.__module__.startswith("transformers.models."):
            text, module = sources_of(base), sys.modules[base.__module__]
            if any(each in text for each in (" @ ", "ACT2FN[", "super().forward(", *(f".{name}(" for name in _OURS))):
                functions = {name: without_wrappers(value) for name, value in vars(base).items()}
                twins = {
                    name: _rewritten(function, text, nn.Linear in base.__bases__)
                    for name, function in functions.items()
                    if name != "__init__" and is_in_source(function, f"{base.__name__}.{name}", module)
                }
                found |= {name: twin for name, twin in twins.items() if twin is not None}
    return found


@functools.cache
def _rewritten(function: FunctionType, text: str, is_linear: bool) -> FunctionType | None:
    """A method of the class with the source `text`, a subclass of `nn.Linear` or not; None: it needs no change, or
    calls another method of its super class."""
    definition: Any = ast.parse(text).body[0]
    method: Any = next(each for each in definition.body if getattr(each, "name", "") == function.__name__)
    rewriter = _Rewriter(is_linear)
    rewriter.visit(method)
    if not rewriter.found or any(isinstance(each, ast.Name) and each.id == "super" for each in ast.walk(method)):
        return None
    method.decorator_list = []
    ast.increment_lineno(method, function.__code__.co_firstlineno - method.lineno)
    # A closure over our functions: the global names stay those of the module, which a program may replace later.
    ours = {_PREFIX + name: value for name, value in _OURS.items()}
    maker: Any = ast.parse(f"def make({', '.join(ours)}):\n    return {method.name}").body[0]
    maker.body.insert(0, method)
    made: dict[str, Any] = {}
    tree = ast.fix_missing_locations(ast.Module([maker], type_ignores=[]))
    exec(compile(tree, function.__code__.co_filename, "exec"), function.__globals__, made)
    twin: FunctionType = made["make"](**ours)
    twin.__qualname__ = function.__qualname__
    return twin


class _Rewriter(ast.NodeTransformer):
    """Calls our functions for `torch.sigmoid(x)`, `F.sigmoid(x)`, `x.sigmoid()`, `a @ b` and `ACT2FN[name](x)`."""

    def __init__(self, is_linear: bool) -> None:
        self.found, self._is_linear = False, is_linear

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        called = node.func
        if self._is_linear and ast.unparse(called) == "super().forward":  # a router
            own = [ast.Attribute(ast.Name("self", ast.Load()), name, ast.Load()) for name in ("weight", "bias")]
            node.func, node.args = self._ours("linear"), [*node.args, *own]
        elif isinstance(called, ast.Attribute) and called.attr in _OURS:
            owner = ast.unparse(called.value)
            # Attention multiplies keys and values by `bmm` too, of which each would be a call.
            if owner in _MODULES and (called.attr != "bmm" or ast.unparse(node.args[1]).startswith("self.")):
                node.func = self._ours(called.attr)
            elif len(node.args) == _OF_TENSORS.get(called.attr) and owner != "self":
                node.func, node.args = self._ours(called.attr), [called.value, *node.args]
        elif isinstance(called, ast.Subscript) and ast.unparse(called.value) == "ACT2FN":
            node.func, node.args = self._ours("activation"), [called, *node.args]
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.MatMult):
            return node
        return ast.Call(self._ours("matmul"), [node.left, node.right], [])

    def _ours(self, name: str) -> ast.Name:
        self.found = True
        return ast.Name(_PREFIX + name, ast.Load())
