"""Longest suffix matches in the texts of one prompt: what followed the same words before."""

from array import array
from collections.abc import Sequence


# Matches are told apart up to this length; longer ones count as equal, and the more frequent continuation wins.
_LONGEST_MATCH = 16
# Lengths of the token runs that are hashed; a lookup tries the longest first. More lengths in between cost time and
# memory per token, and accepted no more drafts.
_ANCHORS = (_LONGEST_MATCH, 2, 1)
# Newest occurrences of a run that a lookup reads: bounds its cost in texts that repeat themselves.
_CANDIDATES = 64


class SuffixIndex:
    """The texts behind one prompt, growing token by token, with a lookup of what continues a suffix.

    Every token is a node that knows the one before it, so that all texts share the prompt:

                          ┌ o n c e ...        text 1
        p r o m p t ──────┼ o n e ...          text 2
                          └ o n c e ...        text 3

    For each anchor length k a hash table holds the newest node behind each run of k tokens, and each node the next
    older one behind the same run (the hash chains of LZ77 compressors). Adding a token costs one table entry per
    anchor; a lookup walks one chain, and its cost does not depend on the amount of text.

    Args:
        prompt: tokens, at least one.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._tokens = array("i")  # of each node
        self._previous = array("i")  # node before; -1: none
        self._next = array("i")  # node behind in the same text; -1: none yet, or the prompt's end
        self._newest: tuple[dict[int, int], ...] = tuple({} for _ in _ANCHORS)
        self._older = tuple(array("i") for _ in _ANCHORS)  # node behind the same run before; -1: none
        self._root = -1
        self._root = self.extend(-1, prompt)

    def __len__(self) -> int:
        """Tokens, the prompt's included."""
        return len(self._tokens)

    @property
    def root(self) -> int:
        """The prompt's last node, where every text begins."""
        return self._root

    def extend(self, node: int, tokens: Sequence[int]) -> int:
        """Adds `tokens` behind `node`, the newest node of its text; returns the text's newest node."""
        context = self._suffix(node, _ANCHORS[0])
        text = [*context, *tokens]
        for position in range(len(context), len(text)):
            new = len(self._tokens)
            for k, newest, older in zip(_ANCHORS, self._newest, self._older, strict=True):
                if position >= k:
                    run = hash(tuple(text[position - k : position]))
                    older.append(newest.get(run, -1))
                    newest[run] = new
                else:
                    older.append(-1)
            self._tokens.append(text[position])
            self._previous.append(node)
            self._next.append(-1)
            if node != self._root:  # behind the prompt there are many; a lookup finds them all
                self._next[node] = new
            node = new
        return node

    def propose(self, node: int, draft_length: int) -> list[int]:
        """What may follow the text that ends in `node`: up to `draft_length` tokens.

        The draft follows the longest matches of the text's end, where they part the more frequent way, and the newest
        of equals. Where they end (a sibling in flight) it looks up its own end again.
        """
        tokens, following = self._tokens, self._next
        context = self._suffix(node, _LONGEST_MATCH)
        matches: list[int] = []  # nodes that may come next, newest first
        draft: list[int] = []
        while len(draft) < draft_length:
            if not matches:
                matches = self._longest_matches((context + draft)[-_LONGEST_MATCH:])
                if not matches:
                    break
            token = tokens[matches[0]]
            if len(matches) > 1:
                counts: dict[int, int] = {}
                for match in matches:
                    counts[tokens[match]] = counts.get(tokens[match], 0) + 1
                token = max(counts, key=counts.__getitem__)  # the first of equals, which is the newest
            draft.append(token)
            matches = [following[match] for match in matches if tokens[match] == token and following[match] >= 0]
        return draft

    def _longest_matches(self, context: list[int]) -> list[int]:
        """Nodes behind the longest matches of `context`'s end, newest first; none: []."""
        tokens, previous, backwards = self._tokens, self._previous, context[::-1]
        for k, newest, older in zip(_ANCHORS, self._newest, self._older, strict=True):
            if len(context) < k:
                continue
            candidate = newest.get(hash(tuple(context[-k:])), -1)
            longest, found = 0, []
            for _ in range(_CANDIDATES):
                if candidate < 0:
                    break
                length, node = 0, previous[candidate]
                if k == _LONGEST_MATCH:  # two runs with one 64-bit hash would be no more than a bad draft
                    length = k
                else:
                    for token in backwards:
                        if node < 0 or tokens[node] != token:
                            break
                        length, node = length + 1, previous[node]
                if length > longest:
                    longest, found = length, [candidate]
                elif length == longest:
                    found.append(candidate)
                candidate = older[candidate]
            if longest:
                return found
        return []

    def _suffix(self, node: int, count: int) -> list[int]:
        """The last `count` tokens of the text that ends in `node`, or all there are."""
        suffix: list[int] = []
        while node >= 0 and len(suffix) < count:
            suffix.append(self._tokens[node])
            node = self._previous[node]
        return suffix[::-1]
