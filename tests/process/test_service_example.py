"""The program of one page: a web service, a worker, and their test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from mqmesh.message import Message

EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENCE_S = 40


def test_its_own_test_passes():
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(EXAMPLES / "test_orders_service.py")],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_the_worker_ends_in_order_when_it_is_asked_to(mqmesh_cluster):
    body = b'{"id": "1", "item": "apple"}'
    mqmesh_cluster.producer().send(Message("orders", body))
    worker = subprocess.Popen(
        [sys.executable, "-u", str(EXAMPLES / "orders_service.py")],
        env=os.environ | {"MQMESH_NAMESRV": mqmesh_cluster.namesrv_addr},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "billed order 1: apple\n"
        worker.send_signal(signal.SIGTERM)
        assert worker.communicate(timeout=PATIENCE_S) == ("", "")
        assert worker.returncode == 0
    finally:
        worker.kill()
        worker.communicate()
