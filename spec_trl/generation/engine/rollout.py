"""The decoding loop: draft, verify, accept, commit, for rows of different lengths."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import methodcaller

import numpy as np
import torch
from torch import Tensor

from ...scheduling.control import Chain, Control
from .chains import Lanes, draft_lengths, is_one_chain
from .drafter import Drafter, DraftSession
from .entering import Entrance, first_tokens
from .faults import broken_logits
from .guarded_drafters import GuardedDrafters, report_broken
from .leaving import hand_over
from .memory import sent
from .noise import RoundNoise, derive, position_keys
from .noise_ahead import NoiseAhead
from .outcome import Outcome
from .overheard import Overheard
from .processors import LogitsPipeline
from .record import Completion, DraftedChains, Record
from .request_queue import RequestQueue
from .room import KVRoom
from .rows import Rows
from .runner import EagerRunner
from .statistics import SpeculationStatistics
from .stopping import Stopping
from .verification import Proposal, Verdict, verify_rejection


class Rollout:
    """One batched generation of the requests that `queue` gives out.

    The candidates of `control` are the `drafters` in their order; the capacity of `rows` bounds the batch. `rejection`
    verifies by rejection sampling where it samples. `on_tokens` is called with `[n]` new tokens in each round, at
    batch 1 only (a streamer). Where `room` says that memory ends, rows leave and wait; None: there is enough.

    Attributes:
        queue, target, rows, want_logprobs: as given.
        drafters: the drafters, of which one that fails is dropped.
        control: decides what drafts now.
        record: rounds, phases and completions so far.
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
        self.queue, self.target, self.rows = queue, target, rows
        self.drafters = GuardedDrafters(drafters, control.drop)
        self.control = self._own_control = control
        self.want_logprobs = want_logprobs
        self.record = Record(strategy, queue.requests, self.drafters.names, rows.tokens.device)
        self._pipeline, self._stopping = pipeline, stopping
        self._do_sample, self._rejection = do_sample, rejection and do_sample
        self._on_tokens, self._kv_room = on_tokens, room
        self._vocabulary = target.network.config.get_text_config(decoder=True).vocab_size
        self._noise = NoiseAhead(rows, self._vocabulary)
        self._entrance = Entrance(queue, rows, self.record.prompt_keys, room)

    def run(self) -> tuple[list[Completion | None], SpeculationStatistics]:
        """Generates until the queue and the rows are empty. Completions come in the order of their indices; None: the
        queue gave the request to another rank."""
        self.begin()
        while self.admit():
            self._make_room()
            self.decode_round(self._plan())
            self.queue.after_round(self)
        self.control.finish()
        statistics = self.record.statistics(self.target, self.rows, [*self.drafters], self.control)
        self.end()
        statistics.drafter_failure = self.drafters.failure
        return self.record.completions, statistics

    def begin(self) -> None:
        """Makes drafters and control ready."""
        with self.record.phase("control"):
            self.control.begin(self.rows.capacity, self.record.prompt_keys)
        own = self.rows, self._pipeline, self._do_sample, self.target, self._rejection
        self._session = session = DraftSession(*own, self.control.most_drafted, self.control.spend)
        self.drafters.each(lambda drafter: drafter.begin(session))
        self._overheard = Overheard(self.control, self.drafters, self.rows, self._vocabulary)

    def end(self) -> None:
        """Lets drafters go of the rows and caches, which would otherwise outlive the generation."""
        self.drafters.each(lambda drafter: drafter.end())

    def admit(self) -> bool:
        """Gives free rows to waiting requests, and takes first tokens; returns whether there are rows to decode."""
        rows = self.rows
        while taken := self._entrance.taken():
            with self.record.phase("prefill"):
                admission = rows.admit(taken)
                count, logits = self.target.read_prompts(rows, admission)
                self.record.tokens_read += count
                raced = {self.drafters.names.index(own.method) for own in admission.moved.values() if own.method}
                self.control = self._own_control.helper(raced.pop()) if raced else self._own_control
                for row, progress in admission.moved.items():
                    self.target.cache.import_row(row, progress.head, progress.tail())
            with self.record.phase("draft"):
                self.drafters.each(methodcaller("admit", admission))
            if logits is not None:
                with self.record.phase("accept"):
                    finished, _ = self._commit(first_tokens(admission, logits, self._session, self.want_logprobs))
                with self.record.phase("compact"):
                    self._retire(finished)
            if rows.active:  # else the first tokens have ended all
                break
        return rows.active > 0

    # ---- a round --------------------------------------------------------------------------------------------------

    def decode_round(self, plan: Sequence[Chain]) -> None:
        """One round: drafters draft the chains of `plan`, one target forward verifies them, and each row goes on with
        the chain of which most was accepted; without chains the target decodes."""
        batch, length = self.rows.active, self._mean_length()
        lengths = draft_lengths(plan, batch)
        self._overheard.before(lengths)  # its time is not the round's
        started, prepared, stood = time.perf_counter(), self.target.preparations, self.drafters.stood
        record = self.record.begin_round(plan, self.rows.indices, length)
        width = sum(max(own) for own in lengths.values())
        self.target.cache.reserve((self.rows.host_lengths + width).tolist())
        with self.record.phase("noise"):
            count = 1 + max((max(own) for own in lengths.values()), default=0)
            noise = self._noise.of_round(count) if self._do_sample else None
        outcome = self._one_chain(lengths, noise) if is_one_chain(lengths) else self._several_chains(lengths, noise)
        with self.record.phase("accept"):
            finished, tokens = self._commit(outcome)
        with self.record.phase("compact"):
            self._retire(finished)
        # The commit has synchronized, so this includes device time. Learning and packing are subtracted.
        seconds = time.perf_counter() - started - (self.drafters.stood - stood)
        record.draft_length, record.seconds, record.tokens = outcome.width, seconds, tokens
        with self.record.phase("control"):
            self.control.record(outcome.width, seconds, tokens, self.target.preparations == prepared)

    def _one_chain(self, lengths: dict[int, list[int]], noise: RoundNoise | None) -> Outcome:
        """Drafts, verifies and accepts where one drafter drafts the same γ for all rows, or none drafts."""
        which, draft_length = next(((which, own[0]) for which, own in lengths.items()), (None, 0))
        with self.record.phase("draft"):
            proposal = self._nothing(0) if which is None else self._propose(which, draft_length, noise)
        with self.record.phase("verify"):
            logits = self._verify(proposal)
        if which is not None:
            self._teach(which, proposal, lambda: (logits, self.rows.lengths > 0))
        with self.record.phase("accept"):
            verdict = self._verdict(proposal, logits, noise)
            return Outcome.of_one_chain(which, proposal, verdict, self.rows.room)

    def _several_chains(self, lengths: dict[int, list[int]], noise: RoundNoise | None) -> Outcome:
        """The same where rows have different chains. Of a race, keeps the K/V and hidden states of the winners."""
        with self.record.phase("draft"):
            drafted = {which: self._propose(which, max(own), noise) for which, own in lengths.items()}
            lanes = Lanes.of(self.rows, lengths, drafted)
        with self.record.phase("verify"):
            if lanes.layout is None:
                logits = self._verify(lanes.proposals[0])
            else:
                logits = self.target.forward_chains(lanes.layout, self.rows.longest + lanes.width)
        for which, proposal in drafted.items():
            self._teach(which, proposal, partial(lanes.verified, which, logits))
        with self.record.phase("accept"):
            own = enumerate(lanes.proposals)
            verdicts = [self._verdict(each, lanes.logits(lane, logits), noise) for lane, each in own]
            outcome = lanes.outcome(verdicts, self.rows.room)
            if lanes.layout is not None:
                winner = sent(torch.from_numpy(outcome.winner), logits.device)  # [B]
                self.target.keep_chains(lanes.layout.slots_of(winner))
        return outcome

    def _plan(self) -> Sequence[Chain]:
        """The chains that the control wants, no longer than the row with most room could use."""
        rows = self.rows
        with self.record.phase("control"):
            plan = self.control.plan(list(rows.indices), self._mean_length(), self.queue.waiting)
            most = int(rows.room.max()) - 1
            chains = [replace(chain, draft_length=min(chain.draft_length, most)) for chain in plan]
            return [chain for chain in chains if chain.draft_length > 0 and self.drafters.has(chain.which)]

    def _mean_length(self) -> float:
        return float(self.rows.host_lengths.mean())

    def _propose(self, which: int, draft_length: int, noise: RoundNoise | None) -> Proposal:
        """What drafter `which` drafts; nothing where it fails."""
        rows, shape = self.rows, (self.rows.active, draft_length, self._vocabulary)
        proposal = self.drafters.ask(which, lambda drafter: drafter.propose(draft_length, noise).checked(*shape))
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
        rows = self.rows
        if draft_length == 0:
            return Proposal(rows.tokens[: rows.active, :0])
        return Proposal(rows.window(-1, 1).expand(-1, draft_length), torch.zeros_like(rows.lengths))

    def _verify(self, proposal: Proposal) -> Tensor:
        """Feeds each row's last committed token and its drafts to the target; returns logits `[B, γ + 1, V]`."""
        rows, width = self.rows, proposal.tokens.shape[1]
        columns = rows.columns_after(-1, width + 1)  # [B, γ + 1]
        tokens = rows.tokens[: rows.active].gather(1, columns[:, :1])  # [B, 1]
        if width:
            tokens = torch.cat([tokens, proposal.tokens], dim=1)  # [B, γ + 1]
        return self.target.forward(tokens, columns, rows.longest + width)

    def _teach(self, which: int, proposal: Proposal, verified: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """Shows a drafter that learns the target's logits on its drafts, and which rows they were verified for."""
        if self.drafters.learns(which):
            with self.record.phase("learn"):
                self.rows.write(0, proposal.tokens)  # where the drafter looks for them
                self.drafters.ask(which, methodcaller("learn", *verified()))

    def _verdict(self, proposal: Proposal, logits: Tensor, noise: RoundNoise | None) -> Verdict:
        if self._rejection and proposal.logits is not None:
            rows, lengths = self.rows, proposal.drafted()  # lengths: [B]
            logits, could = self._pipeline.process_verified(logits, proposal)  # [B, γ + 1, V], [B]
            steps = rows.generated[:, None] + torch.arange(logits.shape[1], device=logits.device)  # [B, γ + 1]
            coins, residual = (position_keys(derive(rows.streams, purpose), steps) for purpose in (1, 2))
            # A draft after which no token can be drawn must pass its own test all the same, else what ends a text
            # would come too seldom: once accepted it stands in the place of that token.
            tested = torch.minimum(lengths, could + 1)  # [B]
            verdict, accepted = verify_rejection(logits, proposal, tested, coins, residual, self.want_logprobs)
            return replace(verdict, most=torch.minimum(accepted, could))
        drawn, most = self._pipeline.draw_verified(logits, noise, proposal, self.want_logprobs)
        return Verdict(drawn.tokens, drawn.scores, drawn.logprobs, most)

    def _commit(self, outcome: Outcome) -> tuple[list[int], int]:
        """Takes the verified tokens into the output; returns the rows that ended, and how many tokens there were."""
        rows, verdict = self.rows, outcome.verdict
        rows.write(0, verdict.tokens)
        kept, ends = self._stopping.first_stop(outcome.tokens, outcome.counts, rows.room)  # [B] each
        sound = np.logical_and.accumulate(outcome.sound, axis=1).sum(1)  # [B]: tokens before the first that is not
        if (sound < kept).any():
            raise broken_logits(self, int((sound < kept).argmax()), sound, outcome.width)
        if self._on_tokens is not None:
            self._on_tokens(verdict.tokens[0, : kept[0]])
        if outcome.width:  # without what lies after a row's end
            drafted = np.where(ends, np.minimum(outcome.drafted, kept), outcome.drafted)  # [N, B]
            accepted = np.minimum(outcome.accepted, kept)  # [N, B]
            counted = outcome.owners, drafted, accepted, kept, outcome.winner
            self.record.rounds[-1].chains = DraftedChains(rows.host_generated, *counted)
            by_drafter = (outcome.of_each_drafter(values) for values in (accepted, drafted))
        rows.commit(rows.host_lengths + kept, verdict.logprobs)
        if outcome.width:
            self.control.record_rows(list(rows.indices), *by_drafter)
        self._overheard.after(rows.indices, outcome.tokens, kept)
        for which in outcome.broken:
            self.drafters.ask(which, report_broken)
        self.drafters.each(lambda drafter: drafter.observe(outcome.tokens, kept))
        return ends.nonzero()[0].tolist(), int(kept.sum())

    def _retire(self, finished: list[int]) -> None:
        if finished:
            self._complete(finished)
            self._free(finished)

    def _complete(self, finished: list[int]) -> None:
        """Keeps what `finished` rows have generated."""
        rows, ended = self.rows, dict[int, Completion]()
        for row in finished:
            if self.queue.keeps(rows.indices[row]):
                span = rows.generated_span(row)
                logprobs = rows.logprobs[row, span].clone() if self.want_logprobs else None
                ended[rows.indices[row]] = Completion(rows.tokens[row, span].clone(), logprobs)
        self.record.end([rows.indices[row] for row in finished], ended)

    def _free(self, finished: list[int]) -> None:
        """Takes `finished` rows out of flight."""
        rows = self.rows
        source, destination = rows.drop(finished)
        columns = rows.host_lengths[destination].tolist()
        self.target.cache.move_rows(source, destination, columns, rows.active)
        self.drafters.each(lambda drafter: drafter.move(source, destination, columns))

    def _make_room(self) -> None:
        """Sends rows back into the queue where memory ends; their K/V is computed again when they come back."""
        leaving = [] if self._kv_room is None else self._kv_room.leaving(int(self.rows.host_lengths.sum()))
        if leaving:
            self.queue.put_back(hand_over(self, leaving, head_share=1.0))
            self.record.preemptions += len(leaving)

    def drop(self, leaving: Sequence[int]) -> None:
        """Takes the rows `leaving` out of flight, with which another rank goes on, or has ended first."""
        self.record.end([self.rows.indices[row] for row in leaving], {})
        self._free(list(leaving))
