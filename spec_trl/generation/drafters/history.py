"""Drafts from earlier rollouts of the same prompt, as in Spec-RL and RhymeRL (ER §A.3), but verified exactly."""

from array import array
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...value_checks import require_value
from ..engine.drafter import Drafter, DraftSession
from ..engine.rows import Admission, Integers
from ..engine.sampling.accept import Proposal
from ..engine.sampling.noise import RoundNoise
from ..options import SpeculativeConfig
from ..registry import register_drafter
from .suffix_index import SuffixIndex


_PARTS = {
    "prompts": torch.int32,
    "prompt_lengths": torch.int64,
    "texts": torch.int32,
    "text_lengths": torch.int64,
    "text_prompts": torch.int64,
}
"""Names of the tensors of a saved history."""


MOST_INDEXED = 1 << 15
"""Newest tokens of a prompt's earlier texts that a generation indexes, in a tenth of a second. All texts of a
prompt with a thousand completions would take seconds."""


@register_drafter
class HistoryDrafter(Drafter):
    """Proposes the tokens after the longest suffix match in the texts of a row's prompt: completions of earlier
    generations (epochs), those of the same group, in flight or finished, and the text of the row.

    Args:
        history_max_tokens: most stored tokens, see :class:`RolloutHistory`.
    """

    strategy = "history"
    has_probabilities = False
    looks_up = outlives_changes = True
    drafts_ahead = False

    def __init__(self, history_max_tokens: int) -> None:
        self.history = RolloutHistory(history_max_tokens)

    @classmethod
    def make(cls, model: PreTrainedModel, assistant: Any, config: SpeculativeConfig) -> "HistoryDrafter":
        return cls(config.history_max_tokens)

    @classmethod
    def kept_for(cls, model: PreTrainedModel, assistant: Any, config: SpeculativeConfig) -> tuple[object, ...]:
        return (config.history_max_tokens,)

    def begin(self, session: DraftSession) -> None:
        super().begin(session)
        self._texts: list[Text] = []  # by row
        self._unread: list[tuple[Integers, Integers]] = []  # committed tokens not in the texts yet
        self.history.drop_indexes(())

    def end(self) -> None:
        self._catch_up()
        super().end()

    def admit(self, admission: Admission) -> None:
        self._catch_up()
        rows = self.session.rows
        prompts = rows.prompts
        self.history.drop_indexes(set(prompts))
        del self._texts[admission.first :]
        self._texts += [self.history.start(prompt) for prompt in prompts[admission.first :]]
        spans = {row: rows.generated_span(row) for row, saved in admission.saved.items() if saved.tokens is not None}
        if spans:
            texts = torch.cat([rows.tokens[row, span] for row, span in spans.items()]).tolist()
            for row, span in spans.items():
                text, texts = texts[: span.stop - span.start], texts[span.stop - span.start :]
                self.history.extend(self._texts[row], text)

    def move(self, source: list[int], destination: list[int], columns: list[int]) -> None:
        self._catch_up()
        for row, target in zip(source, destination, strict=True):
            self._texts[target] = self._texts[row]

    def observe(self, tokens: Integers, counts: Integers) -> None:
        self._unread.append((tokens, counts))

    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        self._catch_up()
        drafts = [self.history.propose(text, draft_length) for text in self._texts[: self.session.rows.active]]
        padded = [draft + [0] * (draft_length - len(draft)) for draft in drafts]
        lengths = torch.tensor([len(draft) for draft in drafts])  # [B]
        return Proposal(torch.tensor(padded, dtype=torch.int64), lengths)  # [B, γ]

    def _catch_up(self) -> None:
        """Extends the texts by newly committed tokens; must run before rows move."""
        rounds, self._unread = self._unread, []
        new: list[list[int]] = [[] for _ in self._texts]
        for tokens, counts in rounds:
            for own, committed, count in zip(new, tokens.tolist(), counts.tolist(), strict=False):
                own += committed[:count]
        for text, own in zip(self._texts, new, strict=True):
            self.history.extend(text, own)
        self.history.evict()

    def remember(self, prompt: Sequence[int], completion: Sequence[int]) -> None:
        """Stores a completion of another rank. Must not be called while a generation runs."""
        self.history.extend(self.history.start(array("q", prompt).tobytes()), completion)
        self.history.evict()

    def state_dict(self) -> dict[str, Tensor]:
        return self.history.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replaces the history. Must not be called while a generation runs."""
        self.history.load_state_dict(state)


@dataclass(eq=False)
class Text:
    """One completion: its tokens so far; the first `indexed` are in its prompt's index and end at `node`. `prompt` is
    None after eviction."""

    prompt: "_Prompt | None"
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    node: int = -1
    indexed: int = 0


@dataclass(eq=False)
class _Prompt:
    key: bytes
    tokens: "array[int]"
    texts: "deque[Text]" = field(default_factory=deque)  # oldest first
    index: SuffixIndex | None = None  # index of its texts; held while the prompt is in flight
    grown: list[tuple[Text, int]] = field(default_factory=list)  # texts to be indexed, in this order, and how far


class RolloutHistory:
    """Stores completions by prompt, the newest `max_tokens` tokens.

    A stored text takes four bytes per token. Only prompts in flight have a suffix index, of `MOST_INDEXED` tokens and
    later ones. At the bound the oldest texts are evicted; their rows get no more drafts.

    Args:
        max_tokens: most stored tokens, of texts and of prompts that have texts.
    """

    def __init__(self, max_tokens: int) -> None:
        require_value("history_max_tokens", max_tokens, [int], low=1)
        self._max_tokens = max_tokens
        self._clear()

    def _clear(self) -> None:
        self._prompts: dict[bytes, _Prompt] = {}
        self._indexed: set[_Prompt] = set()
        self._texts: deque[Text] = deque()  # oldest first
        self._token_count = 0

    def __len__(self) -> int:
        """Number of stored tokens, at most `max_tokens` after :meth:`evict`."""
        return self._token_count

    def start(self, key: bytes) -> Text:
        """Begins a text of the prompt `key`: its int64 tokens as bytes, as in :attr:`Rows.prompts`."""
        prompt = self._prompts.get(key)
        if prompt is None:
            prompt = self._prompts[key] = _Prompt(key, array("i", array("q", key)))
            self._token_count += len(prompt.tokens)
        text = Text(prompt)
        if prompt.index is not None:
            text.node = prompt.index.root
        prompt.texts.append(text)
        self._texts.append(text)
        return text

    def extend(self, text: Text, tokens: Sequence[int]) -> None:
        if text.prompt is None or not tokens:
            return
        text.tokens.extend(tokens)
        self._token_count += len(tokens)
        if text.prompt.index is not None:
            text.prompt.grown.append((text, len(text.tokens)))

    def propose(self, text: Text, draft_length: int) -> list[int]:
        if text.prompt is None:
            return []
        prompt, index = text.prompt, text.prompt.index
        if index is None:
            index = prompt.index = SuffixIndex(prompt.tokens)
            self._indexed.add(prompt)
            left = MOST_INDEXED
            for each in reversed(prompt.texts):
                each.node, each.indexed = index.root, 0 if left > 0 else len(each.tokens)
                left -= len(each.tokens)
            prompt.grown = [(each, len(each.tokens)) for each in prompt.texts if not each.indexed]
        for each, end in prompt.grown:
            each.node, each.indexed = index.extend(each.node, each.tokens[each.indexed : end]), end
        prompt.grown.clear()
        return index.propose(text.node, draft_length)

    def evict(self) -> None:
        """Drops the oldest texts until the bound holds."""
        while self._token_count > self._max_tokens:
            text = self._texts.popleft()
            prompt, text.prompt = text.prompt, None
            assert prompt is not None and prompt.texts[0] is text
            prompt.texts.popleft()
            prompt.index = None  # holds the text's tokens; built again at the next lookup
            self._token_count -= len(text.tokens)
            if not prompt.texts:
                del self._prompts[prompt.key]
                self._token_count -= len(prompt.tokens)

    def drop_indexes(self, but: Collection[bytes]) -> None:
        """Drops the indexes of all prompts `but` those in flight."""
        for prompt in [prompt for prompt in self._indexed if prompt.key not in but]:
            prompt.index = None
            self._indexed.remove(prompt)

    def state_dict(self) -> dict[str, Tensor]:
        """All texts, oldest first, as flat tensors: tokens of prompts in `prompts` int32 with `prompt_lengths` `[P]`
        int64, tokens of texts in `texts` int32 with `text_lengths` `[T]` int64, and `text_prompts` `[T]` int64, the
        prompt of every text."""
        prompts = list(dict.fromkeys(text.prompt for text in self._texts if text.prompt is not None))
        number = {prompt: place for place, prompt in enumerate(prompts)}

        def flat(held: Iterable[Text | _Prompt]) -> "array[int]":
            return array("i", chain.from_iterable(each.tokens for each in held))

        parts = (
            flat(prompts),
            array("q", [len(prompt.tokens) for prompt in prompts]),
            flat(self._texts),
            array("q", [len(text.tokens) for text in self._texts]),
            array("q", [number[text.prompt] for text in self._texts if text.prompt is not None]),
        )
        return {
            # torch.frombuffer refuses an empty buffer.
            name: torch.frombuffer(part, dtype=dtype) if part else torch.zeros(0, dtype=dtype)
            for (name, dtype), part in zip(_PARTS.items(), parts, strict=True)
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replaces the history by the result of :meth:`state_dict`, cut to `max_tokens`.

        Raises:
            ValueError: `state` is something else, or damaged; the history does not change.
        """
        if damage := damage_of(state):
            raise ValueError(
                f"state is not a whole rollout history: {damage}. Load what HistoryDrafter.state_dict() gave, or go "
                "on without: the history only makes rollouts faster."
            )
        self._clear()
        keys = [array("q", tokens).tobytes() for tokens in _split(state["prompts"], state["prompt_lengths"])]
        texts = _split(state["texts"], state["text_lengths"])
        for prompt, tokens in zip(state["text_prompts"].tolist(), texts, strict=True):
            self.extend(self.start(keys[prompt]), tokens)
        self.evict()


