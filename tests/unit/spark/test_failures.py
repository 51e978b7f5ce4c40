"""Errors out of Spark: what a task met is told as if it had been met here."""

from __future__ import annotations

import pytest

from mqmesh.errors import ConfigError, CorruptRecord, StorageError
from mqmesh.spark.failures import as_mqmesh_error

STACK = """An error occurred while calling o123.save.
: org.apache.spark.SparkException: Job aborted. Traceback (most recent call last):
  File "worker.py", line 3, in read
mqmesh.errors.{kind}: {text}
    at org.apache.spark.api.python.BasePythonRunner.read
"""


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("CorruptRecord", CorruptRecord),
        ("ConfigError", ConfigError),
        ("StorageError", StorageError),
        ("Unheard", StorageError),
        ("annotations", StorageError),
    ],
)
def test_an_error_of_ours_is_found_in_the_stack_of_a_task(kind, wanted):
    found = as_mqmesh_error(RuntimeError(STACK.format(kind=kind, text="log 1 to 2 is damaged")))
    assert (type(found), str(found)) == (wanted, "log 1 to 2 is damaged")


def test_what_spark_says_is_one_line():
    found = as_mqmesh_error(RuntimeError("\n no room\n  at a.b.C\n"))
    assert (type(found), str(found)) == (StorageError, "Spark failed: RuntimeError: no room")
    assert str(as_mqmesh_error(RuntimeError())) == "Spark failed: RuntimeError: "


def test_errors_of_ours_stay():
    error = ConfigError("so")
    assert as_mqmesh_error(error) is error
