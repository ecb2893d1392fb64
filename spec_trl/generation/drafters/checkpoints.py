"""Reads and writes checkpoints of learned drafters: a folder or hub id with config.json and tensors."""

import json
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ...json_files import replacing


_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_SPARE = {
    "rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq",
    "verifier_norm.weight", "verifier_lm_head.weight",
}  # fmt: skip
"""Some files hold them; drafting does not need them."""


class ConfigFile(dict[str, Any]):
    """The keys of a config.json, and its text, which is written again if no key has changed."""

    def __init__(self, text: str) -> None:
        super().__init__(json.loads(text))
        self.text = text


def read_checkpoint(checkpoint: str | Path) -> tuple[ConfigFile, dict[str, Tensor]]:
    """Reads the config and the tensors of a checkpoint, as stored, on the CPU.

    Args:
        checkpoint: a folder, or a hub id, which is downloaded (`HF_HUB_OFFLINE=1`: looked up in the hub's cache), with
            `model.safetensors` or its shards, or else `pytorch_model.bin` or its shards (nothing but tensors).

    Raises:
        ValueError: it is neither, or one of its files is missing or cannot be read.
    """
    config = read_config(checkpoint)
    # Pickled weights are fetched only where there are no others.
    for (whole, index), shards in ((_SAFETENSORS, "model*.safetensors"), (_PICKLED, "pytorch_model*.bin")):
        folder = folder_of(checkpoint, [shards, index])
        if (folder / whole).is_file():
            return config, _read_file(folder / whole)
        if (folder / index).is_file():
            return config, _read_shards(folder / index)
    raise ValueError(
        f"assistant_model={str(checkpoint)!r} has no weights; {_SAFETENSORS[0]} or {_PICKLED[0]}, or the index of "
        "their shards, must lie next to its config.json."
    )


def read_config(checkpoint: str | Path, argument: str = "assistant_model") -> ConfigFile:
    """The config.json of a checkpoint, named by `argument`; nothing else is downloaded from the hub.

    Raises:
        ValueError: it is neither folder nor hub id, or its config.json is missing or not a JSON object.
    """
    path, named = folder_of(checkpoint, ["config.json"], argument) / "config.json", f"{argument}={str(checkpoint)!r}"
    if not path.is_file():
        raise ValueError(f"{named} has no config.json; name the folder that holds it with the weights.")
    try:
        return ConfigFile(path.read_bytes().decode())
    except (ValueError, TypeError) as error:
        raise ValueError(f"{named}: its config.json is not a JSON object: {error}.") from error


