"""What Java writes is kept and not shown; the last cause of its end is known."""

from __future__ import annotations

import subprocess
import sys

from mqmesh.spark.jvm.output import LINES_KEPT, JavaOutput

PROGRAM = """
import sys
for number in range(10_000):
    print("line", number, "x" * 3_000, file=sys.stderr)
print('Exception in thread "main" java.lang.RuntimeException: no jar', file=sys.stderr)
print("\\tat a.b(c.java:1)", file=sys.stderr)
sys.exit(1)
"""


def test_what_a_process_writes_is_kept_within_bounds_and_its_last_cause_is_known(capfd):
    output = JavaOutput()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=output.descriptor)
    output.started()
    assert process.wait() == 1
    assert output.last_cause() == "java.lang.RuntimeException: no jar"
    assert len(output._lines) == LINES_KEPT
    assert capfd.readouterr() == ("", "")


def test_a_process_that_says_nothing_has_no_cause():
    output = JavaOutput()
    output.started()
    assert output.last_cause() == ""
