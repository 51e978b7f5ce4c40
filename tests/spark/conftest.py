"""One Spark session a worker for all tests here; without pyspark or Java they are not collected."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from mqmesh.errors import ConfigError
from mqmesh.spark.jvm.java import find_java

HERE = Path(__file__).parent
NEEDED = ("pyspark", "delta", "deltalake", "pyarrow", "duckdb", "matplotlib", "polars")


def why_not() -> str:
    """What is missing for these tests; empty if nothing is."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed; pip install -e '.[dev,spark,spark-test]'"
    try:
        find_java()
    except ConfigError as error:
        return str(error)
    return ""


REASON = why_not()
collect_ignore_glob = ["test_*.py"] if REASON else []
if REASON:
    print(f"Spark tests are left out: {REASON}", file=sys.stderr)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything here, so that it can be run by itself and left out."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.spark)


@pytest.fixture(scope="session")
def spark():
    """The session, as users get it."""
    from mqmesh.spark.session import session

    # The better compiler would take longer than it saves here.
    options = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    extra = {"spark.driver.extraJavaOptions": options}
    spark = session(memory="1g", cores=2, is_quiet=True, extra=extra)
    yield spark
    spark.stop()
