"""Runs captured forwards (CUDA graphs) in place of eager ones, and saves kernel launches.

A captured forward reads its tokens and positions from static buffers and writes its logits into one; replaying it
launches all its kernels at once. It is captured for a number of rows, tokens per row and visible columns, so shapes
are rounded up to buckets. Weights are read at their addresses: optimizer steps and refreshes of the drafter leave it
valid.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..drafter import NetworkDraft
from ..forwards.feature_runner import FeatureRunner
from ..forwards.runner import EagerRunner, Listener
from ..kv.base import KVCache
from ..kv.cache import autocast_dtype
from ..network.attention import attended
from ..network.family import Family
from ..network.products import copied_bytes
from ..network.scans import Taken
from ..network.shadow import decoder_layers, make_shadow
from ..network.snapshot import addresses
from ..sampling.accept import Proposal
from .graph_capture import (
    CapturedForward,
    ForwardKey,
    GraphBudget,
    Outputs,
    Recording,
    column_bucket,
    pad,
    row_bucket,
    uncached_autocast,
)
from .graph_drafts import CapturedFeatures, CapturedLoops


MOST_QUERIES = 65
"""Most tokens per row of a captured forward: γ + 1; longer forwards are prefills."""
CAPTURE_AFTER = 3
"""Uses of a shape before its capture: a rollout's last rounds use many shapes once."""
COMPILE_AFTER = 10_000
"""Replays of a shape before "auto" tries a compiled forward: compiling takes up to tens of
seconds."""
WARM_UPS = 2
"""Forwards of a compiled network before its first capture of a shape; others have run eagerly for `CAPTURE_AFTER`."""


