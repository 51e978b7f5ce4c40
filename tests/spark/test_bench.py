"""`scripts/bench --archive --quick`: it works, and what is no measurement comes out right."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_a_quick_run_has_a_row_for_each_goal(project_root, tmp_path):
    run = project_root / "benchmarks" / "archive" / "run.py"
    command = [sys.executable, str(run), "--quick", "--json", "--dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    rows = json.loads(done.stdout)
    names = [one["goal"] for one in rows]
    assert names == ["F1"] * 4 + ["F2", *["F3"] * 4, "F4", "F5", "F5", "F5", "F6", "F7"]
    wrong = [one for one in rows if one["goal"] in ("F2", "F4", "F7") and not one["met"]]
    assert wrong == []
    # What a look-up found and should not have stands behind a semicolon.
    assert [one["value"] for one in rows if one["goal"] == "F5" and ";" in one["value"]] == []
