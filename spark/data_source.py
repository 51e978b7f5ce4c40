"""Spark's data source ``mqmesh``: snapshots, and topics of a running cluster."""

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from mqmesh.errors import ConfigError

from .live.sink import BatchSink, StreamSink
from .live.source import LiveReader, LiveStreamReader
from .options import flag, words
from .schema import COLUMNS, ddl
from .snapshot_source import SUMMARY, PushdownReader, SnapshotReader, SummaryReader


class MqmeshDataSource(DataSource):
    """Messages as rows; the options stand in ``docs/archive.md`` and ``docs/spark.md``."""

    @classmethod
    def name(cls) -> str:
        """Returns the name of the format for ``spark.read.format``."""
        return "mqmesh"

    def schema(self) -> str:
        """Returns all columns, or those of the option ``columns``, or those of a summary."""
        if flag(self.options, "summary"):
            return ", ".join(f"`{name}` {kind}" for name, kind in SUMMARY.items())
        columns = words(self.options.get("columns")) or list(COLUMNS)
        unknown = [name for name in columns if name not in COLUMNS]
        if unknown:
            raise ConfigError(f"messages have no column {unknown[0]!r}; there are: {list(COLUMNS)}")
        return ddl(columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Makes a reader of snapshots (option ``path``) or of a cluster (option ``namesrv``)."""
        options = self.options
        if options.get("namesrv"):
            if options.get("path"):
                raise ConfigError(
                    "options path and namesrv exclude each other: a snapshot is read, or a cluster"
                )
            return LiveReader(schema, options)
        if flag(options, "summary"):
            return SummaryReader(schema, options)
        # One that looks at filters only where the user's session passes them on.
        kind = PushdownReader if flag(options, "pushdown") else SnapshotReader
        return kind(schema, options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Makes a reader of topics of a running cluster, without an end."""
        return LiveStreamReader(schema, self.options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Sends rows as messages."""
        return BatchSink(schema, self.options, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Sends the rows of a stream as messages."""
        return StreamSink(schema, self.options, overwrite)
