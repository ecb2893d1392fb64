"""The decoding loop: draft, verify, accept, commit, for rows of different lengths."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller

import numpy as np
import torch
from torch import Tensor

from ...scheduling.control import Chain, Control, Tally
from ...scheduling.plain_decoding import plain_rounds
from .cache import RowStates
from .chains import Lanes, draft_lengths, is_one_chain
from .counters import DraftCounter, PhaseTimer, RoundLog
from .drafter import Drafter, DraftSession
from .entering import Entrance, first_tokens
from .guarded_drafters import GuardedDrafters, report_broken
from .kv_room import KVRoom
from .memory import free_memory, sent
from .noise import RoundNoise, derive, position_keys
from .noise_ahead import NoiseAhead
from .outcome import Integers, Outcome
from .overheard import Overheard
from .processors import LogitsPipeline
from .request_queue import RequestQueue
from .rows import Progress, Request, Rows, prompt_key
from .runner import EagerRunner
from .statistics import SpeculationStatistics
from .stopping import Stopping
from .timeline import TimelineLog
from .verification import Proposal, Verdict, verify_rejection


@dataclass(frozen=True)
class Completion:
    """What one request generated: tokens `[n]` int64, EOS included, and their logprobs `[n]` if asked for."""

    tokens: Tensor
    logprobs: Tensor | None


class Rollout:
    """One batched generation of the requests that `queue` gives out.

    The candidates of `control` are the `drafters` in their order; the capacity of `rows` bounds the batch. `rejection`
    verifies by rejection sampling where it samples. `on_tokens` is called with `[n]` new tokens in each round, at
    batch 1 only (a streamer). Where `room` says that memory ends, rows leave and wait; None: there is enough.
    """

    def __init__(
        self,
        queue: RequestQueue,
        target: EagerRunner,
        drafters: Sequence[Drafter],
        control: Control,
        rows: Rows,
        pipeline: LogitsPipeline,
        stopping: Stopping,
        do_sample: bool,
        rejection: bool,
        want_logprobs: bool,
        strategy: str,
        on_tokens: Callable[[Tensor], None] | None = None,
        room: KVRoom | None = None,
    ) -> None:
        requests = queue.requests
        self._kv_room, self._queue = room, queue
        self._completions: list[Completion | None] = [None] * len(requests)
        self._target, self._rows = target, rows
        self._drafters = GuardedDrafters(drafters, control.drop)
        self._control = self._own_control = control
        self._pipeline, self._stopping = pipeline, stopping
        self._do_sample, self._rejection = do_sample, rejection and do_sample
        self._want_logprobs, self._on_tokens = want_logprobs, on_tokens
        self._vocabulary = target.network.config.get_text_config(decoder=True).vocab_size
        self._noise, self._ended_in = NoiseAhead(rows, self._vocabulary), [-1] * len(requests)
        self._statistics, self._log = SpeculationStatistics(strategy), RoundLog()
        self._timeline = TimelineLog(len(requests), self._drafters.names)
        self._prompt_keys = [prompt_key(request.prompt) for request in requests]
        self._entrance = Entrance(queue, rows, self._prompt_keys, room)
        self._tokens_read = self._rounds = 0  # rounds: begun so far
        self._counter, self._timer = DraftCounter(len(requests), self._drafters.names), PhaseTimer(rows.tokens.device)

    def run(self) -> tuple[list[Completion | None], SpeculationStatistics]:
        """Generates until the queue and the rows are empty. Completions come in the order of their indices; None: the
        queue gave the request to another rank."""
        self.begin()
        while self.admit():
            self._make_room()
            self.decode_round(self._plan())
            self._queue.after_round(self)
        self._control.finish()
        self._finish_statistics()
        self.end()
        self._statistics.drafter_failure = self._drafters.failure
        return self._completions, self._statistics

    def begin(self) -> None:
        """Makes drafters and control ready."""
        self._started = time.perf_counter()
        with self._timer.phase("control"):
            self._control.begin(self._rows.capacity, self._prompt_keys)
        own = self._rows, self._pipeline, self._do_sample, self._target, self._rejection
        self._session = session = DraftSession(*own, self._control.most_drafted, self._control.spend)
        self._drafters.each(lambda drafter: drafter.begin(session))
        self._overheard = Overheard(self._control, self._drafters, self._rows, self._vocabulary)

    def end(self) -> None:
        """Lets drafters go of the rows and caches, which would otherwise outlive the generation."""
        self._drafters.each(lambda drafter: drafter.end())

    def admit(self) -> bool:
        """Gives free rows to waiting requests, and takes first tokens; returns whether there are rows to decode."""
        rows = self._rows
        while taken := self._entrance.taken():
            with self._timer.phase("prefill"):
                admission = rows.admit(taken)
                count, logits = self._target.read_prompts(rows, admission)
                self._tokens_read += count
                raced = {self._drafters.names.index(own.method) for own in admission.moved.values() if own.method}
                self._control = self._own_control.helper(raced.pop()) if raced else self._own_control
                for row, progress in admission.moved.items():
                    self._target.cache.import_row(row, progress.head, progress.tail())
            with self._timer.phase("draft"):
                self._drafters.each(methodcaller("admit", admission))
            if logits is not None:
                with self._timer.phase("accept"):
                    finished, _ = self._commit(first_tokens(admission, logits, self._session, self._want_logprobs))
                ended = [rows.indices[row] for row in finished]  # nobody drafts for them
                self._timeline.record(time.perf_counter() - self._started, self._rounds, [], ended)
                with self._timer.phase("compact"):
                    self._retire(finished)
            if rows.active:  # else the first tokens have ended all
                break
        return rows.active > 0

    # ---- a round --------------------------------------------------------------------------------------------------

    def decode_round(self, plan: Sequence[Chain]) -> None:
        """One round: drafters draft the chains of `plan`, one target forward verifies them, and each row goes on with
        the chain of which most was accepted; without chains the target decodes."""
        batch, length = self._rows.active, self._mean_length()
        lengths = draft_lengths(plan, batch)
        self._overheard.before(lengths)  # its time is not the round's
        started, prepared, stood = time.perf_counter(), self._target.preparations, self._drafters.stood
        self._rounds += 1
        width = sum(max(own) for own in lengths.values())
        self._target.cache.reserve((self._rows.host_lengths + width).tolist())
        with self._timer.phase("noise"):
            count = 1 + max((max(own) for own in lengths.values()), default=0)
            noise = self._noise.of_round(count) if self._do_sample else None
        outcome = self._one_chain(lengths, noise) if is_one_chain(lengths) else self._several_chains(lengths, noise)
        with self._timer.phase("accept"):
            finished, tokens = self._commit(outcome)
        with self._timer.phase("compact"):
            self._retire(finished)
        # Of the device too: the commit waited for it. Learning and packing are none of what a round takes.
        seconds = time.perf_counter() - started - (self._drafters.stood - stood)
        names = dict.fromkeys(self._drafters.names[which] for which in lengths)
        self._log.add(batch, length, outcome.width, "+".join(names) or None, seconds, tokens)
        with self._timer.phase("control"):
            self._control.record(outcome.width, seconds, tokens, self._target.preparations == prepared)

    def _one_chain(self, lengths: dict[int, list[int]], noise: RoundNoise | None) -> Outcome:
        """Drafts, verifies and accepts where one drafter drafts the same γ for all rows, or none drafts."""
        which, draft_length = next(((which, own[0]) for which, own in lengths.items()), (None, 0))
        with self._timer.phase("draft"):
            proposal = self._nothing(0) if which is None else self._propose(which, draft_length, noise)
        with self._timer.phase("verify"):
            logits = self._verify(proposal)
        if which is not None:
            self._teach(which, proposal, lambda: (logits, self._rows.lengths > 0))
        with self._timer.phase("accept"):
            verdict = self._verdict(proposal, logits, noise)
            return Outcome.of_one_chain(which, proposal, verdict, self._rows.room)

    def _several_chains(self, lengths: dict[int, list[int]], noise: RoundNoise | None) -> Outcome:
        """The same where rows have different chains. Of a race, keeps the K/V and hidden states of the winners."""
        with self._timer.phase("draft"):
            drafted = {which: self._propose(which, max(own), noise) for which, own in lengths.items()}
            lanes = Lanes.of(self._rows, lengths, drafted)
        with self._timer.phase("verify"):
            if lanes.layout is None:
                logits = self._verify(lanes.proposals[0])
            else:
                logits = self._target.forward_chains(lanes.layout, self._rows.longest + lanes.width)
        for which, proposal in drafted.items():
            self._teach(which, proposal, partial(lanes.verified, which, logits))
        with self._timer.phase("accept"):
            own = enumerate(lanes.proposals)
            verdicts = [self._verdict(each, lanes.logits(lane, logits), noise) for lane, each in own]
            outcome = lanes.outcome(verdicts, self._rows.room)
            if lanes.layout is not None:
                winner = sent(torch.from_numpy(outcome.winner), logits.device)  # [B]
                self._target.keep_chains(lanes.layout.slots_of(winner))
        return outcome

    def _plan(self) -> Sequence[Chain]:
        """The chains that the control wants, no longer than the row with most room could use."""
        rows = self._rows
        with self._timer.phase("control"):
            plan = self._control.plan(list(rows.indices), self._mean_length(), self._queue.waiting)
            most = int(rows.room.max()) - 1
            chains = [replace(chain, draft_length=min(chain.draft_length, most)) for chain in plan]
            plan = [chain for chain in chains if chain.draft_length > 0 and self._drafters.has(chain.which)]
            self._timeline.record(time.perf_counter() - self._started, self._rounds, plan, rows.indices)
        return plan

    def _mean_length(self) -> float:
        return float(self._rows.host_lengths.mean())

    def _propose(self, which: int, draft_length: int, noise: RoundNoise | None) -> Proposal:
        """What drafter `which` drafts; nothing where it fails."""
        rows, shape = self._rows, (self._rows.active, draft_length, self._vocabulary)
        proposal = self._drafters.ask(which, lambda drafter: drafter.propose(draft_length, noise).checked(*shape))
        if proposal is None:
            # Its K/V in the columns it drafted may be broken: verifying as many tokens overwrites it.
            return self._nothing(draft_length)
        proposal = proposal.to(rows.tokens.device)
        # A token that does not exist gives way to one that does, which is verified as any other.
        tokens = proposal.tokens.clamp(0, self._vocabulary - 1)  # [B, γ]
        if not self._rejection and not self._pipeline.may_refuse:
            return replace(proposal, tokens=tokens)
        # What follows must know on the device how many drafts there are: up to the first such token, and to the limit.
        legal = (tokens == proposal.tokens).long().cumprod(1).sum(1)  # [B]
        room = rows.limits - rows.lengths - 1  # [B], the bonus token needs one
        return replace(proposal, tokens=tokens, lengths=torch.minimum(proposal.drafted(), room).minimum(legal).relu())

    def _nothing(self, draft_length: int) -> Proposal:
        """Tokens `[B, draft_length]` of which none is a draft."""
        rows = self._rows
        if draft_length == 0:
            return Proposal(rows.tokens[: rows.active, :0])
        return Proposal(rows.window(-1, 1).expand(-1, draft_length), torch.zeros_like(rows.lengths))

    def _verify(self, proposal: Proposal) -> Tensor:
        """Feeds each row's last committed token and its drafts to the target; returns logits `[B, γ + 1, V]`."""
        rows, width = self._rows, proposal.tokens.shape[1]
        columns = rows.columns_after(-1, width + 1)  # [B, γ + 1]
        tokens = rows.tokens[: rows.active].gather(1, columns[:, :1])  # [B, 1]
        if width:
            tokens = torch.cat([tokens, proposal.tokens], dim=1)  # [B, γ + 1]
        return self._target.forward(tokens, columns, rows.longest + width)

    def _teach(self, which: int, proposal: Proposal, verified: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """Shows a drafter that learns the target's logits on its drafts, and which rows they were verified for."""
        if self._drafters.learns(which):
            with self._timer.phase("learn"):
                self._rows.write(0, proposal.tokens)  # where the drafter looks for them
                self._drafters.ask(which, methodcaller("learn", *verified()))

    def _verdict(self, proposal: Proposal, logits: Tensor, noise: RoundNoise | None) -> Verdict:
        if self._rejection and proposal.logits is not None:
            rows, lengths = self._rows, proposal.drafted()  # lengths: [B]
            logits, could = self._pipeline.process_verified(logits, proposal)  # [B, γ + 1, V], [B]
            steps = rows.generated[:, None] + torch.arange(logits.shape[1], device=logits.device)  # [B, γ + 1]
            coins, residual = (position_keys(derive(rows.streams, purpose), steps) for purpose in (1, 2))
            # A draft after which no token can be drawn must pass its own test all the same, else what ends a text
            # would come too seldom: once accepted it stands in the place of that token.
            tested = torch.minimum(lengths, could + 1)  # [B]
            verdict, accepted = verify_rejection(logits, proposal, tested, coins, residual, self._want_logprobs)
            return replace(verdict, most=torch.minimum(accepted, could))
        drawn, most = self._pipeline.draw_verified(logits, noise, proposal, self._want_logprobs)
        return Verdict(drawn.tokens, drawn.scores, drawn.logprobs, most)

    def _commit(self, outcome: Outcome) -> tuple[list[int], int]:
        """Takes the verified tokens into the output; returns the rows that ended, and how many tokens there were."""
        rows, verdict = self._rows, outcome.verdict
        rows.write(0, verdict.tokens)
        kept, ends = self._stopping.first_stop(outcome.tokens, outcome.counts, rows.room)  # [B] each
        sound = np.logical_and.accumulate(outcome.sound, axis=1).sum(1)  # [B]: tokens before the first that is not
        if (sound < kept).any():
            self._raise_broken(int((sound < kept).argmax()), sound, outcome.width)
        if self._on_tokens is not None:
            self._on_tokens(verdict.tokens[0, : kept[0]])
        if outcome.width:  # without what lies after a row's end
            drafted = np.where(ends, np.minimum(outcome.drafted, kept), outcome.drafted)  # [N, B]
            accepted = np.minimum(outcome.accepted, kept)  # [N, B]
            counted = outcome.owners, drafted, accepted, kept, outcome.winner
            self._counter.add(rows.indices, rows.host_generated, *counted)
            by_drafter = (outcome.of_each_drafter(values) for values in (accepted, drafted))
        rows.commit(rows.host_lengths + kept, verdict.logprobs)
        if outcome.width:
            self._control.record_rows(list(rows.indices), *by_drafter)
        self._overheard.after(rows.indices, outcome.tokens, kept)
        for which in outcome.broken:
            self._drafters.ask(which, report_broken)
        self._drafters.each(lambda drafter: drafter.observe(outcome.tokens, kept))
        return ends.nonzero()[0].tolist(), int(kept.sum())

    def _retire(self, finished: list[int]) -> None:
        if finished:
            self._complete(finished)
            self._free(finished)

    def _complete(self, finished: list[int]) -> None:
        """Keeps what `finished` rows have generated."""
        rows = self._rows
        kept = [row for row in finished if self._queue.keeps(rows.indices[row])]
        for row in kept:
            span = rows.generated_span(row)
            logprobs = rows.logprobs[row, span].clone() if self._want_logprobs else None
            self._completions[rows.indices[row]] = Completion(rows.tokens[row, span].clone(), logprobs)
            self._ended_in[rows.indices[row]] = self._rounds
        done = sum(completion is not None for completion in self._completions)
        seconds = time.perf_counter() - self._started
        if kept:
            self._statistics.completion_curve.append((seconds, done))
        self._timeline.end([rows.indices[row] for row in finished], seconds)

    def _free(self, finished: list[int]) -> None:
        """Takes `finished` rows out of flight."""
        rows = self._rows
        source, destination = rows.drop(finished)
        columns = rows.host_lengths[destination].tolist()
        self._target.cache.move_rows(source, destination, columns, rows.active)
        self._drafters.each(lambda drafter: drafter.move(source, destination, columns))

    def _make_room(self) -> None:
        """Sends rows back into the queue where memory ends; their K/V is computed again when they come back."""
        leaving = [] if self._kv_room is None else self._kv_room.leaving(int(self._rows.host_lengths.sum()))
        if leaving:
            self._queue.put_back(self.hand_over(leaving, head_share=1.0))
            self._statistics.preemptions += len(leaving)

    # ---- rows that another rank goes on with ----------------------------------------------------------------------

    @property
    def in_flight(self) -> list[int]:
        """Index of the request in each row."""
        return list(self._rows.indices)

    @property
    def control(self) -> Control:
        """Decides what drafts now."""
        return self._control

    def lengths(self) -> list[int]:
        """Tokens of each row, its prompt's included."""
        own: list[int] = self._rows.host_lengths.tolist()
        return own

    def expected_tokens(self) -> float:
        """Tokens that a row in flight will generate yet: as many as it has, which is what long-tailed lengths make
        most likely, and no more than it may."""
        rows = self._rows
        return float(np.minimum(rows.host_generated, rows.room).mean())

    def rounds_by_batch(self) -> list[tuple[int, int, float]]:
        """(rows, tokens, seconds) of the rounds so far."""
        return [(point.batch, point.tokens, point.seconds) for point in self._log.points]

    def seconds_per_prompt_token(self) -> float:
        """What reading a prompt took, per token."""
        return self._timer.seconds().get("prefill", 0.0) / max(self._tokens_read, 1)

    def hand_over(self, rows: Sequence[int], head_share: float, method: str | None = None) -> list[Request]:
        """Returns the requests of `rows` with what they have come to. They leave; or they stay, and another rank races
        for them with its drafter named `method`.

        The K/V of the first `head_share` of their columns is left out; all of it where there is no memory for a copy,
        or where drafters read hidden states, which only a forward over these columns gives.
        """
        lengths = self.lengths()
        cache = self._target.cache
        needed = sum(lengths[row] for row in rows) * cache.column_bytes
        share = 1.0 if self._target.is_heard or 2 * needed > free_memory(self._rows.tokens.device) else head_share
        moved = []
        for row in rows:
            index, columns = self._rows.indices[row], lengths[row] - 1
            head, span = round(share * columns), self._rows.generated_span(row)
            logprobs = self._rows.logprobs[row, span].clone() if self._want_logprobs else None
            tail: Callable[[], RowStates] = partial(dict, cache.export_row(row, head, columns))
            progress = Progress(self._rows.tokens[row, span].clone(), logprobs, head, columns, tail, method)
            moved.append(replace(self._queue.requests[index], progress=progress))
        if method is None:
            self.drop(rows)
        return moved

    def drop(self, rows: Sequence[int]) -> None:
        """Takes `rows` out of flight, with which another rank goes on, or has ended first."""
        self._timeline.end([self._rows.indices[row] for row in rows], time.perf_counter() - self._started)
        self._free(list(rows))

    # ---- faults ---------------------------------------------------------------------------------------------------

    @property
    def drafter_failure(self) -> str | None:
        """Why a drafter was dropped, or None."""
        return self._drafters.failure

    def _raise_broken(self, row: int, sound: Integers, draft_length: int) -> None:
        rows, count = self._rows, draft_length + 1
        # The verified tokens are the row's drafts up to the position.
        tokens, columns = rows.window(-1, count), rows.columns_after(-1, count)  # [B, γ + 1] each
        where = self._target.first_broken_module(tokens, columns, rows.longest + draft_length)
        raise FloatingPointError(
            f"the target's logits leave no token to sample (NaN, or -inf everywhere) for request "
            f"{rows.indices[row]} at generated position {rows.host_generated[row] + sound[row]}, after "
            f"{self._log.rounds} decoding rounds; {where}. Check the weights of the last optimizer step and the "
            "logits processors, or run this model in a wider dtype."
        )

    # ---- statistics -----------------------------------------------------------------------------------------------

    def phase_seconds(self) -> dict[str, float]:
        """Seconds per phase so far."""
        return self._timer.seconds()

    def _finish_statistics(self) -> None:
        statistics = self._statistics
        completions = [completion for completion in self._completions if completion is not None]
        self._counter.write_to(statistics)
        self._log.write_to(statistics)
        statistics.ended_in = [ended for ended in self._ended_in if ended >= 0]
        statistics.timeline = [own for own in self._timeline.timelines if own.changes]
        lengths = [len(completion.tokens) for completion in completions]
        statistics.tokens = sum(lengths)
        logprobs = [completion.logprobs for completion in completions if completion.logprobs is not None]
        statistics.logprob_sum = float(sum(own.double().sum() for own in logprobs))
        statistics.target_forwards = self._target.forwards
        most = [length + self._control.most_drafted for length in self._rows.most]
        statistics.cache_bytes = self._target.cache.bytes_of(most)
        statistics.graphs, statistics.graph_bytes = self._target.captured
        for drafter in self._drafters:
            statistics.draft_forwards += drafter.forwards
            statistics.cache_bytes += drafter.cache_bytes
            if drafter.learns:
                statistics.learning = drafter.learning
        account = self._control.account()
        statistics.predicted_speedup, statistics.reason = account.predicted_speedup, account.reason
        statistics.measured_speedup = sum(self._control.tallies, Tally()).measured_speedup
        statistics.phase_seconds = self._timer.seconds()
        statistics.seconds = time.perf_counter() - self._started
        statistics.plain_seconds = self._plain_seconds(lengths)

    def _plain_seconds(self, tokens: list[int]) -> float | None:
        """What plain decoding would have taken: the same prefill, the rounds before the first draft, and the rest."""
        if self._log.plain_rounds == self._log.rounds:
            return self._statistics.seconds
        ended = [request for request in self._queue.requests if self._completions[request.index]]
        begun = [(len(request.prompt) + 1, self._prompt_keys[request.index]) for request in ended]
        left = plain_rounds(begun, [count - 1 for count in tokens], self._rows.capacity, self._log.plain_rounds)
        rest = self._control.plain_seconds(left)
        known = self._statistics.phase_seconds["prefill"] + self._log.plain_seconds
        return None if rest is None else known + rest
