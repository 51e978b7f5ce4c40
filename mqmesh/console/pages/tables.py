"""Tables of keys and values: list, keys of one, one key."""

from typing import Final

from mqmesh.console.page import ConsolePage, Route, TableArguments
from mqmesh.console.queries import tables as queries
from mqmesh.protocol.commands import Right

ROUTES: Final[tuple[Route, ...]] = (
    ConsolePage(
        path="/tables",
        nav="Tables",
        title="Tables",
        right=Right.VIEW,
        template="tables.html",
        arguments=TableArguments,
        query=queries.tables,
        about="Tables of keys and values: keys, bytes, newest revision, broker group.",
    ),
    ConsolePage(
        path="/tables/{topic}",
        title="Table {topic}",
        right=Right.SUB,
        menu="/tables",
        template="table.html",
        arguments=queries.KeysArguments,
        query=queries.keys,
        about="Keys of a table, by prefix.",
    ),
    ConsolePage(
        path="/tables/{topic}/key",
        title="Key of {topic}",
        right=Right.SUB,
        menu="/tables",
        template="table_key.html",
        arguments=queries.KeyArguments,
        query=queries.key,
        about="One key of a table: its value and the revisions that are kept.",
    ),
)
