"""Tests whether a network computes the same bits for a token, whatever else a forward computes.

Then drafts, other rows and the order of requests change no bit of a log-probability, in any dtype. Libraries do not
guarantee it, so it is tested on the first layers of the network, once per machine, in some fifty forwards.

On CUDA no test stands for all numbers of rows, since these choose kernels. There four forwards tell which operations
sum, other than our kernels.
"""

import hashlib
import json
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import CodeType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from ....hardware import kernel_switches, processor_name
from ....json_files import write_atomically
from ....native import native_code
from ....native.cpu_products import reading_prompts
from ....user_cache import cache_directory, read_cached, save_cached
from ..kv.base import KVCache
from ..kv.cache import autocast_dtype
from ..network.family import Family
from ..network.foreign_layers import is_foreign, mixing_layers
from ..network.products import make_copies, native_products
from ..network.shadow import decoder_layers, make_shadow
from ..network.snapshot import HOOK_DICTS, patched_forward, strides_of
from .runner import EagerRunner


ROWS = 12
"""Rows of the test. With `NEW` tokens each they exceed what any kernel treats as few."""
NEW = 7
"""Tokens of a row after its prompt."""
COLUMNS = 96
# Their lengths: equal ones, which a family may read together, a single token, and one beyond what scans take at once.
_PROMPTS = (5, 1, 5, 1, *range(7, 2 + ROWS), 70)
_EQUAL = 2  # first rows, whose tokens as many rows after them have too
# Rows, tokens of a forward, and tokens of a draft beside it, that are compared with all rows and all tokens at once: a
# row alone, verified alone and with another, the other rows too, whose numbers lie elsewhere in every tensor, and
# several chains of a row, whose keys do.
_CASES = (1, 1, 0), (1, NEW, 0), (2, NEW, 0), (ROWS, 1, 0), (ROWS, NEW, 3)
# Of prompts: about the multiples of what kernels take at once, where they change.
_TOKENS = 1, 2, 3, 7, 9, 11, 17, 19, 25, 27, 31, 63, 65
# Parts of names of operations that sum, and those of them, or of reductions, that give each row the same bits.
_SUMMING = (
    "mm", "mv", "dot", "conv", "attention", "norm", "cum", "std", "var", "index_add", "scatter_add", "scatter_reduce",
    "index_reduce", "fft", "cdist", "lstm", "gru", "logsumexp",
)  # fmt: skip
_BY_ROW = {"native_layer_norm", "amax", "amin", "max", "min"}
_NUMBERS = 1 << 19  # of results, at least: of another order of sums one in 20,000 shows in bfloat16


def inexact_parts(
    model: PreTrainedModel, make: Callable[[PreTrainedModel, KVCache], EagerRunner], settings: str
) -> list[str]:
    """Names the parts of `model` that are not exact in the runners that `make` makes under `settings`; [] if all are.
    Tested once per machine, and cached; one warning names them.
    """
    text, is_tried = _describe(model, settings), True
    path = cache_directory() / f"exact_{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    if found := mixing_layers(model):
        verdict: Verdict | None = Verdict(found, [])
    else:
        verdict = read_cached(path, _read, ", and exactness is tried anew")
    # What the libraries compute, torch computes otherwise.
    if verdict is None or not native_code.loads(verdict.libraries):
        try:
            parts = _try_out(make(_first_layers(model), Family.of(model).cache.for_network(model, ROWS, COLUMNS)))
        except Exception as error:  # the generation will raise the error, or succeed where the test cannot
            verdict, is_tried = Verdict([f"it could not be tried: {type(error).__name__}: {error}"], []), False
        else:
            verdict = Verdict(parts, native_code.loaded)
            if not native_code.failed:  # the next process may load them
                save_cached(partial(_save, verdict=verdict), path)
    if found := verdict.parts:
        warnings.warn(
            f"{type(model).__name__} {'is not' if is_tried else 'may not be'} exact on this machine: drafts, or other "
            f"rows, may change a token where two scores are nearly equal ({'; '.join(found)}).",
            stacklevel=2,
        )
    return found


