"""What docs/programs.md says of servers and schedulers that fork, carried out."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.commands import free_ports

from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.testing.processes import ProcessCluster

PAGE = Path(__file__).parents[2] / "docs" / "programs.md"
PATIENCE_S = 40

# Celery's prefork pool as far as processes go: it forks behind the import, calls who connected to
# its signals, and leaves by os._exit. https://docs.celeryq.dev/en/stable/userguide/signals.html
CELERY = """
import os

class Signal:
    def __init__(self):
        self.receivers = []
    def connect(self, receiver):
        self.receivers.append(receiver)
        return receiver
    def send(self):
        for receiver in self.receivers:
            receiver(sender=None)

worker_process_init, worker_process_shutdown = Signal(), Signal()

def prefork(count, work):
    children = []
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            worker_process_init.send()
            work()
            worker_process_shutdown.send()
            os._exit(0)
        children.append(pid)
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[ProcessCluster]:
    with ProcessCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        with AdminClient(cluster.namesrv_addr) as admin:
            for topic in ("orders", "squares", "tasks"):
                admin.create_topic(topic)
        yield cluster


def block(word: str, cluster: ProcessCluster) -> str:
    """The program of the page that has a word in it."""
    (found,) = [b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if word in b]
    return found.replace("NAMESRV", repr(cluster.namesrv_addr))


def stored(cluster: ProcessCluster, topic: str) -> int:
    with AdminClient(cluster.namesrv_addr) as admin:
        queues = [q for one in admin.topic_stats(topic).values() for q in one.queues]
    return sum(queue.max_queue_offset for queue in queues)


def test_multiprocessing(cluster, tmp_path):
    program = tmp_path / "numbers_program.py"
    program.write_text(block("multiprocessing.Pool", cluster))
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert stored(cluster, "squares") == 1_000


def test_celery(cluster, tmp_path):
    (tmp_path / "celery").mkdir()
    (tmp_path / "celery" / "__init__.py").touch()
    (tmp_path / "celery" / "signals.py").write_text(CELERY)
    (tmp_path / "tasks.py").write_text(block("celery.signals", cluster))
    program = """
import celery.signals, mqmesh, tasks
def work():
    for n in range(500):
        tasks.producer.send_async(mqmesh.Message("tasks", b"%d" % n))
celery.signals.prefork(3, work)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert stored(cluster, "tasks") == 1_500


def test_gunicorn(cluster, tmp_path):
    (tmp_path / "shop.py").write_text(block("gunicorn", cluster))
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "gunicorn", "--preload", "--workers", "2"]
    server = subprocess.Popen(
        [*command, "--bind", f"127.0.0.1:{port}", "shop:app"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        log = [next(line for line in server.stderr if "Booting worker" in line)]
        ids = {
            urllib.request.urlopen(f"http://127.0.0.1:{port}/{n}", timeout=PATIENCE_S).read()
            for n in range(20)
        }
        server.terminate()
        log += server.stderr
        assert server.wait(PATIENCE_S) == 0
    finally:
        server.kill()
        server.wait()
        server.stderr.close()  # type: ignore[union-attr]
    assert len(ids) == stored(cluster, "orders") == 20
    assert "Traceback" not in "".join(log)
