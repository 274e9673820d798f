"""The paper's heuristic (section 3.1), for any placement and any memory limit: a list scheduler driven by events.

Whenever a rank is free it takes the most urgent F or B whose input has arrived and whose memory is there; W goes into
the gaps, or comes first when memory is full. How far forwards run ahead, what counts as urgent, and which gaps are
worth a W are the numbers of a `Rule`: the paper's binary choices, and some more. Every rule gives a schedule that can
run; which is best is for `search` to find out.

Memory never deadlocks: a forward is only admitted if the oldest microbatches that are under way keep the room they
need to reach their own backwards, however many chunks a rank has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, TypeAlias

from zerobubble.planner.problem import end_times, spans

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerobubble.planner.problem import Orders, Problem

_NEVER = math.inf
_AGAIN = 1e9
"""Added to the urgency of a B that would follow another, where the two kinds alternate."""


@dataclass(frozen=True)
class Rule:
    """The choices of the heuristic. Urgency is counted in microbatches: F of microbatch i has i + lead, least first.

    Attributes:
        forward_pace: how long a microbatch's way forward takes, over the sum of its forward times and hops. The slower
            the planned way, the more microbatches are under way and the more memory is held.
        backward_pace: the same for the way back.
        turn: added to the urgency of every B; very negative means that B always goes before F.
        alternate: prefer an F after each B of a rank; among either kind, the most urgent.
        extra: microbatches that a stage may have under way beyond what the paces say; infinite: as memory allows.
        fill: a gap shorter than this share of a W is left open, a longer one takes a W although it then overruns.
        level: also fill a gap that would otherwise raise the idle time of its rank above what is bearable.
        allowance: idle time of a rank, as a share of the work, up to which gaps are left open; negative: what the
            idlest rank has so far (the paper's rule).
        patience: rather than start an F, wait for a B that arrives within this share of the F.
        first_patience: the same while a rank waits for its first B of a stage.
        nudges: per stage, added to the lead of its F; empty for none.
        cap_nudges: per stage, added to how many microbatches it may have under way; empty for none.
        base: the name of a schedule whose F and B serve as a guide: an op is as urgent as it is early there. Empty for
            urgency by pace.
        window: how far (in microbatches' work) a rank may look past its most urgent op while that has not arrived.
        share: share of the memory limit that may be used.
        flat: decide as if all stages took the median times (what comes out is judged on the true ones).
    """

    forward_pace: float = 1.0
    backward_pace: float = 1.0
    turn: float = -1e6
    alternate: bool = False
    extra: float = math.inf
    fill: float = 1.0
    level: bool = True
    allowance: float = -1.0
    patience: float = 0.0
    first_patience: float = 0.0
    nudges: tuple[float, ...] = ()
    cap_nudges: tuple[float, ...] = ()
    base: str = ""
    window: float = math.inf
    share: float = 1.0
    flat: bool = False


def leads(problem: Problem, rule: Rule) -> tuple[list[float], list[float], list[float]]:
    """Per stage: lead of its F, lead of its B, and how many microbatches it may have under way (F done, B not)."""
    costs, stages = problem.costs, problem.placement.num_stages
    period = max(problem.work) / problem.num_microbatches or 1.0
    ahead, behind = [0.0] * stages, [0.0] * stages
    for s in range(1, stages):
        ahead[s] = ahead[s - 1] + (costs.forward[s - 1] + costs.hop[s - 1]) * rule.forward_pace / period
    bottom = ahead[-1] + costs.forward[-1] * rule.forward_pace / period
    behind[-1] = bottom
    for s in range(stages - 2, -1, -1):
        behind[s] = behind[s + 1] + (costs.backward_input[s + 1] + costs.hop[s]) * rule.backward_pace / period
    caps = [max(1.0, _ceil(b - a + rule.extra)) for a, b in zip(ahead, behind)]
    if rule.cap_nudges:
        caps = [max(1.0, cap + nudge) for cap, nudge in zip(caps, rule.cap_nudges)]
    if rule.nudges:
        ahead = [lead + nudge for lead, nudge in zip(ahead, rule.nudges)]
    return ahead, [lead + rule.turn for lead in behind], caps


def _ceil(value: float) -> float:
    return math.ceil(value - 1e-6) if value < _NEVER else value


Keys: TypeAlias = "tuple[list[list[float]], list[list[float]]]"
"""How urgent each F and each B is: per stage, per microbatch; least first."""


def keys_of(problem: Problem, orders: Orders) -> Keys | None:
    """Urgency as `orders` have it: the start times of F and B, in microbatches' work."""
    ends = end_times(problem, orders)
    if ends is None:
        return None
    m, period = problem.num_microbatches, max(problem.work) / problem.num_microbatches or 1.0
    starts = [(end - time) / period for end, time in zip(ends, problem.duration)]
    rows = [
        [starts[(3 * s + kind) * m : (3 * s + kind + 1) * m] for s in range(len(starts) // (3 * m))] for kind in (0, 1)
    ]
    return rows[0], rows[1]


def list_schedule(problem: Problem, rule: Rule, keys: Keys | None = None) -> Orders | None:
    """The orders that `rule` gives, within the memory limit. Linear in the number of ops, but for the event queue.

    `keys` are those of the rule's `base`, where it has one.

    Returns None where the rule finds no way on within the memory limit (only near the least limit there is).
    """
    if rule.share < 1.0:
        problem = problem.with_limit(problem.limit * rule.share)
    return _Run(problem.flattened if rule.flat else problem, rule, keys).orders()


class _Run:
    """One run of the list scheduler: the state of every rank and stage while time goes on."""

    def __init__(self, problem: Problem, rule: Rule, keys: Keys | None = None) -> None:
        costs, stages, m = problem.costs, problem.placement.num_stages, problem.num_microbatches
        self.problem, self.rule, self.m = problem, rule, m
        ahead, behind, self.caps = leads(problem, rule)
        if keys is None:
            self.f_key = [[i + lead for i in range(m)] for lead in ahead]
            self.b_key = [[j + lead for j in range(m)] for lead in behind]
        else:
            nudges, turn = rule.nudges or (0.0,) * stages, rule.turn if rule.turn > -9.0 else 0.0
            self.f_key = [[key + nudge for key in row] for row, nudge in zip(keys[0], nudges)]
            self.b_key = [[key + turn for key in row] for row in keys[1]]
        self.f_done, self.b_done, self.w_done = [0] * stages, [0] * stages, [0] * stages
        self.f_arrival = [[0.0] * m] + [[_NEVER] * m for _ in range(stages - 1)]
        self.b_arrival = [[_NEVER] * m for _ in range(stages)]
        ranks = problem.placement.num_ranks
        self.order: Orders = [[] for _ in range(ranks)]
        self.held = [0.0] * ranks
        self.pending = [0] * ranks
        self.last_kind = [0] * ranks
        self.idle, self.wake, self.free = [0.0] * ranks, [_NEVER] * ranks, [0.0] * ranks
        self.tails = [self._tail(rank) for rank in range(ranks)]
        grow = [max(0.0, w - a) for w, a in zip(costs.weight_memory, costs.activation_memory)]
        self.room = [problem.allowed - max(grow[s] for s in on) for on in problem.stages]
        self.bearable = max(problem.work) * (1.0 + max(rule.allowance, 0.0))
        self.granted = [0.0] * ranks

    def _tail(self, rank: int) -> list[float]:
        """Per stage of `rank`, the activation memory of it and the later ones."""
        memory = [self.problem.costs.activation_memory[s] for s in self.problem.stages[rank]]
        return [sum(memory[i:]) for i in range(len(memory))]

    def orders(self) -> Orders | None:
        ranks = len(self.order)
        events: list[tuple[float, int]] = []
        for rank in range(ranks):
            self.wake[rank] = 0.0
            heappush(events, (0.0, rank))
        self.events = events
        wake, decide = self.wake, self._decide
        while events:
            now, rank = heappop(events)
            if wake[rank] == now:
                decide(now, rank)
        return self.order if sum(map(len, self.order)) == self.problem.num_ops else None

    def _decide(self, now: float, rank: int) -> None:
        """Let `rank`, free at `now`, start an op or sleep until something arrives."""
        m, f_done, b_done = self.m, self.f_done, self.b_done
        best, best_key, kind = -1, _NEVER, 0
        coming = coming_b = _NEVER
        starved = is_first = False
        f_key, b_key, horizon = self.f_key, self.b_key, _NEVER
        if self.rule.window < _NEVER:
            horizon = self._most_urgent(rank) + self.rule.window
        again_b = _AGAIN if self.rule.alternate and self.last_kind[rank] == 1 else 0.0
        for s in self.problem.stages[rank]:
            j, i = b_done[s], f_done[s]
            if j < i:
                arrival = self.b_arrival[s][j]
                if arrival > now:
                    if arrival < coming_b:
                        coming_b, is_first = arrival, j == 0
                elif self._b_fits(rank, s):
                    key = b_key[s][j]
                    if key <= horizon and key + again_b < best_key:
                        best, best_key, kind = s, key + again_b, 1
                else:
                    starved = True
            if i < m:
                arrival = self.f_arrival[s][i]
                if i - j >= self.caps[s] or f_key[s][i] > horizon:
                    continue
                if arrival > now:
                    coming = min(coming, arrival)
                elif (key := f_key[s][i]) < best_key:
                    fit = self._f_fits(rank, s)
                    if fit > 0:
                        best, best_key, kind = s, key, 0
                    elif fit == 0:
                        starved = True
        coming = min(coming, coming_b)
        if best >= 0 and kind == 0 and coming_b < _NEVER:
            patience = self.rule.first_patience if is_first else self.rule.patience
            if coming_b < now + patience * self.problem.costs.forward[best]:
                best, coming = -1, coming_b
        if best >= 0:
            self._start(now, rank, best, kind)
        else:
            self._fill_or_sleep(now, rank, coming, starved)

    def _fill_or_sleep(self, now: float, rank: int, coming: float, starved: bool) -> None:
        """Start a W if the gap until `coming` is worth one, or memory asks for it; else sleep until then."""
        if self.pending[rank] and (s := self._worth_filling(rank, coming - now, starved)) >= 0:
            self._start(now, rank, s, 2)
            return
        self.wake[rank] = coming
        if now < coming < _NEVER:
            heappush(self.events, (coming, rank))

    def _most_urgent(self, rank: int) -> float:
        """The least key of what is left on `rank`, whether it has arrived or not."""
        least, m = _NEVER, self.m
        for s in self.problem.stages[rank]:
            if self.f_done[s] < m:
                least = min(least, self.f_key[s][self.f_done[s]])
            if self.b_done[s] < m:
                least = min(least, self.b_key[s][self.b_done[s]])
        return least

    def _b_fits(self, rank: int, s: int) -> bool:
        costs = self.problem.costs
        return self.held[rank] + costs.weight_memory[s] - costs.activation_memory[s] <= self.problem.allowed

    def _f_fits(self, rank: int, s: int) -> int:
        """1 if an F of stage `s` has room, 0 if it will have once W are done, -1 if it must not start now."""
        memory = self.problem.costs.activation_memory
        stages, room = self.problem.stages[rank], self.room[rank]
        f_done, b_done = self.f_done, self.b_done
        active = memory[s] + sum([(f_done[t] - b_done[t]) * memory[t] for t in stages])
        if active > room:
            return -1
        if len(stages) > 1:
            tail = self.tails[rank]
            for k in range(stages.index(s) + 1, len(stages)):
                oldest = f_done[stages[k]]  # of those that still need this chunk's forward
                if oldest >= f_done[s] + 1:
                    continue
                younger = memory[s] + sum([(f_done[t] - oldest) * memory[t] for t in stages[:k]])
                if younger + tail[k] > room:
                    return -1
        return 1 if self.held[rank] + memory[s] <= self.problem.allowed else 0

    def _worth_filling(self, rank: int, gap: float, starved: bool) -> int:
        """The stage whose W should go into the gap before the next arrival, or -1 to leave the gap open."""
        weight, b_done, w_done = self.problem.costs.backward_weight, self.b_done, self.w_done
        waiting = [s for s in self.problem.stages[rank] if w_done[s] < b_done[s]]
        if starved:
            return min(waiting, key=lambda s: (weight[s], w_done[s]))
        fitting = [s for s in waiting if weight[s] <= gap]
        if fitting:
            return max(fitting, key=lambda s: (weight[s], -w_done[s]))
        s = min(waiting, key=lambda s: (weight[s], w_done[s]))
        if gap >= self.rule.fill * weight[s]:
            return s
        if self.rule.level and self.order[rank]:
            total = self.problem.work[rank] + self.idle[rank] + gap
            if total > self.bearable and self.idle[rank] + gap > self.granted[rank]:
                return s
        return -1

    def _start(self, now: float, rank: int, s: int, kind: int) -> None:
        """Start stage `s`'s next op of `kind` (0 F, 1 B, 2 W) and tell whoever waits for it."""
        problem, costs, m = self.problem, self.problem.costs, self.m
        order = self.order[rank]
        if order and now > self.free[rank]:
            self.idle[rank] += now - self.free[rank]
            if self.rule.allowance < 0.0:
                self.bearable = max(self.bearable, problem.work[rank] + self.idle[rank])
        if kind == 0:
            i = self.f_done[s]
            end = now + costs.forward[s]
            self.f_done[s] = i + 1
            self.held[rank] += costs.activation_memory[s]
            if s + 1 < len(self.f_done):
                self._deliver(self.f_arrival[s + 1], i, end + costs.hop[s], s + 1, rank)
            else:
                self.b_arrival[s][i] = end
        elif kind == 1:
            i = self.b_done[s]
            end = now + costs.backward_input[s]
            self.b_done[s] = i + 1
            self.held[rank] += costs.weight_memory[s] - costs.activation_memory[s]
            self.pending[rank] += 1
            if s:
                self._deliver(self.b_arrival[s - 1], i, end + costs.hop[s - 1], s - 1, rank)
        else:
            i = self.w_done[s]
            end = now + costs.backward_weight[s]
            self.w_done[s] = i + 1
            self.held[rank] -= costs.weight_memory[s]
            self.pending[rank] -= 1
        if kind < 2:
            self.last_kind[rank] = kind
        order.append((3 * s + kind) * m + i)
        self.free[rank] = self.wake[rank] = end
        heappush(self.events, (end, rank))

    def _deliver(self, arrivals: list[float], i: int, arrival: float, stage: int, sender: int) -> None:
        """Note when a result arrives, and wake its rank if that sleeps longer."""
        arrivals[i] = arrival
        rank = self.problem.placement.ranks[stage]
        if rank != sender:
            at = max(arrival, self.free[rank])
            if at < self.wake[rank]:
                self.wake[rank] = at
                heappush(self.events, (at, rank))


def refill(problem: Problem, orders: Orders, rule: Rule, granted: Sequence[float] | None = None) -> Orders | None:
    """`orders` with F and B kept as they stand on each rank, and every W put where `rule` finds a gap for it.

    `granted` is idle time, per rank, up to which gaps are left open in any case.

    Returns None where F and B in this order do not fit into the memory limit.
    """
    run = _Refill(problem, rule, orders)
    run.granted = list(granted) if granted else run.granted
    return run.orders()


def refills(problem: Problem, orders: Orders, fills: Sequence[float], passes: int) -> Iterator[Orders]:
    """`orders` with W in other places: for each of `fills` (see `Rule`), in so many passes, what fits.

    The first pass does not know yet which rank will be idlest. Each further one grants the others as much idle time as
    they had less than it, so that they do not delay their neighbours with a W for nothing.
    """
    for fill in fills:
        granted: list[float] | None = None
        for _ in range(passes):
            filled = refill(problem, orders, Rule(fill=fill), granted)
            ends = filled and end_times(problem, filled)
            if not filled or not ends:
                break
            yield filled
            idle = [span - work for span, work in zip(spans(problem, filled, ends), problem.work)]
            granted = [max(idle) - each for each in idle]


class _Refill(_Run):
    """A run that takes F and B in a given order."""

    def __init__(self, problem: Problem, rule: Rule, orders: Orders) -> None:
        super().__init__(problem, rule)
        rows = [[divmod(code // self.m, 3) for code in order] for order in orders]
        self.queue = [[(s, kind) for s, kind in reversed(row) if kind < 2] for row in rows]

    def _decide(self, now: float, rank: int) -> None:
        coming, starved = _NEVER, False
        if self.queue[rank]:
            s, kind = self.queue[rank][-1]
            arrival = self.b_arrival[s][self.b_done[s]] if kind else self.f_arrival[s][self.f_done[s]]
            starved = not self._has_room(rank, s, kind)
            if arrival <= now and not starved:
                self.queue[rank].pop()
                self._start(now, rank, s, kind)
                return
            coming = max(arrival, now)
        self._fill_or_sleep(now, rank, coming, starved)

    def _has_room(self, rank: int, s: int, kind: int) -> bool:
        if kind:
            return self._b_fits(rank, s)
        return self.held[rank] + self.problem.costs.activation_memory[s] <= self.problem.allowed


def one_at_a_time(problem: Problem) -> Orders:
    """Each microbatch alone, every W right after its B: slow, but runs under the least limit that any schedule can."""
    m, stages = problem.num_microbatches, problem.placement.num_stages
    ranks = problem.placement.ranks
    orders: Orders = [[] for _ in problem.stages]
    for mb in range(m):
        for s in range(stages):
            orders[ranks[s]].append(3 * s * m + mb)
        for s in range(stages - 1, -1, -1):
            orders[ranks[s]] += [(3 * s + 1) * m + mb, (3 * s + 2) * m + mb]
    return orders
