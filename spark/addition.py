"""Commits of files to a table of an archive, together with the position of their store."""

import json
from pathlib import Path
from typing import Final

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction

from mqmesh.errors import ConfigError, StorageError
from mqmesh.storage.files.atomic_file import sync_directory

from .partition_files import NewFile, check_files, delete_files, is_local
from .tables import PARTITIONS, LogStretch, open_table, table_path

COMMITS: Final = 100
"""Attempts of a commit while others commit, too."""
_FEATURES: Final = frozenset(
    {
        "appendOnly",
        "invariants",
        "checkConstraints",
        "changeDataFeed",
        "generatedColumns",
        "deletionVectors",
        "timestampNtz",
    }
)
"""Features of tables that an append need not know, or that are refused where they are in use."""


class Moved(StorageError):
    """Raised when another ingest has taken the same stretch in meanwhile."""


class Addition:
    """LogStretch of a store's log on its way into a table.

    A commit must follow the very version of the table in which the position of the store was read:
    with ``max_commit_retries`` of 0 Delta Lake's Rust library refuses it otherwise. Then the
    position is read again: if it is the same, the files are committed as they are; if not, another
    ingest was quicker, and the files are not needed. So no present file has to be replaced.
    """

    def __init__(self, archive: str, name: str, schema: pa.Schema, stretch: LogStretch) -> None:
        """Opens the table, which is made if need be.

        Args:
            archive: Directory of the archive.
            name: Table.
            schema: Columns of the rows that are to come.
            stretch: LogStretch that they are of.

        Raises:
            ConfigError: The table has features that an append would harm.
            Moved: A part of the stretch is there.
        """
        self.place = table_path(archive, name)
        self._archive = archive
        self._name = name
        self._schema = schema
        self._stretch = stretch
        self._before = self._open().transaction_version(stretch.application)
        if (self._before or 0) > stretch.from_offset:
            raise self._moved(self._before)

    def commit(self, files: list[NewFile]) -> None:
        """Makes files a part of the table, and moves the position behind the stretch.

        Raises:
            Moved: Another ingest has moved the position; the files are deleted.
            StorageError: Others commit all the time, or files are gone.
        """
        try:
            table = self.reopen()
        except Moved:
            delete_files(self.place, files)
            raise
        # From here on files stay: a commit whose answer is lost may have come through.
        actions = [action_of(file) for file in files]
        transaction = Transaction(self._stretch.application, self._stretch.to_offset)
        for _ in range(COMMITS):
            check_files(self.place, files)
            try:
                table.create_write_transaction(
                    actions,
                    "append",
                    table.schema(),
                    PARTITIONS[self._name],
                    commit_properties=CommitProperties(
                        app_transactions=[transaction], max_commit_retries=0
                    ),
                )
            except CommitFailedError as error:
                last = error
                table = self.reopen()
            else:
                return
        raise StorageError(f"{self.place}: others committed before each of {COMMITS} tries: {last}")

    def reopen(self) -> DeltaTable:
        """Opens the newest version of the table, in which the position must be as it was.

        Raises:
            Moved: Another ingest has moved the position.
        """
        table = self._open()
        position = table.transaction_version(self._stretch.application)
        if position != self._before:
            raise self._moved(position)
        return table

    def _moved(self, position: int | None) -> Moved:
        return Moved(f"{self._archive} is at {position} of {self._stretch.broker}")

    def _open(self) -> DeltaTable:
        table = open_or_make(self._archive, self._name, self._schema)
        self._check(table)
        return table

    def _check(self, table: DeltaTable) -> None:
        fields = json.loads(table.schema().to_json())["fields"]
        metadata = table.metadata()
        missing = set(self._schema.names) - {field["name"] for field in fields}
        strange = [
            *sorted(set(table.protocol().writer_features or ()) - _FEATURES),
            *(key for key in metadata.configuration if key.startswith("delta.constraints.")),
            *(key for one in fields for key in one["metadata"] if key.startswith("delta.")),
        ]
        problem = ""
        if missing:
            problem = f"has no column {min(missing)!r}"
        elif metadata.partition_columns != PARTITIONS[self._name]:
            problem = f"is divided by {', '.join(metadata.partition_columns) or 'nothing'}"
        elif strange:
            problem = f"has {strange[0]!r}"
        if problem:
            raise ConfigError(f"{self.place}: the table {problem}; an ingest cannot add to it")


def open_or_make(archive: str, name: str, schema: pa.Schema) -> DeltaTable:
    """Opens a table, which is made with some columns if need be."""
    table = open_table(archive, name)
    if table is not None:
        return table
    place = table_path(archive, name)
    if is_local(place):
        path = Path(place)
        new = [one for one in (path, *path.parents) if not one.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for one in new:
            sync_directory(one.parent)
    try:
        return DeltaTable.create(place, schema, partition_by=PARTITIONS[name])
    except DeltaError:
        # Another process may have made it meanwhile.
        table = open_table(archive, name)
        if table is None:
            raise
        return table


def action_of(file: NewFile) -> AddAction:
    """Returns the entry of a commit for a new file."""
    return AddAction(
        path=file.path,
        size=file.size,
        partition_values=file.values,
        modification_time=file.modified_ms,
        data_change=True,
        stats=file.statistics,
    )
