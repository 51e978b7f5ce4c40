"""A tiny benchmark with real processes: metrics come out, and nothing stays behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness.patience import until

ROWS = {
    "ipc": "produce_128,async_128,drain_128,both_128,sync_send,latency_500,sync_flush_128,"
    "single_many,tx_throughput,ha_sync_128,ha_catch_up",
    # Another endpoint is all the difference.
    "tcp": "both_128,latency_500",
}


def command(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "rows.main", "--dir", str(folder), *arguments]


def processes_of(folder: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in text and str(os.getpid()) not in path.parts:
            found.append(text)
    return found


@pytest.mark.timeout(180)
@pytest.mark.parametrize("transport", ROWS)
def test_every_kind_of_row_gives_its_line(short_tmp_path, transport):
    rows = ROWS[transport]
    arguments = ["--rows", rows, "--scale", "0.01", "--runs", "1", "--json"]
    done = subprocess.run(
        command(short_tmp_path, *arguments, "--transport", transport),
        capture_output=True,
        text=True,
        cwd=short_tmp_path,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["row"] for line in lines] == rows.split(",")
    for line in lines:
        assert line["value"] > 0
        assert line["limit"] > 0
        assert line["cpu_s_per_million"]["broker"] >= 0
        assert line["extra"]["broker_rss_peak_mib"] >= line["extra"]["broker_rss_idle_mib"] > 0
    assert list(short_tmp_path.iterdir()) == []
    assert processes_of(short_tmp_path) == []


@pytest.mark.timeout(120)
def test_the_rows_about_delayed_messages_give_their_lines(short_tmp_path):
    rows = "delay_accuracy,delay_drain"
    done = subprocess.run(
        command(short_tmp_path, "--rows", rows, "--scale", "0.02", "--runs", "1", "--json"),
        capture_output=True,
        text=True,
        cwd=short_tmp_path,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    accuracy, drain = (json.loads(line) for line in done.stdout.splitlines())
    assert accuracy["extra"]["late_p0_ms"] >= 0
    assert accuracy["extra"]["service_restart_ms"] > 0
    assert drain["value"] > 0
    assert processes_of(short_tmp_path) == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_benchmark_leaves_nothing_behind(short_tmp_path, number):
    arguments = ["--rows", "both_128", "--scale", "5", "--json"]
    with subprocess.Popen(
        command(short_tmp_path, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=short_tmp_path,
    ) as process:
        # The bare broker runs as soon as its log stands in the folder.
        while not processes_of(short_tmp_path) or not list(short_tmp_path.glob("*/log")):
            assert process.poll() is None
        process.send_signal(number)
        process.communicate(timeout=30)
        assert process.returncode == 130
    # One that was being started is ended by the system, once its parent is gone.
    until(lambda: processes_of(short_tmp_path) == [])
    assert list(short_tmp_path.iterdir()) == []
