"""Inbox and outbox in a database (``pip install 'mqmesh[sql]'``; sqlite3 alone needs no extra).

::

    from mqmesh.sql import Inbox, Outbox, OutboxRelay

    outbox = Outbox()
    with engine.begin() as connection:
        connection.execute(insert(orders).values(...))
        outbox.add(connection, Message("orders", body))

See docs/exactly-once.md.
"""

from mqmesh.sql.inbox import Inbox
from mqmesh.sql.outbox import Outbox
from mqmesh.sql.relay import OutboxRelay, RelayStatus
from mqmesh.sql.schema import add_tables, schema
from mqmesh.sql.statements import TableNames

__all__ = [
    "Inbox",
    "Outbox",
    "OutboxRelay",
    "RelayStatus",
    "TableNames",
    "add_tables",
    "schema",
]
