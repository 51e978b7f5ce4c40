"""First page: is everything well, and if not, what is wrong?"""

from typing import Final

from mqmesh.console.page import ConsolePage, Route
from mqmesh.console.queries.overview import ChartArguments, overview, series
from mqmesh.protocol.commands import Right

ROUTES: Final[tuple[Route, ...]] = (
    ConsolePage(
        path="/",
        nav="Overview",
        title="Overview",
        right=Right.VIEW,
        template="overview.html",
        query=overview,
        needs_view=True,
        about="Processes, rates, backlog, disk, alarms, busiest topics, groups that lag.",
    ),
    ConsolePage(
        path="/series",
        title="Chart",
        right=Right.VIEW,
        arguments=ChartArguments,
        query=series,
        needs_view=True,
        about="Points of a chart: rates, lag, disk.",
    ),
)
