"""The search for the best orders: many seeds, all judged on the true times, then local improvement of the best.

Seeds are the handcrafted schedules that fit, and what the heuristic gives for a grid of rules and for random changes of
the best rules so far. Rules are tried on a shorter step first (warm-up and cool-down are what they differ in), the best
of them on the whole. Nothing depends on the clock unless `stop` does, so the same problem gives the same plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from typing import TYPE_CHECKING

from zerobubble.generators import GENERATORS
from zerobubble.planner.heuristic import Rule, keys_of, list_schedule, one_at_a_time, refills
from zerobubble.planner.improve import improve
from zerobubble.planner.problem import cost, fits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zerobubble.planner.heuristic import Keys
    from zerobubble.planner.problem import Orders, Problem

    Stop = Callable[[], bool]


_LARGE = 20_000
"""Ops above which less is tried of everything."""

_MOVED = ", W moved"

_PATIENCE = 150
"""Tries without a gain after which, and after a quarter of all, a search ends."""

_FEW_MOVES = 60
_FEW_TRIES = 8
"""Fewer moves or tries than these are not worth their time."""


@dataclass(frozen=True)
class Effort:
    """How much is tried. Ops are counted so that large problems get fewer tries, not more time.

    Attributes:
        rule_ops: ops that the heuristic may place while it looks for good rules.
        rule_tries: rules tried at most.
        move_ops: ops that local improvement may simulate.
        moves: moves simulated at most.
        starts: seeds that are improved.
    """

    rule_ops: int
    rule_tries: int
    move_ops: int
    moves: int
    starts: int


EFFORTS = {
    "quick": Effort(rule_ops=150_000, rule_tries=150, move_ops=1_500_000, moves=5_000, starts=2),
    "default": Effort(rule_ops=700_000, rule_tries=1_500, move_ops=25_000_000, moves=40_000, starts=3),
}
EFFORTS["exact"] = EFFORTS["default"]


@dataclass(order=True)
class Found:
    """Orders and what they cost; `name` says where they come from. The cheapest is the least."""

    cost: float
    orders: Orders
    name: str


def search(problem: Problem, effort: Effort, goal: float = 0.0, stop: Stop = bool) -> Found:
    """The best orders within the problem's memory limit, never worse than any seed.

    Args:
        problem: what is planned; its limit is at least `problem.least_limit()`.
        effort: how much is tried.
        goal: a cost that no schedule can beat; the search ends where it is reached.
        stop: asked now and then; ends the search early when it says true.
    """
    seeds = sorted(_handcrafted(problem), key=_by_cost)
    if not (seeds and seeds[0].cost <= goal):
        seeds += _from_rules(problem, effort, goal, stop)
    seeds.sort(key=_by_cost)
    if seeds[0].cost > goal:
        fills = _GAP_FILLS if problem.num_ops < _LARGE else _GAP_FILLS[:2]
        seeds += [more for seed in _different(seeds, effort.starts) for more in _refilled(problem, seed, fills)]
        seeds.sort(key=_by_cost)
    seeds = [*_reurged(problem, seeds[0], effort, goal, stop), *seeds]
    best = seeds[0]
    for number, seed in enumerate(_different(seeds, effort.starts)):
        moves = min(effort.moves, effort.move_ops // problem.num_ops) // effort.starts
        if best.cost <= goal or moves < _FEW_MOVES or stop():
            break
        orders, reached = improve(problem, seed.orders, moves=moves, goal=goal, seed=number, stop=stop)
        best = min(best, Found(reached, orders, seed.name), key=_by_cost)
    return best


def _by_cost(found: Found) -> float:
    return found.cost


def _different(seeds: list[Found], count: int) -> list[Found]:
    """The first `count` seeds whose costs differ: equal costs are mostly equal orders."""
    kept: dict[float, Found] = {}
    for seed in seeds:
        kept.setdefault(seed.cost, seed)
    return list(kept.values())[:count]


def _handcrafted(problem: Problem) -> Iterator[Found]:
    """The generators that have the problem's placement, where they fit; and one microbatch at a time, which does."""
    for name in _guides(problem):
        orders = _guide(problem, name)
        fit = fits(problem, orders)
        if fit:
            yield Found(cost(problem, orders), orders, name)
        if fit or problem.num_ops < _LARGE:
            fills = _GAP_FILLS if problem.num_ops < _LARGE else _GAP_FILLS[:1]
            yield from _refilled(problem, Found(math.inf, orders, name), fills)
    orders = one_at_a_time(problem)
    yield Found(cost(problem, orders), orders, "one_at_a_time")


def _guides(problem: Problem) -> list[str]:
    """The generators that have the problem's placement."""
    style, chunks = problem.placement.style, problem.placement.num_stages // problem.placement.num_ranks
    found = []
    for generator in GENERATORS.values():
        own = "linear" if generator.takes_chunks and chunks == 1 else generator.placement
        slow = problem.num_ops >= _LARGE and generator.name == "v_min"  # takes long to make, and is good for little
        if own == style and not slow:
            found.append(generator.name)
    return found


