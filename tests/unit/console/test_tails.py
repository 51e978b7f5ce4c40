"""Live tails: what came since they began, for a while, as often as it is asked for."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import pytest

from mqmesh.console.tails import LONGEST_MS, MAX_TAILS, UNWATCHED_MS, Tails
from mqmesh.errors import NoPermission, TopicNotFound
from mqmesh.message import BatchInfo, StoredMessage
from mqmesh.testing.clock import ManualClock


class Consumer:
    """A consumer that gets what tests put there."""

    opened: ClassVar[list[Consumer]] = []

    def __init__(self, group, **options):
        self.group, self.options = group, options
        self.waiting: list[StoredMessage] = []
        self.arrived = asyncio.Event()
        self.sought = self.closed = False
        Consumer.opened.append(self)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *raised):
        self.closed = True

    async def queues(self, topic):
        if topic == "nope":
            raise TopicNotFound("no topic 'nope'")
        return ["queue"]

    async def assign(self, queues):
        assert queues == ["queue"]

    async def seek_to_end(self, *queues):
        self.sought = True

    async def poll(self, timeout_ms, most):
        await self.arrived.wait()
        self.arrived.clear()
        found, self.waiting = self.waiting[:most], self.waiting[most:]
        return found

    def put(self, *messages):
        self.waiting += messages
        self.arrived.set()


def message(number, body=b"hello"):
    info = BatchInfo("orders", 1, "broker-a", 0, 1, 1, 1, 1_000, "h", "127.0.0.1:1", 1, 1, 0)
    return StoredMessage("orders", body, queue_offset=number, batch=info)


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def clock():
    Consumer.opened = []
    return ManualClock()


@pytest.fixture
def run(clock):
    def run(scene, **options):
        async def main():
            tails = Tails(["127.0.0.1:9876"], clock, consume=Consumer, **options)
            await scene(tails)

        asyncio.run(main())

    return run


def test_a_tail_shows_what_comes_and_ends_when_it_is_told(run):
    async def scene(tails):
        assert tails.follow("keys", "orders", "1").state == "starting"
        await settle()
        (consumer,) = Consumer.opened
        assert consumer.group.startswith("mqmesh-consume-")
        assert consumer.options["auto_commit"] is False
        assert consumer.options["credentials"] == "keys"
        assert consumer.options["namespace"] == ""
        assert consumer.sought
        assert tails.follow("keys", "orders", "1").state == "listening"
        consumer.put(message(1), message(2))
        await settle()
        seen = tails.follow("keys", "orders", "1").messages
        assert [(one.queue_offset, one.body) for one in seen] == [(1, "hello"), (2, "hello")]
        consumer.arrived.set()
        await tails.stop("keys", "orders", "1")
        view = tails.follow("keys", "orders", "1")
        assert (view.state, view.is_over, len(view.messages)) == ("stopped", True, 2)
        assert consumer.closed

    run(scene)


def test_users_do_not_share_a_tail(run):
    async def scene(tails):
        tails.follow("a", "orders", "1")
        tails.follow("b", "orders", "1")
        await settle()
        assert [one.options["credentials"] for one in Consumer.opened] == ["a", "b"]

    run(scene)


@pytest.mark.parametrize(
    ("passed_ms", "asked", "state"),
    [(LONGEST_MS, True, "ended after 60 s"), (UNWATCHED_MS, False, "ended: nobody looked")],
)
def test_a_tail_ends_by_itself(run, clock, passed_ms, asked, state):
    async def scene(tails):
        tails.follow("keys", "orders", "1")
        await settle()
        clock.advance(passed_ms)
        if asked:
            tails.follow("keys", "orders", "1")
        Consumer.opened[0].put()
        await settle()
        assert tails.follow("keys", "orders", "1").state == state
        assert Consumer.opened[0].closed

    run(scene)


def test_a_thousand_messages_are_enough(run):
    async def scene(tails):
        tails.follow("keys", "orders", "1")
        await settle()
        Consumer.opened[0].put(*map(message, range(1_200)))
        await settle()
        view = tails.follow("keys", "orders", "1")
        assert view.state == "ended after 1,000 messages"
        assert len(view.messages) == 1_000

    run(scene)


def test_an_error_is_the_end(run):
    async def scene(tails):
        tails.follow("keys", "nope", "1")
        await settle()
        assert tails.follow("keys", "nope", "1").state == "no topic 'nope'"

    run(scene)


def test_bodies_stay_hidden_where_they_may_not_be_seen(run):
    async def scene(tails):
        tails.follow("keys", "orders", "1")
        await settle()
        Consumer.opened[0].put(message(1))
        await settle()
        (one,) = tails.follow("keys", "orders", "1").messages
        assert (one.body, one.size) == ("", 5)

    run(scene, shows_bodies=False)


def test_tails_are_few(run):
    async def scene(tails):
        for number in range(MAX_TAILS):
            tails.follow("keys", "orders", str(number))
        with pytest.raises(NoPermission, match="stop one first"):
            tails.follow("keys", "orders", "one more")

    run(scene)
