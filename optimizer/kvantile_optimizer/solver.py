"""Mixed-integer linear programs in HiGHS: rows and variables come as arrays, the answer is a value.

A thin layer over highspy that keeps its types, its banner on stdout and its status codes in one place. `Program` is
solved as a whole; `GrowingLinearProgram` stays in the solver and gets more columns between solves, each of which starts
from the last basis.

Costs are handed over in units of a typical one, since the solver's tolerances and its absolute gap are made for
figures near 1: US dollars a second are not. What it calls a solution is held against the rows as they were given: a
point that breaks them, or a status that is no answer, is tried once more without presolving, and then an error.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import highspy
import numpy as np
import numpy.typing as npt
from scipy import sparse

from kvantile_optimizer.errors import WorkError

INFINITY = float("inf")
RELATIVE_GAP = 1e-4
LEAST_SECONDS = 0.01
"""What a solve has in any case: some programs are done by then."""
NO_COST = 1e-12
"""Of the largest cost: less is lost in rounding."""
SEEDS = 2**31
"""HiGHS takes no larger seed."""
POINT_TOLERANCE = 1e-5
"""How far a point may be from keeping a row, over what meets in the row, and a whole number from one: ten times what
HiGHS allows itself, which it measures on rows that it has scaled."""

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]

_KINDS = highspy.HighsModelStatus
CUT_SHORT = {_KINDS.kTimeLimit, _KINDS.kInterrupt, _KINDS.kIterationLimit, _KINDS.kSolutionLimit}
"""Ends of a run before its search was over; HiGHS calls a limit of branches the last of them."""


class SolveStatus(StrEnum):
    """How a solve ended."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    NO_INCUMBENT = "no-incumbent"


@dataclass(frozen=True, slots=True)
class Solution:
    """The best point found. `values` is (variables,), empty unless the status is optimal or feasible."""

    status: SolveStatus
    values: Array
    objective: float
    bound: float
    seconds: float
    duals: Array = field(default_factory=lambda: np.zeros(0))
    """(rows,) of a linear program: what one more unit of each row's bound adds to the objective."""

    @property
    def found(self) -> bool:
        """Whether there is a point to use."""
        return self.status in {SolveStatus.OPTIMAL, SolveStatus.FEASIBLE}