def _guide(problem: Problem, name: str) -> Orders:
    """The schedule of a generator, whether it fits or not."""
    generator, placement = GENERATORS[name], problem.placement
    extra = {"chunks": placement.num_stages // placement.num_ranks} if generator.takes_chunks else {}
    return problem.encode(generator.make(placement.num_ranks, problem.num_microbatches, **extra))


_GAP_FILLS = (1.0, 0.8, 0.65, 0.5, 0.3, 0.01)
"""Values of `Rule.fill` with which W is put anew, those first that help most."""


def _refilled(problem: Problem, seed: Found, fills: Sequence[float]) -> Iterator[Found]:
    """The same F and B, with W where it fits best for these times and this memory."""
    passes = 3 if problem.num_ops < _LARGE else 2
    name = seed.name.removesuffix(_MOVED) + _MOVED
    for filled in refills(problem, seed.orders, fills, passes):
        yield Found(cost(problem, filled), filled, name)


def _from_rules(problem: Problem, effort: Effort, goal: float, stop: Stop) -> list[Found]:
    """What the best rules give on the whole problem."""
    p, m = problem.placement.num_ranks, problem.num_microbatches
    short = problem.shortened(2 * p + 4) if m > 3 * p + 4 and problem.num_ops > 2_000 else problem
    rules = _best_rules(short, effort, goal if short is problem else 0.0, stop)
    whole = max(1, min(8, effort.rule_ops // problem.num_ops // 2))
    tryout = _Tryout(problem)
    found = [tryout.run(rule) for rule in dict.fromkeys([*rules[:whole], *_always(problem)])]
    return [one for one in found if one.cost < math.inf]


def _always(problem: Problem) -> list[Rule]:
    """Rules that are tried on the whole step in any case: the paper's, with as many F as memory holds."""
    pairs = _PATIENT if problem.num_ops < _LARGE else _PATIENT[:1]
    return [Rule(patience=patience, first_patience=first) for patience, first in pairs]


class _Tryout:
    """Runs rules on one problem; remembers the urgency that handcrafted schedules of that size stand for."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.bases = _guides(problem)
        self._keys: dict[str, Keys | None] = {}

    def run(self, rule: Rule) -> Found:
        if rule.base and rule.base not in self._keys:
            self._keys[rule.base] = keys_of(self.problem, _guide(self.problem, rule.base))
        orders = list_schedule(self.problem, rule, self._keys.get(rule.base))
        name = f"heuristic, after {rule.base}" if rule.base else "heuristic"
        return Found(math.inf if orders is None else cost(self.problem, orders), orders or [], name)


def _reurged(problem: Problem, found: Found, effort: Effort, goal: float, stop: Stop) -> list[Found]:
    """The heuristic guided by the best orders so far, with the urgency of some ops changed; better ones, best first.

    Unlike a move of one op, this moves a run of microbatches on a stage at once, and all ranks adapt.
    """
    tries = min(effort.rule_tries, effort.rule_ops // problem.num_ops)
    tries = tries if tries >= _FEW_TRIES else 0
    random = Random(tries + 1)
    keys = keys_of(problem, found.orders)
    better: list[Found] = []
    gained = 0
    for number in range(tries):
        if keys is None or found.cost <= goal or number - gained > _patience(tries) or (number % 8 == 7 and stop()):
            break
        rule = Rule(
            turn=0.0,
            alternate=random.random() < 0.2,
            window=random.choice(_WINDOWS),
            fill=random.choice(_FILLS),
            allowance=random.choice((-1.0, -1.0, 0.0, 0.003)),
            patience=random.choice(_PATIENCES[:3]),
            first_patience=random.choice(_PATIENCES),
        )
        orders = list_schedule(problem, rule, _shifted(keys, random, problem.num_microbatches))
        reached = math.inf if orders is None else cost(problem, orders)
        if orders is not None and reached <= found.cost:
            if reached < found.cost:
                gained = number
                better.insert(0, Found(reached, orders, found.name))
            found, keys = Found(reached, orders, found.name), keys_of(problem, orders)
    return better


def _patience(tries: int) -> int:
    return max(_PATIENCE, tries // 4)


def _shifted(keys: Keys, random: Random, m: int) -> Keys:
    """The keys with those of one to three runs of microbatches, each on one stage, made more or less urgent."""
    changed = ([*keys[0]], [*keys[1]])
    for _ in range(random.choice((1, 1, 2, 3))):
        rows = random.choice(changed)
        stage = random.randrange(len(rows))
        first, last = (0, m) if random.random() < 0.3 else sorted((random.randrange(m), random.randrange(m) + 1))
        step = random.choice(_NUDGES)
        rows[stage] = [key + step if first <= mb < last else key for mb, key in enumerate(rows[stage])]
    return changed


def _best_rules(problem: Problem, effort: Effort, goal: float, stop: Stop) -> list[Rule]:
    """The best rules of a grid and of random changes to the best, best first."""
    tries = max(8, min(effort.rule_tries, effort.rule_ops // problem.num_ops))
    random = Random(tries)
    tryout = _Tryout(problem)
    grid = _grid(problem, random, tryout.bases)
    pool: list[tuple[float, int, Rule]] = []
    gained = planned = min(len(grid), max(tries // 3, 8))
    for number in range(tries):
        best = pool[0][0] if pool else math.inf
        if best <= goal or number - gained > _patience(tries) or (number % 8 == 7 and stop()):
            break
        if number < planned:
            rule = grid[number]
        else:
            chosen = random.choice(pool)[2] if pool else Rule()
            rule = _changed(chosen, random, problem.placement.num_stages, tryout.bases)
        found = tryout.run(rule).cost
        gained = number if found < best and number > planned else gained
        if found < math.inf and all(rule != other for _, _, other in pool):
            pool = sorted([*pool, (found, -number, rule)])[:8]
    return [rule for _, _, rule in pool]


def _grid(problem: Problem, random: Random, bases: list[str]) -> list[Rule]:
    """The paper's binary choices and how far forwards run ahead, for true and median times; likely ones first."""
    costs = problem.costs
    uneven = any(len(set(times)) > 1 for times in (costs.forward, costs.backward_input, costs.backward_weight))
    ahead = ((1.0, math.inf), (1.5, 1.0), (2.0, 1.0), (2.7, 0.0), (1.0, 0.0))
    likely = [
        Rule(pace, pace, extra=extra, patience=patience, first_patience=first, flat=flat)
        for flat, (patience, first), (pace, extra) in product((False, True)[: 1 + uneven], _PATIENT, ahead)
    ]
    more = [
        Rule(pace, pace, turn, extra=extra, fill=fill, flat=flat)
        for pace, extra, turn, fill, flat in product(
            (1.0, 1.25, 1.5, 2.0, 2.5), (0.0, 1.0, math.inf), (-1e6, 0.0), (1.0, 0.5), (False, True)[: 1 + uneven]
        )
    ]
    random.shuffle(more)
    alternating = [
        Rule(pace, pace, alternate=True, extra=extra, patience=0.1, first_patience=1.0)
        for pace, extra in ((1.0, math.inf), *ahead[1:4])
    ]
    guided = [Rule(base=base, window=window) for base in bases for window in (0.5, 2.0)]
    return likely[:8] + alternating + guided + likely[8:] + more


_PATIENT = ((0.1, 1.0), (0.1, 0.5), (0.0, 1.0), (0.0, 0.0))
"""Patience and patience for the first B that are good for most."""
_TURNS = (-1e6, -4.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0)
_EXTRAS = (-1.0, 0.0, 0.5, 1.0, 2.0, 3.0, math.inf)
_FILLS = (0.01, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0)
_PATIENCES = (0.0, 0.1, 0.3, 0.5, 0.8, 1.0)
_PACES = (0.8, 0.9, 1.1, 1.25)
_WINDOWS = (0.2, 0.5, 1.0, 2.0, 4.0, math.inf)
_NUDGES = (-2.0, -1.0, -0.5, -0.2, 0.2, 0.5, 1.0, 2.0)


def _changed(rule: Rule, random: Random, stages: int, bases: list[str]) -> Rule:
    """The rule with one to three of its choices changed at random."""
    for _ in range(random.choice((1, 1, 2, 3))):
        pick = random.randrange(16)
        if pick == 0:
            rule = replace(rule, forward_pace=max(0.5, rule.forward_pace * random.choice(_PACES)))
        elif pick == 1:
            rule = replace(rule, backward_pace=max(0.5, rule.backward_pace * random.choice(_PACES)))
        elif pick == 2:
            rule = replace(rule, turn=random.choice(_TURNS))
        elif pick == 3:
            rule = replace(rule, extra=random.choice(_EXTRAS))
        elif pick == 4:
            rule = replace(rule, fill=random.choice(_FILLS))
        elif pick == 5:
            rule = replace(rule, level=not rule.level)
        elif pick == 6:
            rule = replace(rule, patience=random.choice(_PATIENCES))
        elif pick == 7:
            rule = replace(rule, share=random.choice((0.7, 0.8, 0.9, 1.0, 1.0)))
        elif pick == 8:
            rule = replace(rule, allowance=random.choice((-1.0, 0.0, 0.001, 0.003, 0.01)))
        elif pick == 9:
            rule = replace(rule, first_patience=random.choice(_PATIENCES))
        elif pick == 10:
            rule = replace(rule, window=random.choice(_WINDOWS))
        elif pick == 11 and bases:
            rule = replace(rule, base=random.choice(["", *bases]), window=random.choice(_WINDOWS))
        elif pick == 12:
            rule = replace(rule, alternate=not rule.alternate)
        elif pick < 15:
            rule = replace(rule, nudges=_nudged(rule.nudges, _NUDGES, random, stages))
        else:
            rule = replace(rule, cap_nudges=_nudged(rule.cap_nudges, (-1.0, 1.0), random, stages))
    return rule


def _nudged(nudges: tuple[float, ...], steps: tuple[float, ...], random: Random, stages: int) -> tuple[float, ...]:
    changed = list(nudges or (0.0,) * stages)
    for _ in range(random.choice((1, 2, 4))):
        changed[random.randrange(stages)] += random.choice(steps)
    return tuple(changed)
