"""The joint program without whole numbers, its columns generated as they are needed: a bound, and where to look.

A thousand classes on six hundred candidates at ten levels are millions of columns, of which a basis holds a few
thousand. The restricted program starts with the cheapest places of each class; its duals then price every pair of a
class and a candidate, and those that would improve it join (Dantzig and Wolfe 1960; Desaulniers, Desrosiers and
Solomon, Column Generation, 2005). A candidate without columns has no duals of its own: it gets the price of its
replicas, which the pools' rows set, spread over whichever of its three rows shows it least attractive.

Since the fractions of a class sum to one at most, no choice of columns can improve the restricted optimum by more than
the sum over classes of the best reduced cost. That makes each round's figure a bound, whether or not it was the last.
What a resident prefix takes is left out, which only lowers the bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy import sparse

from kvantile_optimizer import coefficients, program
from kvantile_optimizer.coefficients import Tables
from kvantile_optimizer.problem import Problem
from kvantile_optimizer.program import Array, Columns, Decision, Instance, Ints, no_columns
from kvantile_optimizer.solver import INFINITY, GrowingLinearProgram, Solution, SolveStatus

FIRST_PLACES = 6
"""Candidates that each class starts with."""
PLACES_PER_ROUND = 4
"""Of a class that join in one round at most: more make each solve dearer, fewer take more rounds."""
MOST_ROUNDS = 60
ENOUGH = 1e-4
"""Relative distance between the restricted optimum and the bound at which the rounds end."""
PENALTY = 100.0
"""What an unserved request costs, in times of the dearest service of any class: above any dual price that matters."""
PART = 0.2
"""Of a class: fewer of its requests on a column of their own hardly ever save a replica."""
UNSERVED = 1e-6
"""Share of all requests that rounding may leave unserved."""


@dataclass(frozen=True, slots=True, eq=False)
class Prices:
    """Dual prices, US dollars."""

    classes: Array
    """(C,) for serving the whole class."""
    rows: Array
    """(3, J) for a unit of engine time, KV and sequences of each candidate."""


class Relaxation:
    """The restricted program in the solver, and the columns that it has so far."""

    def __init__(self, problem: Problem, table: Tables, instance: Instance) -> None:
        """`instance` says everything but the columns, of which it may have some to start with."""
        self.problem, self.table, self.instance = problem, table, instance
        self._built = program.build(replace(instance, columns=no_columns()), prefixes=False)
        self._matrix = self._built.program.matrix().tocsc()
        self._usable = table.alone > 0
        self._seen: set[tuple[int, int, int, bool]] = set()
        self.columns = no_columns()
        self._variables: Ints = np.zeros(0, np.intp)
        most = self._built.program.most
        # The pools' rows bound them: bounds of their own would have duals that no reduced cost knows.
        most[self._built.replicas] = INFINITY
        self._rooms = program.rooms(instance)
        self._every, self._last = np.arange(len(instance.rates)), table.residents - 1
        self._engine = self._engine_seconds()
        with np.errstate(divide="ignore"):
            self._share = np.where(self._usable, 1.0 / table.alone, 0.0)
        cost = self._built.program.cost
        self._penalty = PENALTY * self._dearest_service() * np.maximum(instance.rates, 1e-12)
        cost[self._built.unserved] = self._penalty
        self._linear = GrowingLinearProgram(self._built.program, cost, most)
        nothing = np.zeros(0)
        self._solution = Solution(SolveStatus.NO_INCUMBENT, nothing, INFINITY, -INFINITY, 0.0)
        self._first_prices = Prices(nothing, nothing)
        self._least_unserved = np.zeros(len(instance.rates))
        self.least_spent = 1e-12
        """What the relaxation itself spends, US dollars per second."""
        self.bound = -INFINITY
        self._add(instance.columns)
        self._add(self._first())

    @property
    def replicas(self) -> Array:
        """(J,) fractional replicas of the last solve."""
        return self._solution.values[self._built.replicas]

    @property
    def fractions(self) -> Array:
        """(K,) of `columns`; zero for those that joined after the last solve."""
        values = self._solution.values
        return np.concatenate((values, np.zeros(max(0, self._linear.variable_count - len(values)))))[self._variables]

    @property
    def unserved(self) -> Array:
        """(C,)"""
        return self._solution.values[self._built.unserved]

    @property
    def prices(self) -> Prices:
        """The duals of the last solve, with the leftover of each candidate's price put where it shows it in the worst
        light; a basis need not say what a candidate without traffic would cost."""
        duals, rows = self._solution.duals, self._built.candidate_rows
        own = np.maximum(-duals[rows], 0.0)
        outside = duals.copy()
        outside[rows] = 0.0
        price = self._built.program.cost[self._built.replicas] - self._matrix[:, self._built.replicas].T @ outside
        left = np.maximum(price - own.sum(axis=0), 0.0)
        classes, each = duals[self._built.class_rows], np.eye(3)[:, :, None] * left
        gains = [np.maximum(self._most_gain(Prices(classes, own + part)), 0.0).sum(axis=0) for part in each]
        own[np.argmin(gains, axis=0), np.arange(len(left))] += left
        return Prices(classes, own)

    def solve(self, left_s: Callable[[], float]) -> bool:
        """Generates columns until none improves it by more than `ENOUGH`; False when the time was over before a solve.

        Raises WorkError from the solver.
        """
        for _ in range(MOST_ROUNDS):
            if not np.isfinite(self.resolve(left_s)):
                break
            gain = self._grow()
            objective = self.objective
            self.bound = max(self.bound, objective - gain)
            if gain <= ENOUGH * self.spent or left_s() <= 0:
                break
        if not self._solution.found:
            return False
        self._first_prices = self.prices
        self._least_unserved = self.unserved.copy()
        self.least_spent = self.spent
        return True

    def improve(self, left_s: Callable[[], float]) -> float:
        """Generates columns for the replicas as they are bound: other levels and places. Returns the optimum."""
        found = INFINITY
        for _ in range(MOST_ROUNDS):
            now = self.resolve(left_s)
            if not now < found - ENOUGH * self.spent:
                return min(now, found)
            found = now
            self._grow(open_only=True)
        return found

    @property
    def objective(self) -> float:
        """Of the last solve, US dollars per second, unserved requests at their penalty."""
        return self._solution.objective

    @property
    def spent(self) -> float:
        """Of that, what is not penalty: gaps are shares of it, or a plan that leaves something unserved would be called
        near enough at any cost."""
        return max(float(self._solution.objective - self._penalty @ self.unserved), 1e-12)

    def pin(self) -> None:
        """Has resident prefixes take the memory of as many replicas as the relaxation came to, in proportion to the
        share of the class that uses them. Later figures are no bound."""
        pinned = (
            self.instance.prefix_tokens[self.columns.class_index] / self.problem.sizes.kv_tokens[self.columns.candidate]
        )
        n = np.maximum(self.replicas, 1.0)[self.columns.candidate]
        use = program.uses(self.instance, self.columns)[1]
        self._add(self._without_prefix(self.columns.only(self.columns.resident)))
        for k in np.flatnonzero(self.columns.resident[: len(n)]):
            row = int(self._built.candidate_rows[1, self.columns.candidate[k]])
            self._linear.coefficient(row, int(self._variables[k]), float(use[k] + n[k] * pinned[k]))

    def penalised(self, decision: Decision) -> float:
        """What a decision costs in this program, US dollars per second."""
        return float(decision.objective + self._penalty @ decision.unserved)

    def serves_less(self, decision: Decision) -> bool:
        """Whether a decision leaves more requests unserved than the relaxation had to, beyond rounding."""
        rates = self.instance.rates
        return bool((decision.unserved - self._least_unserved) @ rates > UNSERVED * rates.sum())

    def carried(self) -> Columns:
        """The columns that carry something, and the same without their prefix resident."""
        used = self.columns.only(self.fractions > 0)
        twins = self._without_prefix(used.only(used.resident))
        have = set(keys(used))
        return used.and_also(twins.only(np.array([key not in have for key in keys(twins)], bool)))

    def near(self, distance: float, most: int, *, generated_only: bool = False) -> Columns:
        """The columns, up to `most`, that may be in a plan that costs at most `distance` more than the bound: those
        whose reduced cost is no more than that where a class uses at least a part `PART` of them.

        Those that the program has come first; then, unless `generated_only`, the others by their reduced cost.
        """
        found, distance = self._nearest(most), distance / PART
        if generated_only or len(found) >= most:
            return found
        c, j = np.nonzero(self._usable)
        gain = self._most_gain(self._first_prices)[c, j]
        order = np.argsort(-gain, kind="stable")[: min(most, int((gain >= -distance).sum()))]
        every = coefficients.columns(self.problem, self.table, self.instance.capacity, c[order], j[order])
        reduced, have = self._reduced_costs(every), set(keys(found))
        reduced[[key in have for key in keys(every)]] = INFINITY
        nearest = np.argsort(reduced, kind="stable")[: min(most - len(found), int((reduced <= distance).sum()))]
        return found.and_also(every.only(np.sort(nearest)))

    def _nearest(self, most: int) -> Columns:
        """The program's columns, or of more than `most` those that carry something and the nearest to doing so."""
        if len(self.columns) <= most:
            return self.columns
        reduced = self._reduced_costs(self.columns)
        reduced[self.fractions > 0] = -INFINITY
        return self.columns.only(np.sort(np.argsort(reduced, kind="stable")[:most]))

    def _reduced_costs(self, columns: Columns) -> Array:
        """(K,) US dollars per second at the relaxation's prices, for the whole class."""
        prices = self._first_prices
        use = program.uses(self.instance, columns) * prices.rows[:, columns.candidate]
        costs = program.column_costs(self.instance, columns) + use.sum(axis=0) - prices.classes[columns.class_index]
        return np.asarray(costs)

    def _without_prefix(self, columns: Columns) -> Columns:
        level = (self.table.levels[columns.class_index] < columns.reserve_tokens[:, None]).sum(axis=1)
        return self._columns(columns.class_index, columns.candidate, level, np.zeros_like(level))

    def bound_replicas(self, least: Array, most: Array) -> None:
        """Gives the replicas other bounds, (J,) each."""
        self._linear.bound(self._built.replicas, least, most)

    def resolve(self, left_s: Callable[[], float]) -> float:
        """The optimum of the columns that are there, US dollars per second with unserved requests at their penalty;
        infinite where the time was over. Raises WorkError from the solver."""
        solution = self._linear.solve(left_s())
        if not solution.found or not len(solution.duals):
            return INFINITY
        self._solution = solution
        return solution.objective

    def _dearest_service(self) -> float:
        """US dollars per request of the dearest class at its cheapest place, if replicas could be cut in pieces."""
        alone = self._alone()
        cheapest = np.where(np.isfinite(alone), alone, np.inf).min(axis=1, initial=np.inf)
        per_request = cheapest / np.maximum(self.instance.rates, 1e-12)
        return float(per_request[np.isfinite(per_request)].max(initial=1e-6))

    def _alone(self) -> Array:
        """(C, J) US dollars per second if each class had as much of a candidate as it needs; inf where it may not."""
        shares = [self._base(np.eye(3)[row][:, None] * np.ones(self._engine.shape[1])) for row in range(3)]
        return np.where(self._usable, np.maximum.reduce(shares) * self.problem.sizes.price_usd_per_second, np.inf)

    def _engine_seconds(self) -> Array:
        """(C, J) seconds of engine time per second that the whole class takes, its prefix resident."""
        table, steps = self.table, self.problem.steps
        of_class = np.array([table.prompt[self._last, self._every], table.steps, table.bare])
        seconds = (of_class * self.instance.rates).T @ np.array([steps.delta, steps.beta, steps.gamma])
        return np.asarray(seconds)

    def _base(self, weights: Array) -> Array:
        """(C, J) sum over the three rows of `weights` (3, J) times what the whole class takes at its least footprint.

        Products of matrices, since nearly every coefficient is a sum of products of a figure of the class and one of
        the candidate.
        """
        table, steps, instance = self.table, self.problem.steps, self.instance
        weights = weights / instance.replayed
        kv, seqs = weights[1:] / self._rooms
        step_s = instance.capacity.step_s
        least = np.maximum(table.footprint.min(axis=1) - self._last * table.pinned, 0.0)
        of_class = np.array(
            [least, table.steps, table.prompt[self._last, self._every], table.prompt_squared[self._last, self._every]]
        )
        of_candidate = np.array([kv * step_s, seqs * step_s, kv * steps.alpha / 2, kv * steps.delta / 2])
        engine = weights[0] / instance.correction * self._share + weights[1:].sum(axis=0)
        return np.asarray(self._engine * engine + (of_class * instance.rates).T @ of_candidate)

    def _most_gain(self, prices: Prices) -> Array:
        """(C, J) no column of the pair has a reduced cost below minus this; -inf where it may not be used."""
        gain = prices.classes[:, None] - self._base(prices.rows)
        return np.where(self._usable, gain, -np.inf)

    def _grow(self, *, open_only: bool = False) -> float:
        """Adds the columns that would improve the solution, `open_only` where there are replicas; returns by how much
        any could at most."""
        prices = self.prices
        gains = self._most_gain(prices)
        c, j = np.nonzero((gains > 0) & (self.replicas > 0) if open_only else gains > 0)
        if not len(c):
            return 0.0
        gain, level, resident = self._best(prices, c, j)
        best = np.zeros(len(self.instance.rates))
        np.maximum.at(best, c, gain)
        order = np.lexsort((j, -gain, c))
        order = order[gain[order] > 1e-9 * np.maximum(best[c[order]], 1e-12)]
        first = np.r_[True, np.diff(c[order]) != 0] if len(order) else np.zeros(0, bool)
        rank = np.arange(len(order)) - np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))
        order = order[rank < PLACES_PER_ROUND]
        self._add(self._columns(c[order], j[order], level[order], resident[order]))
        return float(best.sum())

    def _best(self, prices: Prices, c: Ints, j: Ints) -> tuple[Array, Ints, Ints]:
        """The largest gain (P,) of each pair, and the level and residency that have it."""
        rate, step_s = self.instance.rates[c], self.instance.capacity.step_s[j]
        memory, preemption = coefficients.level_costs(self.problem, self.table, self.instance.capacity, c, j)
        kv_price = (prices.rows[1] / (self._rooms[0] * self.instance.replayed))[j, None] * (rate * step_s)[:, None]
        best = np.full(len(c), -np.inf)
        level, resident = np.zeros(len(c), np.intp), np.zeros(len(c), np.intp)
        for with_prefix in range(2):
            fixed = self._fixed_use(prices, c, j, with_prefix)
            held = np.maximum(self.table.footprint[c] - with_prefix * self.table.pinned[c, None], 0.0)
            cost = rate[:, None] * (memory + preemption) + kv_price * held
            at = cost.argmin(axis=1)
            gain = prices.classes[c] - fixed - cost[np.arange(len(c)), at]
            better = (gain > best) & (with_prefix < self.table.residents[c])
            best = np.where(better, gain, best)
            level, resident = np.where(better, at, level), np.where(better, with_prefix, resident)
        return best, level, resident

    def _fixed_use(self, prices: Prices, c: Ints, j: Ints, with_prefix: int) -> Array:
        """(P,) what a pair takes whatever its level, at the prices."""
        table, steps, capacity = self.table, self.problem.steps, self.instance.capacity
        rows = prices.rows / self.instance.replayed
        kv, seqs = (rows[1:] / self._rooms)[:, j]
        prompt, squared = table.prompt[with_prefix, c], table.prompt_squared[with_prefix, c]
        seconds = steps.delta[j] * prompt + steps.beta[j] * table.steps[c] + steps.gamma[j] * table.bare[c]
        prefill = (steps.delta[j] * squared + steps.alpha[j] * prompt) / 2
        decoding = capacity.step_s[j] * table.steps[c]
        engine = rows[0, j] / (table.alone[c, j] * self.instance.correction[j]) + rows[1:, j].sum(axis=0)
        used = engine * seconds + kv * prefill + seqs * decoding
        return np.asarray(self.instance.rates[c] * used)

    def _first(self) -> Columns:
        """Columns of the cheapest places of each class, no more than two in a pool, at the level that is cheapest there
        when each row has an equal part of the replica's price."""
        alone = self._alone()
        pools = {pool.name: index for index, pool in enumerate(self.problem.pools)}
        of_pool = np.array([pools[candidate.pool.name] for candidate in self.problem.candidates], np.intp)
        c, j = [], []
        for index, row in enumerate(alone):
            counts = np.zeros(len(pools), np.intp)
            for place in np.argsort(row, kind="stable"):
                if not np.isfinite(row[place]) or counts.sum() == FIRST_PLACES:
                    break
                if counts[of_pool[place]] < 2:
                    counts[of_pool[place]] += 1
                    c.append(index)
                    j.append(int(place))
        at = np.array(c, np.intp), np.array(j, np.intp)
        if not c:
            return no_columns()
        thirds = np.tile(self.problem.sizes.price_usd_per_second / 3, (3, 1))
        even = Prices(np.zeros(len(self.instance.rates)), thirds)
        _, level, resident = self._best(even, *at)
        return self._columns(*at, level, resident)

    def _columns(self, c: Ints, j: Ints, level: Ints, resident: Ints) -> Columns:
        if not len(c):
            return no_columns()
        found = coefficients.columns(self.problem, self.table, self.instance.capacity, c, j)
        wanted = {
            (int(a), int(b), int(self.table.levels[a, d]), bool(e))
            for a, b, d, e in zip(c, j, level, resident, strict=True)
        }
        return found.only(np.array([key in wanted for key in keys(found)], bool))

    def _add(self, columns: Columns) -> None:
        new = np.array([key not in self._seen for key in keys(columns)], bool)
        if not new.any():
            return
        columns = columns.only(new)
        self._seen.update(keys(columns))
        K, rows = len(columns), self._built.program.row_count
        use = program.uses(self.instance, columns)
        at = np.vstack((self._built.class_rows[columns.class_index], self._built.candidate_rows[:, columns.candidate]))
        matrix = sparse.coo_matrix(
            (np.vstack((np.ones(K), use)).ravel(), (at.ravel(), np.tile(np.arange(K), 4))), (rows, K)
        ).tocsc()
        cost = program.column_costs(self.instance, columns)
        added = self._linear.add(cost, np.full(K, INFINITY), matrix)
        self._variables = np.concatenate((self._variables, added))
        self.columns = columns if not len(self.columns) else self.columns.and_also(columns)


def keys(columns: Columns) -> list[tuple[int, int, int, bool]]:
    """What tells columns apart: class, candidate, tokens, residency."""
    return list(
        zip(
            columns.class_index.tolist(),
            columns.candidate.tolist(),
            columns.reserve_tokens.tolist(),
            columns.resident.tolist(),
            strict=True,
        )
    )
