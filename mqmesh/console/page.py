"""Routes of the console: pages, actions and downloads, and the arguments of each.

A page is an arguments struct, a query and a template. The query gets a ``Visit`` and the arguments,
and returns a struct, which the template shows and the JSON twin at ``/api/v1`` returns.
"""

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any, Final, Generic, Protocol, TypeVar

import msgspec

from mqmesh.aio import AdminClient
from mqmesh.clock import Clock
from mqmesh.console.cluster_view import ClusterReadings, ClusterView
from mqmesh.console.config import ConsoleConfig
from mqmesh.console.rights import UserRights
from mqmesh.console.series import SeriesBook
from mqmesh.console.tails import Tails
from mqmesh.console.users import ConsoleUser
from mqmesh.protocol.commands import Right

ROWS_PER_PAGE: Final = 50
MAX_TEXT: Final = 1_024
"""Longest text of an argument, such as a search, in characters."""

_T = TypeVar("_T")
_C = TypeVar("_C", bound=AdminClient)

Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
Ms = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)]
"""Ms since 1970, UTC."""
PageNumber = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class Lender(Protocol):
    """Source of administration clients."""

    def lend(
        self, credentials: str, kind: type[_C], broker_name: str = ""
    ) -> AbstractAsyncContextManager[_C]:
        """Lends a client, used by one task at a time.

        Args:
            credentials: File of the user's keys.
            kind: Type of the client, of ``mqmesh.aio``.
            broker_name: The only broker group that the client sends requests to; "" for all.
        """


class Visit(msgspec.Struct, frozen=True):
    """Means of one request, which a query or an action works with.

    Attributes:
        user: Console user, by whose credentials all requests are sent.
        rights: Rights of the user, to grey out routes that would be refused.
        view: Last look at the cluster, by the console's own credentials; an empty one for users
            who may not see everything.
        lender: Source of administration clients.
        config: Settings of the console.
        clock: Source of time.
        cluster: Name of the cluster; "" for the console's own one.
        namesrv_addr: Its name servers.
        sees_all: The user may see everything.
        readings: Those of the last look by topic and group; None where ``view`` is empty.
        series: Histories of readings, for charts; None for users who may not see everything.
        tails: Live tails of topics.
        routes: All routes of the console.
    """

    user: ConsoleUser
    rights: UserRights
    view: ClusterView
    lender: Lender
    config: ConsoleConfig
    clock: Clock
    cluster: str = ""
    namesrv_addr: list[str] = []
    sees_all: bool = True
    readings: ClusterReadings | None = None
    series: SeriesBook | None = None
    tails: Tails | None = None
    routes: "Sequence[Route]" = ()

    def client(self, kind: type[_C], broker_name: str = "") -> AbstractAsyncContextManager[_C]:
        """Lends an administration client that has the user's credentials.

        ::

            async with visit.client(GroupAdmin) as admin:
                progress = await admin.progress(arguments.group)
        """
        return self.lender.lend(self.user.credentials, kind, broker_name)


class NoArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of a page that needs none."""


class TableArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of a page with a table; those of a page inherit them.

    Attributes:
        page: Number of the page, from 1.
        sort: Field of a row to sort by; with a ``-`` in front, greatest first. "" for the
            query's own order.
        search: Only rows with this text in one of the searched fields; case does not matter.
    """

    page: PageNumber = 1
    sort: Text = ""
    search: Text = ""


class TablePage(msgspec.Struct, Generic[_T], frozen=True, kw_only=True):
    """One page of a table.

    Attributes:
        rows: Rows of this page, 50 at most.
        total: Rows of all pages, after the search.
        page: Number of this page, from 1.
        pages: Number of pages.
        sort: As it is sorted, as in ``TableArguments``.
        search: As it was searched.
        cut: Reason why rows are missing, and how to narrow the search; "" if none are.
    """

    rows: list[_T]
    total: int
    page: int = 1
    pages: int = 1
    sort: str = ""
    search: str = ""
    cut: str = ""