@dataclass(slots=True)
class Program:
    """min cost . x subject to lower <= A x <= upper and 0 <= x <= most, some x integer."""

    _cost: list[Array] = field(default_factory=list)
    _most: list[Array] = field(default_factory=list)
    _integer: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    _lower: list[Array] = field(default_factory=list)
    _upper: list[Array] = field(default_factory=list)
    _entries: list[tuple[Ints, Ints, Array]] = field(default_factory=list)
    variable_count: int = 0
    row_count: int = 0

    def variables(self, count: int, most: npt.ArrayLike, cost: npt.ArrayLike = 0.0, *, integer: bool = False) -> Ints:
        """Adds `count` variables of at least zero; returns their indices (count,)."""
        self._cost.append(np.broadcast_to(np.asarray(cost, float), (count,)))
        self._most.append(np.broadcast_to(np.asarray(most, float), (count,)))
        self._integer.append(np.full(count, integer))
        self.variable_count += count
        return np.arange(self.variable_count - count, self.variable_count)

    def variable(self, most: float, cost: float = 0.0, *, integer: bool = False) -> int:
        """Adds one variable and returns its index."""
        return int(self.variables(1, most, cost, integer=integer)[0])

    def rows(self, count: int, lower: npt.ArrayLike = -INFINITY, upper: npt.ArrayLike = INFINITY) -> Ints:
        """Adds `count` rows without entries; returns their indices (count,)."""
        self._lower.append(np.broadcast_to(np.asarray(lower, float), (count,)))
        self._upper.append(np.broadcast_to(np.asarray(upper, float), (count,)))
        self.row_count += count
        return np.arange(self.row_count - count, self.row_count)

    def row(self, coefficients: Mapping[int, float], *, lower: float = -INFINITY, upper: float = INFINITY) -> int:
        """Adds one row with its entries and returns its index."""
        index = int(self.rows(1, lower, upper)[0])
        self.entries(np.full(len(coefficients), index), np.array(list(coefficients)), list(coefficients.values()))
        return index

    def entries(self, rows: npt.ArrayLike, variables: npt.ArrayLike, values: npt.ArrayLike) -> None:
        """Adds to A: `values` at `rows` and `variables`, which broadcast; what meets at one place is summed."""
        at = np.broadcast_arrays(np.asarray(rows, np.intp), np.asarray(variables, np.intp), np.asarray(values, float))
        self._entries.append((at[0].ravel(), at[1].ravel(), at[2].ravel()))

    @property
    def cost(self) -> Array:
        """(variables,)"""
        return _joined(self._cost)

    @property
    def most(self) -> Array:
        """(variables,)"""
        return _joined(self._most)

    @property
    def integer(self) -> npt.NDArray[np.bool_]:
        """(variables,)"""
        return np.concatenate(self._integer) if self._integer else np.zeros(0, bool)

    def matrix(self) -> sparse.csr_matrix:
        """A, (rows, variables)."""
        empty = np.zeros(0, np.intp)
        rows, variables, values = (
            np.concatenate([entry[part] for entry in self._entries]) if self._entries else empty for part in range(3)
        )
        shape = (self.row_count, self.variable_count)
        return sparse.coo_matrix((np.asarray(values, float), (rows, variables)), shape).tocsr()

    def solve(
        self,
        time_limit_s: float,
        seed: int = 0,
        *,
        cost: Array | None = None,
        least: Array | None = None,
        most: Array | None = None,
        start: tuple[Ints, Array] | None = None,
        gap: float = RELATIVE_GAP,
        most_nodes: int | None = None,
    ) -> Solution:
        """Solves, with other costs or bounds of the variables where given.

        `start` gives some variables (N,) their values (N,) in a point to start from. `most_nodes` ends the search after
        so many branches, whatever the machine's speed. Raises WorkError when HiGHS reports an error of its own.
        """
        started = time.perf_counter()
        cost = self.cost if cost is None else cost
        unit = _unit(cost)
        lp = self.model(cost / unit, least, most)
        for presolve in ("choose", "off"):
            highs = _quiet_highs()
            left_s = max(LEAST_SECONDS, time_limit_s - (time.perf_counter() - started))
            options = {"time_limit": left_s, "mip_rel_gap": gap, "random_seed": seed % SEEDS, "presolve": presolve}
            if most_nodes is not None:
                options["mip_max_nodes"] = most_nodes
            for option, value in options.items():
                highs.setOptionValue(option, value)
            _ask(highs.passModel(lp), "the solver refused the program")
            if start is not None:
                variables, values = start
                highs.setSolution(len(variables), variables.astype(np.int32), values)
            ended = highs.run()
            found = _solution(highs, ended, self.integer, unit, time.perf_counter() - started)
            if found is not None:
                return found
        raise _trouble(highs)

    def model(
        self, cost: Array | None, least: Array | None, most: Array | None, *, relaxed: bool = False
    ) -> highspy.HighsLp:
        """The program as HiGHS takes it, with other costs and bounds where given; `relaxed` without whole numbers."""
        matrix = self.matrix()
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = self.variable_count, self.row_count
        lp.col_cost_ = self.cost if cost is None else cost
        lp.col_lower_ = np.zeros(self.variable_count) if least is None else least
        lp.col_upper_ = self.most if most is None else most
        lp.row_lower_, lp.row_upper_ = _joined(self._lower), _joined(self._upper)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = matrix.indptr.astype(np.int32)
        lp.a_matrix_.index_ = matrix.indices.astype(np.int32)
        lp.a_matrix_.value_ = matrix.data
        if not relaxed:
            kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
            lp.integrality_ = [kinds[whole] for whole in self.integer.tolist()]
        if not (np.isfinite(matrix.data).all() and np.isfinite(lp.col_cost_).all()):
            raise WorkError("the program has a coefficient that is not finite, which is a fault of the planner")
        return lp


_NONE = np.zeros(0, bool)


class GrowingLinearProgram:
    """A linear relaxation of a `Program` that stays in the solver; columns are added between solves."""

    def __init__(self, program: Program, cost: Array | None = None, most: Array | None = None) -> None:
        self._highs = _quiet_highs()
        cost = program.cost if cost is None else cost
        self._unit = _unit(cost)
        lp = program.model(cost / self._unit, None, most, relaxed=True)
        _ask(self._highs.passModel(lp), "the solver refused the program")
        self.variable_count = program.variable_count

    def add(self, cost: Array, most: Array, matrix: sparse.csc_matrix) -> Ints:
        """Adds variables of at least zero with their columns `matrix` (rows, K); returns their indices."""
        count = len(cost)
        added = self._highs.addCols(
            count,
            cost / self._unit,
            np.zeros(count),
            most,
            matrix.nnz,
            matrix.indptr[:-1].astype(np.int32),
            matrix.indices.astype(np.int32),
            matrix.data,
        )
        _ask(added, "the solver refused more columns")
        self.variable_count += count
        return np.arange(self.variable_count - count, self.variable_count)

    def bound(self, variables: Ints, least: Array, most: Array) -> None:
        """Gives `variables` (K,) other bounds."""
        self._highs.changeColsBounds(len(variables), variables.astype(np.int32), least, most)

    def coefficient(self, row: int, variable: int, value: float) -> None:
        """Gives A another entry."""
        self._highs.changeCoeff(row, variable, value)

    def solve(self, time_limit_s: float) -> Solution:
        """Solves from the last basis. Raises WorkError when HiGHS reports an error of its own."""
        started = time.perf_counter()
        # The limit counts from the solver's first run on.
        self._highs.setOptionValue("time_limit", self._highs.getRunTime() + max(LEAST_SECONDS, time_limit_s))
        found = self._run(started)
        if found is None:
            # What a long chain of bases has lost in precision a fresh factorisation has not.
            self._highs.clearSolver()
            self._highs.setOptionValue("presolve", "off")
            found = self._run(started)
            self._highs.setOptionValue("presolve", "choose")
        if found is None:
            raise _trouble(self._highs)
        return found

    def _run(self, started: float) -> Solution | None:
        ended = self._highs.run()
        return _solution(self._highs, ended, _NONE, self._unit, time.perf_counter() - started)


