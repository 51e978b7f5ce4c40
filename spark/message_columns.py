"""Columns of messages in Spark, the archive and snapshots."""

from collections.abc import Iterable, Sequence
from typing import Final

from mqmesh.errors import ConfigError

COLUMNS: Final = {
    "topic": "string",
    "dt": "date",
    "broker": "string",
    "store_id": "bigint",
    "epoch": "bigint",
    "queue_id": "bigint",
    "queue_offset": "bigint",
    "commitlog_offset": "bigint",
    "ordinal": "int",
    "message_id": "string",
    "tag": "string",
    "keys": "array<string>",
    "properties": "map<string,string>",
    "body": "binary",
    "flag": "int",
    "sharding_key": "string",
    "born_timestamp": "timestamp",
    "store_timestamp": "timestamp",
    "born_host": "string",
    "reconsume_times": "int",
    "transaction": "boolean",
    "physical_topic": "string",
}
"""Column by column its type in Spark's words. A row is one for all time by (store_id,
commitlog_offset, ordinal), not by its message id: a retry has the id of its message."""
SUMMARY: Final = {
    "snapshot": "string",
    "start_offset": "bigint",
    "end_offset": "bigint",
    "messages": "bigint",
    "_damage": "bigint",
}
"""Columns of a summary of a snapshot."""


def ddl(columns: Sequence[str]) -> str:
    """Returns Spark's description of some columns."""
    return ", ".join(f"`{name}` {COLUMNS[name]}" for name in columns)


def check_columns(columns: Iterable[str]) -> None:
    """Refuses columns that messages do not have.

    Raises:
        ConfigError: Names the first one, and all that there are.
    """
    for name in columns:
        if name not in COLUMNS:
            raise ConfigError(f"messages have no column {name!r}; there are: {', '.join(COLUMNS)}")
