"""Snapshots whose index was made to harm whoever looks into it; all checksums fit."""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from harness.indexed_store import IndexedStore
from harness.snapshots import take_snapshot
from harness.store_files import SEGMENT_BYTES

from mqmesh.checksum import crc32
from mqmesh.errors import CorruptRecord
from mqmesh.message import Message
from mqmesh.spark.selection import Selection, plan, read_task
from mqmesh.storage.index.part import HEAD_KEY, SortedRun, WaitingKeys, decode_head, encode_head
from mqmesh.storage.index.texts import KeyText, text_key
from mqmesh.storage.lmdb.env import DATA_FILE, LmdbEnv, has_sound_pages
from mqmesh.storage.tools.snapshot import seal_manifest
from mqmesh.storage.tools.snapshot_making import restore_snapshot
from mqmesh.storage.tools.snapshot_reading import LogRange, Snapshot, verify_snapshot
from mqmesh.testing.store_contract import NOW

COUNT = 300
COPIES = 200
"""Files with random changes that one process looks into."""

PAGE = 4_096
PAGE_HEADER = 16
META_ROOT = 128
"""Where a meta page says which page is the root of the tree."""
META_PAGES = 136
"""Where it says which page is the last."""
BRANCH, LEAF = 1, 2

# Opens an environment as whoever believes its file, and asks for what the index asks for.
BELIEVER = """
import sys
from pathlib import Path
from mqmesh.errors import StorageError
from mqmesh.storage.lmdb.env import LmdbEnv
from mqmesh.storage.index.blocks import BEYOND, run_key
from mqmesh.storage.index.part import HEAD_KEY
for path in sys.argv[1:]:
    try:
        env = LmdbEnv(Path(path), map_size=1 << 20, read_only=True)
        env.get(HEAD_KEY)
        for run in range(9):
            entry = BEYOND
            while (pair := env.at_or_before(run_key(run, entry))) and pair[0][4:] < entry:
                entry = pair[0][4:]
        env.close()
    except StorageError as error:
        print(error)
"""


def body_of(number):
    return random.Random(number).randbytes(600)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A snapshot of some sealed segments and one that is not."""
    root = tmp_path_factory.mktemp("made")
    # In few large steps: the tree of a part that is not sealed has one page, too.
    store = IndexedStore(root / "store", step_bytes=SEGMENT_BYTES)
    try:
        for number in range(COUNT):
            # So many that they take pages of their own, beside the tree's.
            keys = [f"key-{number}", *(f"more-{number}-{one}" for one in range(20))]
            store.put([Message("topic", body_of(number), keys=keys)], stored_ms=NOW + number)
        store.catch_up()
        return take_snapshot(store, root / "store", root / "snapshots")[0]
    finally:
        store.close()


@pytest.fixture
def snapshot(made, tmp_path):
    """A copy of it, of which nothing is shared."""
    return Path(shutil.copytree(made, tmp_path / made.name))


def index_files(directory):
    return sorted(directory.glob(f"index/*/{DATA_FILE}"))


def forge(directory, path, data):
    """Puts other bytes in place of a file, and a manifest that says the same."""
    path.write_bytes(data)
    manifest = msgspec.json.decode((directory / "manifest.json").read_bytes())
    for file in manifest["files"]:
        if directory / file["path"] == path:
            file["size"], file["crc32"] = len(data), crc32(data)
    (directory / "manifest.json").write_bytes(seal_manifest(msgspec.json.encode(manifest)))


def root_of(data):
    """The root page's number, by the newer meta page."""
    newer = max((0, 1), key=lambda meta: struct.unpack_from("<Q", data, meta * PAGE + 144))
    return struct.unpack_from("<Q", data, newer * PAGE + META_ROOT)[0]


def set_everywhere(data, position, form, value):
    for meta in (0, 1):
        struct.pack_into(form, data, meta * PAGE + position, value)


def nodes(data, page):
    """Where the nodes of a page begin in the file."""
    count = (struct.unpack_from("<H", data, page * PAGE + 12)[0] - PAGE_HEADER) // 2
    pointers = struct.unpack_from(f"<{count}H", data, page * PAGE + PAGE_HEADER)
    return [page * PAGE + pointer for pointer in pointers]