def _unit(cost: Array) -> float:
    """The geometric mean of the costs that count, as a power of two, so that dividing by it rounds nothing."""
    some = np.abs(cost)
    some = some[some > NO_COST * some.max(initial=0.0)]
    return float(2.0 ** np.rint(np.log2(some).mean())) if len(some) and np.isfinite(some).all() else 1.0


def _ask(answer: highspy.HighsStatus, otherwise: str) -> None:
    if answer == highspy.HighsStatus.kError:
        raise WorkError(otherwise)


def _trouble(highs: highspy.Highs) -> WorkError:
    words = highs.modelStatusToString(highs.getModelStatus())
    return WorkError(
        f"the solver stopped with {words!r} and no point that keeps the rows: rates, prices or radii that are very far "
        "apart do that, so try with less extreme ones"
    )


def _keeps(highs: highspy.Highs, integer: npt.NDArray[np.bool_], found: Solution, unit: float) -> bool:
    """Whether a point keeps rows, bounds and whole numbers and costs what is said, whatever the solver says of it.

    `integer` (variables,) or empty: which have to be whole.
    """
    lp, values = highs.getLp(), found.values
    if not np.isfinite(values).all():
        return False
    by_row = lp.a_matrix_.format_ == highspy.MatrixFormat.kRowwise
    kind = sparse.csr_matrix if by_row else sparse.csc_matrix
    parts = lp.a_matrix_.value_, lp.a_matrix_.index_, lp.a_matrix_.start_
    matrix = kind(parts, (lp.num_row_, lp.num_col_))
    rows, size = matrix @ values, 1 + np.asarray(abs(matrix) @ np.abs(values))
    reach, terms = 1 + np.abs(values), np.array(lp.col_cost_) * values
    over = [
        (np.array(lp.row_lower_) - rows) / size,
        (rows - np.array(lp.row_upper_)) / size,
        (np.array(lp.col_lower_) - values) / reach,
        (values - np.array(lp.col_upper_)) / reach,
        np.abs(values - np.rint(values))[integer],
        np.abs(terms.sum(keepdims=True) - found.objective / unit) / (1 + np.abs(terms).sum()),
    ]
    return all(bool((part <= POINT_TOLERANCE).all()) for part in over)


def _joined(parts: list[Array]) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0)


def _solution(
    highs: highspy.Highs, ended: highspy.HighsStatus, integer: npt.NDArray[np.bool_], unit: float, seconds: float
) -> Solution | None:
    """What a run came to; None where the solver does not vouch for it, or does so wrongly.

    `integer` (variables,), which have to be whole; empty for a linear program.
    """
    status, info, mixed = highs.getModelStatus(), highs.getInfo(), bool(integer.any())
    kinds, sound = _KINDS, highspy.SolutionStatus.kSolutionStatusFeasible
    nothing, optimal = np.zeros(0), status == kinds.kOptimal
    if ended == highspy.HighsStatus.kError:
        return None
    if status == kinds.kInfeasible:
        return Solution(SolveStatus.INFEASIBLE, nothing, INFINITY, INFINITY, seconds)
    if status not in {kinds.kOptimal, *CUT_SHORT}:
        return None
    if info.primal_solution_status != sound:
        if optimal:
            return None
        return Solution(SolveStatus.NO_INCUMBENT, nothing, INFINITY, -INFINITY, seconds)
    if optimal and not mixed and info.dual_solution_status != sound:
        return None
    objective = unit * info.objective_function_value
    relaxed_bound = objective if optimal else -INFINITY
    bound = unit * info.mip_dual_bound if mixed else relaxed_bound
    point = highs.getSolution()
    if not np.isfinite(objective) or np.isnan(bound):
        return None
    found = Solution(
        SolveStatus.OPTIMAL if optimal else SolveStatus.FEASIBLE,
        np.array(point.col_value),
        objective,
        min(bound, objective),
        seconds,
        unit * np.array(point.row_dual) if not mixed else nothing,
    )
    return found if _keeps(highs, integer, found, unit) else None


def _quiet_highs() -> highspy.Highs:
    with _stdout_closed():
        highs = highspy.Highs()  # type: ignore[no-untyped-call]  # highspy has no annotations
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    return highs


@contextlib.contextmanager
def _stdout_closed() -> Iterator[None]:
    """HiGHS prints its banner on the C stdout while it is constructed, which would end up in JSON output."""
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
