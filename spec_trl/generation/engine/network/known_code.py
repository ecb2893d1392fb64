"""Recognises classes of transformers by the source of their forwards, whatever families they belong to.

transformers repeats a forward in the file of each family that computes the same. Two classes compute the same if the
sources of their forwards, and of what these call in their files, are equal but for annotations, docstrings, the order
of keywords, and keywords that our attention ignores.
"""

import ast
import dis
import functools
import inspect
import re
import sys
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from transformers import models

from .attention import ragged_attention


# Modules that wrap forwards: of layers, of decoders, and, from 5.24 on, of all that take a cache, by its old name too.
_WRAPPERS = tuple(f"transformers.{name}" for name in (
    "integrations.accelerate", "modeling_layers", "utils.deprecation", "utils.generic", "utils.output_capturing"))
_READ = frozenset(inspect.signature(ragged_attention).parameters)
_DEFINITION = re.compile(r"^(?:class|def) (\w+)\b.*?(?=^[@\w#]|\Z)", re.MULTILINE | re.DOTALL)
FAMILY = "_spec_trl_family"
"""Attribute of a class of ours that stands for a class of transformers (`rewritten.py`): that class."""
# Fields of syntax trees that change no result, or that Python's versions fill differently.
_LEFT_OUT = {"annotation", "returns", "decorator_list", "ctx", "kind", "type_comment", "type_params", "simple"}


def has_its_forward(kind: Any) -> bool:
    """Whether the forward of a module class, and the functions and methods that it calls in its module, are the
    original ones."""
    kind = vars(kind).get(FAMILY, kind)
    forward, module = without_wrappers(kind.forward), sys.modules[kind.__module__]
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    called = [vars(kind)[name] for name in names if inspect.isfunction(vars(kind).get(name))]
    return _is_of_source(forward, f"{kind.__name__}.forward", module) and all(
        _is_of_source(method, f"{kind.__name__}.{method.__name__}", module) for method in called
    )


def without_wrappers(function: Any) -> Any:
    """`function` inside the wrappers of transformers."""
    while getattr(function, "__globals__", {}).get("__name__") in _WRAPPERS and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def is_in_source(function: Any, name: str, module: ModuleType) -> bool:
    """Whether `function` is what the source of `module` defines by the qualified name `name`."""
    code = getattr(function, "__code__", None)
    return code is not None and (code.co_filename, code.co_qualname) == (module.__file__, name)


def _is_of_source(function: Any, name: str, module: ModuleType) -> bool:
    """Whether `function`, and what it calls of the definitions in `module`, are those of the source of `module`."""
    if not is_in_source(function, name, module):
        return False
    code, defined = function.__code__, _sources(Path(str(module.__file__)))
    named = {name: vars(module)[name] for name in _globals_of(code) if name in vars(module) and name in defined}
    called = {name: value for name, value in named.items() if callable(value) and not isinstance(value, type)}
    return all(_is_of_source(value, name, module) for name, value in called.items())


@functools.cache
def _globals_of(code: CodeType) -> frozenset[str]:
    return frozenset(step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")


def code_of(kind: Any) -> str:
    """What the forward of a class of transformers computes, in a form to compare; "" if it has none of its own."""
    return _code(Path(str(sys.modules[kind.__module__].__file__)), kind.__name__)


def code_of_reference(name: str) -> str:
    """The same for the class `<family>.<name>`, whose file is read and not imported; "" if transformers lacks it."""
    family, _, kind = name.partition(".")
    return _code(Path(models.__path__[0], family, f"modeling_{family}.py"), kind)


@functools.cache
def _code(file: Path, name: str) -> str:
    sources = _sources(file)
    functions = {each: ast.parse(source).body[0] for each, source in sources.items() if source.startswith("def")}
    own: Any = ast.parse(sources.get(name, "class Absent: pass")).body[0]
    functions |= {f"self.{each.name}": each for each in own.body if isinstance(each, ast.FunctionDef)}
    todo, found = ["self.forward"], dict[str, str]()
    for called in todo:  # which grows
        function: Any = functions.get(called)
        if function is None or called in found or called == "eager_attention_forward":  # it is replaced by ours
            continue
        parameters = "" if called == "self.forward" else _plain(function.args)  # defaults count
        found[called] = f"{parameters} {_plain(function.body)}"
        todo += [ast.unparse(node) for node in ast.walk(function) if isinstance(node, ast.Name | ast.Attribute)]
    return str(found) if found else ""


def sources_of(kind: Any) -> str:
    """The source of a class."""
    return _sources(Path(str(sys.modules[kind.__module__].__file__))).get(kind.__name__, "")


@functools.cache
def _sources(file: Path) -> dict[str, str]:
    """Of the classes and functions of a module, by name."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return {each[1]: each[0] for each in _DEFINITION.finditer(text)}


def _plain(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_plain(each) for each in tree if not _is_docstring(each)]
    if not isinstance(tree, ast.AST):
        return "cache" if tree == "past_key_values" else tree
    if isinstance(tree, ast.AnnAssign) and tree.value is not None:
        tree = ast.Assign([tree.target], tree.value)
    given = ((name, value) for name, value in ast.iter_fields(tree) if value is not None and value != [])
    fields = {name: value for name, value in given if name not in _LEFT_OUT}
    if isinstance(tree, ast.Call):
        attends = isinstance(tree.func, ast.Name) and tree.func.id == "attention_interface"
        read = [each for each in tree.keywords if not attends or each.arg in _READ]
        fields["keywords"] = sorted(read, key=lambda each: each.arg or "")
    return type(tree).__name__, [(name, _plain(value)) for name, value in fields.items()]


def _is_docstring(tree: Any) -> bool:
    return isinstance(tree, ast.Expr) and isinstance(tree.value, ast.Constant)