def unordered_sums(model: PreTrainedModel) -> list[str]:
    """Names the operations of an exact shadow of `model` on CUDA whose rounding of a token may depend on other tokens,
    and the classes of modules that call them, sorted: all that sum or multiply matrices, but our kernels, and those of
    torch that give a row to one block of threads whatever the number of rows, as layer norms and softmaxes do.

    They are found in a prompt, a verification, a step and, where rows may have them, several chains.
    """
    shadow, family = _first_layers(model, exact=True), Family.of(model)
    runner, watch = EagerRunner(shadow, family.cache.for_network(model, 2, COLUMNS)), _Sums()
    for module in shadow.modules():
        module.register_forward_pre_hook(lambda module, _: watch.inside.append(type(module).__name__))
        module.register_forward_hook(lambda *_: [watch.inside.pop(), None][1])
    try:
        with torch.no_grad(), watch:
            trial = _Trial(runner, 2)
            for step, count, beside in ((0, 2, 0), (2, 1, 0), *([(3, 2, 1)] if family.takes_chains else [])):
                trial.forward(step, count, beside)
    except Exception as error:  # the generation will raise it, or succeed where this cannot
        return [f"it could not be tried: {type(error).__name__}: {error}"]
    return sorted(watch.found)


class _Sums(TorchDispatchMode):
    """Finds operations for :func:`unordered_sums`; `inside` are the classes of the modules that run."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.found: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        library, _, name = function._schema.name.partition("::")
        sums = torch.Tag.reduction in function.tags or any(word in name for word in _SUMMING)
        sums = library != "spec_trl" and name not in _BY_ROW and (sums or library not in ("aten", "prim", "prims"))
        first = result[0] if isinstance(result, tuple) else result
        if sums and isinstance(first, Tensor) and first.is_floating_point():
            self.found.add(f"{name} in {self.inside[-1] if self.inside else 'the network'}")
        return result


@dataclass(frozen=True)
class Verdict:
    """The result of a trial, as it is kept."""

    parts: list[str]  # that are not exact
    libraries: list[native_code.Library]  # that were loaded


def _read(path: Path) -> Verdict:
    """Reads what :func:`_save` wrote, without pydantic, which takes a quarter of a second to import."""
    found = json.loads(path.read_bytes())
    parts, libraries = found["parts"], found["libraries"]
    verdict = Verdict(parts, [native_code.Library(*each) for each in libraries])
    texts = [*parts, *(text for each in verdict.libraries for text in (each.source, *each.macros.values()))]
    if not isinstance(parts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("it holds no verdict on exactness")
    return verdict


def _save(path: Path, verdict: Verdict) -> None:
    write_atomically(path, json.dumps(asdict(verdict)))


def _describe(model: PreTrainedModel, settings: str) -> str:
    """Everything that determines the kernels, but whether our libraries load."""
    package = Path(__file__).parents[3]
    sources = sorted(path for suffix in ("py", "cpp", "h") for path in package.rglob(f"*.{suffix}"))
    ours = hashlib.sha256(b"".join(map(Path.read_bytes, sources))).hexdigest()
    target = native_code.target() if native_code.compiler() is not None else b""
    switches = *kernel_switches(), torch.get_float32_matmul_precision(), str(torch.backends.mkldnn.enabled)
    packages = sorted({type(module).__module__.partition(".")[0] for module in model.modules()} | {"transformers"})
    versions = [f"{name} {getattr(sys.modules.get(name), '__version__', '')}" for name in packages]
    machine = processor_name(), torch.__config__.show(), hashlib.sha256(target).hexdigest(), ours
    layers = map(_describe_module, model.modules())
    return "\n".join(
        [*machine, *switches, *versions, settings, repr(model.config.to_dict()), *dict.fromkeys(layers)]
    )


def _describe_module(module: Any) -> str:
    """Class, weights, hooks, and a forward that was set on it."""
    weights = [(tuple(each.shape), str(each.dtype), strides_of(each)) for each in module.parameters(False)]
    hooks = [hook for name in sorted(HOOK_DICTS) for hook in vars(module).get(name, {}).values()]
    code = [_describe_code(function) for function in (patched_forward(module), *hooks) if function is not None]
    mode = module.training and is_foreign(module)  # in which it may compute otherwise
    return f"{type(module).__name__} {weights} {code} {mode}"


def _describe_code(function: Any) -> str:
    """Tells functions apart by what they do, in every process alike."""
    while isinstance(function, MethodType | partial):
        function = function.__func__ if isinstance(function, MethodType) else function.func
    code = getattr(function, "__code__", None)
    return f"{type(function).__name__} {_hash_of(code) if isinstance(code, CodeType) else ''}"


def _hash_of(code: CodeType) -> str:
    inside = [_hash_of(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return hashlib.sha256(repr((code.co_code, code.co_names, inside)).encode()).hexdigest()


def _first_layers(model: PreTrainedModel, exact: bool = False) -> PreTrainedModel:
    """A shadow of `model`, maybe `exact`, with enough layers for one of every kind, at least two."""
    shadow: PreTrainedModel = make_shadow(model, exact)
    try:
        layers = decoder_layers(shadow)
    except ValueError:
        return shadow
    config = shadow.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None) or [""] * len(layers)
    inside = ["".join(type(module).__name__ for module in layer.modules()) for layer in layers]
    kinds = list(zip(types, inside, strict=False))
    del layers[max(2, 1 + max(map(kinds.index, kinds), default=0)) :]
    make_copies(shadow)  # as in generations under autocast
    return shadow


def _try_out(runner: EagerRunner) -> list[str]:
    """Compares the bits of rows' logits, then those of all modules, which reveal more, since later sums round
    differences away. No test reveals enough of attention under masks, whose sums depend on where keys lie."""
    if type(runner) is EagerRunner:
        return ["attention under masks"]
    with torch.no_grad():
        together = _Trial(runner, ROWS)
        verified = together.forward(0, NEW)  # [ROWS, NEW, V]
        firsts, equals = slice(0, _EQUAL), slice(_EQUAL, 2 * _EQUAL)
        is_alike = all(torch.equal(logits[firsts], logits[equals]) for logits in (verified, together.prompt))
        is_alike &= _reads_alike(together, verified)
        for rows, count, beside in _cases(runner):
            trial = _Trial(runner, rows)
            found = torch.cat([trial.forward(step, count, beside) for step in range(0, NEW, count)], dim=1)
            is_alike &= torch.equal(found, verified[:rows]) and torch.equal(trial.prompt, together.prompt[:rows])
        differs = _first_that_differs(runner) or ([] if is_alike else ["what decoder layers compute"])
        return differs or _products_of_prompts(runner)


def _reads_alike(together: "_Trial", verified: Tensor) -> bool:
    """Whether the longest prompt has the same logits alone, and the first ones where one is read into the last row,
    beside rows that run, and goes on there as a row that has moved, and where only their last tokens are read again,
    as for copies of a prompt that come later."""
    longest = together.read(slice(ROWS - 1, ROWS), ROWS - 1)
    alone = together.read(slice(0, 1), ROWS - 1)
    together.tokens[-1], together.lengths[-1] = together.tokens[0], together.lengths[0]
    moved = together.forward(0, NEW)[-1]
    if not (torch.equal(longest, together.prompt[-1:]) and torch.equal(moved, verified[0])):
        return False
    if not Family.of(together.runner.network).shares_prompts:
        return torch.equal(alone, together.prompt[:1])
    ends = together.lengths[:_EQUAL, None] - 1  # [n, 1]
    with reading_prompts():
        tokens = together.tokens[:_EQUAL].gather(1, ends)
        again = together.runner.prefill(tokens, ends, max(_PROMPTS[:_EQUAL]), 0, [(row, 0) for row in range(_EQUAL)])
    assert again is not None
    return torch.equal(alone, together.prompt[:1]) and torch.equal(again, together.prompt[:_EQUAL])


def _cases(runner: EagerRunner) -> list[tuple[int, int, int]]:
    return [case for case in _CASES if not case[2] or Family.of(runner.network).takes_chains]


def _products_of_prompts(runner: EagerRunner) -> list[str]:
    """Names a dense layer, a router or experts whose result for a prompt token depends on the number of tokens: every
    shape is tested separately, since prompts have any length."""
    kinds: set[tuple[object, ...]] = set()
    for name, weight, product in native_products(runner.network):  # weight [out, in]
        if (weight.shape, weight.is_contiguous()) in kinds:
            continue
        kinds.add((weight.shape, weight.is_contiguous()))
        out, size = weight.shape
        for seed in range(1 + _NUMBERS // (out * sum(_TOKENS))):
            x = torch.randn(max(_TOKENS), size, generator=torch.Generator().manual_seed(seed)).to(weight)
            with reading_prompts():
                whole = product(x)  # [m, out]
                for count in _TOKENS:
                    if not torch.equal(product(x[:count]), whole[:count]):
                        return [f"{name}, {_name_of(runner)}, {count} of a prompt's tokens"]
    return []


def _name_of(runner: EagerRunner) -> str:
    dtype = autocast_dtype(runner.network.device) or runner.network.dtype
    return str(dtype).removeprefix("torch.")


class _Trial:
    """Admits `rows` rows and reads their prompts: `prompt` `[rows, 1, V]` are the logits after them."""

    def __init__(self, runner: EagerRunner, rows: int) -> None:
        self.runner = runner
        device, lengths = runner.network.device, _PROMPTS[:rows]
        vocabulary = runner.network.get_input_embeddings().weight.shape[0]
        ids = torch.arange(rows * COLUMNS, device=device).view(rows, COLUMNS)
        self.tokens = (ids * 7919 + 11) % vocabulary  # [rows, columns]
        if rows > _EQUAL:
            self.tokens[_EQUAL : 2 * _EQUAL] = self.tokens[:_EQUAL]
        self.lengths = torch.tensor(lengths, device=device)  # [rows]
        self.prompt = self.read(slice(0, rows), 0)

    def read(self, rows: slice, first: int) -> Tensor:
        """Reads the prompts of `rows` into the rows of the cache from `first` on; returns logits `[n, 1, V]`."""
        cache, lengths = self.runner.cache, self.lengths[rows].tolist()
        cache.reserve(lengths, first)
        cache.forget(range(first, first + len(lengths)))
        cache.feeds(lengths)
        positions = torch.arange(max(lengths), device=self.lengths.device).expand(len(lengths), -1)  # [n, q]
        places = [(row, length - 1) for row, length in enumerate(lengths)]
        with reading_prompts():
            tokens = self.tokens[rows, : max(lengths)]
            logits = self.runner.prefill(tokens, positions, max(lengths), first, places)
        assert logits is not None
        cache.trim(first, lengths)
        return logits.clone()

    def forward(self, step: int, count: int, beside: int = 0) -> Tensor:
        """Logits `[rows, count, V]` of the tokens from `step` on after the prompts; with a draft of `beside` tokens
        after the first of them, before the others."""
        places = self.lengths[:, None] + torch.arange(step, step + count + beside, device=self.lengths.device)
        self.runner.cache.reserve((self.lengths + step + count + beside).tolist(), 0)
        columns = int(places.max()) + 1
        if not beside:
            tokens, is_step = self.tokens.gather(1, places), count == 1  # [rows, count]
            logits = self.runner.forward(tokens, places, columns, is_step=is_step).clone()
            self.runner.cache.commit([count] * len(tokens))
            return logits
        slots = torch.tensor(_slots_of(count, beside), device=places.device)  # [count]
        positions = places.clone()  # [rows, count + beside]
        positions[:, slots] = places[:, :count]
        logits, _ = self.runner.forward_at(self.tokens.gather(1, positions), positions, columns, places)
        self.runner.cache.move_columns(places[:, slots], places[:, :count])
        return logits[:, slots].clone()


def _slots_of(count: int, beside: int) -> list[int]:
    """Indices of `count` tokens in a forward with a draft of `beside` tokens."""
    return [0, *range(1 + beside, count + beside)]


def _first_that_differs(runner: EagerRunner) -> list[str]:
    """Names the first module with different results for a token, and whether its inputs were equal."""
    dtype = _name_of(runner)
    many = _outputs(_Trial(runner, ROWS), 0, NEW)
    for name, pair in many.items():
        given, output = (own is None or torch.equal(own[:_EQUAL], own[_EQUAL : 2 * _EQUAL]) for own in pair)
        if not output:
            return [f"{name if given else f'what {name} is given'}, {dtype}, equal rows"]
    for rows, count, beside in _cases(runner):
        trial = _Trial(runner, rows)
        for step in range(0, NEW, count):
            for name, pair in _outputs(trial, step, count, beside).items():  # in the order in which they ran
                others = [None if each is None else each[:rows, step : step + count] for each in many[name]]
                given, output = (
                    own is None or other is None or torch.equal(own, other)
                    for own, other in zip(pair, others, strict=True)
                )
                if not output:
                    which = "several chains" if beside else "1 row" if rows == 1 else f"{rows} rows"
                    return [f"{name if given else f'what {name} is given'}, {dtype}, {which}"]
    return []


def _outputs(
    trial: _Trial, step: int, count: int, beside: int = 0
) -> defaultdict[str, tuple[Tensor | None, Tensor | None]]:
    """Inputs and outputs `[rows, count, features]` of the modules in a forward; None for other shapes."""
    found: defaultdict[str, tuple[Tensor | None, Tensor | None]] = defaultdict(lambda: (None, None))
    slots = _slots_of(count, beside)

    def by_token(value: Any) -> Tensor | None:
        rows, width = len(trial.lengths), count + beside
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return None
        # Of four dimensions the second may be heads: a later module shows a difference in those.
        is_by_token = {3: (rows, width), 2: (rows * width,)}.get(value.dim()) == tuple(value.shape[:-1])
        return value.reshape(rows, width, -1)[:, slots].clone() if is_by_token else None

    def keep(name: str, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        found[name] = by_token(inputs[0] if inputs else None), by_token(first)

    handles = [
        module.register_forward_hook(lambda _, inputs, output, name=name: keep(name, inputs, output))
        for name, module in trial.runner.network.named_modules()
        if name
    ]
    try:
        trial.forward(step, count, beside)
    finally:
        for handle in handles:
            handle.remove()
    return found
