"""Runs the decoding loop: admit, plan, draft, verify, accept, commit, retire."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import methodcaller

import numpy as np
import torch
from torch import Tensor

from ..planner.control import AdmissionDelay, Chain, Control
from .drafter import Drafter, DraftSession
from .forwards.runner import EagerRunner
from .guarded_drafters import GuardedDrafters, LookupEvaluation, broken_logits, report_broken
from .kv.memory import free_memory, sent
from .kv.row_memory import RowMemory
from .parked_rows import ParkedRows
from .record import Completion, DraftedChains, Record
from .rows import Admission, NoiseAhead, Request, Rows
from .sampling.accept import Drafts, Outcome, Proposal, draft_lengths, verify_rejection
from .sampling.noise import Draw, RoundNoise, derive, position_keys
from .sampling.processors import LogitsPipeline
from .sampling.stopping import Stopping
from .statistics import SpeculationStatistics


class RequestQueue:
    """Hands out `requests` in order. `distributed/pool.py` has a queue that several ranks share.

    Attributes:
        requests: all of the batch, by index.
        waiting: number of requests that no rank decodes yet, as far as this rank knows.
        parked: takes the K/V of rows that end, for the next turn of a conversation; None: it is dropped.
    """

    parked: ParkedRows | None = None

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self._dealt = list(requests)  # requests that this rank gives out
        self.waiting = len(requests)

    @property
    def upcoming(self) -> Request | None:
        """The next request, if that is known."""
        return self._dealt[0] if self._dealt else None

    def take(self, free: int, active: int) -> list[Request]:
        """Returns up to `free` requests to start now, next to `active` rows. No request while `active` is 0 ends the
        rollout."""
        taken, self._dealt = self._dealt[:free], self._dealt[free:]
        self.waiting = len(self._dealt)
        return taken

    def put_back(self, requests: list[Request]) -> None:
        """Puts taken `requests` back, in front."""
        self._dealt = requests + self._dealt
        self.waiting += len(requests)

    def keeps(self, index: int) -> bool:
        """Called once when request `index` ends; False discards its completion: another rank ended it first."""
        return True

    def after_round(self, rollout: "Rollout") -> None:
        """Called after a round, when ended rows have left; the queue may take further rows out of `rollout`."""


class Rollout:
    """One batched generation of the requests of `queue`.

    The candidates of `control` are the `drafters` in their order; the capacity of `rows` bounds the batch. `rejection`
    verifies by rejection sampling if it samples. A streamer's `on_tokens` is called with `[n]` new tokens per round,
    at batch 1 only. `memory` watches free memory and preempts rows when it runs out; None disables this.

    Attributes:
        in_step: whether all rows commit equally many tokens in a round.
        drafters: failing ones are dropped.
        control: decides when drafters draft.
        record: rounds, phases and completions so far.
    """

    in_step = False

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
        memory: RowMemory | None = None,
    ) -> None:
        self.queue, self.target, self.rows = queue, target, rows
        self.drafters = GuardedDrafters(drafters, control.drop)
        self.control = control
        self.want_logprobs = want_logprobs
        self.record = Record(strategy, queue.requests, self.drafters.names, rows.tokens.device)
        self._pipeline, self._stopping = pipeline, stopping
        self._do_sample, self._rejection = do_sample, rejection and do_sample
        self._on_tokens, self._memory = on_tokens, memory
        self._vocabulary = target.network.config.get_text_config(decoder=True).vocab_size
        self._noise = NoiseAhead(rows, self._vocabulary)
        self._delay = AdmissionDelay(rows.capacity)

    def run(self) -> tuple[list[Completion | None], SpeculationStatistics]:
        """Generates until the queue and the rows are empty. Completions are by index of request; None: another rank
        decoded it."""
        self.begin()
        while self.admit():
            self._preempt()
            self.decode_round(self._plan())
            self.queue.after_round(self)
        self.control.finish()
        statistics = self.record.statistics(self.target, self.rows, [*self.drafters.in_use.values()], self.control)
        self.end()
        statistics.drafter_failure = self.drafters.failure
        return self.record.completions, statistics

    def begin(self) -> None:
        control = self.control
        with self.record.phase("control"):
            control.in_step = self.in_step
            control.begin(self.rows.capacity, self.record.prompt_keys)
        pipeline = self._pipeline.for_drafts() if self.in_step else self._pipeline
        options = pipeline, self._do_sample, self.target, self._rejection
        session = DraftSession(self.rows, *options, control.most_drafted, control.spend)
        self.drafters.ask_all(methodcaller("begin", session))
        self._lookups = LookupEvaluation(control, self.drafters, self._vocabulary)

    def end(self) -> None:
        """Makes drafters drop rows and caches: nothing of the generation stays."""
        self.drafters.ask_all(methodcaller("end"))

    # ---- rows that enter --------------------------------------------------------------------------------------------

    def admit(self) -> bool:
        """Gives free rows to waiting requests, and draws first tokens; returns whether there are rows to decode."""
        rows, phase = self.rows, self.record.phase
        while taken := self._take():
            with phase("prefill"):
                admission = rows.admit(taken)
                count, logits = self.target.read_prompts(rows, admission)
                self.record.tokens_read += count
            with phase("draft"):
                self.drafters.ask_all(methodcaller("admit", admission))
            if logits is not None:
                with phase("accept"):
                    finished, _ = self._commit(self._first_tokens(admission, logits))
                with phase("compact"):
                    self._retire(finished)
            if rows.active:  # else all rows ended with their first token
                break
        return rows.active > 0

    def _take(self) -> list[Request]:
        queue, rows, memory, keys = self.queue, self.rows, self._memory, self.record.prompt_keys
        free = 0 if memory is not None and memory.is_full else rows.capacity - rows.active
        next_key = None if (upcoming := queue.upcoming) is None else keys[upcoming.index]
        if not free or self._delay.waits(free, {keys[index] for index in rows.indices}, next_key):
            return []
        taken = queue.take(free, rows.active) if queue.waiting or not rows.active else []
        if taken and memory is not None:
            fitting = memory.fitting(taken)
            queue.put_back(taken[fitting:])
            taken = taken[:fitting]
        return taken if queue.parked is None else queue.parked.saved_of(taken, self.target, self.drafters)

    def _first_tokens(self, admission: Admission, logits: Tensor) -> Outcome:
        """Draws the first token of every row without one, with the noise of its position; all copies of a prompt draw
        from the same row of `logits` (`[n, 1, V]`, n leaders). Other rows take no token."""
        rows, leader_of = self.rows, admission.first_token_rows
        place = {leader: place for place, leader in enumerate(dict.fromkeys(leader_of.values()))}
        places = [[*leader_of], [place[leader] for leader in leader_of.values()]]
        row, leader = sent(torch.tensor(places), rows.tokens.device)  # [m] each
        if len(leader_of) > len(logits):
            logits = logits[leader]  # [m, 1, V]
        noise = RoundNoise(rows.noise_keys(1)[row], logits.shape[-1]) if self._do_sample else None
        drawn = self._pipeline.draw(logits, noise, want_logprobs=self.want_logprobs, rows=[*leader_of])
        drawn = drawn.spread(row, rows.active)
        return self._until_stop(Outcome.of(Drafts.of(rows, {}, {}), drawn, rows.remaining))

    # ---- a round ----------------------------------------------------------------------------------------------------

    def _requests(self) -> list[int]:
        return list(self.rows.indices)

    def _plan(self) -> list[Chain]:
        rows = self.rows
        most = int(rows.remaining.max()) - 1
        with self.record.phase("control"):
            plan = self.control.plan(self._requests(), rows.mean_length, self.queue.waiting)
        plan = [chain for chain in plan if chain.draft_length > 0 and chain.drafter in self.drafters.in_use]
        return [replace(chain, draft_length=min(chain.draft_length, most)) for chain in plan] if most > 0 else []

    def decode_round(self, plan: Sequence[Chain]) -> None:
        """Runs one round: drafters draft the chains of `plan`, one target forward verifies them, and every row commits
        the accepted tokens and one of the target; without drafts the target decodes."""
        rows, target, phase = self.rows, self.target, self.record.phase
        lengths = draft_lengths(plan, rows.active)
        self._lookups.before_round(lengths, self._requests())  # its time is not part of the round
        started, prepared, waited = time.perf_counter(), target.preparations, self.drafters.waited
        record = self.record.begin_round(plan, rows.indices, rows.mean_length)
        longest = {drafter: max(of_rows) for drafter, of_rows in lengths.items()}
        target.cache.reserve((rows.host_lengths + sum(longest.values())).tolist())
        with phase("noise"):
            noise = self._noise.of_round(1 + max(longest.values(), default=0)) if self._do_sample else None
        with phase("draft"):
            drafted = {index: self._propose(index, length, noise) for index, length in longest.items()}
            drafts = self._arrange(lengths, drafted)
        with phase("verify"):
            logits = self._forward(drafts)  # [B, W, V]
        for index, proposal in drafted.items():
            drafter = self.drafters.in_use.get(index)
            if drafter is not None and drafter.learns:
                with phase("learn"):
                    rows.write(0, proposal.tokens)  # where the drafter reads them
                    self.drafters.ask(index, methodcaller("learn", *drafts.verified(index, logits)))
        with phase("accept"):
            finished, tokens = self._commit(self._judge(drafts, logits, noise))
        with phase("compact"):
            self._retire(finished)
        # The commit has synchronized, so this includes device time. Learning and packing are subtracted.
        seconds = time.perf_counter() - started - (self.drafters.waited - waited)
        record.draft_length, record.seconds, record.tokens = drafts.width, seconds, tokens
        with phase("control"):
            self.control.record(drafts.width, seconds, tokens, target.preparations == prepared)

    def _propose(self, index: int, draft_length: int, noise: RoundNoise | None) -> Proposal:
        """Returns the proposal of drafter `index`; an empty one if the drafter fails."""
        rows, shape = self.rows, (self.rows.active, draft_length, self._vocabulary)
        drafter = self.drafters.in_use.get(index)
        before = None if drafter is None else drafter.max_rows
        proposal = self.drafters.ask(index, lambda drafter: drafter.propose(draft_length, noise).checked(*shape))
        if drafter is not None and drafter.max_rows != before:
            self.control.limit(index, drafter.max_rows)
        if proposal is None:
            # K/V of its drafts may be broken: verifying as many tokens overwrites it.
            return Proposal(rows.window(-1, 1).expand(-1, draft_length), torch.zeros_like(rows.lengths))
        # Rejection and processors need the number of drafts on the device; the bonus token counts too.
        drafts_left = rows.limits - rows.lengths - 1 if self._rejection or self._pipeline.may_refuse else None  # [B]
        return proposal.to(rows.tokens.device).within(self._vocabulary, drafts_left)

    def _arrange(self, lengths: Mapping[int, list[int]], drafted: Mapping[int, Proposal]) -> Drafts:
        return Drafts.of(self.rows, lengths, drafted)

    def _forward(self, drafts: Drafts) -> Tensor:
        """Verifies by a forward over the last committed token and drafts of rows; returns logits `[B, W, V]`."""
        rows, width = self.rows, drafts.width
        columns = rows.columns_after(-1, width + 1)  # [B, γ + 1]
        tokens = rows.tokens[: rows.active].gather(1, columns[:, :1])  # [B, 1]
        if width:
            tokens = torch.cat([tokens, drafts.proposal.tokens], dim=1)  # [B, γ + 1]
        return self.target.forward(tokens, columns, rows.longest + width, is_step=width == 0)

    def _judge(self, drafts: Drafts, logits: Tensor, noise: RoundNoise | None) -> Outcome:
        drawn = self._draw(drafts.proposal, logits, noise)
        return self._until_stop(Outcome.of(drafts, drawn, self.rows.remaining))

    def _draw(self, proposal: Proposal, logits: Tensor, noise: RoundNoise | None) -> Draw:
        if not self._rejection or proposal.logits is None:
            return self._pipeline.draw_verified(logits, noise, proposal, self.want_logprobs)
        rows, lengths = self.rows, proposal.drafted()  # lengths: [B]
        logits, could = self._pipeline.process_verified(logits, proposal)  # [B, γ + 1, V], [B]
        steps = rows.generated[:, None] + torch.arange(logits.shape[1], device=logits.device)  # [B, γ + 1]
        coins, residual = (position_keys(derive(rows.streams, purpose), steps) for purpose in (1, 2))
        # Also test a draft that ends the text (a processor refuses to go on after it): skipping it would make endings
        # rarer than the target makes them. If accepted, it is the round's last token: no bonus token follows.
        tested = torch.minimum(lengths, could + 1)  # [B]
        drawn = verify_rejection(logits, proposal, tested, coins, residual, self.want_logprobs)
        kept = logits > -torch.inf if self._pipeline.keeps_support else None
        return replace(drawn, most=could if drawn.most is None else drawn.most.minimum(could), kept=kept)

    def _until_stop(self, outcome: Outcome) -> Outcome:
        self.rows.write(0, outcome.drawn.tokens)  # where criteria read them
        counts, ends = self._stopping.first_stop(outcome.tokens, outcome.counts, self.rows.remaining)  # [B] each
        drafted = np.where(ends, np.minimum(outcome.drafted, counts), outcome.drafted)  # [B]
        accepted = np.minimum(outcome.accepted, counts)  # [B]
        return replace(outcome, counts=counts, ends=ends, drafted=drafted, accepted=accepted)

    def _commit(self, outcome: Outcome) -> tuple[list[int], int]:
        """Commits the tokens of rows; returns the ended rows and the number of tokens."""
        rows, drawn, counts, requests = self.rows, outcome.drawn, outcome.counts, self._requests()
        if (outcome.sound < counts).any():
            done = sum(past.tokens > 0 for past in self.record.rounds)
            raise broken_logits(self.target, rows, outcome.sound, counts, outcome.width, done)
        if self._on_tokens is not None:
            self._on_tokens(drawn.tokens[0, : counts[0]])
        committed = counts * (np.array(requests) >= 0)  # [B], without tokens after a row's end
        if outcome.width:
            chains = outcome.owners, outcome.drafted, outcome.accepted, committed
            self.record.rounds[-1].chains = DraftedChains.of(rows.host_generated, *chains)
        if drawn.kept is not None:
            self.record.keep_support(requests, drawn.kept, committed)
        rows.commit(rows.host_lengths + counts, drawn.logprobs)
        self.target.cache.commit(counts.tolist())
        if outcome.width:
            by_drafter = outcome.of_each_drafter(outcome.accepted), outcome.of_each_drafter(outcome.drafted)
            self.control.record_rows(requests, *by_drafter)
        self._lookups.after_round(requests, outcome.tokens, committed)
        for drafter in outcome.broken:
            self.drafters.ask(drafter, report_broken)
        self.drafters.ask_all(methodcaller("observe", outcome.tokens, committed))
        return outcome.ends.nonzero()[0].tolist(), int(committed.sum())

    # ---- rows that leave --------------------------------------------------------------------------------------------

    def _retire(self, finished: list[int]) -> None:
        """Stores the completions of `finished` rows, and removes the rows."""
        if finished:
            self._complete(finished)
            self._free(finished)

    def _complete(self, finished: list[int]) -> None:
        rows, ended = self.rows, dict[int, Completion]()
        for row in finished:
            if self.queue.keeps(rows.indices[row]):
                ended[rows.indices[row]] = Completion(*rows.output(row, self.want_logprobs))
                if self.queue.parked is not None:
                    request = self.queue.requests[rows.indices[row]]
                    self.queue.parked.add(request, row, rows, self.target, self.drafters)
        self.record.end([rows.indices[row] for row in finished], ended)

    def _free(self, leaving: list[int]) -> None:
        source, destination = self.rows.drop(leaving)
        columns = self.rows.host_lengths[destination].tolist()
        self.target.cache.move_rows(source, destination, columns, self.rows.active)
        self.drafters.ask_all(methodcaller("move", source, destination, columns))

    def drop(self, leaving: Sequence[int]) -> None:
        """Removes the rows `leaving`: another rank continues or has ended them."""
        self.record.end([self.rows.indices[row] for row in leaving], {})
        self._free(list(leaving))

    def _preempt(self) -> None:
        """Preempts rows if memory runs out: they return to the queue, and their K/V is computed again later."""
        leaving = [] if self._memory is None else self._memory.leaving(int(self.rows.host_lengths.sum()))
        if leaving:
            requests = self.save(leaving, head_share=1.0)
            self.drop(leaving)
            self.queue.put_back(requests)
            self.record.preemptions += len(leaving)

    def save(self, leaving: Sequence[int], head_share: float) -> list[Request]:
        """Returns the requests of the rows `leaving` with all that a row needs to continue them; the rows stay.

        Leaves out K/V of the first `head_share` of the columns, to be computed again. Leaves out all K/V without
        memory for a copy, or if drafters read hidden states or layers have states: only a forward produces these.
        """
        rows, cache = self.rows, self.target.cache
        needed = sum(int(rows.host_lengths[row]) for row in leaving) * cache.column_bytes
        must_read = self.target.has_listeners or not cache.is_divisible
        share = 1.0 if must_read or 2 * needed > free_memory(rows.tokens.device) else head_share
        requests = []
        for row in leaving:
            first = round(share * (int(rows.host_lengths[row]) - 1))
            saved = rows.save(row, cache, first, self.want_logprobs)
            requests.append(replace(self.queue.requests[rows.indices[row]], saved=saved))
        return requests
