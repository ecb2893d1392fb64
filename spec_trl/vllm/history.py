"""Drafts inside vLLM from earlier texts of the same prompt: its `custom_class` proposer. No push can make it stale."""

from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..generation.drafters.history import RolloutHistory, Text
from . import step_planner


class HistoryProposer:
    """Proposes what followed the longest suffix match in texts of a row's prompt: earlier rollouts, and siblings.

    vLLM names no requests here, and moves rows. So a row is known by its text before its newest tokens.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._most = vllm_config.speculative_config.num_speculative_tokens
        self._longest = vllm_config.model_config.max_model_len
        self._history = RolloutHistory(vllm_config.additional_config["spec_trl"]["history_max_tokens"])
        self._rows: dict[bytes, list[Text]] = {}

    def load_model(self, *_: Any, **__: Any) -> None:
        """Has no weights."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft tokens of each row, any number up to γ.

        Args:
            sampled_token_ids: newest tokens of each row; none while its prompt is read.
            num_tokens_no_spec: `[rows]`, length of each text, the newest tokens included.
            token_ids_cpu: `[rows, longest]`, the texts.
        """
        length = self._most if step_planner.newest_length is None else min(step_planner.newest_length, self._most)
        rows, drafts = defaultdict[bytes, list[Text]](list), list[list[int]]()
        for row, newest in enumerate(sampled_token_ids):
            end = int(num_tokens_no_spec[row])
            before = token_ids_cpu[row, : end - len(newest)]
            if not newest:
                drafts.append([])
                continue
            known = self._rows.get(before.tobytes())
            text = known.pop() if known else self._history.start(before.astype(np.int64).tobytes())
            self._history.extend(text, newest)
            rows[token_ids_cpu[row, :end].tobytes()].append(text)
            most = min(length, self._longest - end - 1)
            drafts.append(self._history.propose(text, most) if most > 0 else [])
        self._rows = rows
        self._history.evict()
        return drafts
