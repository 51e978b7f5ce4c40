"""Programs of one page: a web service and its worker, a FastStream application; and their tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from mqmesh.message import Message

EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENCE_S = 40


def test_their_own_tests_pass():
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *map(str, EXAMPLES.glob("test_*.py"))],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def started(program, cluster):
    return subprocess.Popen(
        [sys.executable, "-u", str(EXAMPLES / program)],
        env=os.environ | {"MQMESH_NAMESRV": cluster.namesrv_addr},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_faststream_application_ends_in_order(mqmesh_cluster):
    shop = started("faststream_app.py", mqmesh_cluster)
    try:
        assert shop.stdout is not None
        missing = {"bill of 4", "in the books", "an apple costs 3"}
        while missing:
            line = shop.stdout.readline()
            assert line, shop.communicate()
            missing = {text for text in missing if text not in line}
        shop.send_signal(signal.SIGTERM)
        _, errors = shop.communicate(timeout=PATIENCE_S)
        assert shop.returncode == 0, errors
    finally:
        shop.kill()
        shop.communicate()


def test_the_worker_ends_in_order_when_it_is_asked_to(mqmesh_cluster):
    body = b'{"id": "1", "item": "apple"}'
    mqmesh_cluster.producer().send(Message("orders", body))
    worker = started("orders_service.py", mqmesh_cluster)
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "billed order 1: apple\n"
        worker.send_signal(signal.SIGTERM)
        assert worker.communicate(timeout=PATIENCE_S) == ("", "")
        assert worker.returncode == 0
    finally:
        worker.kill()
        worker.communicate()