def no_such_root(data):
    set_everywhere(data, META_ROOT, "<Q", len(data) // PAGE + 1_000)


def no_such_root_in_a_file_said_to_be_large(data):
    set_everywhere(data, META_ROOT, "<Q", 200)
    set_everywhere(data, META_PAGES, "<Q", 255)


def nodes_out_of_their_page(data):
    root = root_of(data)
    for number in range(len(nodes(data, root))):
        struct.pack_into("<H", data, root * PAGE + PAGE_HEADER + 2 * number, 0xFFF0)


def more_nodes_than_a_page_has(data):
    struct.pack_into("<HH", data, root_of(data) * PAGE + 12, 0xFFF0, 0xFFF0)


def keys_longer_than_their_page(data):
    for node in nodes(data, root_of(data)):
        struct.pack_into("<H", data, node + 6, 0xFFFF)


def values_of_a_gigabyte(data):
    for node in nodes(data, root_of(data)):
        struct.pack_into("<HH", data, node, 0, 0x4000)


def values_beyond_the_end(data):
    for node in nodes(data, root_of(data)):
        flags, key_size = struct.unpack_from("<HH", data, node + 4)
        if flags & 1:
            struct.pack_into("<Q", data, node + 8 + key_size, 1 << 40)


def a_page_below_itself(data):
    root = root_of(data)
    struct.pack_into("<H", data, root * PAGE + 10, BRANCH)
    for node in nodes(data, root):
        struct.pack_into("<HHH", data, node, root & 0xFFFF, root >> 16, 0)


def a_value_as_root(data):
    root = root_of(data)
    page = next(
        struct.unpack_from("<Q", data, node + 8 + key_size)[0]
        for node in nodes(data, root)
        for flags, key_size in [struct.unpack_from("<HH", data, node + 4)]
        if flags & 1
    )
    struct.pack_into("<HHH", data, page * PAGE + 10, LEAF, 0xFFF0, 0xFFF0)
    set_everywhere(data, META_ROOT, "<Q", page)


def duplicates_where_there_are_none(data):
    set_everywhere(data, 88 + 4, "<H", 0x10)
    for node in nodes(data, root_of(data)):
        struct.pack_into("<H", data, node + 4, 4)


def pages_of_no_bytes(data):
    set_everywhere(data, 40, "<I", 0)


CRAFTS = (
    no_such_root,
    no_such_root_in_a_file_said_to_be_large,
    nodes_out_of_their_page,
    more_nodes_than_a_page_has,
    keys_longer_than_their_page,
    values_of_a_gigabyte,
    values_beyond_the_end,
    a_page_below_itself,
    a_value_as_root,
    duplicates_where_there_are_none,
    pages_of_no_bytes,
)


def forge_all(directory, craft):
    for path in index_files(directory):
        data = bytearray(path.read_bytes())
        craft(data)
        forge(directory, path, bytes(data))


def bodies_of_key(directory, key):
    wanted = Selection(topics=("topic",), key=key)
    opened = Snapshot(directory)
    return [
        message.body
        for task in plan(str(directory), wanted)
        for _, messages in read_task(opened, task, wanted)
        for message in messages
    ]


def test_pages_that_brokers_write_are_sound(made):
    paths = index_files(made)
    assert len(paths) > 2
    assert all(has_sound_pages(path) for path in paths)
    assert Snapshot(made).places_of_key("topic", "key-33")[1] == []


@pytest.mark.parametrize("craft", CRAFTS)
def test_messages_are_found_by_the_log_where_the_index_leads_astray(craft, snapshot, tmp_path):
    forge_all(snapshot, craft)
    opened = Snapshot(snapshot)
    places, unknown = opened.places_of_key("topic", "key-33")
    assert places == []
    assert unknown == [LogRange(segment.start, segment.end) for segment in opened.log]
    assert bodies_of_key(snapshot, "key-33") == [body_of(33)]
    report = verify_snapshot(opened, lambda progress: None)
    assert report.damaged_files == [
        path.relative_to(snapshot).as_posix() for path in index_files(snapshot)
    ]
    restore_snapshot(snapshot, tmp_path / "restored")
    assert index_files(tmp_path / "restored") == []


def believe(paths):
    """Exit code of a process that opens environments; negative if a signal ended it."""
    command = [sys.executable, "-c", BELIEVER, *paths]
    return subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode


def test_who_believes_such_an_index_dies_of_it(snapshot, tmp_path):
    ends = {}
    for craft in CRAFTS:
        directory = Path(shutil.copytree(snapshot, tmp_path / craft.__name__))
        forge_all(directory, craft)
        paths = [str(path.parent) for path in index_files(directory)]
        ends[craft.__name__] = believe(paths)
    assert any(code < 0 for code in ends.values()), ends


def test_what_passes_does_no_harm(made, tmp_path):
    chance = random.Random(7)
    (path, *_) = index_files(made)
    good = path.read_bytes()
    root = root_of(good)
    passed = []
    for number in range(COPIES):
        data = bytearray(good)
        # Where LMDB looks at bytes: its own pages, and the beginnings of others.
        page = chance.choice((0, 1, root, root, root, chance.randrange(len(good) // PAGE)))
        position = page * PAGE + chance.randrange(200 if page != root else PAGE)
        data[position] ^= 1 << chance.randrange(8)
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / DATA_FILE).write_bytes(data)
        if has_sound_pages(directory / DATA_FILE):
            passed.append(str(directory))
    assert 0 < len(passed) < COPIES
    assert believe(passed) == 0


def rewrite(directory, change):
    """Has LMDB write other pairs into the first part."""
    path = index_files(directory)[0]
    env = LmdbEnv(path.parent, map_size=1 << 20)
    change(env)
    env.close()
    forge(directory, path, path.read_bytes())


def with_head(env, **changes):
    head = msgspec.structs.replace(decode_head(env.get(HEAD_KEY)), **changes)
    env.write([(HEAD_KEY, encode_head(head))])


@pytest.mark.parametrize(
    "changes",
    [
        {"through": -(1 << 40)},
        {"runs": [SortedRun(1, 1, 0, 1 << 31, 3)] * 2},
        {"runs": [SortedRun(1 << 40, 1, 0, 1 << 31, 3)]},
        {"runs": [SortedRun(-1, 1, 0, 1 << 31, 3)]},
        {"texts": [WaitingKeys(3, 0, 1 << 31)] * 2},
        {"texts": [WaitingKeys(-3, 0, 1 << 31)]},
        {"widths": -1},
        {"texts": [WaitingKeys(3, 0, 1 << 31)]},
    ],
)
def test_a_head_that_no_index_has_is_not_believed(snapshot, changes):
    rewrite(snapshot, lambda env: with_head(env, **changes))
    _, unknown = Snapshot(snapshot).places_of_key("topic", "key-33")
    assert unknown == [LogRange(0, SEGMENT_BYTES)]
    assert bodies_of_key(snapshot, "key-33") == [body_of(33)]


@pytest.mark.parametrize("batches", [[], [[5, 0, 1, 1]], [[5, 0, 9, 1], [6, 0, 1, 1]]])
def test_keys_that_belong_to_no_batch_are_damage(batches):
    text = b"\x91\xa5other\x91\xa3key"
    data = msgspec.msgpack.encode([["t"], batches, text])
    crc = crc32(data, crc32(text_key(1)))
    with pytest.raises(CorruptRecord):
        KeyText(1, crc.to_bytes(4, "little") + data).places("t", "key", below=10)


@pytest.mark.parametrize("batch", [[-5, 0, 12, 1], [5, 0, 12, 1 << 40], [1 << 40, 0, 12, 1]])
def test_a_batch_of_keys_that_cannot_be_is_damage(batch):
    data = msgspec.msgpack.encode([["t"], [batch], b"\x91\xa5other\x91\xa3key"])
    crc = crc32(data, crc32(text_key(1)))
    with pytest.raises(CorruptRecord):
        KeyText(1, crc.to_bytes(4, "little") + data)
