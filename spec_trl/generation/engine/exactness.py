"""Whether what a network computes for a token is the same, bit for bit, whatever else a forward computes with it.

Then drafts, other rows and the order of requests change no bit of a log-probability, in any dtype. Libraries promise
nothing of the kind, so it is tried: on the network itself, once per machine, in a dozen forwards of a few tokens.
"""

import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn

from ... import cpu_products
from ...json_files import read_json, write_json
from ...native_code import cache_directory
from .cache import autocast_dtype
from .runner import EagerRunner


ROWS = 12
"""Rows of the trial: with `NEW` tokens each, more than any kernel serves as few."""
NEW = 7
"""Tokens after the prompt."""
COLUMNS = 64
_PROMPTS = tuple(range(5, 5 + ROWS))  # their lengths


@dataclass(frozen=True)
class Trial:
    """What a trial found: names of modules that differ, "q_proj, bfloat16, 1 row"; none: it is exact.

    Attributes:
        network: what was tried, and under which versions.
    """

    network: str
    inexact: list[str] = field(default_factory=list)
    version: Literal[1] = 1


def inexact_parts(network: nn.Module, make_runner: Callable[[], EagerRunner]) -> list[str]:
    """Names of what is not exact in `network`, as it runs on this machine; [] where all is. `make_runner` makes a
    runner of it for `ROWS` rows of `COLUMNS`."""
    text = _describe(network)
    path = cache_directory() / f"exact_{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    try:
        return read_json(path, Trial, "trial of exactness", "delete it").inexact
    except (OSError, ValueError):
        pass
    runner = make_runner()
    with torch.no_grad():
        found = try_out(runner)
    if found:
        dtype = str(autocast_dtype(runner.network.device) or runner.network.dtype).removeprefix("torch.")
        warnings.warn(
            f"{type(network).__name__} in {dtype} is not exact on this machine: drafts may change a token where two "
            f"scores are nearly equal, because of {'; '.join(found)}.",
            stacklevel=2,
        )
    try:
        write_json(path, Trial(text, found))
    except OSError:  # a read-only home: the next process tries again
        pass
    return found


def try_out(runner: EagerRunner) -> list[str]:
    """Compares the bits of a row's logits between steps of one token, alone, and one verification among other rows."""
    alone, steps = _Bits(runner, 1), []
    for step in range(NEW):
        steps.append(alone.forward(step, 1))
    for rows in (2, ROWS):
        together = _Bits(runner, rows)
        if not torch.equal(together.forward(0, NEW)[:1], torch.cat(steps, dim=1)) or not torch.equal(
            together.prompt[:1], alone.prompt
        ):
            return _first_that_differs(runner) or ["decoder layers"]
    return []


class _Bits:
    """`rows` rows whose prompts have been read: `prompt`, the logits after them."""

    def __init__(self, runner: EagerRunner, rows: int) -> None:
        self.runner, self.rows = runner, rows
        device, lengths = runner.network.device, _PROMPTS[:rows]
        vocabulary = runner.network.get_input_embeddings().num_embeddings
        ids = torch.arange(rows * COLUMNS, device=device).view(rows, COLUMNS)
        self.tokens = (ids * 7919 + 11) % vocabulary  # [rows, columns]
        self.lengths = torch.tensor(lengths, device=device)  # [rows]
        runner.cache.reserve(list(lengths), 0)
        positions = torch.arange(max(lengths), device=device).expand(rows, -1)
        places = [(row, length - 1) for row, length in enumerate(lengths)]
        read = runner.prefill(self.tokens[:, : max(lengths)], positions, max(lengths), 0, places)
        assert read is not None
        self.prompt: Tensor = read.clone()  # [rows, 1, V]
        runner.cache.trim(0, list(lengths))

    def forward(self, step: int, count: int) -> Tensor:
        """Logits `[rows, count, V]` of the tokens from `step` on after the prompts."""
        positions = self.lengths[:, None] + torch.arange(step, step + count, device=self.lengths.device)
        self.runner.cache.reserve((self.lengths + step + count).tolist(), 0)
        tokens = self.tokens.gather(1, positions)
        return self.runner.forward(tokens, positions, int(positions.max()) + 1).clone()


def _first_that_differs(runner: EagerRunner) -> list[str]:
    """Names of the first modules, one of each kind, that differ in the first token though their inputs do not."""
    dtype = str(autocast_dtype(runner.network.device) or runner.network.dtype).removeprefix("torch.")
    outputs: list[dict[str, Tensor]] = []
    for rows, count in ((1, 1), (ROWS, NEW)):
        bits, found = _Bits(runner, rows), dict[str, Tensor]()

        def keep(name: str, module: nn.Module, inputs: Any, output: Any, into: dict[str, Tensor] = found) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor) and first.is_floating_point() and first.dim() > 1:
                into[name] = first.reshape(-1, first.shape[-1])[0].clone()

        handles = [
            module.register_forward_hook(lambda *given, name=name: keep(name, *given))
            for name, module in runner.network.named_modules()
            if name
        ]
        try:
            bits.forward(0, count)
        finally:
            for handle in handles:
                handle.remove()
        outputs.append(found)
    one, many = outputs
    differ = [name for name in one if name in many and not torch.equal(one[name], many[name])]
    return [f"{name}, {dtype}, 1 row against {ROWS * NEW}" for name in differ[:1]]


def _describe(network: nn.Module) -> str:
    """Everything that decides which kernels run."""
    layers = [f"{type(module).__name__}{[(tuple(p.shape), p.dtype) for p in module.parameters(False)]}" for module in network.modules()]
    library = cpu_products.library()
    return "\n".join([
        torch.__version__, transformers.__version__, torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads()),
        "" if library is None else Path(library._name).name, str(autocast_dtype(next(network.parameters()).device)), *layers,
    ])
