"""`scripts/bench --archive` without Spark; tests/spark/test_bench.py runs all of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ARCHIVE = Path(__file__).parents[2] / "benchmarks" / "archive"


def run(program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs a program of the benchmark."""
    command = [sys.executable, str(ARCHIVE / program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("scale", ["0", "-1", "101", "nan", "much"])
def test_a_scale_that_is_none_is_refused(scale: str) -> None:
    done = run("run.py", f"--scale={scale}")
    assert done.returncode == 2
    assert "--scale" in done.stderr.splitlines()[-1]


def test_the_core_loads_without_the_packages_of_the_archive() -> None:
    done = run("core_modules.py")
    assert done.returncode == 0, done.stderr
    count, failures = json.loads(done.stdout)
    assert count > 200
    assert failures == []
