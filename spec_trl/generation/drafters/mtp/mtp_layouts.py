"""Reads the multi-token-prediction heads that transformers leaves out when it loads a model.

Layouts name the same parts differently; `MtpNetwork` has Qwen's names. DeepSeek's heads are decoder layers after the
last one, with copies of the embedding and of the output head.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..checkpoints import folder_of


INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
_PROMISES = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""Tensors of a head that are the target's."""
_MTP = re.compile(r"(^|\.)mtp[._]")
_FURTHER = re.compile(r"\w+\.[1-9]\d*\.")
"""Tensors of the second and later heads, trained to follow the first: one head serves all depths."""


class Layout(NamedTuple):
    """The names of one format.

    Args:
        mark: the name of the projection; the first group begins all names of the head, the second, if any, is the
            number of a decoder layer.
        renames: later parts of names -> the network's names, by their beginnings.
        has_norm: whether there is a norm after the block.
    """

    mark: re.Pattern[str]
    renames: Mapping[str, str]
    has_norm: bool = True


_EXAONE = {"layers.0.mlp.e_score_correction_bias": "layers.0.mlp.gate.e_score_correction_bias"}
_HUNYUAN = {
    "mlp.router.gate.": "layers.0.mlp.gate.",
    "mlp.expert_bias": "layers.0.mlp.e_score_correction_bias",
    "mlp.shared_mlp.": "layers.0.mlp.shared_experts.",
}
LAYOUTS = (
    Layout(re.compile(r"(mtp\.)fc\.weight"), _EXAONE | {"": ""}),  # Qwen3-Next, Qwen3.5, EXAONE
    Layout(  # DeepSeek V3, GLM-4.5 to 4.7, HunYuan V3
        re.compile(r"((?:.+\.)?layers\.(\d+)\.)eh_proj\.weight"),
        {"enorm.": "pre_fc_norm_embedding.", "hnorm.": "pre_fc_norm_hidden.", "eh_proj.": "fc."}
        | {"shared_head.norm.": "norm.", **_HUNYUAN, "": "layers.0."},
    ),
    Layout(  # Ernie 4.5 MoE
        re.compile(r"(model\.mtp_)linear_proj\.0\.weight"),
        {"emb_norm.0.": "pre_fc_norm_embedding.", "hidden_norm.0.": "pre_fc_norm_hidden."}
        | {"linear_proj.0.": "fc.", "block.0.": "layers.0."},
        has_norm=False,
    ),
)


def promises_heads(config: PreTrainedConfig) -> bool:
    """Whether a model's config says that its checkpoint has heads."""
    configs = config, config.get_text_config(decoder=True)
    return any(getattr(one, name, None) for one in configs for name in _PROMISES)


@dataclass(frozen=True)
class StoredHeads:
    """All heads of a checkpoint.

    Args:
        folder: of the checkpoint.
        files: file names by tensor.
        layout: of the first head; None: unknown.
        prefix: beginning of the first head's names.
    """

    folder: Path
    files: Mapping[str, str]
    layout: Layout | None
    prefix: str

    @property
    def first(self) -> list[str]:
        """Names of the tensors that the first head drafts with."""
        rest = {name: name.removeprefix(self.prefix) for name in self.files if name.startswith(self.prefix)}
        return [name for name, end in rest.items() if end not in _COPIES and not _FURTHER.match(end)]

    @property
    def renames(self) -> dict[str, str]:
        """Beginnings of stored names -> those of the network's."""
        assert self.layout is not None
        return {self.prefix + stored: name for stored, name in self.layout.renames.items()}

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        """Reads the tensors `names`, on the CPU and as stored, from their files.

        Raises:
            ValueError: a file is missing, or cannot be read.
        """
        tensors: dict[str, Tensor] = {}
        for file in sorted({self.files[name] for name in names}):
            try:
                with safe_open(self.folder / file, "pt") as opened:
                    # Copies: tensors are mapped from the file, and the policy may be saved over it.
                    tensors |= {name: opened.get_tensor(name).clone() for name in names if self.files[name] == file}
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{self.folder / file} cannot be read; fetch it again: {error}") from error
        return {name: tensors[name] for name in names}


def find_heads(checkpoint: str | Path, target: PreTrainedModel, argument: str, **hub: Any) -> StoredHeads | None:
    """The heads in a checkpoint of `target`, by the index of its shards or the header of its one file; None: no heads.
    No tensor is read. Only shards with heads are fetched from the hub; `hub` are options of `snapshot_download`.

    Raises:
        ValueError: it is neither folder nor hub id, or its files cannot be read; `argument` named it.
    """
    folder = folder_of(checkpoint, [INDEX, "config.json"], argument, **hub)
    if not (folder / INDEX).is_file():
        folder = folder_of(checkpoint, [WHOLE], argument, **hub)
    try:
        files = stored_files(folder)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise ValueError(f"{argument}={str(checkpoint)!r}: its weights cannot be read: {error}") from error
    depth = target.config.get_text_config(decoder=True).num_hidden_layers
    marks = [(layout, mark) for layout in LAYOUTS for name in files if (mark := layout.mark.fullmatch(name))]
    # Layers with a smaller number would be another depth's.
    marks = [(layout, mark) for layout, mark in marks if mark.lastindex == 1 or int(mark[2]) >= depth]
    layers = tuple(mark[1] for _, mark in marks)
    of_heads = {name: file for name, file in files.items() if _MTP.search(name) or name.startswith(layers)}
    if not of_heads:
        return None
    served = [(layout, mark) for layout, mark in marks if mark.lastindex == 1 or int(mark[2]) == depth]
    layout, prefix = (served[0][0], served[0][1][1]) if served else (None, "")
    folder = folder_of(checkpoint, sorted(set(of_heads.values())), argument, **hub)
    return StoredHeads(folder, of_heads, layout, prefix)


def stored_files(folder: Path) -> dict[str, str]:
    """File names by tensor of a folder's safetensors; a single file comes before an index, as in transformers; empty:
    none."""
    if (folder / WHOLE).is_file():
        with safe_open(folder / WHOLE, "pt") as opened:
            return dict.fromkeys(opened.keys(), WHOLE)
    if not (folder / INDEX).is_file():
        return {}
    files: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return files
