"""Best-of-N speculation (SA §4.2): history and ladder choose the method that drafts first, and tail rows race.

Measured rounds have the last word: the toggle's on the method, the race judge's on the race.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from .acceptance import Acceptance, AcceptanceCounts
from .account import Account, decision, promise, too_many_rows
from .assignment import YARDSTICK, MethodView, Racing, RowView, further_method
from .control import Candidate, Chain, Control
from .delivery import RolloutWatch
from .ladder import NO_METHOD, Choice, Ladder, LadderCosts
from .plain_decoding import PlainRounds
from .race_judge import Field, RacedRound, RaceJudge
from .roofline import Roofline
from .selection import OPTIMISTIC, AcceptanceHistory, Selection, counts_last_row, expectation
from .toggle import HOPELESS, WINDOW, Gain, SpeculationToggle


@dataclass(eq=False, repr=False)
class BestOfN(Control):
    """One primary drafter for all rows, other methods for prompts that do better with them, and races in the tail.

    * The primary is a toggle's choice. At the start of a rollout each candidate gets the γ of largest speedup and the
      τ that its acceptance so far lets expect (SA's ① and ②). A method that never drafted is taken at `OPTIMISTIC`.
    * A prompt whose own acceptance favours another method by more than `margin` drafts with that one.
    * When no request waits and verification has room, rows get further chains: :class:`~.assignment.Racing`.

    The second and third begin after the primary was measured alone: for a few rounds, or a whole window on trial.

    Raises:
        ValueError: `candidates` is empty or has a name twice.
    """

    candidates: Sequence[Candidate]  # γ, τ_prev and, without a roofline, costs of each are set here
    ladder: Ladder  # has all of them
    history: AcceptanceHistory  # so far; it is written to, and outlives the control
    margin: float = 0.05  # ε of the toggle, and by how much a prompt's own method must be faster; at least 0
    roofline: Roofline | None = None  # tells which verified tokens are free; None: as many as at first in the rollout
    tolerance: float = 0.05  # share by which a verification may be slower than the primary's own, at least 0
    budget: int | None = None  # most tokens of a verification, all rows together; None: the free ones
    race: bool = True  # whether rows race at all
    races = True  # no option: rows of different methods share rounds even where none races

    def __post_init__(self) -> None:
        names = [candidate.name for candidate in self.candidates]
        self._index = {name: index for index, name in enumerate(names)}
        if not names or len(self._index) < len(names):
            raise ValueError(f"candidates={names} must be one or more drafters of different names.")
        self._by_ladder = [candidate.roofline is None for candidate in self.candidates]
        self._toggle = SpeculationToggle(self.candidates, self.margin)
        self.tallies = self._toggle.tallies  # of the rounds in which a candidate drafted alone for all rows

    @property
    def most_drafted(self) -> int:
        ladder = self.ladder
        lengths = [max(max(ladder.draft_lengths(name, batch)) for batch in ladder.batches) for name in self._index]
        return sum(lengths) if self.race else max(lengths)

    # ---- a rollout --------------------------------------------------------------------------------------------------

    def begin(self, capacity: int, prompts: Sequence[str]) -> None:
        self._prompts = list(prompts)
        batch = max(min(capacity, len(prompts)), 1)
        self._on_trial: set[int] = set()
        self._until_last_row = counts_last_row(self.history, list(self._index), prompts, batch, self.race)
        for index, candidate in enumerate(self.candidates):
            expected = expectation(self.ladder, self.history, candidate.name, prompts, self._until_last_row)
            if expected is None:
                self._on_trial.add(index)
                expected = OPTIMISTIC.block_efficiency
            candidate.draft_length = self.ladder.best_draft_length(candidate.name, expected, batch)[0]
            candidate.block_efficiency = expected(candidate.draft_length)
            if self._by_ladder[index]:
                efficiency = candidate.block_efficiency
                candidate.roofline = LadderCosts(self.ladder, candidate.name, efficiency, self.roofline)
        self._toggle.begin(capacity, prompts)
        self.tallies = self._toggle.tallies
        self._own = self._choose_per_prompt(batch)
        self._racing, self._judge = Racing(self.ladder), RaceJudge(self.race)
        self._dropped: set[int] = set()
        self._raced: set[int] = set()  # requests that the race knows
        self._unrecorded: dict[tuple[int, int], AcceptanceCounts] = {}  # by candidate and request
        self._outcome: tuple[Sequence[int], Mapping[int, Sequence[int]], Mapping[int, Sequence[int]]] | None = None
        self._primary: int | None = None
        self._laid_out: tuple[object, ...] | None = None
        self._weighed = 0  # rows
        self._verified_at_first: int | None = None
        self._watch = RolloutWatch()
        self._opened: set[tuple[int, int]] = set()

    def _choose_per_prompt(self, batch: int) -> list[Choice | None]:
        """For each request the method of its prompt, if that differs from the batch's."""
        methods = [candidate.name for candidate in self.candidates if candidate.max_rows >= batch]
        if len(methods) < 2:
            return [None] * len(self._prompts)
        selection = Selection(self.ladder, self.history, self._prompts, batch, methods, self.race)
        common, own = selection.common.method, selection.per_prompt(self.margin)
        return [choice if choice.method != common else None for choice in own]

    def finish(self) -> None:
        self._settle(set())
        self._write_history()
        self.history.end_rollout()
        # The speedup after each method's first use at a batch; after `end_rollout`, which fades older ones.
        for which, requests, length, speedup in self._watch.deliveries(self._toggle.autoregressive_seconds):
            candidate, batch = self.candidates[which], len(requests)
            keys = [self._prompts[request] for request in requests]
            tau = expectation(self.ladder, self.history, candidate.name, keys, self._until_last_row)
            if tau is None or which in self._dropped:
                continue
            expected = self._toggle.speedup_at(tau(candidate.draft_length), which, batch, length)
            profiled = self.ladder.profiled_batch(batch)
            self.history.record_delivery(candidate.name, profiled, self._until_last_row, speedup, expected)

    def drop(self, index: int) -> None:
        self._dropped.add(index)
        self._toggle.drop(index)
        self._racing.drop(self.candidates[index].name)
        self._laid_out = None
        self._weighed = 0

    def further_method(
        self, requests: Sequence[int], helpers: Mapping[tuple[int, str], int]
    ) -> tuple[str, list[int]] | None:
        """By SA Algorithm 3, for the requests of this rank."""
        names = [candidate.name for index, candidate in enumerate(self.candidates) if self._can_draft(index)]
        if not self.race or not names:
            return None
        speedups = {
            name: self.ladder.best_draft_length(name, self._expected(name).block_efficiency, 1)[1] for name in names
        }
        own = self.candidates[self._plan[0].which].name if self._plan else NO_METHOD
        judge = own if own in names else names[0]
        rates = {request: self._expected(judge, request).block_efficiency(YARDSTICK) for request in requests}
        return further_method(rates, sorted(names, key=speedups.__getitem__, reverse=True), own, helpers)

    def account(self) -> Account:
        return self._toggle.account()

    def forecast(self, batch: int, length: float) -> Account:
        """By the ladder, whose times do not depend on lengths."""
        promised = {
            each.name: self.ladder.best_draft_length(each.name, self._expected(each.name).block_efficiency, batch)[1]
            for each in self.candidates
            if batch <= each.max_rows
        }
        if not promised:
            return Account(None, too_many_rows(batch, max(candidate.max_rows for candidate in self.candidates)))
        best, speedup = max(promised.items(), key=lambda pair: pair[1])
        said = promise(f'speculation with "{best}"', speedup, batch, length)
        return Account(speedup, f"{said}: {decision(speedup, self.margin)}")

    def plain_seconds(self, rounds: Sequence[PlainRounds]) -> float | None:
        return self._toggle.plain_seconds(rounds)

    # ---- a round --------------------------------------------------------------------------------------------------

    def plan(self, requests: Sequence[int], length: float, waiting: int) -> Sequence[Chain]:
        self._settle(set(requests))
        batch = len(requests)
        self._batch, self._length = batch, length
        self._weigh(requests, waiting)
        self._requests = requests
        which, draft_length = self._toggle.decide(batch, length, waiting)
        primary = Chain(which, draft_length)
        self._plan: tuple[Chain, ...] = (primary,) if draft_length else ()
        self._is_composed = False
        if not draft_length:
            return self._plan
        opening = which, self.ladder.profiled_batch(batch)
        if which in self._on_trial and which not in {opener for opener, _ in self._opened}:
            # A trial may slow the rest of the rollout, which says nothing about the methods before it.
            self._opened.clear()
            self._watch.forget()
        if not waiting and opening not in self._opened:
            self._opened.add(opening)
            self._watch.open(which, requests, length)
        if self._verified_at_first is None:
            self._verified_at_first = batch * (1 + draft_length)
        if which != self._primary:
            self._judge.forget()
            self._primary = which
        if self._may_compose(which, waiting) and (judged := self._judge.field(batch)):
            field = judged if self.race and not waiting else Field.NOBODY
            key = (tuple(requests), which, draft_length, judged, field)
            if key != self._laid_out or (field and self._racing.changed):
                self._composed = self._compose(requests, primary, length, judged, field)
                self._laid_out = key
            self._is_composed = self._composed != self._plan
            self._plan = self._composed
        return self._plan

    def _weigh(self, requests: Sequence[int], waiting: int) -> None:
        """Tells the toggle what drafters do for the rows in flight, if none waits: the last one ends the rollout."""
        if waiting:
            self._toggle.weigh()
            return
        if not self._toggle.judgement_due and self._weighed == len(requests):
            return
        self._weighed = len(requests)
        self._write_history()
        keys = [self._prompts[request] for request in requests]
        gains = [
            self._gain(candidate, keys) if tally.rounds >= WINDOW else None
            for candidate, tally in zip(self.candidates, self._toggle.tallies, strict=True)
        ]
        batch = self.ladder.profiled_batch(len(requests))
        delivered = [self.history.delivered(each.name, batch, self._until_last_row) for each in self.candidates]
        self._toggle.weigh(gains, self._others_can_help(requests), delivered)

    def _gain(self, candidate: Candidate, keys: Sequence[str]) -> Gain:
        length = candidate.draft_length
        rows = [rates.block_efficiency(length) for rates in self.history.rates_of_rows(candidate.name, keys)]
        return Gain(sum(rows) / len(rows), self.ladder.until_last_row(candidate.name, rows, length))

    def _others_can_help(self, requests: Sequence[int]) -> bool:
        """Whether another drafter could join the primary: in a race, or as a prompt's own."""
        verdict, primary = self._judge.verdict, self._primary
        others = [index for index in range(len(self.candidates)) if index != primary and self._can_draft(index)]
        allowed = {index for index in others if verdict >= 1 + self.candidates[index].is_network}
        own = {self._index.get(choice.method) for request in requests if (choice := self._own[request])}
        return bool(allowed and (self.race or own & allowed))

    def _may_compose(self, which: int, waiting: int) -> bool:
        """Whether another method could draft, and the primary has been measured alone."""
        if len(self.candidates) == 1 or ((waiting or not self.race) and not any(self._own)):
            return False
        return self._toggle.tallies[which].rounds >= (WINDOW if which in self._on_trial else min(HOPELESS))

    def _compose(
        self, requests: Sequence[int], primary: Chain, length: float, judged: Field, field: Field
    ) -> tuple[Chain, ...]:
        """The plan: chains of the primary, of prompts' own methods and of racers."""
        self._write_history()
        rows = [self._view(request, primary, judged) for request in requests]
        chains = {row.request: [(row.method, row.draft_length)] if row.draft_length else [] for row in rows}
        if field:
            batch, widest = len(rows), max(row.draft_length for row in rows)
            racers = self._racers(primary.which, batch, field)
            chains = self._racing.assign(rows, racers, self.free_tokens(batch, length, widest))
            self._raced.update(requests)
        groups: dict[tuple[int, int], list[int]] = {}
        for row, request in enumerate(requests):
            for method, draft_length in chains[request]:
                groups.setdefault((self._index[method], draft_length), []).append(row)
        return tuple(
            Chain(which, draft_length, None if len(own) == len(requests) else tuple(own))
            for (which, draft_length), own in sorted(groups.items(), key=lambda g: (g[0][0] != primary.which, g[0]))
        )

    def _view(self, request: int, primary: Chain, judged: Field) -> RowView:
        """The row with the method that drafts for it."""
        method, draft_length = self.candidates[primary.which].name, primary.draft_length
        if (own := self._own[request]) is not None:
            if own.method == NO_METHOD:
                return RowView(request, NO_METHOD, 0, Acceptance.geometric(0.0))
            index = self._index[own.method]
            if self._can_draft(index) and (judged is Field.EVERYBODY or not self.candidates[index].is_network):
                method, draft_length = own.method, own.draft_length
        return RowView(request, method, draft_length, self._expected(method, request))

    def _racers(self, primary: int, batch: int, field: Field) -> list[MethodView]:
        """Methods that may race, the primary among them, for rows that another method leads by now."""
        return [
            MethodView(candidate.name, candidate.draft_length, self._expected(candidate.name), candidate.max_rows)
            for index, candidate in enumerate(self.candidates)
            if index == primary or (self._can_draft(index) and self._may_race(index, primary, batch, field))
        ]

    def _can_draft(self, index: int) -> bool:
        return index not in self._dropped and self._batch <= self.candidates[index].max_rows

    def _may_race(self, index: int, primary: int, batch: int, field: Field) -> bool:
        """A network's drafts are not free: it races where its accepted tokens would pay for its forwards if they all
        came on top of the primary's."""
        if not self.candidates[index].is_network:
            return True
        plain = self.ladder.plain_seconds(batch)
        (gain, drafting), (alone, seconds) = (self._by_itself(which, batch) for which in (index, primary))
        return field is Field.EVERYBODY and (alone + gain - 1) * seconds >= alone * (seconds + drafting - plain)

    def _by_itself(self, index: int, batch: int) -> tuple[float, float]:
        """τ and a round's seconds of a candidate that drafts alone for all rows, by the ladder."""
        candidate = self.candidates[index]
        efficiency = self._expected(candidate.name).block_efficiency(candidate.draft_length)
        costs = LadderCosts(self.ladder, candidate.name, efficiency)
        return efficiency, costs.cycle_seconds(batch, 0, candidate.draft_length)

    def _expected(self, method: str, request: int | None = None) -> Acceptance:
        """Acceptance of a method on a request's prompt, or on average."""
        return self.history.rates(method, None if request is None else self._prompts[request])

    def free_tokens(self, batch: int, length: float, draft_length: int) -> int:
        """Most tokens, all rows together, of a verification that takes no longer than the primary's own, of
        γ = `draft_length`."""
        if self.budget is not None:
            return self.budget
        if self.roofline is None:
            return self._verified_at_first or 0
        most = (1 + self.tolerance) * self.roofline.verify_seconds(batch, length, draft_length)
        width, widest = draft_length, self.most_drafted
        while width < widest and self.roofline.verify_seconds(batch, length, width + 1) <= most:
            width += 1
        return batch * (1 + width)

    # ---- what became of it ----------------------------------------------------------------------------------------

    def record_rows(
        self, requests: Sequence[int], accepted: Mapping[int, Sequence[int]], drafted: Mapping[int, Sequence[int]]
    ) -> None:
        self._outcome = tuple(requests), accepted, drafted

    def record(self, draft_length: int, seconds: float, tokens: int, is_typical: bool = True) -> None:
        costs = self.candidates[0].roofline  # autoregressive rounds cost the same in all of them
        assert costs is not None
        plain_seconds = costs.target_seconds(self._batch, self._length)
        accepted = self._outcome[1] if self._outcome else {}
        self._watch.record(self._requests, accepted, seconds if is_typical else None, plain_seconds)
        if not self._is_composed:
            self._toggle.record(draft_length, seconds, tokens, is_typical)
        widths = [0] * self._batch  # Σγ as planned
        for chain in self._plan:
            for row in self._rows_of(chain):
                widths[row] += chain.draft_length
        if not is_typical or not self._plan or draft_length < max(widths):
            return  # a rollout's last rounds are too short to judge by
        assert self._primary is not None
        # By the predicted plain time: one measured in between would shift the rounds that are compared.
        cost = seconds / plain_seconds
        if self._is_composed:
            others = {chain.which for chain in self._plan} - {self._primary}
            networks = any(self.candidates[which].is_network for which in others)
            plain = self._toggle.autoregressive_seconds(self._batch, self._length)
            alone, gain = self._alone(self._primary), tokens / self._batch
            self._judge.record_raced(RacedRound(cost, tokens, alone, networks, gain, seconds / plain))
        else:
            self._judge.record_unraced(self._batch, cost)

    def _rows_of(self, chain: Chain) -> Sequence[int]:
        return range(self._batch) if chain.rows is None else chain.rows

    def _alone(self, primary: int) -> float:
        """Tokens that the primary would have committed alone: those of its chains, or the expected ones where a row
        had none."""
        assert self._outcome is not None
        requests, accepted, _ = self._outcome
        candidate = self.candidates[primary]
        expected = [self._expected(candidate.name, each).block_efficiency(candidate.draft_length) for each in requests]
        own = accepted.get(primary, [-1] * len(requests))
        return sum(count + 1 if count >= 0 else tau for count, tau in zip(own, expected, strict=True))

    def _settle(self, alive: Set[int]) -> None:
        """Passes the last round on to history and race, now that the requests still `alive` are known."""
        if self._outcome is not None:
            (requests, accepted, drafted), self._outcome = self._outcome, None
            for chain in self._plan:
                if chain.which not in accepted:  # its drafter failed before it was asked
                    continue
                own = accepted[chain.which], drafted[chain.which]
                for row in self._rows_of(chain):
                    if own[0][row] >= 0:
                        self._remember(chain, requests[row], own[0][row], own[1][row], requests[row] in alive)
            # In a round without a race chains have the toggle's γ, which may be longer than laid out.
            alone = {} if self._is_composed else {self.candidates[c.which].name: c.draft_length for c in self._plan}
            for row, request in enumerate(requests) if self._raced else ():
                if request in alive and request in self._raced:
                    names = {self.candidates[i].name: own[row] for i, own in accepted.items() if own[row] >= 0}
                    self._racing.record(request, names, alone)
        for request in sorted(self._raced - alive):
            self._racing.remove(request)
            self._raced.remove(request)

    def _remember(self, chain: Chain, request: int, accepted: int, drafted: int, alive: bool) -> None:
        attempted = min(accepted + 1, drafted)
        if alive and accepted == drafted and not self.candidates[chain.which].is_network:
            # A lookup that found no more tokens is as bad as a wrong token; a row's end is not.
            attempted = min(accepted + 1, chain.draft_length)
        counts = self._unrecorded.setdefault((chain.which, request), AcceptanceCounts())
        counts.add(AcceptanceCounts.of_round(accepted, attempted))

    def _write_history(self) -> None:
        """Writes what was counted since the last time: writing in each round would take longer than a round."""
        for (which, request), counts in self._unrecorded.items():
            self.history.record(self.candidates[which].name, self._prompts[request], counts)
        self._unrecorded.clear()
