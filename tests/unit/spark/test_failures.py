"""Errors out of Spark: what a task met is told as if it had been met here."""

from __future__ import annotations

import pytest

from mqmesh.errors import ConfigError, CorruptRecord, StorageError
from mqmesh.spark.failures import as_mqmesh_error, last_cause

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


PY4J = "An error occurred.\n: java.lang.A: first\n\tat b\n"
NO_HEAP = """Invalid maximum heap size: -Xmx1x
Error: Could not create the Java Virtual Machine.
Error: A fatal exception has occurred. Program will exit."""
NO_JAR = 'found io.delta\nException in thread "main" java.lang.R: [unresolved: x]\n\tat b'


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", ""),
        ("\n[PARSE] Syntax error at 'x'.\n\n== SQL ==\nx\n^^^", "[PARSE] Syntax error at 'x'."),
        (PY4J, "java.lang.A: first"),
        (PY4J + "Caused by: c.D: last\n\tat e\n\t... 3 more", "c.D: last"),
        (NO_JAR, "java.lang.R: [unresolved: x]"),
        (NO_HEAP, "Invalid maximum heap size: -Xmx1x"),
    ],
)
def test_the_last_cause_is_found_in_what_java_says(text, cause):
    assert last_cause(text.splitlines()) == cause
