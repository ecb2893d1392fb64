"""Checkpoints of learned drafters: a folder or hub id with a config.json and tensors, read and written exactly."""

import json
import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class ConfigFile(dict[str, Any]):
    """The keys of a config.json, and the text they came in: a config that is unchanged is written as it was read."""

    def __init__(self, text: str) -> None:
        super().__init__(json.loads(text))
        self.text = text


def read_checkpoint(checkpoint: str | Path) -> tuple[ConfigFile, dict[str, Tensor]]:
    """Reads a checkpoint on the CPU, as stored: names, dtypes and bits.

    `model.safetensors` or its shards; where there are none, `pytorch_model.bin` or its shards, of which nothing but
    tensors is unpickled.

    Args:
        checkpoint: a folder, or a hub id, which is downloaded (`HF_HUB_OFFLINE=1`: looked up in the hub's cache).

    Raises:
        ValueError: it is neither, or a file of it is missing or cannot be read.
    """
    config = read_config(checkpoint)
    # Pickled weights are fetched only where there are no others.
    for (whole, index), shards in ((_SAFETENSORS, "model*.safetensors"), (_PICKLED, "pytorch_model*.bin")):
        folder = _folder_of(checkpoint, [shards, index])
        if (folder / whole).is_file():
            return config, _read_file(folder / whole)
        if (folder / index).is_file():
            return config, _read_shards(folder / index)
    raise ValueError(
        f"assistant_model={str(checkpoint)!r} has no weights; {_SAFETENSORS[0]} or {_PICKLED[0]}, or the index of "
        "their shards, must lie beside its config.json."
    )


def read_config(checkpoint: str | Path, argument: str = "assistant_model") -> ConfigFile:
    """The config.json of a checkpoint alone; of one on the hub nothing else is downloaded.

    Args:
        checkpoint: as in :func:`read_checkpoint`.
        argument: that it was named by, for messages.
    """
    path = _folder_of(checkpoint, ["config.json"], argument) / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{argument}={str(checkpoint)!r} has no config.json; name the folder that holds it with the weights."
        )
    try:
        return ConfigFile(path.read_bytes().decode())
    except (ValueError, TypeError) as error:
        raise ValueError(f"{argument}={str(checkpoint)!r}: its config.json is no JSON object: {error}.") from error


