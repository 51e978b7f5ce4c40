"""Spark's data source ``mqmesh``: snapshots, and topics of a running cluster."""

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from mqmesh.errors import ConfigError

from .message_columns import COLUMNS, SUMMARY, check_columns, ddl
from .options import flag, words
from .versions import check_pyspark

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType


class MqmeshDataSource(DataSource):
    """Messages as rows; the options stand in ``docs/archive.md`` and ``docs/spark.md``.

    Spark loads this module in each process that looks for data sources, plans or reads. Modules
    that only readers and writers need are loaded when these are made.
    """

    def __init__(self, options: dict[str, str]) -> None:
        """Checks the version of Spark.

        Args:
            options: Options that the user gave.

        Raises:
            ConfigError: mqmesh does not work with it.
        """
        check_pyspark()
        super().__init__(options)

    @classmethod
    def name(cls) -> str:
        """Returns the name of the format for ``spark.read.format``."""
        return "mqmesh"

    def schema(self) -> str:
        """Returns all columns, or those of the option ``columns``, or those of a summary."""
        if flag(self.options, "summary"):
            return ", ".join(f"`{name}` {kind}" for name, kind in SUMMARY.items())
        columns = words(self.options.get("columns")) or list(COLUMNS)
        check_columns(columns)
        return ddl(columns)

    def reader(self, schema: "StructType") -> "DataSourceReader":
        """Makes a reader of snapshots (option ``path``) or of a cluster (option ``namesrv``)."""
        options = self.options
        if options.get("namesrv"):
            if options.get("path"):
                raise ConfigError(
                    "options path and namesrv exclude each other: a snapshot is read, or a cluster"
                )
            from .live.source import LiveReader

            return LiveReader(schema, options)
        from .snapshot_source import SnapshotReader, SummaryReader

        return (SummaryReader if flag(options, "summary") else SnapshotReader)(schema, options)

    def streamReader(self, schema: "StructType") -> "DataSourceStreamReader":
        """Makes a reader of topics of a running cluster, without an end."""
        from .live.source import LiveStreamReader

        return LiveStreamReader(schema, self.options)

    def writer(self, schema: "StructType", overwrite: bool) -> "DataSourceWriter":
        """Sends rows as messages."""
        from .live.sink import BatchSink

        return BatchSink(schema, self.options, overwrite)

    def streamWriter(self, schema: "StructType", overwrite: bool) -> "DataSourceStreamWriter":
        """Sends the rows of a stream as messages."""
        from .live.sink import StreamSink

        return StreamSink(schema, self.options, overwrite)
