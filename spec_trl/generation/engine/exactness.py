"""Whether what a network computes for a token is the same, bit for bit, whatever else a forward computes with it.

Then drafts, other rows and the order of requests change no bit of a log-probability, in any dtype. Libraries promise
nothing of the kind, so it is tried: on the first layers of the network itself, once per machine, in a dozen forwards.
"""

import hashlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from ...cpu_products import reading_prompts
from ...json_files import write_atomically
from ...native_code import cache_directory
from .cache import RaggedCache, autocast_dtype
from .runner import EagerRunner
from .shadow import decoder_layers, make_shadow
from .snapshot import while_unchanged


ROWS = 12
"""Rows of the trial. With `NEW` tokens each they are more than what any kernel takes for few."""
NEW = 7
"""Tokens of a row after its prompt."""
COLUMNS = 32
_PROMPTS = tuple(range(5, 5 + ROWS))  # their lengths


def inexact_parts(model: PreTrainedModel, make: Callable[[PreTrainedModel, RaggedCache], EagerRunner]) -> list[str]:
    """Names of what is not exact in `model` in the runners that `make` makes on this machine; [] where all is.

    Tried once per machine, and kept with what is known of it. One warning says it, per model and process.
    """
    settings = f"exact {make.__name__} {torch.get_num_threads()} {autocast_dtype(model.device)}"
    return while_unchanged(model, settings, lambda: _inexact_parts(model, make, settings))


def _inexact_parts(
    model: PreTrainedModel, make: Callable[[PreTrainedModel, RaggedCache], EagerRunner], settings: str
) -> list[str]:
    text = _describe(model, settings)
    path = cache_directory() / f"exact_{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    try:
        found: list[str] = json.loads(path.read_bytes())
    except (OSError, ValueError):
        try:
            found = _try_out(make(_first_layers(model), RaggedCache.for_network(model, ROWS, COLUMNS)))
        except Exception as error:  # the generation will say what is wrong, or do what the trial cannot
            return [f"it could not be tried: {type(error).__name__}: {error}"]
        try:
            write_atomically(path, json.dumps(found))
        except OSError:  # a read-only home: the next process tries it again
            pass
    if found:
        warnings.warn(
            f"{type(model).__name__} is not exact on this machine: drafts, or other rows, may change a token where "
            f"two scores are nearly equal ({'; '.join(found)}).",
            stacklevel=2,
        )
    return found


def _describe(model: PreTrainedModel, settings: str) -> str:
    """Everything that decides which kernels run."""
    package = Path(__file__).parents[2]
    sources = sorted(path for suffix in ("py", "cpp", "h") for path in package.rglob(f"*.{suffix}"))
    ours = hashlib.sha256(b"".join(map(Path.read_bytes, sources))).hexdigest()
    layers = [
        f"{type(module).__name__} {[(tuple(tensor.shape), str(tensor.dtype)) for tensor in module.parameters(False)]}"
        for module in model.modules()
    ]
    machine = torch.__version__, transformers.__version__, torch.backends.cpu.get_cpu_capability(), ours
    return "\n".join([*machine, settings, repr(model.config.to_dict()), *dict.fromkeys(layers)])


def _first_layers(model: PreTrainedModel) -> PreTrainedModel:
    """A shadow of `model` with as many layers as hold one of each kind, and two at least."""
    shadow: PreTrainedModel = make_shadow(model)
    try:
        layers = decoder_layers(shadow)
    except ValueError:
        return shadow
    config = shadow.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None) or [""] * len(layers)
    inside = ["".join(type(module).__name__ for module in layer.modules()) for layer in layers]
    kinds = list(zip(types, inside, strict=False))
    del layers[max(2, 1 + max(map(kinds.index, kinds), default=0)) :]
    return shadow


def _try_out(runner: EagerRunner) -> list[str]:
    """Compares the bits of a row's logits: steps of one token, alone, against a verification among other rows."""
    with torch.no_grad():
        alone = _Trial(runner, 1)
        steps = torch.cat([alone.forward(step, 1) for step in range(NEW)], dim=1)  # [1, NEW, V]
        for rows in (2, ROWS):
            together = _Trial(runner, rows)
            found = together.forward(0, NEW)[:1]
            if not torch.equal(found, steps) or not torch.equal(together.prompt[:1], alone.prompt):
                return _first_that_differs(runner) or ["what decoder layers compute"]
    return []


class _Trial:
    """`rows` rows whose prompts have been read: `prompt` `[rows, 1, V]` are the logits after them."""

    def __init__(self, runner: EagerRunner, rows: int) -> None:
        self.runner = runner
        device, lengths = runner.network.device, _PROMPTS[:rows]
        vocabulary = runner.network.get_input_embeddings().weight.shape[0]
        ids = torch.arange(rows * COLUMNS, device=device).view(rows, COLUMNS)
        self.tokens = (ids * 7919 + 11) % vocabulary  # [rows, columns]
        self.lengths = torch.tensor(lengths, device=device)  # [rows]
        runner.cache.reserve(list(lengths), 0)
        positions = torch.arange(max(lengths), device=device).expand(rows, -1)  # [rows, q]
        places = [(row, length - 1) for row, length in enumerate(lengths)]
        with reading_prompts():
            read = runner.prefill(self.tokens[:, : max(lengths)], positions, max(lengths), 0, places)
        assert read is not None
        self.prompt = read.clone()
        runner.cache.trim(0, list(lengths))

    def forward(self, step: int, count: int) -> Tensor:
        """Logits `[rows, count, V]` of the tokens from `step` on after the prompts."""
        positions = self.lengths[:, None] + torch.arange(step, step + count, device=self.lengths.device)
        self.runner.cache.reserve((self.lengths + step + count).tolist(), 0)
        tokens = self.tokens.gather(1, positions)  # [rows, count]
        return self.runner.forward(tokens, positions, int(positions.max()) + 1).clone()


def _first_that_differs(runner: EagerRunner) -> list[str]:
    """Names the first module that gives a token something else, and whether it was given the same."""
    dtype = str(autocast_dtype(runner.network.device) or runner.network.dtype).removeprefix("torch.")
    alone = _Trial(runner, 1)
    steps = [_outputs(alone, step, 1) for step in range(NEW)]
    together = _Trial(runner, ROWS)
    many = _outputs(together, 0, NEW)
    for step, one in enumerate(steps):
        for name, (given, output) in one.items():  # in the order in which they ran
            others = many.get(name)
            if others is None or torch.equal(output[0], others[1][step]):
                continue
            is_alike = given is None or others[0] is None or torch.equal(given[0], others[0][step])
            return [f"{name if is_alike else f'what {name} is given'}, {dtype}, 1 row"]
    return []


def _outputs(trial: _Trial, step: int, count: int) -> dict[str, tuple[Tensor | None, Tensor]]:
    """Inputs and outputs `[tokens, features]` of the modules in a forward; of modules of other shapes nothing."""
    found: dict[str, tuple[Tensor | None, Tensor]] = {}

    def keep(name: str, inputs: Any, output: Any) -> None:
        states = _by_token(output[0] if isinstance(output, tuple) else output)
        if states is not None:
            found[name] = _by_token(inputs[0] if inputs else None), states

    handles = [
        module.register_forward_hook(lambda _, inputs, output, name=name: keep(name, inputs, output))
        for name, module in trial.runner.network.named_modules()
        if name
    ]
    try:
        trial.forward(step, count)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _by_token(value: Any) -> Tensor | None:
    is_states = isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1
    return value.reshape(-1, value.shape[-1]).clone() if is_states else None
