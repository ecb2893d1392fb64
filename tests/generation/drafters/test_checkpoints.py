"""Checkpoints of learned drafters come in exactly, and go out as they came."""

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from torch import Tensor, nn

from spec_trl.generation.drafters.checkpoints import (
    load_exactly,
    read_checkpoint,
    tensors_to_store,
    write_checkpoint,
)
from spec_trl.json_files import write_atomically


RENAMES = {"old.": "new.inner."}
CONFIG = {"kind": "test", "width": 3}


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "old.weight": torch.randn(3, 2, generator=generator).half(),
        "old.bias": torch.randn(3, generator=generator).half(),
        "ids": torch.tensor([2, 0, 1]),
    }


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.new = nn.ModuleDict({"inner": nn.Linear(2, 3)})
        self.register_buffer("ids", torch.empty(3, dtype=torch.int64))


def load(given: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> Network:
    with torch.device("meta"):
        network = Network().to(dtype)
    load_exactly(network, given, RENAMES, torch.device("cpu"))
    return network


def is_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


def test_a_config_is_kept_to_the_byte_until_it_changes(tmp_path: Path) -> None:
    text = '{ "width":3 ,\r\n\t"kind": "t\\u00e9st", "unknown": [1.0, 1e5]}'
    square = torch.arange(9.0).view(3, 3)
    given = tensors() | {"a": square, "shares its memory": square, "not contiguous": square.T}
    write_checkpoint(tmp_path, CONFIG, given)
    (tmp_path / "config.json").write_bytes(text.encode())
    config, found = read_checkpoint(str(tmp_path))
    write_checkpoint(tmp_path, config, found)  # over the file its tensors are mapped to
    assert (tmp_path / "config.json").read_bytes() == text.encode()
    assert is_equal(found, given) and is_equal(read_checkpoint(tmp_path)[1], given)
    config["width"] = 4
    write_checkpoint(tmp_path, config, found)
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads(text) | {"width": 4}
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


def write_pieces(folder: Path, kind: str) -> None:
    """The tensors as `kind` of file."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    given = tensors()
    first, second = {"ids": given.pop("ids")}, given
    if kind == "bin":
        torch.save(first | second, folder / "pytorch_model.bin")
        return
    stem, suffix = ("model", "safetensors") if kind == "safetensors shards" else ("pytorch_model", "bin")
    names = [f"{stem}-0000{i}-of-00002.{suffix}" for i in (1, 2)]
    for name, part in zip(names, (first, second), strict=True):
        save_file(part, folder / name) if suffix == "safetensors" else torch.save(part, folder / name)
    places = dict.fromkeys(first, names[0]) | dict.fromkeys(second, names[1])
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.parametrize("kind", ["bin", "safetensors shards", "bin shards"])
def test_other_files(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder, and by a hub id from the cache, as a download leaves it."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--someone--drafter" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    write_atomically(snapshot.parents[1] / "refs/main", "0" * 40)
    write_pieces(snapshot, kind)
    for checkpoint in (snapshot, "someone/drafter"):
        config, found = read_checkpoint(checkpoint)
        assert config == CONFIG and is_equal(found, tensors())
    write_checkpoint(snapshot, CONFIG, {"a": torch.zeros(1)})
    assert list(read_checkpoint(snapshot)[1]) == ["a"]  # one safetensors file is preferred
    for unknown in ("someone/else", "no/such/folder", Path("nowhere")):
        with pytest.raises(ValueError, match=f"assistant_model='{unknown}' is neither a folder nor a hub id"):
            read_checkpoint(unknown)


class Payload:
    def __reduce__(self) -> Any:
        return print, ("unpickled",)


def shards(folder: Path, changes: dict[str, str] | None) -> None:
    """Shards whose index has `changes`, or is none."""
    write_pieces(folder, "safetensors shards")
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    index.write_text("{}" if changes is None else json.dumps({"weight_map": places | changes}))


def file(name: str, content: bytes) -> Callable[[Path], Any]:
    """Makes a folder with an empty config, and then this file."""

    def make(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        (folder / name).write_bytes(content)

    return make


def pickled(content: object) -> Callable[[Path], Any]:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return file("pytorch_model.bin", buffer.getvalue())


SHARD = "-of-00002.safetensors"
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda folder: None, "no config.json"),
    "half a config": (file("config.json", b"{"), "not a JSON object"),
    "a list": (file("config.json", b"[1]"), "not a JSON object"),
    "no weights": (file("config.json", b"{}"), "no weights"),
    "damaged weights": (file("model.safetensors", b"not one"), "cannot be read"),
    "code": (pickled({"a": Payload()}), "cannot be read"),
    "more than tensors": (pickled({"a": torch.zeros(1), "step": 3}), "more than a dict of"),
    "a shard is missing": (lambda folder: shards(folder, {"ids": "model-00003" + SHARD}), "does not lie next to it"),
    "a shard elsewhere": (lambda folder: shards(folder, {"ids": "../a.safetensors"}), r"\.\./a"),
    "a tensor is missing": (lambda folder: shards(folder, {"b": "model-00001" + SHARD}), r"disagree about \['b'\]"),
    "no index": (lambda folder: shards(folder, None), "is not an index"),
}


@pytest.mark.parametrize("make, message", BROKEN.values(), ids=BROKEN)
def test_broken_folders(
    make: Callable[[Path], Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        read_checkpoint(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "unpickled" not in capsys.readouterr().out  # nothing but tensors is


# ---- into a network ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_loaded_and_stored(dtype: torch.dtype) -> None:
    given = tensors() | {"verifier_norm.weight": torch.zeros(1)}  # a spare one
    network = load(given, dtype)
    assert all(tensor.device.type == "cpu" for tensor in network.state_dict().values())
    assert torch.equal(network.new.inner.weight, given["old.weight"].to(dtype))
    assert torch.equal(network.ids, given["ids"]) and network.new.inner.bias.dtype == dtype
    assert all(parameter.requires_grad for parameter in network.parameters())
    assert is_equal(tensors_to_store(network, given, RENAMES), given)  # bfloat16 holds less than float16, and yet
    with torch.no_grad():
        network.new.inner.bias += 1
    stored = tensors_to_store(network, given, RENAMES)
    assert stored["old.bias"].dtype == torch.float16 and not torch.equal(stored["old.bias"], given["old.bias"])
    assert is_equal(stored | {"old.bias": given["old.bias"]}, given)


BAD: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "missing": ({"old.bias": None}, r"missing \['new.inner.bias'\], unexpected \[\]"),
    "unexpected": ({"old.scale": torch.zeros(1)}, r"missing \[\], unexpected \['old.scale'\]"),
    "twice": ({"new.inner.bias": torch.zeros(3)}, r"\['new.inner.bias', 'old.bias'\] are stored for the same place"),
    "shape": ({"old.bias": torch.zeros(4)}, r"old.bias has shape \[4\] and its config makes it \[3\]"),
    "kind": ({"ids": torch.zeros(3)}, "ids is stored as torch.float32"),
    "NaN": ({"old.bias": torch.tensor([0.0, torch.nan, 0.0])}, "old.bias holds NaN or infinite"),
    "too large for the dtype": ({"old.bias": torch.tensor([1e5, 0.0, 0.0])}, "old.bias .* torch.float16"),
}


@pytest.mark.parametrize("changes, message", BAD.values(), ids=BAD)
def test_what_does_not_fit(changes: dict[str, Tensor | None], message: str) -> None:
    given = {key: value for key, value in (tensors() | changes).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        load(given, torch.float16)


def test_nothing_keeps_a_value_it_was_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a copy is forgotten the parameter is NaN, not zero."""
    monkeypatch.setattr(Tensor, "copy_", lambda self, source: self)
    with pytest.raises(ValueError, match="holds NaN"):
        load(tensors())
