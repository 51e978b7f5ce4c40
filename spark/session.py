"""A Spark session for mqmesh: with Java, Delta Lake, and times in UTC."""

import importlib.metadata
import importlib.util
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mqmesh.errors import ConfigError
from mqmesh.units import MIB

from .columns import with_values
from .jvm.class_archive import class_archive_options
from .jvm.jars import delta_package, fetched_jars, jar_files, remember_jars, turn_to_fetch
from .jvm.java import Java, cache_directory, find_java
from .jvm.output import JavaOutput
from .notebook import shorten_tracebacks
from .tables import MESSAGES, require_table, table_path
from .versions import check_pyspark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BLOOM: Final = "spark.hadoop.parquet.bloom.filter.enabled#message_id"

_SHORT: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""JVM options of a short session: half a million messages in 14 s, not 19; repeated, 1.2 x."""

_log = logging.getLogger(__name__)

_SETTINGS: Final = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # The default of 50 tasks a commit costs seconds on one machine.
    "spark.databricks.delta.snapshotPartitions": "2",
    # Trigger.AvailableNow also takes what came after a batch that was not finished; with an option
    # that it would ignore, the source refuses it.
    "spark.sql.streaming.triggerAvailableNowWrapper.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    # INT96, the default, has no statistics: a query by time would read everything.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.compression.codec": "zstd",
    BLOOM: "true",
    "spark.hadoop.parquet.bloom.filter.adaptive.enabled": "true",
    "spark.hadoop.parquet.page.row.count.limit": "2000",
    # Readers without Spark skip groups of rows, which otherwise are as large as files.
    "spark.hadoop.parquet.block.size": str(8 * MIB),
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}


def session(
    *,
    master: str = "",
    memory: str = "1g",
    cores: int = 2,
    jars: str | Path | None = None,
    name: str = "mqmesh",
    is_short: bool = False,
    is_quiet: bool = False,
    extra: Mapping[str, str] | None = None,
) -> "SparkSession":
    """Returns a Spark session, or the one that is running, for snapshots and the archive.

    In a notebook errors of Spark are then shown as one sentence below the user's own lines.

    Args:
        master: Address of a Spark cluster, as ``spark://host:7077``; empty for this machine alone.
        memory: Heap of the driver, as Java writes sizes.
        cores: Tasks at a time on this machine, from 1; not used with ``master``.
        jars: Directory with Delta Lake's jars; None has Spark fetch them from Maven Central, once.
        name: Name of the application.
        is_short: True for a query or two: Java starts to work sooner, and a fifth slower.
        is_quiet: Show nothing of what Java, Ivy and Spark write to standard error. An error of this
            function then has the last cause that they wrote.
        extra: Further settings of Spark; they win over those made here, but ``spark.jars.packages``
            are fetched beside Delta Lake's.

    Raises:
        ConfigError: Java, pyspark or Delta Lake is missing, or has another version.
    """
    check_pyspark()
    try:
        from pyspark.errors import PySparkRuntimeError
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise ConfigError(f"{error}: pip install 'mqmesh[spark]'") from error
    is_new = SparkSession.getActiveSession() is None
    settings = dict(_SETTINGS)
    if is_new:
        java = find_java()
        os.environ["JAVA_HOME"] = str(java.home)
        # In front of ``extraJavaOptions``, which are the user's.
        settings["spark.driver.defaultJavaOptions"] = _java_options(java, is_short=is_short)
    # Else workers run whatever python3 is on PATH, which may not have mqmesh.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ["PYTHONPATH"] = _path_with_source(os.environ.get("PYTHONPATH", ""), sys.path)
    builder = SparkSession.builder.appName(name).master(master or f"local[{cores}]")
    if not master:
        settings |= {
            "spark.driver.memory": memory,
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.sql.shuffle.partitions": str(max(cores, 1)),
            "spark.default.parallelism": str(max(cores, 1)),
        }
    files = fetched_jars(delta_package()) if jars is None else _names(Path(jars))
    output = JavaOutput() if is_quiet and is_new else None
    shorten_tracebacks()
    try:
        return _begin(builder, settings, dict(extra or {}), files, is_new, output)
    except PySparkRuntimeError as error:
        cause = (output.last_cause() if output else "") or str(error)
        hint = "" if files else "; without a way to Maven Central, give it jars (`archive jars`)"
        raise ConfigError(f"Spark does not start: {cause}{hint}") from error


def _begin(
    builder: "SparkSession.Builder",
    settings: dict[str, str],
    wanted: dict[str, str],
    files: list[str],
    is_new: bool,
    output: JavaOutput | None,
) -> "SparkSession":
    """Makes the session; of processes that have to fetch jars for it, one at a time does."""
    packages = wanted.get("spark.jars.packages", "")
    with ExitStack() as stack:
        if is_new and (packages or not files):
            stack.enter_context(turn_to_fetch())
            files = files or fetched_jars(delta_package())  # another one has fetched them meanwhile
        if files:
            settings["spark.jars"] = ",".join(files)
        else:
            wanted["spark.jars.packages"] = ",".join(filter(None, [delta_package(), packages]))
            _log.warning(
                "fetching %s from Maven Central, once (`mqmesh archive jars` keeps them for "
                "machines without a way out)",
                delta_package(),
            )
        for key, value in (settings | wanted).items():
            builder = builder.config(key, value)
        if output is not None:
            _start_quietly(builder, output)
        spark = builder.getOrCreate()
        if is_new and not files and not packages and "spark.jars" not in wanted:
            fetched = spark.sparkContext.getConf().get("spark.jars", "")
            remember_jars(delta_package(), [jar for jar in fetched.split(",") if jar])
    return spark


def _start_quietly(builder: "SparkSession.Builder", output: JavaOutput) -> None:
    """Starts Java with another standard error; the builder then finds the context that is there."""
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.logger import PySparkLogger

    # The errors that they repeat, with stacks of 9 kB, are raised as well.
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        PySparkLogger.getLogger(name).disabled = True
    conf = SparkConf().setAll(list(builder._options.items()))
    try:
        # A process has one Java, also for several sessions in turn.
        if SparkContext._gateway is None:
            gateway = launch_gateway(conf, popen_kwargs={"stderr": output.descriptor})
        else:
            gateway = SparkContext._gateway
    finally:
        output.started()
    SparkContext(conf=conf, gateway=gateway)


def _names(directory: Path) -> list[str]:
    return [str(path) for path in jar_files(directory)]


def _java_options(java: Java, *, is_short: bool) -> str:
    packages = f"pyspark {importlib.metadata.version('pyspark')} {delta_package()}"
    options = class_archive_options(java, packages, cache_directory(os.environ), time.time())
    return f"{options} {_SHORT}" if is_short else options


def _path_with_source(python_path: str, folders: Sequence[str]) -> str:
    """Returns a PYTHONPATH with which Spark finds the data source.

    It looks through folders for names of modules. In an editable install the module is in none of
    them, unless the checkout happens to be the current folder.
    """
    spec = importlib.util.find_spec("pyspark_mqmesh")
    assert spec is not None and spec.origin is not None
    folder = str(Path(spec.origin).parent)
    known = [one for one in python_path.split(os.pathsep) if one]
    if folder in known or folder in folders:
        return python_path
    return os.pathsep.join([*known, folder])


def read_archive(spark: "SparkSession", archive: str, *, values: Sequence[str] = ()) -> "DataFrame":
    """Reads the messages of an archive, for notebooks.

    Args:
        spark: A session of ``session``.
        archive: Directory of the archive.
        values: Topics whose bodies become the column ``value``, see ``columns.with_values``; empty
            for no such column.

    Raises:
        ConfigError: The directory is no archive.
    """
    require_table(archive, MESSAGES)
    frame = spark.read.format("delta").load(table_path(archive, MESSAGES))
    return with_values(frame, values) if values else frame
