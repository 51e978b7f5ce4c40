"""About the console, and the page of its API."""

from typing import Final

from mqmesh.console.page import ConsolePage, NoArguments, Route
from mqmesh.console.queries.about import about, api
from mqmesh.protocol.commands import Right

ROUTES: Final[tuple[Route, ...]] = (
    ConsolePage(
        path="/about",
        nav="About",
        title="About",
        right=Right.NONE,
        template="about.html",
        arguments=NoArguments,
        query=about,
        about="Versions and licences.",
    ),
    ConsolePage(
        path="/api",
        nav="API",
        title="API",
        right=Right.NONE,
        template="api.html",
        arguments=NoArguments,
        query=api,
        about="All paths of the API with their arguments and rights.",
    ),
)
