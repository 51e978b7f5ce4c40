"""Watch of a table, with a broker that a test plays."""

from types import SimpleNamespace

from mqmesh.protocol.command import encode_header
from mqmesh.protocol.pulling import PullResponse, PullStatus
from mqmesh.sdk.tables.entries import KvEntry
from mqmesh.sdk.tables.watch import TableWatch


class Ended(Exception):
    """No more answers are planned."""


def watched(pages, answers, **options):
    """The entries of a watch whose reads and pulls have these answers."""
    pages, answers, asked = iter(pages), iter(answers), []

    def read(since, keys_only):
        asked.append((since, keys_only))
        return next(pages)

    def pull(at, epoch):
        status = next(answers, None)
        if status is None:
            raise Ended
        return SimpleNamespace(header=encode_header(PullResponse(status, at, 0, at)), body=b"")

    found = []
    try:
        for entry in TableWatch("", read, pull).changes(**options):
            found.append((entry.key, entry.operation.value))
    except Ended:
        return found, asked
    raise AssertionError("a watch has no end")


def entry(key, revision):
    return KvEntry(key, b"v", revision, 0)


def test_a_key_that_is_written_while_the_table_is_read_again_is_not_deleted():
    before = [(3, [entry("a", 1), entry("b", 2), entry("c", 3)])]
    again = [(8, [entry("a", 1)]), (9, [entry("b", 9)])]
    found, _ = watched([before, again], [PullStatus.OFFSET_ILLEGAL], include_current=True)
    assert found[3:] == [("a", "PUT"), ("c", "DEL")]


def test_a_watch_of_what_comes_reads_keys_without_values():
    found, asked = watched([[(1, [entry("a", 1)])]], [], include_current=False)
    assert (found, asked) == ([], [(0, True)])


def test_a_table_is_read_page_by_page_as_its_entries_are_taken():
    read = []

    def pages(since, keys_only):
        for number in (1, 2):
            read.append(number)
            yield 2, [entry(f"k{number}", number)]

    changes = TableWatch("", pages, None).changes(include_current=True)
    assert next(changes).key == "k1"
    assert read == [1]
