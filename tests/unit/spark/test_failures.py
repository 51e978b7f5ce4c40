"""Errors out of Spark: what a task met is told as if it had been met here."""

from __future__ import annotations

import pytest

from mqmesh.errors import ConfigError, CorruptRecord, DiskFull, StorageError
from mqmesh.spark.failures import (
    as_mqmesh_error,
    errors_of_libraries,
    last_cause,
    place_error,
)

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


ARROW = "\x1b[31m\u21b3\x1b[0m"
REFUSED = f"""Kernel error -> Generic S3 error
  {ARROW} Error performing GET http://127.0.0.1:1/bucket/x in 3.5s, after 10 retries
   {ARROW} tcp connect error
    {ARROW} Connection refused (os error 111)
"""
NO_BUCKET = f"""Kernel error -> Generic S3 error
  {ARROW} 404 Not Found
   {ARROW} <?xml version="1.0" encoding="utf-8"?>
<Error><Code>NoSuchBucket</Code><Message>The specified bucket does not exist</Message></Error>
"""


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (OSError(28, "No space left on device"), DiskFull, "No space left on device"),
        (OSError(REFUSED), StorageError, "tcp connect error: Connection refused (os error 111)"),
        (OSError(NO_BUCKET), StorageError, "The specified bucket does not exist"),
        (OSError(), StorageError, ""),
    ],
)
def test_an_error_about_a_place_names_its_last_cause(error, kind, text):
    found = place_error(error, "cannot open s3://bucket/x")
    assert (type(found), str(found)) == (kind, f"cannot open s3://bucket/x: {text}")


def test_an_error_about_a_bucket_is_one_of_ours_and_one_about_a_file_stays():
    one_line = r"\Acannot reach the archive: tcp .*111\)\Z"
    with pytest.raises(StorageError, match=one_line), errors_of_libraries():
        raise OSError(REFUSED)
    for error in (FileExistsError(17, "File exists", "out"), ZeroDivisionError("a bug")):
        with pytest.raises(type(error)) as caught, errors_of_libraries():
            raise error
        assert caught.value is error


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
