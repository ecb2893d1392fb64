"""Checkpoints of learned drafters come in exactly, and go out as they came."""

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


def test_written_and_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "new" / "folder", CONFIG, tensors())
    config, found = read_checkpoint(tmp_path / "new" / "folder")
    assert config == CONFIG and is_equal(found, tensors())


def test_a_config_is_kept_to_the_byte_until_it_changes(tmp_path: Path) -> None:
    text = '{ "width":3 ,\r\n\t"kind": "t\\u00e9st", "unknown": [1.0, 1e5]}'
    write_checkpoint(tmp_path, CONFIG, tensors())
    (tmp_path / "config.json").write_bytes(text.encode())
    config, found = read_checkpoint(str(tmp_path))
    write_checkpoint(tmp_path, config, found)  # over the file its tensors are mapped to
    assert (tmp_path / "config.json").read_bytes() == text.encode()
    assert is_equal(found, tensors()) and is_equal(read_checkpoint(tmp_path)[1], tensors())
    config["width"] = 4
    write_checkpoint(tmp_path, config, found)
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads(text) | {"width": 4}
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


def test_tensors_that_share_memory_or_are_not_contiguous(tmp_path: Path) -> None:
    square = torch.arange(9.0).view(3, 3)
    given = {"a": square, "b": square, "c": square.T}
    write_checkpoint(tmp_path, CONFIG, given)
    assert is_equal(read_checkpoint(tmp_path)[1], given)


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
def test_other_files(kind: str, tmp_path: Path) -> None:
    write_pieces(tmp_path, kind)
    config, found = read_checkpoint(tmp_path)
    assert config == CONFIG and is_equal(found, tensors())
    write_checkpoint(tmp_path, CONFIG, {"a": torch.zeros(1)})
    assert list(read_checkpoint(tmp_path)[1]) == ["a"]  # one safetensors file is preferred


@pytest.mark.parametrize("kind", ["bin", "safetensors shards"])
def test_hub_ids(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the hub's cache, as a download leaves it."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--someone--drafter"
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("0" * 40)
    write_pieces(snapshot, kind)
    config, found = read_checkpoint("someone/drafter")
    assert config == CONFIG and is_equal(found, tensors())
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


def pickled(folder: Path, content: object) -> None:
    (folder / "config.json").write_text("{}")
    torch.save(content, folder / "pytorch_model.bin")


def damaged(folder: Path) -> None:
    write_checkpoint(folder, CONFIG, tensors())
    (folder / "model.safetensors").write_bytes(b"not one")


SHARD = "-of-00002.safetensors"
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda folder: None, "no config.json"),
    "half a config": (lambda folder: (folder / "config.json").write_text("{"), "not a JSON object"),
    "a list": (lambda folder: (folder / "config.json").write_text("[1]"), "not a JSON object"),
    "no weights": (lambda folder: (folder / "config.json").write_text("{}"), "no weights"),
    "damaged weights": (lambda folder: damaged(folder), "cannot be read"),
    "code": (lambda folder: pickled(folder, {"a": Payload()}), "cannot be read"),
    "more than tensors": (lambda folder: pickled(folder, {"a": torch.zeros(1), "step": 3}), "more than a dict of"),
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
    "infinite": ({"old.bias": torch.tensor([0.0, torch.inf, 0.0])}, "old.bias holds NaN or infinite"),
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
