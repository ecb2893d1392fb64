"""Decodes on a device that pretends to be a GPU, and prints what the host did in each round. It cannot be taken back,
and so has a process of its own.

python -m tests.generation.engine.fake_device_job LIBRARY [SCENARIO ...]
"""

import json
import sys
import traceback
import types
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import spec_trl
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.rollout import Rollout
from spec_trl.generation.planner.planner import Planner
from spec_trl.papers.specactor.decoupled.decoupled_drafter import DecoupledDrafter
from spec_trl.papers.specactor.decoupled.worker import Kind
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.engine.tape import install_tape
from tests.papers.specactor.decoupled.scripted import InTurn
from tests.tiny_families import make


NAME = "pretended"
SOME = [0, 1, 6]  # rows, of which two have one prompt
_SHAPES_FROM_DATA = ("nonzero", "equal", "masked_select", "_unique2", "unique_dim", "unique_consecutive")
_COPIES = ("_to_copy", "copy_", "_copy_from")  # between devices


class Audit(TorchDispatchMode):
    """Notes, with their places, the waits of each round, copies for which the host waits, both outside of rounds, and
    operations that mix devices. What is copied to the host without waiting arrives at the next wait alone, as it may
    on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[list[str]] = []
        self.sends: list[int] = []  # for states
        self.copies: Counter[str] = Counter()
        self.mixed: Counter[str] = Counter()
        self.outside: Counter[str] = Counter()
        self.overheard = 0
        self.is_round = False
        self._late: list[tuple[Tensor, Tensor]] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.split("::")[1]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [tensor.device.type == NAME for tensor in tensors]
        if name in _COPIES:
            return self._copy(func, args, kwargs, tensors)
        if any(there) and not all(on or tensor.dim() == 0 for on, tensor in zip(there, tensors, strict=True)):
            self.mixed[f"{name} in {_place()}"] += 1
        picks = name == "index" and any(tensor.dtype == torch.bool for tensor in tensors[1:])
        if any(there) and (name in ("_local_scalar_dense", *_SHAPES_FROM_DATA) or picks):
            self._wait()
        return func(*args, **kwargs)

    def _copy(self, func: Any, args: tuple, kwargs: dict, tensors: list[Tensor]) -> Any:
        is_read = tensors[-1].device.type == NAME
        to = tensors[0].device if len(tensors) > 1 else torch.device(kwargs.get("device") or tensors[0].device)
        if is_read == (to.type == NAME):
            return func(*args, **kwargs)
        waits = not (kwargs.get("non_blocking") or (len(tensors) > 1 and True in args[2:]))
        if not is_read and waits:
            (self.copies if self.is_round else self.outside)[_place()] += 1
        if not is_read and not waits and self.is_round:
            self.sends[-1] += any(name in _place() for name in ("engine/kv/states.py", "engine/network/scans.py"))
        if is_read and waits:
            self._wait()
        elif is_read:
            late = torch.full(tensors[-1].shape, -7, dtype=kwargs.get("dtype") or tensors[-1].dtype)
            self._late.append((late, tensors[-1].clone()))
            return late
        return func(*args, **kwargs)

    def _wait(self) -> None:
        place = _place()
        # Once a capture its replay is compared, and once a call the copy looks whether weights have changed.
        if not any(name in place for name in ("engine/graph_", "generation/session.py")):
            if self.is_round:
                self.waits[-1].append(place)
            else:
                self.outside[place] += 1
        for late, source in self._late:
            late.copy_(source)
        self._late.clear()


class Calls(TorchFunctionMode):
    """Notes copies from lists to the device, for which the host waits and which no dispatch mode sees."""

    def __init__(self, audit: Audit) -> None:
        super().__init__()
        self._audit = audit

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found, name = func(*args, **(kwargs or {})), func.__name__
        copies = False
        if name in ("tensor", "as_tensor", "new_tensor"):
            copies = found.device.type == NAME and not isinstance(args[0], Tensor)
        elif name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            copies = args[0].device.type == NAME and any(isinstance(part, list) for part in index)
        if copies:
            (self._audit.copies if self._audit.is_round else self._audit.outside)[_place()] += 1
        return found


class Apart(InTurn):
    """Drafts as another process would: what its drafter does is not the round's."""

    def send(self, kind: Kind, values: Tensor) -> None:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            super().send(kind, values)

    def receive(self) -> Tensor:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return super().receive()


def _convolve(x: Tensor, weight: Tensor, bias: Any = None, padding: int = 0, **_: Any) -> Tensor:
    """A convolution of each channel `[B, channels, T]` by itself, which the device lacks."""
    x, width = F.pad(x, (padding, padding)), weight.shape[-1]
    out = sum(x[..., at : x.shape[-1] - width + 1 + at] * weight[:, 0, at, None] for at in range(width))
    return out if bias is None else out + bias[:, None]


