"""What a checkpoint promises about the consume queues."""

from __future__ import annotations

import pytest
from harness.store_files import StoreFiles, settle

from mqmesh.storage.queues import consume_queues
from mqmesh.testing.store_contract import NOW, make_batch, read_queue


@pytest.fixture
def files(tmp_path):
    files = StoreFiles(tmp_path / "store")
    yield files
    files.close()


def test_on_a_slow_disk_no_queue_is_left_out(files, monkeypatch):
    # Each step gives up after one queue, as when opening a file takes longer than it may.
    monkeypatch.setattr(consume_queues, "MOST_WRITING_NS", -1)
    store = files.open()
    for queue_id in range(5):
        store.put([make_batch([f"queue {queue_id}"], queue_id=queue_id)], NOW)
    settle(store)
    killed = files.copy().open()
    for queue_id in range(5):
        assert read_queue(killed, queue_id=queue_id) == [f"queue {queue_id}"]
    killed.close()