def write_checkpoint(folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes `config.json` and `model.safetensors`, whole or not at all each: a folder may be written over itself.

    Args:
        folder: made where it does not exist.
        config: of :func:`read_checkpoint`, which is written as it was read unless a key has changed, or any mapping.
        tensors: by the names they are to have.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(config, ConfigFile) and json.loads(config.text) == config:
        text = config.text
    else:
        text = json.dumps(dict(config), indent=2) + "\n"
    # Copies: safetensors refuses tensors that share memory, as those of a .bin file may.
    layout = torch.contiguous_format
    plain = {name: tensor.detach().cpu().clone(memory_format=layout) for name, tensor in tensors.items()}
    weights, settings = folder / ".model.safetensors.new", folder / ".config.json.new"
    save_file(plain, weights, metadata={"format": "pt"})
    settings.write_bytes(text.encode())
    # Replaced, not overwritten: tensors that were read from the old file are still mapped to it.
    os.replace(weights, folder / "model.safetensors")
    os.replace(settings, folder / "config.json")


def load_exactly(
    network: nn.Module,
    tensors: Mapping[str, Tensor],
    renames: Mapping[str, str],
    optional: Iterable[str],
    source: str | Path,
    device: torch.device,
) -> None:
    """Gives every parameter and persistent buffer of `network` the tensor of its name, and leaves none over.

    Nothing keeps a value it was not given: parameters are NaN before, and none may be afterwards.

    Args:
        network: on the meta device, in the dtype it is to run in.
        tensors: of :func:`read_checkpoint`; floating ones are cast to the network's dtype.
        renames: stored prefix -> prefix in the network, e.g. `{"midlayer.": "layers.0."}`.
        optional: stored names that may be there without a place in the network.
        source: the checkpoint, for messages.
        device: where the network is to be.

    Raises:
        ValueError: a tensor is missing, left over, of another shape or kind, or not finite.
    """
    where = f"assistant_model={str(source)!r}"
    places = network.state_dict(keep_vars=True)
    spare = set(optional)
    given = {stored: renamed(stored, renames) for stored in tensors if stored not in spare}
    missing = sorted(set(places) - set(given.values()))
    unexpected = sorted(stored for stored, name in given.items() if name not in places)
    if missing or unexpected:
        raise ValueError(
            f"{where}: its tensors are not those of its config: missing {missing}, unexpected {unexpected}. Check "
            "that weights and config.json belong together."
        )
    twice = sorted(stored for stored, name in given.items() if list(given.values()).count(name) > 1)
    if twice:
        raise ValueError(f"{where}: {twice} are stored for the same place; keep one of them.")
    for stored, name in given.items():
        tensor, place = tensors[stored], places[name]
        if tensor.shape != place.shape:
            raise ValueError(
                f"{where}: {stored} has shape {list(tensor.shape)} and its config makes it {list(place.shape)}. Check "
                "that weights and config.json belong together."
            )
        if tensor.is_floating_point() != place.is_floating_point():
            raise ValueError(f"{where}: {stored} is stored as {tensor.dtype} and must be like {place.dtype}.")
        _materialise(network, name, place, device)
    with torch.no_grad():
        placed = network.state_dict()
        for stored, name in given.items():
            placed[name].copy_(tensors[stored])
    for stored, name in given.items():
        if placed[name].is_floating_point() and not bool(placed[name].isfinite().all()):
            raise ValueError(
                f"{where}: {stored} holds NaN or infinite values in {placed[name].dtype}. The file is broken, or its "
                "dtype reaches further: pass dtype=torch.float32."
            )


def tensors_to_store(
    network: nn.Module, tensors: Mapping[str, Tensor], renames: Mapping[str, str]
) -> dict[str, Tensor]:
    """The tensors of a checkpoint as `network` has them now, under the names and in the dtypes they came in.

    One that did not change is returned bit for bit, whatever dtype the network runs in. Those without a place in the
    network are returned as they came.

    Args:
        network: filled by :func:`load_exactly`.
        tensors: what it was filled from.
        renames: as there.
    """
    placed = network.state_dict()
    found = dict(tensors)
    for stored, original in tensors.items():
        name = renamed(stored, renames)
        if name in placed:
            now = placed[name].cpu()
            if not torch.equal(original.to(now.dtype), now):
                found[stored] = now.to(original.dtype)
    return found


def renamed(stored: str, renames: Mapping[str, str]) -> str:
    """The name in the network of the tensor `stored`."""
    for prefix, replacement in renames.items():
        if stored.startswith(prefix):
            return replacement + stored.removeprefix(prefix)
    return stored


def _materialise(network: nn.Module, name: str, place: Tensor, device: torch.device) -> None:
    owner_name, _, leaf = name.rpartition(".")
    owner = network.get_submodule(owner_name)
    # NaN: a forgotten copy would show, where zeros would draft badly and random numbers differ from run to run.
    empty = torch.nan if place.is_floating_point() else 0
    tensor = torch.full(place.shape, empty, dtype=place.dtype, device=device)
    if isinstance(place, nn.Parameter):
        owner.register_parameter(leaf, nn.Parameter(tensor, requires_grad=place.requires_grad))
    else:
        owner.register_buffer(leaf, tensor)


def _folder_of(checkpoint: str | Path, files: Sequence[str], argument: str = "assistant_model") -> Path:
    if Path(checkpoint).is_dir():
        return Path(checkpoint)
    try:
        if not isinstance(checkpoint, str):
            raise HFValidationError("no such folder")
        return Path(snapshot_download(checkpoint, allow_patterns=list(files)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"{argument}={str(checkpoint)!r} is neither a folder nor a hub id that can be fetched: {error}"
        ) from error


def _read_shards(index: Path) -> dict[str, Tensor]:
    try:
        files: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{index} is no index of shards; fetch it again.") from error
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        if Path(file).name != file or not (index.parent / file).is_file():
            raise ValueError(f"{index} names the shard {file!r}, which does not lie beside it; fetch it again.")
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
