"""TRL's client of a vLLM server, which pushes the policy's weights into a drafter that is a copy of it, too."""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from requests.exceptions import RequestException
from safetensors.torch import save_file
from torch import Tensor
from trl.generation.vllm_client import VLLMClient

from .counts import Counts
from .drafting import BACKEND, Drafting


class DraftingClient(VLLMClient):
    """Pushes over TRL's NCCL group, or, to a server on this machine that was started for it, by a file.

    Raises:
        ValueError: the server does not draft as the trainer's options say.
        ConnectionError: it does not answer, or answers with an error.
    """

    def __init__(self, *args: Any, drafting: Drafting, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._drafting, self._is_drafter = drafting, False
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        info = self.get_server_info()
        self._check(info)
        if (info["weight_transfer_config"] or {}).get("backend") != BACKEND:
            super().init_communicator(device)
            return
        self._post(f"{self.base_url}/init_weight_transfer_engine", json={"init_info": {}})
        self._folder = tempfile.TemporaryDirectory(prefix="spec_trl-")

    def _check(self, info: dict[str, Any]) -> None:
        wanted, found = self._drafting.speculative, info.get("speculative_config")
        method = found and found.get("method")
        if (wanted and wanted["method"]) != method:
            raise ValueError(
                f"assistant_strategy={self._drafting.strategy!r} needs a server with speculative_config={wanted}, and "
                f"{self.base_url} has {method!r}. Start it with the line that `spec-trl vllm-serve-command` prints."
            )

    def _post(self, url: str, **kwargs: Any) -> Any:
        try:
            return super()._post(url, **kwargs)
        except RequestException as error:
            raise ConnectionError(
                f"the vLLM server fails at {url} ({type(error).__name__}). Look at its log, start it again, and "
                "resume from the newest checkpoint, which is whole."
            ) from error

    def _start_weight_update(self) -> None:
        self._post(f"{self.base_url}/start_{'draft_' * self._is_drafter}weight_update", json={})

    def update_named_params(
        self, metadata: list[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, Tensor]]
    ) -> None:
        """Pushes the policy, and the drafter if it is a copy; each parameter is gathered once."""
        if self._folder is not None:
            path = self._save(named_params)
            for is_drafter in (False, True)[: 1 + self._drafting.is_copy]:
                self._read(path, is_drafter)
            return
        kept: dict[str, Tensor] = {}
        super().update_named_params(metadata, self._keeping(named_params, kept))
        if kept:
            self.update_drafter(kept)

    def update_drafter(self, weights: Mapping[str, Tensor]) -> None:
        """Pushes the drafter."""
        if self._folder is not None:
            self._read(self._save(weights.items()), is_drafter=True)
            return
        metadata = [(name, str(one.dtype).removeprefix("torch."), [*one.shape]) for name, one in weights.items()]
        device = torch.device("cuda", torch.cuda.current_device())
        self._is_drafter = True
        super().update_named_params(metadata, ((name, weight.to(device)) for name, weight in weights.items()))
        self._is_drafter = False

    def _save(self, weights: Iterable[tuple[str, Tensor]]) -> Path:
        assert self._folder is not None
        path = Path(self._folder.name, "weights.safetensors")
        # Copies: safetensors refuses tensors that share memory, as tied ones do.
        save_file({name: weight.detach().to("cpu", copy=True).contiguous() for name, weight in weights}, path)
        return path

    def _read(self, path: Path, is_drafter: bool) -> None:
        """The server reads the weights in `path`."""
        self._is_drafter = is_drafter
        self._start_weight_update()
        self._post(f"{self.base_url}/update_weights", json={"update_info": {"path": str(path)}})
        self._finish_weight_update()
        self._is_drafter = False

    def _keeping(
        self, named: Iterator[tuple[str, Tensor]], kept: dict[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        for name, weight in named:
            if self._drafting.is_copy:
                kept[name] = weight.to("cpu", copy=True)
            yield name, weight

    def counts(self) -> Counts:
        """Totals since the server's start."""
        try:
            return Counts.of_text(self.session.get(f"{self.base_url}/metrics", timeout=60).text)
        except RequestException as error:
            raise ConnectionError(f"the vLLM server at {self.base_url} does not answer at /metrics.") from error
