"""The scheduler of one engine, as vLLM V1's: running requests first, then waiting ones, within a token budget.

Semantics by vLLM 0.33's v1/core/sched/scheduler.py: chunked prefill, first come first served or priority, preemption by
recompute, prefix cache, a head that does not fit stops admission.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable
from math import nan

from tailscope.sim.blocks import Blocks
from tailscope.sim.outcome import (
    BY_BUDGET,
    BY_KV,
    BY_PREEMPTION,
    BY_SLOTS,
    DECODE,
    NOT_BLOCKED,
    PREFILL,
    RECOMPUTE,
)
from tailscope.sim.scenario import Engine, Fault

#: Blocks of a request that is done belong to no one who may come back; their owners count down from here.
NOBODYS = -(1 << 40)


def _chance(index: int) -> float:
    """A number in [0, 1) that is a request's own (Knuth's multiplicative hash)."""
    return (index + 1) * 2_654_435_761 % (1 << 32) / (1 << 32)


class Request:
    """A request in an engine. `total`: tokens of prompt and answer so far; `computed` of them are in the KV cache once
    all batches made so far have run; `issued`: answer tokens that those batches give."""

    __slots__ = (
        "blocks", "cached", "computed", "fetch_s", "fetched_s", "first_token_s", "gave", "gone", "index", "input_s", "issued", "last_token_s", "leaves_at",
        "order", "output", "preempted_untold", "preemptions", "prefix", "prefix_blocks", "prompt", "queued_s", "remote",
        "run_before", "run_first", "run_last", "scheduled_s", "sharing", "total", "transfer_s", "zero_first", "zero_last",
    )  # fmt: skip

    def __init__(
        self, index: int, prompt: int, output: int, prefix: int = -1, prefix_blocks: int = 0
    ) -> None:
        self.index, self.prompt, self.output = index, prompt, output
        self.prefix, self.prefix_blocks = prefix, prefix_blocks
        self.total, self.computed, self.issued = prompt, 0, 0
        #: Own blocks, without those shared with others of its beginning; `sharing`: how many are shared.
        self.blocks = self.sharing = 0
        self.cached = -1
        self.preemptions = self.preempted_untold = 0
        self.order: tuple[int, float, int] = (0, 0.0, index)
        self.input_s = self.queued_s = self.scheduled_s = self.first_token_s = self.last_token_s = nan
        #: Answer tokens after which its client leaves; -1: at its first scheduling; 0: never.
        self.leaves_at = 0
        self.gone = False
        #: Seconds its KV cache takes to come from a prefill instance; None: it computes its own.
        self.transfer_s: float | None = None
        #: When it began to come, and when the scheduler knew that it was there: with a step's result.
        self.fetch_s = self.fetched_s = nan
        self.remote = False
        self.run_first = self.run_last = self.zero_first = self.zero_last = -2
        self.run_before = 0
        #: Number of the last batch in which a prefill gave a token.
        self.gave = -2


class Batch:
    """What one step computes."""

    __slots__ = (
        "attention",
        "blocked",
        "context",
        "decodes",
        "finishing",
        "firsts",
        "leaving",
        "made_s",
        "number",
        "preempted",
        "preempted_told",
        "prefill_requests",
        "prefill_tokens",
        "recompute_requests",
        "recompute_tokens",
    )  # fmt: skip

    def __init__(self, number: int, made_s: float) -> None:
        self.number, self.made_s = number, made_s
        self.attention = 0.0
        self.context = self.decodes = self.prefill_requests = self.prefill_tokens = 0
        self.recompute_requests = self.recompute_tokens = self.preempted = self.preempted_told = 0
        self.blocked = NOT_BLOCKED
        self.firsts: list[Request] = []
        self.finishing: list[Request] = []
        self.leaving: list[Request] = []

    @property
    def empty(self) -> bool:
        return not (self.decodes or self.prefill_requests or self.recompute_requests)


class Scheduler:
    """Running and waiting requests of one engine, and the runs they were scheduled in (columns of `outcome.Runs`)."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.kv = Blocks(engine.kv_blocks, engine.block_size, engine.enable_prefix_caching)
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        #: Waiting for KV cache from a prefill instance.
        self.fetching: list[Request] = []
        self.arrived_remote: list[Request] = []
        self.started_fetches: list[Request] = []
        self.made = 0
        self.runs: list[tuple[int, int, int, int, int, int, bool]] = []
        self._by_priority = engine.policy == "priority"
        self._keep_free = int(engine.watermark * self.kv.total)
        self._left_outs: list[Fault] = []
        self._cache_losses: list[Fault] = []
        #: Of the batch being made: the share of running requests it leaves out, and whether the cache is lost to it.
        self._leaves_out = 0.0
        self._cache_lost = False

    def set_faults(self, faults: Iterable[Fault], replica: int) -> None:
        """What of the faults is the scheduler's."""
        mine = [fault for fault in faults if fault.replica == replica]
        self._left_outs = [fault for fault in mine if fault.kind == "left-out"]
        self._cache_losses = [fault for fault in mine if fault.kind == "cache-loss"]

    def add(self, request: Request, now: float) -> None:
        request.queued_s = now
        self._enqueue(request)

    def _enqueue(self, request: Request, front: bool = False) -> None:
        if self._by_priority:
            # A deque has no ordered insertion; queues of priority schedulers are short or bad news.
            ordered = list(self.waiting)
            insort(ordered, request, key=lambda r: r.order)
            self.waiting = deque(ordered)
        elif front:
            self.waiting.appendleft(request)
        else:
            self.waiting.append(request)

    def _most_for_one(self) -> int:
        """Tokens that one request may get in a step; 0: all there are, as for a request that is alone."""
        alone = len(self.running) + len(self.waiting) <= 1
        return 0 if alone else self.engine.long_prefill_token_threshold

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting or self.fetching or self.arrived_remote)

    # -- making a batch ------------------------------------------------------------------------

    def schedule(self, now: float, last: Batch | None) -> Batch:
        """Make the next batch. `last`: the batch made before it, if its result is still to come."""
        batch = Batch(self.made, now)
        for request in self.arrived_remote:
            if request.fetched_s != request.fetched_s:
                request.fetched_s = now
        if self._left_outs or self._cache_losses:
            self._leaves_out = self._share_left_out(now)
            self._cache_lost = any(f.is_on(now) for f in self._cache_losses)
        budget = self._schedule_running(batch, self.engine.max_num_batched_tokens, last)
        if batch.preempted:
            if self.waiting:
                batch.blocked = BY_PREEMPTION
        else:
            self._admit(batch, budget, now)
        if not batch.empty:
            self.made += 1
        return batch

    def _share_left_out(self, now: float) -> float:
        """The share of the running requests that a batch leaves out; 0 where nobody else would go on."""
        share = max((fault.often for fault in self._left_outs if fault.is_on(now)), default=0.0)
        others = any(_chance(r.index) >= share and r.issued < r.output for r in self.running)
        return share if others else 0.0

    def _schedule_running(self, batch: Batch, budget: int, last: Batch | None) -> int:
        running, kv, number = self.running, self.kv, batch.number
        size, threshold = kv.size, self._most_for_one()
        context = decodes = i = 0
        while i < len(running):
            request = running[i]
            if request.issued >= request.output:
                i += 1
                continue
            if self._leaves_out and _chance(request.index) < self._leaves_out:
                self._give_nothing(batch, request)
                i += 1
                continue
            if not budget:
                self._left_out(batch, i)
                break
            computed = request.computed
            tokens = request.total - computed
            if tokens > 1:
                if 0 < threshold < tokens:
                    tokens = threshold
                if tokens > budget:
                    tokens = budget
            need = (computed + tokens + size - 1) // size - request.blocks - request.sharing
            if need > 0:
                if need > kv.free:
                    i, budget = self._make_room(batch, request, need, i, budget, last)
                    if i < 0:
                        break
                kv.take(need)
                request.blocks += need
            budget -= tokens
            i += 1
            if tokens == 1 and request.issued and computed == request.total - 1:
                # A decode: by far the most frequent case.
                context += computed
                decodes += 1
                if request.run_last == number - 1:
                    request.run_last = number
                else:
                    self._begin_run(request, number, computed)
                request.computed = computed + 1
                self._give(batch, request)
            else:
                self._prefill(batch, request, tokens)
        batch.decodes += decodes
        batch.context += context
        return budget

    def _begin_run(self, request: Request, number: int, computed: int) -> None:
        self.end_runs(request)
        request.run_first = request.run_last = number
        request.run_before = computed

    def end_runs(self, request: Request) -> None:
        if request.run_first >= 0:
            self.runs.append(
                (request.index, request.run_first, request.run_last, DECODE, 1, request.run_before, True)
            )
            request.run_first = request.run_last = -2
        if request.zero_first >= 0:
            phase = DECODE if request.issued else PREFILL
            self.runs.append(
                (request.index, request.zero_first, request.zero_last, phase, 0, request.computed, False)
            )
            request.zero_first = request.zero_last = -2

    def _left_out(self, batch: Batch, start: int) -> None:
        """The budget is used up: the rest of the running requests get nothing."""
        for request in self.running[start:]:
            if request.issued < request.output:
                self._give_nothing(batch, request)

    def _give_nothing(self, batch: Batch, request: Request) -> None:
        if request.zero_last != batch.number - 1:
            self.end_runs(request)
            request.zero_first = batch.number
        request.zero_last = batch.number

    def _prefill(self, batch: Batch, request: Request, tokens: int) -> None:
        """A chunk of a prompt, or of what is computed again after a preemption."""
        computed = request.computed
        self.end_runs(request)
        gives = computed + tokens == request.total
        phase = RECOMPUTE if request.issued else PREFILL
        self.runs.append((request.index, batch.number, batch.number, phase, tokens, computed, gives))
        batch.attention += tokens * (computed + tokens / 2)
        if phase == RECOMPUTE:
            batch.recompute_requests += 1
            batch.recompute_tokens += tokens
        else:
            batch.prefill_requests += 1
            batch.prefill_tokens += tokens
        request.computed = computed + tokens
        shareable, had = request.prefix_blocks, request.sharing
        if (
            shareable > had
            and request.computed >= shareable * self.kv.size
            and self.kv.lend(request.prefix, had, shareable)
        ):
            request.sharing = shareable
            request.blocks -= shareable - had
        if gives:
            request.gave = batch.number
            self._give(batch, request)
            if request.issued == 1:
                batch.firsts.append(request)

    def _give(self, batch: Batch, request: Request) -> None:
        """A token comes with the batch, and with it what was not told of the request."""
        request.issued += 1
        request.total += 1
        if request.preempted_untold:
            batch.preempted_told += request.preempted_untold
            request.preempted_untold = 0
        if request.issued == request.output:
            batch.finishing.append(request)
        if request.issued == request.leaves_at:
            batch.leaving.append(request)

    # -- preemption ----------------------------------------------------------------------------

    def _make_room(
        self, batch: Batch, request: Request, need: int, i: int, budget: int, last: Batch | None
    ) -> tuple[int, int]:
        """Preempt until `need` blocks are free: (place of the request among the running, budget); place -1 where it
        had to go itself."""
        running = self.running
        while need > self.kv.free:
            if self._by_priority:
                victim = max(running, key=lambda r: r.order)
                place = running.index(victim)
                del running[place]
                if place < i:
                    i -= 1
                    budget += self._take_back(batch, victim)
            else:
                victim = running.pop()
            self._preempt(batch, victim, last)
            if victim is request:
                return -1, budget
        return i, budget

    def _take_back(self, batch: Batch, victim: Request) -> int:
        """Undo what the batch being made was to compute for a victim; its tokens go back to the budget."""
        if victim.run_last == batch.number:
            batch_tokens = 1
            batch.decodes -= 1
            batch.context -= victim.computed - 1
            victim.run_last -= 1
            if victim.run_last < victim.run_first:
                victim.run_first = victim.run_last = -2
            gave = True
        else:
            index = next(
                (k for k in range(len(self.runs) - 1, -1, -1) if self.runs[k][0] == victim.index), -1
            )
            if index < 0 or self.runs[index][1] != batch.number:
                return 0
            _, _, _, phase, batch_tokens, before, gave = self.runs.pop(index)
            batch.attention -= batch_tokens * (before + batch_tokens / 2)
            if phase == RECOMPUTE:
                batch.recompute_requests -= 1
                batch.recompute_tokens -= batch_tokens
            else:
                batch.prefill_requests -= 1
                batch.prefill_tokens -= batch_tokens
        if gave:
            victim.issued -= 1
            victim.total -= 1
            for those in (batch.firsts, batch.finishing, batch.leaving):
                if victim in those:
                    those.remove(victim)
        return batch_tokens

    def _preempt(self, batch: Batch, victim: Request, last: Batch | None) -> None:
        in_flight = last is not None and last.number in (victim.run_last, victim.gave)
        self.end_runs(victim)
        self._free(victim, keep=True)
        victim.computed = 0
        # What came from a prefill instance came once; now it computes its own.
        victim.remote, victim.transfer_s = False, None
        victim.preemptions += 1
        batch.preempted += 1
        if in_flight and last is not None:
            # The event rides on the output that is still to come.
            last.preempted_told += 1
        else:
            victim.preempted_untold += 1
        self._enqueue(victim, front=True)

    def _free(self, request: Request, keep: bool) -> None:
        owner = request.index if keep else NOBODYS - request.index
        full = request.computed // self.kv.size - request.sharing
        self.kv.give_back(owner, request.blocks, min(max(full, 0), request.blocks))
        if request.sharing:
            self.kv.unshare(request.prefix)
        request.blocks = request.sharing = 0

    # -- admission -----------------------------------------------------------------------------

    def _admit(self, batch: Batch, budget: int, now: float) -> None:
        self._promote()
        while self.waiting:
            if len(self.running) >= self.engine.max_num_seqs:
                batch.blocked = BY_SLOTS
                return
            if not budget:
                batch.blocked = BY_BUDGET
                return
            request = self.waiting[0]
            if request.transfer_s is not None and not request.remote:
                if not self._fetch(request):
                    batch.blocked = BY_KV
                    return
                self.waiting.popleft()
                request.fetch_s = now
                continue
            tokens = self._place(request, budget)
            if not tokens:
                batch.blocked = BY_KV
                return
            self.waiting.popleft()
            self.running.append(request)
            if request.scheduled_s != request.scheduled_s:
                request.scheduled_s = now
                if request.leaves_at < 0:
                    batch.leaving.append(request)
            budget -= tokens
            self._prefill(batch, request, tokens)

    def _place(self, request: Request, budget: int) -> int:
        """Give a waiting request blocks for its first chunk: the chunk's tokens, 0 where it does not fit."""
        kv, size = self.kv, self.kv.size
        if request.remote:
            tokens = request.total - request.computed
            need = (request.total + size - 1) // size - request.blocks
            if need > kv.free:
                return 0
            kv.take(max(need, 0))
            request.blocks += max(need, 0)
            return tokens
        most = (request.total - 1) // size
        known = request.prefix_blocks and not self._cache_lost
        shared = min(kv.shared(request.prefix), request.prefix_blocks, most) if known else 0
        own = min(kv.found(request.index), most - shared) if request.preemptions else 0
        hit = (shared + own) * size
        tokens = request.total - hit
        threshold = self._most_for_one()
        if 0 < threshold < tokens:
            tokens = threshold
        tokens = min(tokens, budget)
        until = request.total if self.engine.reserve_full_isl else hit + tokens
        # What is found among the free blocks is free no longer.
        touched = own + (shared if shared and kv.shared_is_free(request.prefix) else 0)
        if (until + size - 1) // size - shared - own > kv.free - touched - self._keep_free:
            return 0
        if shared:
            kv.share(request.prefix, shared)
            request.sharing = shared
        if own:
            kv.reuse(request.index, own)
        need = (hit + tokens + size - 1) // size - request.sharing - own
        kv.take(max(need, 0))
        request.blocks = own + max(need, 0)
        request.computed = hit
        if request.cached < 0:
            request.cached = hit
        return tokens

    # -- KV cache from a prefill instance --------------------------------------------------------

    def _fetch(self, request: Request) -> bool:
        need = (request.prompt + self.kv.size - 1) // self.kv.size
        if need > self.kv.free - self._keep_free:
            return False
        self.kv.take(need)
        request.blocks = need
        self.fetching.append(request)
        self.started_fetches.append(request)
        return True

    def _promote(self) -> None:
        """Requests whose cache has come wait again where they stood: behind those preempted, before those to fetch."""
        for request in self.arrived_remote:
            request.remote = True
            request.computed = request.prompt - 1
            request.cached = request.prompt - 1
            if self._by_priority:
                self._enqueue(request)
                continue
            place = 0
            for other in self.waiting:
                if not (other.preemptions or (other.remote and other.order < request.order)):
                    break
                place += 1
            self.waiting.insert(place, request)
        self.arrived_remote.clear()

    # -- results -------------------------------------------------------------------------------

    def finish(self, request: Request, keep_blocks: bool = False) -> None:
        """A request that has all its tokens, or whose client has left, goes; with `keep_blocks` until `release`."""
        request.gone = True
        if request in self.running:
            self.running.remove(request)
        elif request in self.fetching:
            self.fetching.remove(request)
        elif request in self.arrived_remote:
            self.arrived_remote.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.end_runs(request)
        if not keep_blocks:
            self._free(request, keep=False)

    def release(self, request: Request) -> None:
        """The blocks of a request that is done, once they have been sent."""
        self._free(request, keep=False)
