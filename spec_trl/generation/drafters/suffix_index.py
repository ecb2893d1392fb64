"""Finds longest suffix matches in the texts of one prompt, and proposes the tokens after them."""

from array import array
from collections import Counter
from collections.abc import Sequence


LONGEST_MATCH = 16
"""Most tokens of a match: longer matches count as equal, and the more frequent continuation wins."""
ANCHORS = (LONGEST_MATCH, 2, 1)
"""Lengths of the token runs that are hashed; a lookup tries the longest first. More lengths in between cost time and
memory per token, and accepted no more drafts."""
CANDIDATES = 64
"""Newest occurrences of a run that a lookup reads: bounds its cost in repetitive texts."""


class SuffixIndex:
    """Texts of one prompt, growing token by token, and the continuations of their suffixes.

    Every token is a node with a link to the token before, so all texts share the prompt:

                          ┌ o n c e ...        text 1
        p r o m p t ──────┼ o n e ...          text 2
                          └ o n c e ...        text 3

    For every anchor length k a hash table holds the newest node after a run of k tokens, and a node links to the next
    older node after the same run (the hash chains of LZ77 compressors). Adding a token costs one table entry per
    anchor; a lookup walks one chain, at a cost independent of the amount of text.

    Args:
        prompt: tokens, at least one.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._tokens = array("i")  # by node
        self._previous = array("i")  # node before; -1: none
        self._next = array("i")  # node after it in the same text; -1: none yet, or the prompt's end
        self._newest: tuple[dict[int, int], ...] = tuple({} for _ in ANCHORS)
        self._older = tuple(array("i") for _ in ANCHORS)  # the next older node after the same run; -1: none
        self.root = -1
        self.root = self.extend(-1, prompt)
        """The prompt's last node, where every text begins."""

    def extend(self, node: int, tokens: Sequence[int]) -> int:
        """Adds `tokens` after `node`, the newest node of its text; returns the text's newest node."""
        context = self._suffix(node, LONGEST_MATCH)
        text = [*context, *tokens]
        for position in range(len(context), len(text)):
            new = len(self._tokens)
            for k, newest, older in zip(ANCHORS, self._newest, self._older, strict=True):
                run = hash(tuple(text[position - k : position])) if position >= k else None
                older.append(-1 if run is None else newest.get(run, -1))
                if run is not None:
                    newest[run] = new
            self._tokens.append(text[position])
            self._previous.append(node)
            self._next.append(-1)
            if node != self.root:  # many texts follow the prompt; a lookup finds them all
                self._next[node] = new
            node = new
        return node

    def propose(self, node: int, draft_length: int) -> list[int]:
        """Proposes up to `draft_length` tokens after the text that ends in `node`.

        The draft follows the longest matches of the text's end: the most frequent token where they differ, among
        equals that of the newest match. Where all matches end (a text in flight) the draft is looked up again.
        """
        tokens, following = self._tokens, self._next
        context = self._suffix(node, LONGEST_MATCH)
        matches: list[int] = []  # nodes that may come next, newest first
        draft: list[int] = []
        while len(draft) < draft_length:
            matches = matches or self._longest_matches((context + draft)[-LONGEST_MATCH:])
            if not matches:
                break
            token = tokens[matches[0]]
            if len(matches) > 1:  # among equal counts the first is taken: the newest
                ((token, _),) = Counter(tokens[match] for match in matches).most_common(1)
            draft.append(token)
            matches = [following[match] for match in matches if tokens[match] == token and following[match] >= 0]
        return draft

    def _longest_matches(self, context: list[int]) -> list[int]:
        """Returns the nodes after the longest matches of `context`'s end, newest first, or []."""
        tokens, previous, backwards = self._tokens, self._previous, context[::-1]
        for k, newest, older in zip(ANCHORS, self._newest, self._older, strict=True):
            if len(context) < k:
                continue
            candidate = newest.get(hash(tuple(context[-k:])), -1)
            longest, matches = 0, []
            for _ in range(CANDIDATES):
                if candidate < 0:
                    break
                # A 64-bit hash collision of two runs of LONGEST_MATCH tokens only costs a bad draft.
                length, node = k if k == LONGEST_MATCH else 0, previous[candidate]
                for token in backwards[length:]:
                    if node < 0 or tokens[node] != token:
                        break
                    length, node = length + 1, previous[node]
                if length > longest:
                    longest, matches = length, [candidate]
                elif length == longest:
                    matches.append(candidate)
                candidate = older[candidate]
            if longest:
                return matches
        return []

    def _suffix(self, node: int, count: int) -> list[int]:
        suffix: list[int] = []
        while node >= 0 and len(suffix) < count:
            suffix.append(self._tokens[node])
            node = self._previous[node]
        return suffix[::-1]