class GraphRunner(EagerRunner):
    """An :class:`EagerRunner` that replays captured forwards for the few tokens per row of drafting and verifying.

    Returned logits are in memory that all captured forwards of its budget share: valid until the next forward. Chains
    of several drafters (`forward_at`) are verified eagerly.

    Args:
        cache: rows that pad a batch (:func:`row_bucket`) write into its free rows.
        budget: shared by a model and its drafters.
        mode: "graph", "compiled", or "auto": after many replays of a shape the faster of the two.
        made_for: calls with an equal tuple reuse its captured forwards.

    Attributes:
        in_use: whether a drafter of this generation uses it.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        cache: KVCache,
        budget: GraphBudget,
        mode: str,
        made_for: tuple[object, ...] = (),
    ) -> None:
        super().__init__(network, cache)
        self.budget = budget
        self.made_for = made_for
        self._mode = mode
        self._graphs: dict[ForwardKey, CapturedForward] = {}
        self._loops = CapturedLoops()
        self._asked: Counter[ForwardKey] = Counter()
        # A runner stays until a later call replaces it.
        self._of_drafters: list[GraphRunner | CapturedFeatures] = []
        self.in_use = False
        self._failed: set[ForwardKey] = set()
        self._gave_up = False

    def for_drafter(self, network: PreTrainedModel, shares_cache: bool, made_of: tuple[object, ...]) -> EagerRunner:
        if not (shares_cache or Family.of(network).takes_pages):
            return super().for_drafter(network, shares_cache, made_of)
        # Hooks are part of a capture, with the tensors that they read: a learner's corrections.
        hooks = (id(hook) for module in network.modules() for hook in module._forward_hooks.values())
        made_for = (*made_of, *addresses(network), *hooks)

        def make() -> GraphRunner:
            cache = self.cache.for_drafts() if shares_cache else self.cache.like(network)
            return GraphRunner(network, cache, self.budget, self._mode, made_for)

        runner: GraphRunner = self._of_drafter(made_for, shares_cache, make)
        runner.begin()
        return runner

    def for_features(self, network: nn.Module, layers: int, more: int) -> FeatureRunner:
        hooks = (hook for module in network.modules() for hook in module._forward_hooks.values())
        made_for = (network, *addresses(network), *hooks)

        def make() -> CapturedFeatures:
            return CapturedFeatures(network, self.cache.beside(layers, more), self.budget, CAPTURE_AFTER, made_for)

        runner: CapturedFeatures = self._of_drafter(made_for, False, make)
        return runner

    def _of_drafter(self, made_for: tuple[object, ...], shares_cache: bool, make: Callable[[], Any]) -> Any:
        layers = self.cache.layers
        same_kind = [runner for runner in self._of_drafters if (runner.cache.layers is layers) == shares_cache]
        runner = next((runner for runner in same_kind if runner.made_for == made_for), None)
        if runner is None:
            for idle in [runner for runner in same_kind if not runner.in_use]:  # drafters change
                idle.drop_graphs()
                self._of_drafters.remove(idle)
            runner = make()
            self._of_drafters.append(runner)
        elif not shares_cache:
            runner.cache.wipe()
        runner.in_use = True
        return runner

    def begin(self) -> None:
        self.forwards = self.eager_forwards = 0
        self.cache.clear()  # a drafter that failed has left K/V and listeners
        self._listeners.clear()
        for runner in self._of_drafters:
            runner.in_use = False

    @property
    def captured(self) -> tuple[int, int]:  # type: ignore[override]
        return self.budget.graphs, self.budget.bytes

    @property
    def preparations(self) -> int:  # type: ignore[override]
        return self.budget.preparations

    @property
    def held_bytes(self) -> int:
        """Bytes of captured forwards, caches (those of drafters included), and copies of weights."""
        caches = {id(runner.cache): runner.cache for runner in (self, *self._of_drafters)}
        return self.budget.bytes + sum(cache.held_bytes for cache in caches.values()) + copied_bytes(self.network)

    def forward(
        self, tokens: Tensor, positions: Tensor, columns: int, first_row: int = 0, is_step: bool = False
    ) -> Tensor:
        if first_row or tokens.shape[1] > MOST_QUERIES:
            return super().forward(tokens, positions, columns, first_row)
        key = self._key(tokens, columns)
        may = self.cache.is_repeatable and not self._gave_up
        if self.cache.has_states and key.queries == 1:  # such a capture takes its tokens
            may = may and is_step
        graph = self._graph_for(key, tokens, positions, columns) if may else None
        if graph is None:
            return self._forward_padded(key, tokens, positions, columns)
        graph.fill(tokens, positions)
        if self._mode == "auto" and graph.replays == COMPILE_AFTER:
            self._try_compiled(graph)
        recording, rows = graph.recording, len(tokens)
        recording.replay()
        if self.cache.has_states:
            self.cache.point_at(graph.positions, key.columns, 0)
            self.cache.held = graph.held
        self.forwards += 1
        graph.replays += 1
        if recording.features is not None:
            self.call_listeners(recording.features[:rows], positions, first_row)
        return recording.logits[:rows]

    def draft(self, draft: NetworkDraft, columns: int) -> Proposal:
        """Like the eager runner's. Tensors of a captured loop are valid until the same shape drafts again."""
        shape = self._key(draft.tokens[:, :1], columns + draft.draft_length - 1)
        if draft.drawn_by is None or self._gave_up:
            return super().draft(draft, columns)
        loop, may_capture = self._loops.get(draft, shape), True
        if loop is None and not (may_capture := self.budget.allows_more()):
            loop = self._loops.larger(draft, shape)
        if loop is not None:
            self.forwards += draft.draft_length
            return loop.replay(draft)
        if not may_capture or (asked := self._loops.ask(draft, shape)) > CAPTURE_AFTER:  # by captured steps
            return super().draft(draft, columns)
        self.cache.begin_drafts(shape.rows)
        proposal = draft.run(partial(self._step_padded, columns))
        if asked == CAPTURE_AFTER:
            self.budget.preparations += 1
            runner = self._compiled_runner if self._mode == "compiled" else self

            def forward(tokens: Tensor, positions: Tensor, step: int) -> Tensor:
                if step == 0:
                    self.cache.begin_drafts(shape.rows)
                return runner._run(tokens, positions, shape.columns, spans=self.uses_spans)[0]

            record = partial(self._record, runner, shape)
            self._loops.capture(draft, shape, proposal, forward, record, type(self.network).__name__)
        return proposal

    def _step_padded(self, columns: int, tokens: Tensor, positions: Tensor, step: int) -> Tensor:
        key = self._key(tokens, columns + step)
        self.budget.preparations += 1
        return self._forward_padded(key, tokens, positions, columns + step)

    def _forward_padded(self, key: ForwardKey, tokens: Tensor, positions: Tensor, columns: int) -> Tensor:
        """Runs eagerly like a captured forward of `key`, over the same number of rows and with its spans: both change
        rounding, and a seed must sample the same tokens before and after a capture."""
        rows = len(tokens)
        self.cache.feeds()  # even one token is held: rows that pad take none
        padded, places = pad(tokens, key.rows), pad(positions, key.rows)  # [key.rows, q]

        def run() -> tuple[Tensor, Tensor | None]:
            visible = self._key(tokens, columns).columns  # fewer under masks
            return self._run(padded, places, visible, spans=self.uses_spans)

        logits, features = attended(self, run)
        self.forwards += 1
        if features is not None:
            self.call_listeners(features[:rows], positions, 0)
        return logits[:rows]

    def listen(self, layers: Sequence[int], listener: Listener) -> None:
        before = self._stored
        super().listen(layers, listener)
        if self._stored != before:  # captured forwards store other states, or none
            self.drop_graphs()

    def drop_graphs(self) -> None:
        for taken in (*(graph.bytes for graph in self._graphs.values()), *self._loops.drop()):
            self.budget.give_back(taken)
        self._graphs.clear()
        vars(self).pop("_compiled_runner", None)

    # ---- choice of a graph ----------------------------------------------------------------------------------------

    def _key(self, tokens: Tensor, columns: int) -> ForwardKey:
        visible = self.cache.columns if self.uses_spans else column_bucket(columns, self.cache.columns)
        rows = row_bucket(len(tokens), self.cache.rows)
        return ForwardKey(rows, tokens.shape[1], visible, autocast_dtype(tokens.device))

    def _graph_for(self, key: ForwardKey, tokens: Tensor, positions: Tensor, columns: int) -> CapturedForward | None:
        graph = self._graphs.get(key)
        if graph is None and key not in self._failed:
            if not self.budget.allows_more():
                return self._larger(key)
            self._asked[key] += 1
            self.budget.preparations += 1
            if self._asked[key] >= CAPTURE_AFTER:
                graph = self._capture(key, tokens, positions, columns)
        return graph

    def _larger(self, key: ForwardKey) -> CapturedForward | None:
        fitting = [other for other in self._graphs if other.serves(key)]
        return self._graphs[min(fitting)] if fitting else None

    def _capture(self, key: ForwardKey, tokens: Tensor, positions: Tensor, columns: int) -> CapturedForward | None:
        # Filled with this call: the warm-up writes the K/V that the call writes anyway.
        buffers = pad(tokens, key.rows), pad(positions, key.rows)  # [rows, q]
        counts = torch.zeros(key.rows, dtype=torch.int64, device=tokens.device) if self.cache.has_states else None
        try:
            self.cache.feeds()
            expected, _ = self._run(tokens, positions, columns, spans=self.uses_spans)
            runner = self._compiled_runner if self._mode == "compiled" else self
            self.cache.feeds(counts=counts if key.queries == 1 else None)  # zeros: a warm-up changes no state
            recording, taken = self._record_forward(runner, *buffers, key, expected, "an eager forward's")
            graph = CapturedForward(key, *buffers, recording, taken, len(tokens), counts=counts)
            if counts is not None and key.queries > 1:
                self._record_commit(graph, counts)
        except Exception as error:
            self._note_failure(key, error)
            return None
        self._graphs[key] = graph
        return graph

    def _record_commit(self, graph: CapturedForward, counts: Tensor) -> None:
        """Captures the commit of the inputs that the newly captured forward held."""
        held = graph.inputs = self.cache.held

        def work() -> Outputs:
            taken = Taken(counts, graph.key.queries)
            for replay in held.values():
                replay(taken)
            return counts, None

        try:
            uncached = uncached_autocast(counts.device, graph.key.autocast, work)
            graph.commit, taken = self.budget.record(uncached, graphs=0)
        except BaseException:
            self.budget.give_back(graph.bytes)
            raise
        graph.bytes += taken

    def _note_failure(self, key: ForwardKey, error: Exception) -> None:
        """After a failure: stops compiling; or runs this shape eagerly, or all shapes if it was the first."""
        if self._mode == "compiled":
            self._mode, then = "graph", "goes on without being compiled"
        else:
            self._failed.add(key)
            is_first = not self._graphs and not self._loops
            self._gave_up = is_first and not isinstance(error, torch.OutOfMemoryError)  # a smaller one may fit
            then = "runs eagerly" if self._gave_up else f"runs eagerly for {key.rows} rows x {key.queries} tokens"
        warnings.warn(
            f"the forward of {type(self.network).__name__} could not be captured and {then}, with the same tokens but "
            f"slower: {type(error).__name__}: {error}",
            stacklevel=2,
        )

    def _record_forward(
        self, runner: EagerRunner, tokens: Tensor, positions: Tensor, key: ForwardKey, expected: Tensor, whose: str
    ) -> tuple[Recording, int]:
        """:meth:`_record` for a forward of `runner` on these buffers; the first rows' logits are `expected`."""
        shape = *tokens.shape, expected.shape[-1]  # [rows, q, vocab]
        shared = self.budget.logits(shape, expected.dtype, expected.device)

        def forward() -> Outputs:
            logits, features = runner._run(tokens, positions, key.columns, spans=self.uses_spans)
            # The hooks of a compiled twin are those of this runner, and store the states here.
            return shared.copy_(logits), features if runner is self or not self._stored else self._features()

        def compared(recording: Recording) -> tuple[Tensor, Tensor]:
            return recording.logits[: len(expected)], expected

        return self._record(runner, key, forward, compared, whose)

    def _record(
        self,
        runner: EagerRunner,
        key: ForwardKey,
        work: Callable[[], Outputs],
        compared: Callable[[Recording], tuple[Tensor, Tensor]],
        whose: str,
    ) -> tuple[Recording, int]:
        """Captures `work`, forwards of `runner`; returns the recording and its bytes.

        Raises:
            RuntimeError: a replay's logits or scores differ much from others, of `whose`; `compared` returns both.
        """
        uncached = uncached_autocast(self.network.device, key.autocast, work)
        for _ in range(0 if runner is self else WARM_UPS):
            uncached()
        return self.budget.record_checked(uncached, compared, whose, self.network.dtype)

    # ---- compiled -------------------------------------------------------------------------------------------------

    @cached_property
    def _compiled_runner(self) -> EagerRunner:
        return EagerRunner(compiled_twin(self.network, self.cache), self.cache)

    def _try_compiled(self, graph: CapturedForward) -> None:
        """Replaces the filled `graph` by a compiled forward if both agree and that is faster."""
        if not self.budget.allows_more():
            return
        self.budget.preparations += 1
        before, seconds = graph.recording, self.budget.recorder.seconds
        try:
            before.replay()
            expected = before.logits.clone()  # the next replay may overwrite them
            buffers = graph.tokens, graph.positions
            recording, taken = self._record_forward(
                self._compiled_runner, *buffers, graph.key, expected, "the uncompiled forward's"
            )
            is_faster = seconds(recording.replay) < seconds(before.replay)
            self.budget.give_back(graph.bytes if is_faster else taken)
            if is_faster:
                graph.recording, graph.bytes = recording, taken
        except Exception as error:
            self._mode = "graph"
            warnings.warn(
                f"{type(self.network).__name__} could not be compiled and stays as it is, with the same tokens: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )


class _LayerCache:
    """The cache as one layer sees it.

    `KVCache.update` takes the index of a layer, and torch.compile would compile the layer for every value of it.
    Here every layer gets an object of the same shape, and the index is ignored.
    """

    def __init__(self, cache: KVCache, index: int) -> None:
        self.layer = cache.layers[index]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self.layer.update(key_states, value_states)

    def layer_at(self, _index: int) -> Any:
        return self.layer


def compiled_twin(network: PreTrainedModel, cache: KVCache) -> PreTrainedModel:
    """A twin of `network`, a shadow or its quantized twin, over the same weights, whose decoder layers are compiled.

    Layers are compiled separately, in seconds instead of minutes, since layers of one class, shape and layer type
    share the compiled code. Embedding, final norm and head, with their patches, stay eager. `cache`: of its forwards,
    one of which has run. Raises ValueError for a network without a list of decoder layers.
    """
    twin = make_shadow(network)
    layers = decoder_layers(twin)
    # A new code object, since torch counts and limits recompilations per code object.
    code = _run_layer.__code__.replace(co_name=f"run_{type(layers[0]).__name__}")
    compiled = torch.compile(FunctionType(code, _run_layer.__globals__), fullgraph=True)
    for index, layer in enumerate(layers):
        layer.forward = partial(_forward, compiled, layer, _LayerCache(cache, index))
    return twin


def _run_layer(layer: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


def _forward(compiled: Any, layer: nn.Module, cache: _LayerCache, /, *args: Any, **kwargs: Any) -> Any:
    kwargs = {name: cache if isinstance(value, KVCache) else value for name, value in kwargs.items()}
    return compiled(layer, *args, **kwargs)
