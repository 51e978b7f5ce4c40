"""The comparison with other systems, as far as it needs nothing that is not installed."""

import json
import subprocess
import sys
from pathlib import Path

RUN = Path(__file__).parents[2] / "benchmarks" / "peers" / "run.py"


def test_the_comparison_measures_mqmesh_in_its_rows(tmp_path: Path) -> None:
    command = [sys.executable, str(RUN), "--systems", "mqmesh", "--runs", "1", "--rows", "both"]
    command += ["--scale", "0.002", "--json", "--dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert list(rows) == ["both at once, plain", "both at once, ordinary"]
    for name, systems in rows.items():
        (value, cpu_us), *_ = systems["mqmesh"]
        assert value > 0, name
        assert cpu_us > 0, name


def test_an_unknown_system_is_one_clear_line() -> None:
    done = subprocess.run(
        [sys.executable, str(RUN), "--systems", "rabbit"], capture_output=True, text=True
    )
    assert done.returncode != 0
    assert done.stderr == "error: rabbit is none of mqmesh, redis, kafka\n"