def _split(flat: Tensor, lengths: Tensor) -> "list[array[int]]":
    return [array("i", part.numpy().tobytes()) for part in flat.cpu().split(lengths.tolist())]


def damage_of(state: object) -> str | None:
    """Returns the fault of a saved history, or None."""
    if not isinstance(state, Mapping) or set(state) != set(_PARTS):
        found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        return f"it is {found} instead of tensors {sorted(_PARTS)}"
    for name, dtype in _PARTS.items():
        part = state[name]
        if not isinstance(part, Tensor) or part.dtype != dtype or part.dim() != 1:
            return f"{name} is not a one-dimensional {dtype} tensor"
    prompts, texts = (state["prompts"], state["prompt_lengths"]), (state["texts"], state["text_lengths"])
    for name, (tokens, lengths), shortest in (("prompt", prompts, 1), ("text", texts, 0)):
        if (lengths < shortest).any() or int(lengths.sum()) != len(tokens):
            return f"{name}_lengths ask for {int(lengths.sum())} tokens, {name}s has {len(tokens)}"
        if (tokens < 0).any():
            return f"{name}s holds negative tokens"
    owners = state["text_prompts"]
    if len(owners) != len(texts[1]) or ((owners < 0) | (owners >= len(prompts[1]))).any():
        return f"text_prompts names {owners.tolist()[:9]} as prompts of {len(texts[1])} texts, of {len(prompts[1])}"
    return None
