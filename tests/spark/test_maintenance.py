"""Compaction, expiry and forgetting in tables that both engines write; catalogs that name them."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from datetime import UTC, date, datetime
from pathlib import Path
from types import SimpleNamespace

import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from harness.indexed_store import make_messages_batch
from harness.snapshots import take_snapshot
from harness.store_files import StoreFiles

from mqmesh.cli import main
from mqmesh.errors import ConfigError, StorageError
from mqmesh.message import Message
from mqmesh.spark import compaction, deletion, forgetting, local_engine, tables
from mqmesh.spark.compaction import compact
from mqmesh.spark.find import find
from mqmesh.spark.forgetting import choose, expire, expire_by_settings, forget
from mqmesh.spark.ingest import ingest
from mqmesh.spark.maintenance import vacuum, verify
from mqmesh.spark.notebook import shorten_tracebacks
from mqmesh.spark.partition_files import PartitionFiles
from mqmesh.spark.tables import INGESTS, KEYS, MESSAGES, ArchivedTopic, open_table, table_path
from mqmesh.units import TimestampMs

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

FIRST = datetime(2026, 1, 20, 12, tzinfo=UTC)
DAYS = 20
STEPS = 3
"""Snapshots; each has some days more than the one before, and ends within one."""
TOPICS = ("orders", "pay", "debug-1")
PER_DAY = 9
COUNT = DAYS * PER_DAY
TODAY = date(2026, 2, 9)


def put(store, start, stop):
    for number in range(start, stop):
        day, hour = divmod(number, PER_DAY)
        topic = TOPICS[number % len(TOPICS)]
        message = Message(
            topic,
            json.dumps({"number": number, "customer": f"c-{number % 10}"}).encode(),
            keys=[f"k-{number}", f"customer-{number % 10}"],
            properties={"number": str(number)},
        )
        batch = make_messages_batch([message], topic=topic, first_sequence=number)
        moment_ms = int(FIRST.timestamp() * 1_000) + day * 86_400_000 + hour * 60_000
        store.put([batch], TimestampMs(moment_ms))


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory):
    root = tmp_path_factory.mktemp("maintenance")
    files = StoreFiles(root / "store")
    store = files.open()
    paths = []
    for number in range(STEPS):
        put(store, number * COUNT // STEPS, (number + 1) * COUNT // STEPS)
        name = f"broker-a.{number}.0"
        paths.append(str(take_snapshot(store, files.directory, root / "snapshots", name=name)[0]))
    files.close()
    return paths


@pytest.fixture
def archive(snapshots, tmp_path):
    """An archive that the local engine has filled in four steps."""
    archive = tmp_path / "archive"
    archive.mkdir()
    for path in snapshots:
        ingest(None, path, str(archive))
    return str(archive)


def rows_of(archive, name=MESSAGES):
    return tables.require_table(archive, name).to_pyarrow_table()


def numbers(archive):
    found = rows_of(archive).column("properties").to_pylist()
    return sorted(int(dict(one)["number"]) for one in found)


def keys(archive):
    return sorted(rows_of(archive, KEYS).column("key").to_pylist())


def keys_of(found):
    return sorted(key for one in found for key in (f"k-{one}", f"customer-{one % 10}"))


def test_compaction_joins_what_is_small_and_nothing_twice(archive, snapshots, monkeypatch):
    before = rows_of(archive).sort_by("commitlog_offset")
    checked = []
    content = compaction.content_of_files

    def count(dataset, fragments, name):
        checked.append(len(fragments))
        return content(dataset, fragments, name)

    monkeypatch.setattr(compaction, "content_of_files", count)
    done = compact(archive, TODAY)
    # A day has the files of one ingest or two; each table of keys those of all.
    assert done["files_after"] == DAYS + 2 + 1 < done["files_before"]
    assert sum(checked) < done["files_before"] + done["files_after"]
    assert rows_of(archive).sort_by("commitlog_offset").equals(before)
    assert keys(archive) == keys_of(range(COUNT))
    checked.clear()
    versions = [open_table(archive, name).version() for name in (MESSAGES, KEYS, INGESTS)]
    assert compact(archive, TODAY)["files_before"] == done["files_after"]
    assert [open_table(archive, name).version() for name in (MESSAGES, KEYS, INGESTS)] == versions
    assert checked == []
    # Keys of a month that is over are in the order of their hashes; positions are what they were.
    january = open_table(archive, KEYS).to_pyarrow_table(partitions=[("month", "=", "2026-01")])
    hashes = january["key_hash"].to_pylist()
    assert hashes == sorted(hashes)
    (source,) = tables.sources(archive)
    assert len(source.ingests) == STEPS
    for path in snapshots:
        report = ingest(None, path, archive)
        assert report.from_offset == report.to_offset == source.position == source.keys_position
    assert numbers(archive) == list(range(COUNT))
    (found,) = find(archive, key="k-17").rows
    assert dict(found["properties"])["number"] == "17"


def test_both_engines_go_on_with_compacted_tables(spark, snapshots, tmp_path):
    archive = str(tmp_path / "archive")
    for number, path in enumerate(snapshots):
        ingest(spark if number % 2 else None, path, archive)
        compact(archive, TODAY)
        assert numbers(archive) == list(range((number + 1) * COUNT // STEPS))
    assert keys(archive) == keys_of(range(COUNT))


def test_ingests_and_compaction_at_once_lose_nothing(snapshots, tmp_path):
    archive = str(tmp_path / "archive")
    ingest(None, snapshots[0], archive)
    errors = []

    def work():
        try:
            for path in snapshots[1:]:
                ingest(None, path, archive)
        except BaseException as error:
            errors.append(error)

    other = threading.Thread(target=work)
    other.start()
    while other.is_alive():
        compact(archive, TODAY)
    other.join()
    assert not errors
    assert numbers(archive) == list(range(COUNT))
    assert keys(archive) == keys_of(range(COUNT))


def test_a_compaction_that_changes_rows_is_an_error_that_says_how_to_go_back(archive, monkeypatch):
    content = compaction.content_of_files
    seen = []

    def change(dataset, fragments, name):
        seen.append(content(dataset, fragments, name))
        return (seen[-1][0], len(seen))

    monkeypatch.setattr(compaction, "content_of_files", change)
    version = open_table(archive, MESSAGES).version()
    with pytest.raises(StorageError, match=rf"restore\({version}\)"):
        compact(archive, TODAY)
    table = DeltaTable(table_path(archive, MESSAGES))
    table.restore(version)
    assert numbers(archive) == list(range(COUNT))


def test_whole_days_expire_with_their_keys_and_topics_by_themselves(archive):
    first = sum(1 for number in range(5 * PER_DAY))
    assert expire(archive, before="2026-01-25") == first
    assert numbers(archive) == list(range(first, COUNT))
    assert keys(archive) == keys_of(range(first, COUNT))
    gone = [one for one in range(first, 10 * PER_DAY) if TOPICS[one % 3] == "pay"]
    assert expire(archive, before="2026-01-30", topic="pay") == len(gone)
    left = sorted(set(range(first, COUNT)) - set(gone))
    assert numbers(archive) == left
    assert keys(archive) == keys_of(left)
    assert expire(archive, before="2026-01-30", topic="pay") == 0
    with pytest.raises(ConfigError, match="is no day"):
        expire(archive, before="yesterday")


def test_each_topic_is_kept_as_long_as_the_settings_say(archive, tmp_path):
    settings = '[expire_days]\n"*" = 15\n"debug*" = 5\norders = 400\n'
    (tmp_path / "archive" / "archive.toml").write_text(settings)
    first = {"pay": 5, "debug-1": 15, "orders": 0}
    left = [one for one in range(COUNT) if one // PER_DAY >= first[TOPICS[one % 3]]]
    assert expire_by_settings(archive, TODAY) == COUNT - len(left)
    assert numbers(archive) == left
    assert keys(archive) == keys_of(left)
    assert expire_by_settings(archive, TODAY) == 0


@pytest.mark.parametrize(
    ("conditions", "fits"),
    [
        ({"key": "customer-3"}, lambda one: one % 10 == 3),
        ({"key": "customer-3", "topic": "pay"}, lambda one: one % 10 == 3 and one % 3 == 1),
        ({"topic": "debug-1"}, lambda one: one % 3 == 2),
        ({"key": "k-7"}, lambda one: one == 7),
    ],
)
def test_chosen_messages_are_forgotten_in_both_tables(archive, conditions, fits):
    gone = [one for one in range(COUNT) if fits(one)]
    left = [one for one in range(COUNT) if not fits(one)]
    choice = choose(archive, **conditions)
    assert choice.messages == len(gone)
    assert {one.topic for one in choice.topics} == {TOPICS[one % 3] for one in gone}
    assert numbers(archive) == list(range(COUNT))
    assert forget(archive, choice) == len(gone)
    assert numbers(archive) == left
    assert keys(archive) == keys_of(left)
    assert choose(archive, **conditions).topics == []
    # What is forgotten does not come again, and old files go.
    table = open_table(archive, MESSAGES)
    old = DeltaTable(table_path(archive, MESSAGES), version=table.version() - 1).file_uris()
    assert set(old) - set(table.file_uris())
    assert vacuum(archive, hours=1, dry_run=True) == []


def test_files_that_are_joined_while_messages_are_forgotten_are_looked_at_again(
    archive, monkeypatch
):
    done = []

    class Late(PartitionFiles):
        def close(self):
            if not done:
                done.append(compact(archive, TODAY)["files_after"])
            return super().close()

    gone = [one for one in range(COUNT) if one % 10 == 3]
    choice = choose(archive, key="customer-3")
    monkeypatch.setattr(deletion, "PartitionFiles", Late)
    assert forget(archive, choice) == len(gone)
    left = sorted(set(range(COUNT)) - set(gone))
    assert numbers(archive) == left
    assert keys(archive) == keys_of(left)
    # The other way round the compaction begins anew.
    table = open_table(archive, MESSAGES)
    assert forget(archive, choose(archive, key="customer-4"))
    with pytest.raises(CommitFailedError, match="concurrent transaction deleted"):
        table.optimize.z_order(["commitlog_offset"])


def test_a_commit_that_came_through_with_an_error_loses_nothing(archive, monkeypatch):
    """A bucket stores the commit and answers 500: the next try of the library meets itself."""
    real = DeltaTable.create_write_transaction

    def commit(*arguments, **options):
        real(*arguments, **options)
        raise CommitFailedError("version 9 is there")

    choice = choose(archive, key="customer-3")
    with monkeypatch.context() as patch:
        patch.setattr(DeltaTable, "create_write_transaction", commit)
        assert forget(archive, choice) == COUNT // 10
        first = sum(1 for one in range(5 * PER_DAY) if one % 10 != 3)
        assert expire(archive, before="2026-01-25") == first
    left = [one for one in range(5 * PER_DAY, COUNT) if one % 10 != 3]
    assert numbers(archive) == left
    assert keys(archive) == keys_of(left)


def test_files_stay_once_a_commit_was_tried(archive, monkeypatch):
    """Somebody else joins the files after a try whose outcome is not known."""
    real = DeltaTable.create_write_transaction
    deleted = []

    def commit(*arguments, **options):
        monkeypatch.setattr(DeltaTable, "create_write_transaction", real)
        compact(archive, TODAY)
        raise CommitFailedError("version 9 is there")

    monkeypatch.setattr(DeltaTable, "create_write_transaction", commit)
    monkeypatch.setattr(deletion, "delete_files", lambda *arguments: deleted.append(arguments))
    choice = choose(archive, key="customer-3")
    assert forget(archive, choice) == COUNT // 10
    assert deleted == []
    assert numbers(archive) == [one for one in range(COUNT) if one % 10 != 3]


@pytest.mark.parametrize(
    ("delete", "fits"),
    [
        (lambda archive: forget(archive, choose(archive, key="k-7")), lambda one: one == 7),
        (lambda archive: forget(archive, choose(archive, topic="pay")), lambda one: one % 3 == 1),
        (lambda archive: expire_by_settings(archive, TODAY), lambda one: one < 5 * PER_DAY),
    ],
)
def test_a_deletion_that_ends_between_the_tables_is_ended_by_the_next(
    archive, tmp_path, monkeypatch, delete, fits
):
    (tmp_path / "archive" / "archive.toml").write_text('[expire_days]\n"*" = 15\n')
    real = forgetting.delete_rows

    def stop(archive, name, *arguments, **options):
        if name == KEYS:
            raise StorageError("stopped")
        return real(archive, name, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(forgetting, "delete_rows", stop)
        with pytest.raises(StorageError, match="stopped"):
            delete(archive)
    left = [one for one in range(COUNT) if not fits(one)]
    assert numbers(archive) == left
    assert keys(archive) == keys_of(range(COUNT))
    delete(archive)
    assert numbers(archive) == left
    assert keys(archive) == keys_of(left)


def test_topics_that_are_kept_stay_when_they_come_in_meanwhile(snapshots, tmp_path, monkeypatch):
    archive = str(tmp_path / "archive")
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "archive.toml").write_text("[expire_days]\npay = 1\n")
    ingest(None, snapshots[-1], archive, topics="pay")
    looked = []

    def late(batches):
        looked.append(tables.by_topic_and_day(batches))
        if len(looked) == 2:  # at messages and keys
            ingest(None, snapshots[-1], archive, name="broker-b", topics="orders")
        return looked[-1]

    monkeypatch.setattr(forgetting, "by_topic_and_day", late)
    assert expire_by_settings(archive, date(2026, 3, 1)) == COUNT // 3
    left = [one for one in range(COUNT) if one % 3 == 0]
    assert numbers(archive) == left
    assert keys(archive) == keys_of(left)


def test_keys_do_not_come_back_after_their_messages(snapshots, archive, monkeypatch):
    gone = []

    class Late(PartitionFiles):
        def close(self):
            if not gone:
                gone.append(forget(archive, choose(archive, topic="pay")))
            return super().close()

    monkeypatch.setattr(local_engine, "PartitionFiles", Late)
    ingest(None, snapshots[-1], archive, name="broker-b")
    left = [one for one in range(COUNT) if one % 3 != 1] * 2
    assert gone == [2 * COUNT // 3]
    assert numbers(archive) == sorted(left)
    assert keys(archive) == keys_of(left)
    monkeypatch.setattr(local_engine, "TRIES", 0)
    with pytest.raises(StorageError, match="deleted or compacted before each of 0 tries"):
        ingest(None, snapshots[-1], archive, name="broker-c")


def test_vacuum_leaves_what_may_still_be_committed(archive):
    choice = choose(archive, topic="pay")
    forget(archive, choice)
    place = Path(table_path(archive, MESSAGES))
    for name, hours in (("new", 3), ("old", 25)):
        file = place / "dt=2026-01-20" / f"{name}.parquet"
        file.write_bytes(b"x")
        moment = time.time() - hours * 3_600
        os.utime(file, (moment, moment))
    gone = ["messages/dt=2026-01-20/old.parquet"]
    assert vacuum(archive, hours=1, dry_run=True) == gone
    assert vacuum(archive, hours=24, dry_run=True) == gone
    assert vacuum(archive, hours=48, dry_run=True) == []
    removed = vacuum(archive, hours=0, dry_run=False)
    assert any("/part-" in one for one in removed)
    assert (place / "dt=2026-01-20" / "new.parquet").exists()
    assert not (place / "dt=2026-01-20" / "old.parquet").exists()
    assert numbers(archive) == [one for one in range(COUNT) if one % 3 != 1]


def test_files_that_are_gone_are_not_committed_by_a_deletion(archive, monkeypatch):
    class Gone(PartitionFiles):
        def close(self):
            files = super().close()
            Path(table_path(archive, MESSAGES), files[0].path).unlink()
            return files

    monkeypatch.setattr(deletion, "PartitionFiles", Gone)
    with pytest.raises(StorageError, match=r"parquet is gone, and \d+ bytes were written"):
        forget(archive, choose(archive, key="customer-3"))
    assert numbers(archive) == list(range(COUNT))


def test_a_message_is_forgotten_by_its_id_and_by_sql(spark, archive):
    (row,) = find(archive, key="k-7").rows
    day = row["dt"].isoformat()
    choice = choose(archive, message_id=row["message_id"].lower())
    assert choice.topics == [ArchivedTopic("pay", 1, day, day)]
    assert forget(archive, choice) == 1
    sql = "json(body, '$.customer') = 'c-4' -- or a comment"
    choice = choose(archive, where=sql, topic="orders", spark=spark)
    gone = {one for one in range(COUNT) if one % 10 == 4 and one % 3 == 0} | {7}
    assert choice.messages == len(gone) - 1
    forget(archive, choice)
    left = sorted(set(range(COUNT)) - gone)
    assert numbers(archive) == left
    assert keys(archive) == keys_of(left)
    assert verify(spark, archive).sound
    deletion.delete_rows(archive, MESSAGES, ds.field("topic") == "orders")
    report = verify(spark, archive)
    left = [one for one in left if one % 3 == 0]
    assert (report.sound, report.keys_missing, report.keys_left) == (False, 0, 2 * len(left))
    for wrong in ("nix = 1", "true) or (true; drop table x"):
        with pytest.raises(ConfigError, match="Spark cannot do that"):
            choose(archive, where=wrong, spark=spark)


def test_what_cannot_be_chosen_is_refused(archive, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="say what to forget"):
        choose(archive)
    with pytest.raises(ConfigError, match="no archive"):
        choose(str(tmp_path / "nowhere"), topic="pay")
    monkeypatch.setattr(forgetting, "MOST_PLACES", 3)
    with pytest.raises(ConfigError, match="more than 3 messages would go"):
        choose(archive, key="customer-3")
    source = tables.sources(archive)[0]
    behind = tables.Source(
        broker="broker-a", store_id=1, position=5, keys_position=4, ingests=source.ingests
    )
    monkeypatch.setattr(forgetting, "sources", lambda place: [behind])
    with pytest.raises(ConfigError, match="lacks keys of broker-a"):
        choose(archive, key="customer-3")


def test_commands_show_what_goes_before_it_goes(archive, capsys):
    def call(*arguments, code=0):
        assert main.main(["archive", *arguments]) == code
        return capsys.readouterr()

    forget_key = ("forget", archive, "--key", "customer-3")
    count = COUNT // 10
    said = json.loads(call(*forget_key, "--dry-run", "--json").out)
    assert (said["messages"], said["dry_run"]) == (0, True)
    assert [one["topic"] for one in said["topics"]] == sorted(TOPICS)
    assert sum(one["messages"] for one in said["topics"]) == count
    said = call(*forget_key, code=2)
    assert "LAST DAY" in said.out
    assert f"this deletes {count} messages from the archive; add --yes" in said.err
    said = call(*forget_key, "--yes")
    assert f"{count} messages are gone" in said.out
    assert "mqmesh archive vacuum" in said.err
    assert "no message was found" in call(*forget_key, "--yes").out
    status = json.loads(call("status", archive, "--topics", "--json").out)
    assert sum(one["rows"] for one in status["days"]) == COUNT - count
    assert sum(one["messages"] for one in status["topics"]) == COUNT - count
    assert "files became" in call("compact", archive, "--since", "2026-02-01").out
    assert "messages are gone" in call("expire", archive, "--older-than", "1d", "--yes").out


def test_a_catalog_names_the_tables_and_the_feed_shows_what_changed(spark, snapshots, tmp_path):
    archive = tmp_path / "archive"
    archive.mkdir()
    (archive / "archive.toml").write_text("change_data_feed = true\n")
    for path in snapshots[:2]:
        ingest(None, path, str(archive))
    version = open_table(str(archive), MESSAGES).version()
    ingest(None, snapshots[2], str(archive))
    compact(str(archive), TODAY)
    gone = forget(str(archive), choose(str(archive), key="customer-3"))
    spark.sql("CREATE SCHEMA archive")
    try:
        for name in (MESSAGES, KEYS):
            place = table_path(str(archive), name)
            spark.sql(f"CREATE TABLE archive.{name} USING delta LOCATION '{place}'")
        count = spark.sql("SELECT count(*) FROM archive.messages WHERE dt > '2026-01-21'")
        assert count.collect()[0][0] > 0
        feed = spark.sql(f"SELECT * FROM table_changes('archive.messages', {version + 1})")
        changes = dict(map(tuple, feed.groupBy("_change_type").count().collect()))
        # Messages that stay in a file from which others went are deleted and inserted again.
        assert changes["insert"] - changes["delete"] == COUNT // STEPS - gone
        spark.sql("DROP TABLE archive.keys")
        assert open_table(str(archive), KEYS) is not None
    finally:
        spark.sql("DROP SCHEMA archive CASCADE")


def test_a_notebook_shows_the_cause_in_one_sentence(spark, tmp_path, monkeypatch):
    handlers, shown = {}, []

    def set_custom_exc(kinds, show):
        handlers.update(dict.fromkeys(kinds, show))

    shell = SimpleNamespace(
        custom_exceptions=(),
        set_custom_exc=set_custom_exc,
        showtraceback=lambda found, tb_offset: shown.append(found),
    )
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    shorten_tracebacks()
    frame = spark.read.format("mqmesh").option("topic", "orders")
    with pytest.raises(tuple(handlers)) as caught:
        frame.load(str(tmp_path)).collect()
    show = next(one for kind, one in handlers.items() if isinstance(caught.value, kind))
    show(shell, caught.type, caught.value, caught.tb)
    ((kind, cause, trace),) = shown
    assert kind is ConfigError
    assert str(cause).startswith("a snapshot has no option 'topic'; it has")
    assert "\n" not in str(cause)
    assert {one.filename for one in traceback.extract_tb(trace)} == {__file__}
    shell.custom_exceptions, handlers = (ValueError,), {}
    shorten_tracebacks()
    assert handlers == {}
