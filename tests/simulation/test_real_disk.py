"""A cut of power takes what was not synced, and nothing else."""

import os
import random

from harness.simulation.real_disk import RealDisk

SYNCED, WRITTEN = b"s" * 1_000, b"w" * 1_000


def test_a_consume_queue_keeps_what_was_synced_and_loses_some_of_the_rest(tmp_path):
    seen = set()
    for seed in range(50):
        disk = RealDisk(tmp_path / str(seed), seed)
        (disk.files / "commitlog").mkdir(parents=True)
        path = disk.files / "consumequeue" / "topic" / "0-0"
        path.parent.mkdir(parents=True)
        path.write_bytes(SYNCED)
        fd = os.open(path, os.O_RDONLY)
        disk.sync(fd)
        os.close(fd)
        path.write_bytes(SYNCED + WRITTEN)
        disk.lose_power(random.Random(seed).randrange)
        left = path.read_bytes()
        assert left.startswith(SYNCED)
        seen.add((len(left), left.count(b"w") not in (0, len(WRITTEN))))
    assert {size for size, _ in seen} == {len(SYNCED), len(SYNCED) + len(WRITTEN)}
    assert any(is_torn for _, is_torn in seen)
