"""Tables of keys and values: all of them, the keys of one, and a key with its history."""

from typing import Annotated, Final, Literal

import msgspec

from mqmesh.aio import TableAdmin
from mqmesh.console.body_view import BodyKind, BodyView
from mqmesh.console.page import Name, TableArguments, TablePage, Visit, table_page
from mqmesh.console.queries.messages import shown_body
from mqmesh.errors import TopicNotFound
from mqmesh.protocol.tables import OPERATIONS, TableEntry
from mqmesh.sdk.tables.table_admin import TableStatus

KEYS_PER_PAGE: Final = 100

Key = Annotated[str, msgspec.Meta(max_length=255)]


class KeysArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of the keys of a table.

    Attributes:
        topic: Name of the table.
        prefix: Only keys that begin so.
        after: Only keys behind this one; "" for all.
    """

    topic: Name
    prefix: Key = ""
    after: Key = ""


class KeyArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of one key of a table.

    Attributes:
        topic: Name of the table.
        key: The key.
        revision: Revision whose value is shown; 0 for the newest one.
        kind: View of the value, if it can be read so; "" for the best one.
    """

    topic: Name
    key: Key = ""
    revision: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    kind: BodyKind | Literal[""] = ""


class RevisionRow(msgspec.Struct, frozen=True):
    """One revision of a key.

    Attributes:
        key: The key.
        revision: Its number.
        operation: ``PUT``, or which tombstone it is.
        stored_ms: When it was stored, ms since 1970.
        expires_ms: When the value expires, or the tombstone goes; 0 for never.
        size: Bytes of the value.
    """

    key: str
    revision: int
    operation: str
    stored_ms: int
    expires_ms: int
    size: int


class TableKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Some keys of a table.

    Attributes:
        revision: Of the table.
        rows: Keys that have a value, in order.
        after: Last key that was looked at, if there are more behind it; else "".
    """

    revision: int
    rows: list[RevisionRow]
    after: str


class KeyDetails(msgspec.Struct, frozen=True, kw_only=True):
    """One key of a table.

    Attributes:
        shown: Revision that is shown.
        history: Revisions that are kept, newest first.
        value: View of the value; None where values are not shown.
    """

    shown: RevisionRow
    history: list[RevisionRow]
    value: BodyView | None


async def tables(visit: Visit, arguments: TableArguments) -> TablePage[TableStatus]:
    """Return one page of the tables."""
    async with visit.client(TableAdmin) as admin:
        found = await admin.tables()
    return table_page(found, arguments, ("table",), sort="table")


async def keys(visit: Visit, arguments: KeysArguments) -> TableKeys:
    """Return some keys of a table."""
    async with visit.client(TableAdmin) as admin:
        found = await admin.table_keys(
            arguments.topic, arguments.prefix, after=arguments.after, limit=KEYS_PER_PAGE
        )
    return TableKeys(
        revision=found.revision,
        rows=[_row(one) for one in found.entries],
        after=found.after if found.more else "",
    )


async def key(visit: Visit, arguments: KeyArguments) -> KeyDetails:
    """Return one key, its history, and the value of one revision."""
    async with visit.client(TableAdmin) as admin:
        found = await admin.table_history(arguments.topic, arguments.key)
        history = [_row(one) for one in reversed(found.entries)]
        wanted = arguments.revision or (history[0].revision if history else 0)
        entry = await admin.table_value(arguments.topic, arguments.key, wanted) if wanted else None
    shown = next((one for one in history if one.revision == wanted), None)
    if shown is None or entry is None:
        what = f"revision {arguments.revision}" if arguments.revision else "revision"
        raise TopicNotFound(f"table {arguments.topic!r} keeps no {what} of {arguments.key!r}")
    value = shown_body(visit, entry.value, arguments.kind)
    return KeyDetails(shown=shown, history=history, value=value)


def _row(one: TableEntry) -> RevisionRow:
    operation = OPERATIONS[one.operation].value
    return RevisionRow(one.key, one.revision, operation, one.stored_ms, one.expires_ms, one.size)
