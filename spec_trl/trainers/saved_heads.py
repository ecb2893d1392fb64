"""MTP heads in saved policies. transformers leaves them out when it loads a model, and so when it saves it; engines
that read in config.json that there are some then fail, or draft with random weights."""

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from ..generation.drafters.mtp.mtp_drafter import OWN, MtpDrafter
from ..generation.drafters.mtp.mtp_layouts import INDEX, WHOLE, find_heads, promises_heads, stored_files
from ..json_files import replacing, write_atomically


_HEADS, _REST = "model-mtp.safetensors", "model-00001-of-00001.safetensors"


@contextmanager
def adding_heads(policy: PreTrainedModel, folder: str | Path, trained: MtpDrafter | None) -> Iterator[None]:
    """Adds all heads of the checkpoint that `policy` was loaded from to `folder`, where the block saves the policy, be
    it over that very checkpoint. They keep the names and the dtypes that they came with.

    Args:
        policy: whose config names the checkpoint.
        folder: where safetensors of the policy are then; without them nothing is added.
        trained: its weights take the place of those of the checkpoint; None: none was trained.
    """
    folder, tensors = Path(folder), dict[str, Tensor]()
    if policy.config.name_or_path and promises_heads(policy.config):
        revision = getattr(policy.config, "_commit_hash", None)
        try:
            heads = find_heads(policy.config.name_or_path, policy, OWN, revision=revision)
            tensors = {} if heads is None else heads.read(heads.files)
        except ValueError as error:
            warnings.warn(
                f"{folder} is saved without the policy's multi-token-prediction head, which config.json promises: "
                f"{error} Copy the head's tensors there, or set its number of heads to 0.",
                stacklevel=3,
            )
    if trained is not None:
        tensors |= {name: tensor for name, tensor in trained.tensors().items() if name in tensors}
    yield
    saved = stored_files(folder)
    if saved and (tensors := {name: tensor for name, tensor in tensors.items() if name not in saved}):
        add_tensors(folder, tensors)


def add_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Adds `tensors` to the safetensors in `folder`, in a shard that the index names. One file becomes a shard too."""
    with replacing(folder / _HEADS) as file:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    if is_whole := (folder / WHOLE).is_file():
        with (folder / WHOLE).open("rb") as opened:
            header = 8 + int.from_bytes(opened.read(8), "little")
        size = (folder / WHOLE).stat().st_size - header
        files = dict.fromkeys(stored_files(folder), _REST)
        index: dict[str, Any] = {"metadata": {"total_size": size}, "weight_map": files}
    else:
        index = json.loads((folder / INDEX).read_text())
    index["metadata"]["total_size"] += sum(tensor.nbytes for tensor in tensors.values())
    index["weight_map"] |= dict.fromkeys(tensors, _HEADS)
    write_atomically(folder / INDEX, json.dumps(index, indent=2) + "\n")
    if is_whole:  # last: while there is a single file, readers take it
        (folder / WHOLE).replace(folder / _REST)
