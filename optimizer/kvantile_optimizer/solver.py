"""Mixed-integer linear programs in HiGHS: rows are written one by one, the answer is a value.

A thin layer over highspy that keeps its types, its banner on stdout and its status codes in one place.
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
from numpy.typing import NDArray

from kvantile_optimizer.errors import WorkError

INFINITY = float("inf")
RELATIVE_GAP = 1e-4


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
    values: NDArray[np.float64]
    objective: float
    bound: float
    seconds: float

    @property
    def found(self) -> bool:
        """Whether there is a point to use."""
        return self.status in {SolveStatus.OPTIMAL, SolveStatus.FEASIBLE}


@dataclass(slots=True)
class Program:
    """min cost . x subject to lower <= A x <= upper and bounds, some x integer."""

    cost: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    rows: list[tuple[float, float, dict[int, float]]] = field(default_factory=list)

    def variable(self, upper: float, cost: float = 0.0, *, integer: bool = False) -> int:
        """Adds a variable of at least zero and returns its index."""
        self.cost.append(cost)
        self.lower.append(0.0)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(self, coefficients: Mapping[int, float], *, lower: float = -INFINITY, upper: float = INFINITY) -> int:
        """Adds a row and returns its index."""
        self.rows.append((lower, upper, {index: value for index, value in coefficients.items() if value != 0.0}))
        return len(self.rows) - 1

    def solve(self, time_limit_s: float, seed: int = 0) -> Solution:
        """Solves. Raises WorkError when HiGHS reports an error of its own."""
        started = time.perf_counter()
        highs = _quiet_highs()
        for option, value in (
            ("time_limit", max(0.01, time_limit_s)),
            ("mip_rel_gap", RELATIVE_GAP),
            ("random_seed", seed),
            ("threads", 1),
        ):
            highs.setOptionValue(option, value)
        lp = self._model()
        if not (np.isfinite(lp.a_matrix_.value_).all() and np.isfinite(lp.col_cost_).all()):
            raise WorkError("the program has a coefficient that is not finite, which is a fault of the planner")
        if highs.passModel(lp) == highspy.HighsStatus.kError:
            raise WorkError("the solver refused the program")
        highs.run()
        return _solution(highs, any(self.integer), time.perf_counter() - started)

    def _model(self) -> highspy.HighsLp:
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.cost), len(self.rows)
        lp.col_cost_ = np.array(self.cost)
        lp.col_lower_, lp.col_upper_ = np.array(self.lower), np.array(self.upper)
        lp.row_lower_ = np.array([row[0] for row in self.rows])
        lp.row_upper_ = np.array([row[1] for row in self.rows])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum([0, *(len(row[2]) for row in self.rows)]).astype(np.int32)
        lp.a_matrix_.index_ = np.array([index for row in self.rows for index in row[2]], dtype=np.int32)
        lp.a_matrix_.value_ = np.array([value for row in self.rows for value in row[2].values()])
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        lp.integrality_ = [kinds[whole] for whole in self.integer]
        return lp


def _solution(highs: highspy.Highs, mixed: bool, seconds: float) -> Solution:
    status = highs.getModelStatus()
    info = highs.getInfo()
    kinds = highspy.HighsModelStatus
    nothing = np.zeros(0)
    if status in {kinds.kInfeasible, kinds.kUnboundedOrInfeasible}:
        return Solution(SolveStatus.INFEASIBLE, nothing, INFINITY, INFINITY, seconds)
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        if status in {kinds.kTimeLimit, kinds.kInterrupt, kinds.kIterationLimit}:
            return Solution(SolveStatus.NO_INCUMBENT, nothing, INFINITY, -INFINITY, seconds)
        raise WorkError(f"the solver stopped with {highs.modelStatusToString(status)!r}")
    objective = info.objective_function_value
    bound = info.mip_dual_bound if mixed else objective
    optimal = status == kinds.kOptimal
    return Solution(
        SolveStatus.OPTIMAL if optimal else SolveStatus.FEASIBLE,
        np.array(highs.getSolution().col_value),
        objective,
        min(bound, objective),
        seconds,
    )


def _quiet_highs() -> highspy.Highs:
    with _stdout_closed():
        highs = highspy.Highs()  # type: ignore[no-untyped-call]  # highspy has no annotations
    highs.setOptionValue("output_flag", False)
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