def table_page(
    rows: Iterable[_T],
    arguments: TableArguments,
    searched: Sequence[str] = (),
    *,
    sort: str = "",
    cut: str = "",
) -> TablePage[_T]:
    """Searches, sorts and cuts rows to one page.

    Args:
        rows: All of them.
        arguments: Page, order and search; an order by an unknown field counts as none.
        searched: Fields with the texts to search in.
        sort: Order where ``arguments`` names none.
        cut: As of ``TablePage``.
    """
    found = list(rows)
    if arguments.search:
        wanted = arguments.search.casefold()
        found = [
            row
            for row in found
            if any(wanted in str(getattr(row, field)).casefold() for field in searched)
        ]
    order = arguments.sort or sort
    field = order.removeprefix("-")
    if found and field in type(found[0]).__struct_fields__:  # type: ignore[attr-defined]
        found.sort(key=lambda row: _sortable(getattr(row, field)), reverse=order.startswith("-"))
    pages = max(1, math.ceil(len(found) / ROWS_PER_PAGE))
    page = min(arguments.page, pages)
    begin = (page - 1) * ROWS_PER_PAGE
    return TablePage(
        rows=found[begin : begin + ROWS_PER_PAGE],
        total=len(found),
        page=page,
        pages=pages,
        sort=order,
        search=arguments.search,
        cut=cut,
    )


def _sortable(value: Any) -> tuple[bool, Any]:
    """Return a key that has unknown values first, and texts in any case side by side."""
    known = value is not None
    return known, value.casefold() if isinstance(value, str) else value if known else 0


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Common part of pages, actions and downloads.

    Attributes:
        path: As of Starlette: ``/topics/{topic}``; a placeholder is a field of ``arguments``.
        title: Heading or label; fields of the arguments stand in it as ``{topic}``.
        right: Right that the user needs; of the topic and group that the arguments name. The
            console greys out routes that the user lacks it for; brokers check it.
        arguments: Type of the arguments, from path, query string or form.
        about: One sentence for the page of the API.
    """

    path: str
    title: str
    right: Right
    arguments: type[msgspec.Struct] = NoArguments
    about: str = ""


class ConsolePage(Route, frozen=True, kw_only=True):
    """A page, and its JSON twin.

    Attributes:
        template: File in ``templates/``; "" for a page that has only the JSON twin.
        query: Makes the result.
        menu: Entry of the navigation that it belongs to, as ``/topics``; "" for its own path.
        nav: Name in the navigation; "" for a page that is not in it.
        needs_view: The result comes of ``Visit.view``, so the console itself checks that the user
            may see everything.
    """

    template: str = ""
    query: Callable[[Visit, Any], Awaitable[Any]]
    menu: str = ""
    nav: str = ""
    needs_view: bool = False


class ActionTable(msgspec.Struct, frozen=True, kw_only=True):
    """Table in a plan or a result.

    Attributes:
        columns: Headings.
        rows: Cells, as many as headings.
    """

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


class ActionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Sentence that says what an action will do, before it is done.

    Attributes:
        summary: One sentence: "Topic orders gets 4 more queues".
        details: Further sentences.
        table: Table of details, such as numbers by queue.
        warning: Sentence about a loss, or an effect that cannot be undone; "" for none.
        typed: Name that must be typed first, where messages can be lost; "" for none.
        possible: False where there is nothing to do; ``summary`` says why.
    """

    summary: str
    details: tuple[str, ...] = ()
    table: ActionTable | None = None
    warning: str = ""
    typed: str = ""
    possible: bool = True


class ActionResult(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of an action.

    Attributes:
        summary: One sentence: "3 resent, 2 were before".
        details: Further sentences.
        table: Outcomes by queue or message.
        ok: False if a part of it failed.
        next: Path of the page to go on at, such as ``/topics``; "" for the page it began on.
    """

    summary: str
    details: tuple[str, ...] = ()
    table: ActionTable | None = None
    ok: bool = True
    next: str = ""


class ConsoleAction(Route, frozen=True, kw_only=True):
    """An action: a form where arguments are missing, a plan, a confirmation, a result.

    Attributes:
        plan: Describes the effect; changes nothing.
        do: Does it.
        initial: Values that the form begins with, by field; None for the defaults.
        danger: Messages or settings can be lost: the button is red.
        verb: Label of the button that does it: "Delete".
        template: File in ``templates/`` for the form; "" for the one made of ``arguments``.
    """

    plan: Callable[[Visit, Any], Awaitable[ActionPlan]]
    do: Callable[[Visit, Any], Awaitable[ActionResult]]
    verb: str
    initial: Callable[[Visit, dict[str, str]], Awaitable[dict[str, Any]]] | None = None
    danger: bool = False
    template: str = ""


class ConsoleDownload(Route, frozen=True, kw_only=True):
    """A file to download, as ``application/octet-stream``.

    Attributes:
        filename: Fixed name of the file.
        content: Yields its parts.
    """

    filename: str
    content: Callable[[Visit, Any], AsyncIterator[bytes]]
