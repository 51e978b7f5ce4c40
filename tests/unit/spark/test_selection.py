"""What a reader of snapshots selects, and the tasks that read it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness.indexed_store import IndexedStore
from harness.snapshots import take_snapshot

from mqmesh.errors import ConfigError, CorruptRecord
from mqmesh.message import Message
from mqmesh.spark.selection import Selection, plan, read_task
from mqmesh.storage.tools.snapshot_reading import LogRange, Snapshot
from mqmesh.testing.store_contract import NOW

COUNT = 60
TOPICS = ("orders", "orders-eu", "pay", "%RETRY%g", "SCHEDULE_TOPIC_XXXX")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    root = tmp_path_factory.mktemp("selection")
    store = IndexedStore(root / "store")
    try:
        for number in range(COUNT):
            topic = TOPICS[number % len(TOPICS)]
            message = Message(
                "orders", f"{number} {'x' * 3_000}".encode(), keys=[f"k-{number}", "all"]
            )
            store.put([message], topic=topic, stored_ms=NOW + number)
        store.catch_up()
        directory, _ = take_snapshot(store, root / "store", root / "snapshots")
    finally:
        store.close()
    return str(directory)


def numbers(path, wanted, **options):
    snapshot = Snapshot(Path(path))
    return sorted(
        int(message.body.split()[0])
        for task in plan(path, wanted, **options)
        for _, messages in read_task(snapshot, task, wanted)
        for message in messages
    )


def of(*topics):
    return [n for n in range(COUNT) if TOPICS[n % len(TOPICS)] in topics]


@pytest.mark.parametrize("range_bytes", [1, 10_000, 1 << 30])
def test_system_topics_are_left_out_unless_they_are_asked_for(path, range_bytes):
    all_but = of("orders", "orders-eu", "pay")
    assert numbers(path, Selection(), range_bytes=range_bytes) == all_but
    everything = Selection(include_system=True)
    assert numbers(path, everything, range_bytes=range_bytes) == list(range(COUNT))


@pytest.mark.parametrize(
    ("topics", "found"),
    [
        (("orders",), ("orders",)),
        (("orders*",), ("orders", "orders-eu")),
        (("orders*", "pay"), ("orders", "orders-eu", "pay")),
        (("%RETRY%g",), ("%RETRY%g",)),
        (("%RETRY%*",), ()),
        (("*",), ("orders", "orders-eu", "pay")),
        (("nobody's",), ()),
    ],
)
def test_topics_are_named_or_begin_with_something(path, topics, found):
    assert numbers(path, Selection(topics=topics)) == of(*found)


def test_a_key_of_a_named_topic_is_looked_up_and_of_others_searched(path):
    known = Selection(topics=("orders", "pay"), key="k-5")
    assert all(task.places for task in plan(path, known))
    assert numbers(path, known) == [5]
    assert numbers(path, Selection(key="k-5")) == [5]
    assert numbers(path, Selection(topics=("orders*",), key="all")) == of("orders", "orders-eu")
    assert plan(path, Selection(topics=("orders",), key="nobody's")) == []


def test_ids_are_looked_up(path):
    snapshot = Snapshot(Path(path))
    (task,) = plan(path, Selection(topics=("orders",), key="k-20"))
    ((_, (message,)),) = read_task(snapshot, task, Selection())
    wanted = Selection(message_ids=(message.message_id, "no id", "0" * 32))
    assert numbers(path, wanted) == [20]
    assert all(task.places for task in plan(path, wanted))


def test_times_and_offsets_bound_what_is_read(path):
    everything = Selection(include_system=True, from_ms=NOW + 10, to_ms=NOW + 20)
    assert numbers(path, everything) == list(range(10, 21))
    middle = Snapshot(Path(path)).ranges(40_000)[1].start_offset
    low = numbers(path, Selection(include_system=True, to_offset=middle))
    high = numbers(path, Selection(include_system=True, from_offset=middle))
    assert low + high == list(range(COUNT))
    assert low
    assert high


def test_damage_fails_or_is_read_around(path, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    snapshot = Snapshot(copy)
    ((place,),) = [one.places for one in plan(str(copy), Selection(topics=("orders",), key="k-20"))]
    segment = snapshot.log.find(place)
    with open(segment.path, "r+b") as file:
        file.seek(place - segment.start + 300)
        file.write(b"damage")
    with pytest.raises(CorruptRecord, match=r"--on-damage skip \(option onDamage\)"):
        numbers(str(copy), Selection())
    rest = [n for n in of("orders", "orders-eu", "pay") if n != 20]
    assert numbers(str(copy), Selection(on_damage="skip")) == rest
    told = []
    wanted = Selection(topics=("orders",), on_damage="skip")
    for task in plan(str(copy), wanted):
        for _ in read_task(snapshot, task, wanted, told.append):
            pass
    assert [one.start_offset for one in told] == [place]
    with pytest.raises(ConfigError, match="onDamage is 'ignore'"):
        Selection(on_damage="ignore")


def test_none_of_this_needs_spark(tmp_path):
    code = (
        "import sys, mqmesh, mqmesh.cli.stores.archive, mqmesh.cli.stores.snapshot, "
        "mqmesh.spark.selection, mqmesh.spark.steps, mqmesh.spark.jvm.java\n"
        "sys.exit(bool({'pyspark', 'pyarrow', 'deltalake', 'delta'} & set(sys.modules)))"
    )
    # Elsewhere than in the checkout, whose folders would hide those of an installed wheel.
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0


@pytest.mark.parametrize("knows", [0, 1, 2])
def test_what_the_index_cannot_tell_of_one_id_is_read_whatever_it_tells_of_others(
    path, monkeypatch, knows
):
    """A bad block of the index: it answers for some ids."""
    snapshot = Snapshot(Path(path))
    wanted = [3, 17, 41]
    ids = {
        message.message_id: int(message.body.split()[0])
        for task in plan(path, Selection(include_system=True))
        for _, messages in read_task(snapshot, task, Selection(include_system=True))
        for message in messages
        if int(message.body.split()[0]) in wanted
    }
    good = Snapshot.places_of_id
    answers = []

    def places(self, producer_id, sequence):
        answers.append(1)
        if len(answers) - 1 == knows:
            return good(self, producer_id, sequence)
        return [], [LogRange(segment.start, segment.end) for segment in self.log]

    monkeypatch.setattr(Snapshot, "places_of_id", places)
    selection = Selection(include_system=True, message_ids=tuple(sorted(ids, key=ids.get)))
    assert numbers(path, selection) == wanted
