"""What Java writes is kept and not shown; the last cause of its end is known."""

from __future__ import annotations

import subprocess
import sys

from mqmesh.spark.jvm.output import JavaOutput

CAUSE = """
print('Exception in thread "main" java.lang.RuntimeException: no jar', file=sys.stderr)
print("\\tat a.b(c.java:1)", file=sys.stderr)
"""
MUCH = """
for number in range(10_000):
    print("line", number, "x" * 3_000, file=sys.stderr)
"""


def cause_of(program):
    output = JavaOutput()
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys\n{program}sys.exit(1)"], stderr=output.descriptor
    )
    output.started()
    assert process.wait() == 1
    return output.last_cause()


def test_the_last_cause_of_a_process_is_known_and_nothing_is_shown(capfd):
    assert cause_of(MUCH + CAUSE) == "java.lang.RuntimeException: no jar"
    assert capfd.readouterr() == ("", "")


def test_of_a_process_that_says_much_the_last_lines_are_kept():
    assert "no jar" not in cause_of(CAUSE + MUCH)


def test_a_process_that_says_nothing_has_no_cause():
    output = JavaOutput()
    output.started()
    assert output.last_cause() == ""
