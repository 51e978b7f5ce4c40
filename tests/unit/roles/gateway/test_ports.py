"""Ports of broker groups, which never change."""

from collections.abc import Callable

import pytest

from mqmesh.errors import CorruptRecord, StorageError, StoreLocked
from mqmesh.roles.gateway.ports import BrokerPorts


class Port:
    """A gateway's ports, and what they did."""

    def __init__(self) -> None:
        self.listening: dict[int, str] = {}
        self.saved = b""
        self.failure: Exception | None = None
        self.ports = BrokerPorts("10.0.0.1", 20_911, self.listen, self.change)

    def listen(self, port: int, name: str) -> None:
        if port in self.listening:
            raise OSError(98, "taken")
        self.listening[port] = name

    def change(self, change: Callable[[bytes | None], bytes]) -> None:
        document = change(self.saved or None)
        if self.failure is not None:
            raise self.failure
        self.saved = document


def test_each_group_has_a_port_of_its_own():
    one = Port()
    for name in ("b", "a", "b"):
        one.ports.serve(name, "c")
    assert one.listening == {20_911: "b", 20_921: "a"}
    assert str(one.ports.address("a")) == "10.0.0.1:20921"
    assert one.ports.groups() == {"b": "c", "a": "c"}


def test_a_group_keeps_its_port_over_restarts():
    before, after = Port(), Port()
    for name in ("b", "a"):
        before.ports.serve(name, "c")
    after.ports.load(before.saved)
    after.ports.serve("a", "c")
    assert after.listening == {20_921: "a"}


def test_workers_give_a_group_one_port():
    one, other = Port(), Port()
    one.ports.serve("b", "c")
    other.saved = one.saved
    other.ports.serve("a", "c")
    other.ports.serve("b", "c")
    assert other.listening == {20_921: "a", 20_911: "b"}


def test_a_group_whose_number_cannot_be_kept_is_not_served(caplog):
    one = Port()
    one.failure = StorageError("the disk is full")
    one.ports.serve("a", "c")
    assert (one.listening, one.ports.groups()) == ({}, {})
    assert "the disk is full" in caplog.text
    one.failure = None
    one.ports.serve("a", "c")
    assert one.ports.groups() == {"a": "c"}


def test_a_group_waits_while_another_worker_changes_the_numbers(caplog):
    one = Port()
    one.ports.serve("a", "c")

    def held(change: Callable[[bytes | None], bytes]) -> None:
        raise StoreLocked("held")

    other = BrokerPorts("10.0.0.1", 20_911, one.listen, held)
    other.load(one.saved)
    one.listening.clear()
    for name in ("b", "a"):
        other.serve(name, "c")
    assert other.groups() == {"a": "c"}
    assert "is not served" not in caplog.text


def test_a_port_that_is_taken_is_tried_again(caplog):
    one = Port()
    one.listening[20_911] = "another"
    one.ports.serve("a", "c")
    assert one.ports.groups() == {}
    assert "is not served" in caplog.text
    one.listening.clear()
    one.ports.serve("a", "c")
    assert one.ports.groups() == {"a": "c"}


@pytest.mark.parametrize("document", [b"", b"[]", b'{"brokers": {"a": "x"}}', b'{"ports": {}}'])
def test_numbers_that_are_none_are_refused(document):
    with pytest.raises(CorruptRecord, match="numbers of broker groups"):
        Port().ports.load(document)
