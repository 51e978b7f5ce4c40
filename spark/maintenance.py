"""Queries of an archive by Spark, its verification, vacuum, and jars."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from mqmesh.errors import ConfigError

from .columns import register_functions, with_values
from .failures import last_cause
from .jvm.jars import jar_path, lacking_jars
from .tables import (
    INGESTS,
    KEYS,
    MESSAGES,
    open_table,
    require_table,
    sources,
    table_path,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

UNCOMMITTED_HOURS: Final = 24
"""Age from which a file that was never committed goes; a command that takes longer may fail."""
_CONTENT: Final = (
    "count(*) AS found, count(DISTINCT store_id, broker, commitlog_offset, ordinal) AS different, "
    "coalesce(bit_xor(xxhash64(store_id, broker, commitlog_offset, ordinal, body)), 0) AS content"
)


class Content(msgspec.Struct, frozen=True):
    """Content of a table of messages, in three numbers.

    Attributes:
        rows: Messages.
        distinct: Different places in logs that the messages come from.
        content: Hash over places and bodies, in no order.
    """

    rows: int
    distinct: int
    content: int


class ArchiveReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a check of an archive.

    Attributes:
        sound: Every message is there once, and its keys can be looked up, and no others.
        rows: Messages.
        duplicates: Rows that repeat a message.
        keys_missing: Keys of messages that the table of keys does not have.
        keys_left: Keys of messages that are gone.
        gaps: Sentences about stretches of logs that never came in.
    """

    sound: bool
    rows: int
    duplicates: int
    keys_missing: int
    keys_left: int
    gaps: list[str]


def content_of(spark: "SparkSession", archive: str) -> Content:
    """Counts and hashes all messages."""
    row = spark.sql(f"SELECT {_CONTENT} FROM {_table(archive, MESSAGES)}").collect()[0]
    return Content(row["found"], row["different"], row["content"])


def vacuum(archive: str, *, hours: int, dry_run: bool) -> list[str]:
    """Removes files that no version of the last hours needs; without Spark.

    Files that no version had may be those of a command that is still to commit them: they stay for
    ``UNCOMMITTED_HOURS`` at least.

    Args:
        archive: Directory of the archive.
        hours: Readers that began earlier may fail; from 1.
        dry_run: Only list the files.

    Returns:
        The files, by table.
    """
    require_table(archive, MESSAGES)
    gone: dict[str, None] = {}
    for name in (MESSAGES, KEYS, INGESTS):
        table = open_table(archive, name)
        if table is None:
            continue
        # First those that the log says were removed, then all that it does not name.
        for is_full, age in ((False, hours), (True, max(hours, UNCOMMITTED_HOURS))):
            removed = table.vacuum(
                retention_hours=age, dry_run=dry_run, enforce_retention_duration=False, full=is_full
            )
            gone |= dict.fromkeys(f"{name}/{path}" for path in removed)
    return list(gone)


def verify(spark: "SparkSession", archive: str) -> ArchiveReport:
    """Counts all messages and compares the keys with them."""
    require_table(archive, MESSAGES)
    found = content_of(spark, archive)
    missing = left = 0
    wanted = (
        f"SELECT store_id, broker, commitlog_offset, ordinal, explode(keys) AS key "
        f"FROM {_table(archive, MESSAGES)}"
    )
    if open_table(archive, KEYS) is not None:
        there = (
            f"SELECT store_id, broker, commitlog_offset, ordinal, key FROM {_table(archive, KEYS)}"
        )
        missing = spark.sql(f"SELECT count(*) FROM ({wanted} EXCEPT {there})").collect()[0][0]
        left = spark.sql(f"SELECT count(*) FROM ({there} EXCEPT {wanted})").collect()[0][0]
    else:
        missing = spark.sql(f"SELECT count(*) FROM ({wanted})").collect()[0][0]
    duplicates = found.rows - found.distinct
    return ArchiveReport(
        sound=not (duplicates or missing or left),
        rows=found.rows,
        duplicates=duplicates,
        keys_missing=int(missing),
        keys_left=int(left),
        gaps=gaps_of(archive),
    )


def gaps_of(archive: str) -> list[str]:
    """Returns sentences about stretches that never came in."""
    return [
        f"{source.broker}: {step.gap_before:,} bytes of log before {step.from_offset}"
        for source in sources(archive)
        for step in source.gaps
    ]


def query(spark: "SparkSession", archive: str, text: str, *, values: Sequence[str] = ()) -> Any:
    """Runs a query over the views ``messages``, ``keys`` and ``ingests``.

    Args:
        spark: A session.
        archive: Directory of the archive.
        text: One SELECT.
        values: Topics whose bodies become the column ``value`` of ``messages``, see
            ``with_values``; empty for no such column.

    Returns:
        A data frame.

    Raises:
        ConfigError: The directory is no archive, or the text is no query.
    """
    from pyspark.errors import PySparkException

    require_table(archive, MESSAGES)
    for table in (MESSAGES, KEYS, INGESTS):
        # Delta Lake's first look at a table takes a second and more.
        is_named = re.search(rf"\b{table}\b", text, re.IGNORECASE)
        if is_named and open_table(archive, table) is not None:
            frame = spark.read.format("delta").load(table_path(archive, table))
            if table == MESSAGES and values:
                frame = with_values(frame, values)
            frame.createOrReplaceTempView(table)
    register_functions(spark)
    try:
        check_reads_only(spark, text)
        return spark.sql(text)
    except PySparkException as error:
        cause = last_cause(str(error).splitlines())
        raise ConfigError(f"Spark cannot do that: {cause}") from error


def check_reads_only(spark: "SparkSession", text: str) -> None:
    """Refuses statements that would write, before they run.

    Raises:
        ConfigError: The text is a command.
    """
    jvm: Any = spark._jvm
    plan = spark._jsparkSession.sessionState().sqlParser().parsePlan(text)
    kinds = [
        jvm.java.lang.Class.forName(f"org.apache.spark.sql.catalyst.plans.logical.{name}")
        for name in ("Command", "ParsedStatement")
    ]
    todo = [plan]
    while todo:
        node = todo.pop()
        if any(kind.isInstance(node) for kind in kinds):
            raise ConfigError("archive sql writes nothing: only SELECT")
        children = node.children()
        todo += [children.apply(number) for number in range(children.size())]


def copy_jars(spark: "SparkSession", directory: Path) -> list[str]:
    """Copies the jars of a session that pyspark lacks, for machines without a way out.

    Args:
        spark: A session that fetched them.
        directory: For the jars; made if need be.

    Returns:
        Their names.
    """
    directory.mkdir(parents=True, exist_ok=True)
    entries = spark.sparkContext.getConf().get("spark.jars", "").split(",")
    paths = [
        Path(path) for path in lacking_jars(str(jar_path(entry)) for entry in entries if entry)
    ]
    for path in paths:
        shutil.copyfile(path, directory / path.name)
    return sorted(path.name for path in paths)


def _table(archive: str, name: str) -> str:
    path = table_path(archive, name)
    if "`" in path:
        raise ConfigError(f"{archive}: an archive's path may have no backtick")
    return f"delta.`{path}`"