def write_checkpoint(folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes `config.json` and `model.safetensors`, each whole or not at all: a folder may be written over itself. An
    unchanged config of :func:`read_checkpoint` is written as read."""
    text = json.dumps(dict(config), indent=2) + "\n"
    if isinstance(config, ConfigFile) and json.loads(config.text) == config:
        text = config.text
    # Copies: safetensors refuses tensors that share memory, as those of a .bin file may.
    layout = torch.contiguous_format
    plain = {name: tensor.detach().cpu().clone(memory_format=layout) for name, tensor in tensors.items()}
    with replacing(Path(folder) / "model.safetensors") as file:
        save_file(plain, file, metadata={"format": "pt"})
    with replacing(Path(folder) / "config.json") as file:
        file.write_bytes(text.encode())


def load_exactly(
    network: nn.Module, tensors: Mapping[str, Tensor], renames: Mapping[str, str], device: torch.device
) -> None:
    """Loads every parameter and persistent buffer of `network` from the tensor of its name; none may be left.

    Args:
        network: on the meta device, in the dtype it is to run in.
        tensors: of :func:`read_checkpoint`; floating ones are cast to the network's dtype.
        renames: stored prefix -> prefix in the network, e.g. `{"midlayer.": "layers.0."}`.
        device: of the network.

    Raises:
        ValueError: a tensor is missing, left over, of another shape or kind, or not finite.
    """
    places = network.state_dict(keep_vars=True)
    names = {stored: name for stored in tensors if (name := renamed(stored, renames)) not in _SPARE}
    missing = sorted(set(places) - set(names.values()))
    unexpected = sorted(stored for stored, name in names.items() if name not in places)
    remedy = "Check that weights and config.json belong together."
    if missing or unexpected:
        raise ValueError(
            f"its tensors are not those of its config: missing {missing}, unexpected {unexpected}. {remedy}"
        )
    counts = Counter(names.values())
    if twice := sorted(stored for stored, name in names.items() if counts[name] > 1):
        raise ValueError(f"{twice} are stored for the same place; keep one of them.")
    for stored, name in names.items():
        tensor, place = tensors[stored], places[name]
        if tensor.shape != place.shape:
            raise ValueError(
                f"{stored} has shape {list(tensor.shape)} and its config makes it {list(place.shape)}. {remedy}"
            )
        if tensor.is_floating_point() != place.is_floating_point():
            raise ValueError(f"{stored} is stored as {tensor.dtype} and must be like {place.dtype}.")
    network.to_empty(device=device)
    placed = network.state_dict()
    for tensor in placed.values():  # NaN: a forgotten copy would show, where any other number would draft badly
        tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
    for stored, name in names.items():
        placed[name].copy_(tensors[stored])
        if placed[name].is_floating_point() and not bool(placed[name].isfinite().all()):
            raise ValueError(
                f"{stored} holds NaN or infinite values in {placed[name].dtype}. The file is broken, or its "
                "dtype reaches further: pass dtype=torch.float32."
            )


def tensors_to_store(
    network: nn.Module, tensors: Mapping[str, Tensor], renames: Mapping[str, str]
) -> dict[str, Tensor]:
    """Current values of the tensors from which :func:`load_exactly` filled `network`, with their names and dtypes;
    unchanged tensors and those without a place in the network bit for bit."""
    placed = network.state_dict()
    found = dict(tensors)
    for stored, original in tensors.items():
        if (now := placed.get(renamed(stored, renames))) is not None:
            now = now.cpu()
            if not torch.equal(original.to(now.dtype), now):
                found[stored] = now.to(original.dtype)
    return found


def renamed(stored: str, renames: Mapping[str, str]) -> str:
    """The name in the network of the tensor `stored`."""
    for prefix, replacement in renames.items():
        if stored.startswith(prefix):
            return replacement + stored.removeprefix(prefix)
    return stored


def folder_of(
    checkpoint: str | Path, files: Sequence[str], argument: str = "assistant_model", **options: Any
) -> Path:
    """The folder of a checkpoint, named by `argument`; of a hub id, the folder in the hub's cache, with those of its
    `files` that exist. `options` are of `snapshot_download`.

    Raises:
        ValueError: it is neither folder nor hub id.
    """
    if Path(checkpoint).is_dir():
        return Path(checkpoint)
    try:
        if not isinstance(checkpoint, str):
            raise HFValidationError("no such folder")
        return Path(snapshot_download(checkpoint, allow_patterns=list(files), **options))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"{argument}={str(checkpoint)!r} is neither a folder nor a hub id that can be fetched: {error}"
        ) from error


def state_of(checkpoint: str) -> tuple[object, ...]:
    """The name of a checkpoint and, of a folder, its files and their modification times: equal until a file is
    written. A hub id stands for one state."""
    folder = Path(checkpoint)
    files = folder.iterdir() if folder.is_dir() else ()
    return checkpoint, *sorted((file.name, file.stat().st_mtime_ns) for file in files)


def _read_shards(index: Path) -> dict[str, Tensor]:
    try:
        files: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{index} is not an index of shards; fetch it again.") from error
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        if Path(file).name != file or not (index.parent / file).is_file():
            raise ValueError(f"{index} names the shard {file!r}, which does not lie next to it; fetch it again.")
        tensors |= _read_file(index.parent / file)
    if set(tensors) != set(files):
        raise ValueError(
            f"{index} and its shards disagree about {sorted(set(tensors) ^ set(files))}; fetch them again."
        )
    return tensors


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{file} cannot be read; fetch it again, or convert it to safetensors: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ValueError(f"{file} holds more than a dict of tensors; save the drafter's state_dict alone.")
    return tensors
