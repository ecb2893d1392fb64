"""Saves policies with their MTP heads. transformers leaves them out when it loads a model, and so when it saves it;
engines that read in config.json that there are some then fail, or draft with random weights."""

import functools
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from ..generation.drafters.mtp.mtp_drafter import OWN, MtpDrafter
from ..generation.drafters.mtp.mtp_layouts import INDEX, WHOLE, find_heads, promises_heads, stored_files
from ..generation.engine.drafter import Drafter
from ..generation.keyword import UNDONE_WITH_IT
from ..json_files import replacing, write_atomically


_HEADS, _REST = "model-mtp.safetensors", "model-00001-of-00001.safetensors"
_read: "WeakKeyDictionary[PreTrainedModel, tuple[str, Mapping[str, Tensor]]]" = WeakKeyDictionary()
"""Heads by policy, with the checkpoint's name."""
_kept: "WeakKeyDictionary[PreTrainedModel, Callable[[], Mapping[str, Tensor]]]" = WeakKeyDictionary()
_save_pretrained: Callable[..., Any] | None = None
_OF_PUSHES = {"commit_message", "create_pr", "max_shard_size", "private", "token"}
"""Options of `save_pretrained` that `push_to_hub` takes."""


def head_of(drafters: Iterable[Drafter]) -> Mapping[str, Tensor]:
    """Tensors of the drafting head, with its learning; empty: none of `drafters` has one."""
    return next((drafter.tensors() for drafter in drafters if isinstance(drafter, MtpDrafter)), {})


def keep_heads(policy: PreTrainedModel, drafting: Callable[[], Mapping[str, Tensor]]) -> None:
    """Saves `policy` with its heads from now on, whoever saves it: trainers, loops, merges and pushes all call
    `save_pretrained`, replaced for all models, and unchanged for all but such policies.

    Args:
        policy: ignored if its config promises no heads.
        drafting: returns `learned` of :func:`adding_heads`; must not keep the policy alive.
    """
    global _save_pretrained
    if not promises_heads(policy.config):
        return
    _kept[policy] = drafting
    if _save_pretrained is not None:
        return
    original = _save_pretrained = PreTrainedModel.save_pretrained

    @functools.wraps(original)
    def save_pretrained(
        self: PreTrainedModel, save_directory: str | Path, is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        if self not in _kept or not is_main_process:
            return original(self, save_directory, is_main_process, *args, **kwargs)
        pushes = kwargs.pop("push_to_hub", False)  # before the heads are there
        with adding_heads(self, save_directory, _kept[self]()):
            original(self, save_directory, is_main_process, *args, **kwargs)
        if pushes:
            options = {name: kwargs[name] for name in _OF_PUSHES & kwargs.keys()}
            self.push_to_hub(kwargs.get("repo_id", Path(save_directory).name), **options)

    PreTrainedModel.save_pretrained = save_pretrained
    UNDONE_WITH_IT.append(_restore)


def _restore() -> None:
    global _save_pretrained
    PreTrainedModel.save_pretrained, _save_pretrained = _save_pretrained, None


@contextmanager
def adding_heads(policy: PreTrainedModel, folder: str | Path, learned: Mapping[str, Tensor]) -> Iterator[None]:
    """Adds all heads of the checkpoint that `policy` was loaded from to `folder`, where the block saves the policy,
    even over that very checkpoint. Names and dtypes stay.

    Args:
        policy: its config names the checkpoint.
        folder: of the policy's safetensors at the end of the block; without them nothing is added.
        learned: tensors in place of those of the checkpoint, and alone where these are missing.
    """
    folder, tensors = Path(folder), dict[str, Tensor]()
    if promises_heads(policy.config):
        try:
            tensors = dict(heads_of(policy) or learned)
        except ValueError as error:
            tensors = dict(learned)
            if not learned:
                warnings.warn(
                    f"{folder} is saved without the policy's multi-token-prediction head, which config.json promises: "
                    f"{error} Copy the head's tensors there, or set its number of heads to 0.",
                    stacklevel=3,
                )
    tensors |= {name: tensor for name, tensor in learned.items() if name in tensors}
    yield
    saved = stored_files(folder)
    if saved and (tensors := {name: tensor for name, tensor in tensors.items() if name not in saved}):
        add_tensors(folder, tensors)
    elif WHOLE in saved.values() and (folder / _HEADS).is_file():  # an earlier save had heads
        (folder / INDEX).unlink(missing_ok=True)
        (folder / _HEADS).unlink()


def heads_of(policy: PreTrainedModel) -> Mapping[str, Tensor]:
    """All heads of the checkpoint that `policy` was loaded from, on the CPU, read once: the checkpoint may be deleted
    during training, as by `save_total_limit`.

    Raises:
        ValueError: they cannot be read, or are those of a model of another size; in the second case later calls return
            none.
    """
    name, revision = policy.config.name_or_path, getattr(policy.config, "_commit_hash", None)
    if not name:
        return {}
    if (known := _read.get(policy)) is not None and known[0] == name:
        return known[1]
    heads = find_heads(name, policy, OWN, revision=revision)
    if heads is not None:
        try:
            source = type(policy.config).from_pretrained(heads.folder)
        except Exception as error:  # a save goes on
            raise ValueError(f"{OWN}={name!r}: its config.json cannot be read: {error}") from error
        for size in ("hidden_size", "num_hidden_layers"):
            theirs, ours = (getattr(one.get_text_config(decoder=True), size, None) for one in (source, policy.config))
            if theirs != ours:
                _read[policy] = name, {}  # later saves say nothing of it
                raise ValueError(f"{OWN}={name!r} has {size}={theirs}, and the policy's is {ours}.")
    tensors = {} if heads is None else heads.read(heads.files)
    _read[policy] = name, tensors
    return tensors


def add_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Adds `tensors` to the safetensors in `folder`, in a shard named by the index. A single file becomes a shard."""
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
