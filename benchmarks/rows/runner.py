"""Runs rows: limit and mqmesh in turn, so that a machine's moods fall on both."""

from collections.abc import Callable, Sequence

from mqmesh.errors import InvalidArgument
from rows.report import Line, summarize
from rows.rows import ROWS, Row
from rows.sides import Conditions, Sample

OnStep = Callable[[str], None]
"""Told what begins: row, side and number of the run."""


def select_rows(names: Sequence[str]) -> list[Row]:
    """Rows by name; all but the optional ones for no name.

    Args:
        names: Whole names, or the beginning of several.

    Raises:
        InvalidArgument: A name fits no row.
    """
    if not names:
        return [row for row in ROWS.values() if not row.optional]
    chosen: dict[str, Row] = {}
    for name in names:
        found = (
            [ROWS[name]] if name in ROWS else [r for r in ROWS.values() if r.name.startswith(name)]
        )
        if not found:
            raise InvalidArgument(f"there is no row {name!r}; there are {', '.join(ROWS)}")
        chosen.update((row.name, row) for row in found)
    return list(chosen.values())


def count_steps(rows: Sequence[Row], runs: int) -> int:
    """How often ``on_step`` will be called."""
    return sum(runs * (1 if row.limit is None else 2) for row in rows)


def run_row(row: Row, conditions: Conditions, runs: int, on_step: OnStep) -> Line:
    """Runs one row.

    Args:
        row: Which.
        conditions: How.
        runs: How often each side, at least 1.
        on_step: Told before each run.

    Raises:
        BenchError: A process failed, or a count did not come out right.
    """
    limits: list[Sample] = []
    products: list[Sample] = []
    for number in range(1, runs + 1):
        if row.limit is not None:
            on_step(f"{row.name}: limit, run {number} of {runs}")
            limits.append(row.limit(conditions))
        on_step(f"{row.name}: mqmesh, run {number} of {runs}")
        products.append(row.product(conditions))
    return summarize(row, products, limits)