def _place() -> str:
    root = str(Path(spec_trl.__file__).parent) + "/"
    frames = [f for f in traceback.extract_stack(limit=60) if f.filename.startswith(root)]
    return " < ".join(f"{f.filename.removeprefix(root)}:{f.lineno}" for f in frames[:-3:-1])


def _register() -> torch.device:
    """The device of the loaded library."""
    torch.utils.rename_privateuse1_backend(NAME)
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.is_available, module._is_in_bad_fork = lambda: True, lambda: False
    module.device_count, module.current_device = lambda: 1, lambda: 0
    module.get_amp_supported_dtype, module.manual_seed_all = lambda: [torch.bfloat16], lambda seed: None
    torch._register_device_module(NAME, module)
    return torch.device(NAME, 0)


def _watch(patch: pytest.MonkeyPatch) -> list[Audit]:
    """Has rounds tell the newest of the audits that are returned."""
    audits: list[Audit] = []
    decode_round, overheard = Rollout.decode_round, Planner.record_unverified

    def watched(self: Rollout, plan: Any) -> None:
        audits[-1].waits.append([])
        audits[-1].sends.append(0)
        audits[-1].is_round = True
        decode_round(self, plan)
        audits[-1].is_round = False

    def counted(self: Planner, *told: Any) -> None:
        audits[-1].overheard += len(told[1])
        overheard(self, *told)

    patch.setattr(Rollout, "decode_round", watched)
    patch.setattr(Planner, "record_unverified", counted)
    return audits


def main(library: str, *titles: str) -> None:
    warnings.simplefilter("ignore")
    torch.ops.load_library(library)
    device = _register()
    model, assistant = tiny_llama(num_hidden_layers=1), tiny_llama(num_hidden_layers=1)
    prompts = pad_left(random_rows([4, 6, 5, 7, 4, 9]) + random_rows([4]))
    there = {name: tensor.to(device) for name, tensor in prompts.items()}
    common: dict[str, Any] = dict(max_new_tokens=24, eos_token_id=5)
    top_p = dict(top_p=0.9, top_k=20, repetition_penalty=1.1)
    expected = {
        cut: outputs(generate(model, prompts, config={"runner": "eager"}, **common, **(top_p if cut else {})))
        for cut in (False, True)
    }
    hybrid = make("qwen3_5_text")
    with_states = outputs(generate(hybrid, prompts, config={"runner": "eager"}, **common))
    for network in (model, assistant, hybrid):
        network.to(device)
    patch = pytest.MonkeyPatch()
    patch.setattr(F, "conv1d", _convolve)
    install_tape(patch)
    audits = _watch(patch)
    scenarios = (
        ("none", "none", {}, {}),
        ("penalty, top-p", "self", {}, top_p),
        ("self", "self", {}, {}),
        ("fewer rows", "self", {}, {"request_ids": SOME}),
        ("refill", "self", {"max_batch_size": 2}, {}),
        ("ngram", "ngram", {}, {}),
        ("history", "history", {}, {}),
        ("model", "model", {}, {"assistant_model": assistant}),
        ("auto", "auto", {}, {}),
        ("best_of_n", "best_of_n", {}, {}),
        ("decoupled", "self", {}, {"drafter": DecoupledDrafter(Apart(SelfDrafter(model, kernel="reference")))}),
        ("states", "self", {"max_batch_size": 2}, {}),
        ("states, none", "none", {}, {}),
        ("states, model", "model", {}, {"assistant_model": hybrid}),
    )
    for title, strategy, config, options in scenarios:
        if titles and title not in titles:
            continue
        audits.append(audit := Audit())
        with audit, Calls(audit):
            target = hybrid if title in ("states", "states, none") else model
            asked = {name: tensor[SOME] for name, tensor in there.items()} if "request_ids" in options else there
            result = generate(target, asked, strategy, config, **common, **options)
        host = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in result.items()}
        texts = with_states if target is hybrid else expected[bool(options.get("top_p"))]
        same = outputs(type(result)(**host)) == [texts[row] for row in options.get("request_ids", range(len(texts)))]
        statistics = result.statistics
        told = dict(
            same=same, rounds=statistics.rounds, drafted=statistics.total.drafted, graphs=statistics.graphs,
            failure=statistics.drafter_failure, overheard=audit.overheard, waits=audit.waits, copies=audit.copies,
            mixed=audit.mixed, outside={place: count for place, count in audit.outside.items() if " < " in place},
            sends=audit.sends,
        )  # fmt: skip
        print(json.dumps({"title": title} | told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
