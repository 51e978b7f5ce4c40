"""Pull consumers and the consumers for asyncio against a real cluster."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
import time
from collections import Counter

import pytest
from harness.patience import until
from harness.stopwatch import Stopwatch

from mqmesh.errors import ClientClosed, InvalidArgument, NoRoute, OffsetIllegal
from mqmesh.message import Message
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.aio import consumer as aio_consumer
from mqmesh.sdk.client.client import ClientEngine
from mqmesh.sdk.consumer.consumer_engine import START_COMMIT_MS, ConsumerEngine
from mqmesh.sdk.consumer.listening.consume_result import ConsumeResult
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.testing.processes import ProcessCluster

PATIENCE_S = 20.0
_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster that no test harms; topics get 4 queues."""
    with ProcessCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def topic(cluster):
    """A topic with messages 0 to 99, some in each queue, which no other test uses."""
    topic = f"pull-{next(_numbers)}"
    send(cluster, topic, range(100))
    with consumer_of(cluster, "any") as consumer:
        assert len(consumer.queues(topic)) == 4  # now name servers know the topic
    return topic


def send(cluster, topic, numbers):
    with Producer("producers", namesrv_addr=cluster.namesrv_addr) as producer:
        for number in numbers:
            message = Message(topic, b"%d" % number, sharding_key=str(number))
            producer.send_async(message)


def consumer_of(cluster, group, **options):
    options = {"consume_from_where": "FIRST_OFFSET", **options}
    return PullConsumer(group, namesrv_addr=cluster.namesrv_addr, **options)


def poll_until(consumer, count):
    found, deadline = [], time.monotonic() + PATIENCE_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} messages came"
        found += consumer.poll(100, count - len(found))
    return found


def numbers_of(messages):
    return sorted(int(message.body) for message in messages)


def test_subscribing_and_polling_gives_every_message_once_and_in_order(cluster, topic):
    with consumer_of(cluster, topic) as consumer:
        consumer.subscribe(topic)
        found = poll_until(consumer, 10)
        until(lambda: consumer.metrics().number("cached_messages", topic) == 90)
        assert consumer.metrics().number("cached_bytes", topic) > 0
        found += poll_until(consumer, 90)
        assert consumer.poll(0) == []
        assert consumer.assignment() == consumer.queues(topic)
        told = consumer.metrics()
        assert told.number("pulled_messages_total") == 100
        assert told.number("cached_messages", topic) == told.number("unpulled_messages", topic) == 0
        assert told.number("assigned_queues") == len(consumer.assignment())
    assert numbers_of(found) == list(range(100))
    expected = Counter()
    for message in found:
        assert message.queue_offset == expected[message.queue_id]
        expected[message.queue_id] += 1


def test_a_poll_waits_for_a_message_and_no_longer(cluster, topic):
    with consumer_of(cluster, topic, consume_from_where="LAST_OFFSET") as consumer:
        consumer.subscribe(topic)
        assert consumer.poll(50) == []
        sender = threading.Thread(target=send, args=(cluster, topic, [100]))
        sender.start()
        watch = Stopwatch()
        assert numbers_of(consumer.poll(10_000)) == [100]
        assert watch.seconds < 5
        sender.join()


def test_what_a_poll_returned_is_done_when_the_next_one_is_made(cluster, topic):
    with consumer_of(cluster, topic) as consumer:
        consumer.subscribe(topic)
        done = numbers_of(poll_until(consumer, 60))
    with pytest.raises(ZeroDivisionError), consumer_of(cluster, topic) as consumer:
        consumer.subscribe(topic)
        first = poll_until(consumer, 10)
        second = consumer.poll(1_000, 10)
        assert second
        raise ZeroDivisionError  # so the second poll's messages were perhaps not worked on
    done += numbers_of(first)
    with consumer_of(cluster, topic) as consumer:
        consumer.subscribe(topic)
        rest = numbers_of(poll_until(consumer, 30))
        assert consumer.poll(100) == []
    assert sorted(done + rest) == list(range(100))


def test_without_auto_commit_only_commit_commits(cluster, topic):
    with consumer_of(cluster, topic, auto_commit=False) as consumer:
        consumer.assign(consumer.queues(topic))
        queue = consumer.assignment()[0]
        poll_until(consumer, 60)
        consumer.commit()
        assert consumer.committed(queue) == consumer.position(queue)
        poll_until(consumer, 40)
    with consumer_of(cluster, topic, auto_commit=False) as consumer:
        consumer.assign(consumer.queues(topic))
        assert len(poll_until(consumer, 40)) == 40
        consumer.commit({queue: 3})
        assert consumer.committed(queue) == 3
        assert sum(consumer.lag().values()) == 0


def test_assigned_queues_are_read_whoever_else_is_in_the_group(cluster, topic):
    with consumer_of(cluster, topic) as sharing, consumer_of(cluster, topic) as consumer:
        sharing.subscribe(topic)
        two = consumer.queues(topic)[:2]
        consumer.assign(two)
        assert consumer.assignment() == two
        found = poll_until(consumer, sum(consumer.lag().values()))
        assert {message.message_queue for message in found} == set(two)
        consumer.assign(two[1:])
        with pytest.raises(InvalidArgument, match="not assigned"):
            consumer.position(two[0])
        deadline = time.monotonic() + PATIENCE_S
        while len(sharing.assignment()) < 4:  # nobody counts us as a member
            assert time.monotonic() < deadline
            sharing.poll(10)


def test_seeking_goes_where_it_is_told(cluster, topic):
    with consumer_of(cluster, topic) as consumer:
        queues = consumer.queues(topic)
        consumer.assign(queues)
        queue = queues[0]
        poll_until(consumer, 100)
        assert sum(consumer.lag().values()) == 0
        consumer.seek_to_begin()
        assert sum(consumer.lag().values()) == 100
        assert len(poll_until(consumer, 100)) == 100
        consumer.seek(queue, 2)
        assert consumer.position(queue) == 2
        (message,) = consumer.poll(1_000, 1)
        assert (message.message_queue, message.queue_offset) == (queue, 2)
        consumer.seek_to_end(queue)
        assert consumer.poll(50) == []
        assert consumer.lag(queue) == {queue: 0}
        for offset in (-1, 1_000):
            with pytest.raises(OffsetIllegal, match=f"offset {offset} "):
                consumer.seek(queue, offset)


def test_what_is_no_offset_is_refused_at_once_and_harms_no_other_queue(cluster, topic):
    with consumer_of(cluster, topic, auto_commit=False) as consumer:
        queues = consumer.queues(topic)
        consumer.assign(queues)
        for wrong in (-5, 2**63, 1.5, True, "3", None):
            with pytest.raises(InvalidArgument, match=re.escape(f"{queues[1]} must be an int of")):
                consumer.commit({queues[0]: 1, queues[1]: wrong})
        for wrong in (1.5, "3", None):
            with pytest.raises(InvalidArgument, match=re.escape(f"{queues[1]} must be an int, ")):
                consumer.seek(queues[1], wrong)
        for wrong in (-1, 2**63, "now"):
            with pytest.raises(InvalidArgument, match="timestamp_ms must be an int"):
                consumer.seek_to_time(wrong)
        consumer.commit()
        assert {consumer.committed(queue) for queue in queues} == {0}
        consumer.commit({queues[0]: 1})
        assert consumer.committed(queues[0]) == 1


def test_seeking_to_a_time_finds_what_was_stored_from_then_on(cluster, topic):
    with consumer_of(cluster, topic) as consumer:
        consumer.assign(consumer.queues(topic))
        old = poll_until(consumer, 100)
        # The store's clock has moved on when a message gets a later time than all others.
        latest, number = max(message.store_timestamp for message in old), 100
        while True:
            send(cluster, topic, [number])
            (message,) = poll_until(consumer, 1)
            if message.store_timestamp > latest:
                break
            number += 1
        send(cluster, topic, range(1_000, 1_020))
        consumer.seek_to_time(message.store_timestamp)
        assert numbers_of(poll_until(consumer, 21)) == [number, *range(1_000, 1_020)]
        consumer.seek_to_time(0)
        assert sum(consumer.lag().values()) == number + 21
        consumer.seek_to_time(message.store_timestamp + 3_600_000)
        assert sum(consumer.lag().values()) == 0


def test_paused_queues_are_passed_over_until_they_are_resumed(cluster, topic):
    with consumer_of(cluster, topic) as consumer:
        queues = consumer.queues(topic)
        consumer.assign(queues)
        consumer.pause(*queues[:2])
        found = poll_until(consumer, sum(consumer.lag(*queues[2:]).values()))
        assert {message.message_queue for message in found} == set(queues[2:])
        assert consumer.poll(50) == []
        consumer.resume()
        found += poll_until(consumer, 100 - len(found))
        assert numbers_of(found) == list(range(100))


def test_little_memory_is_enough_for_much_data(cluster, topic):
    with consumer_of(cluster, topic, pull_threshold_for_queue=3, pull_max_bytes=1) as consumer:
        consumer.subscribe(topic)
        assert numbers_of(poll_until(consumer, 100)) == list(range(100))


def test_misuse_is_told_at_once(cluster):
    consumer = PullConsumer("g", namesrv_addr=cluster.namesrv_addr)
    with pytest.raises(ClientClosed, match="start"):
        consumer.poll(0)
    consumer.subscribe("t")
    with pytest.raises(InvalidArgument, match="subscribed already"):
        consumer.subscribe("t", "A")
    with pytest.raises(InvalidArgument, match="exclude"):
        consumer.assign([])
    consumer.close()
    with pytest.raises(ClientClosed):
        consumer.poll(0)
    with PullConsumer("g", namesrv_addr=cluster.namesrv_addr) as consumer:
        with pytest.raises(NoRoute, match="nowhere"):
            consumer.queues("nowhere")
        with pytest.raises(InvalidArgument, match="max_messages"):
            consumer.poll(0, 0)


def test_closing_wakes_a_poll(cluster, topic):
    consumer = consumer_of(cluster, topic, consume_from_where="LAST_OFFSET")
    consumer.start()
    outcome = []

    def poll():
        try:
            outcome.append(consumer.poll(30_000))
        except ClientClosed as error:
            outcome.append(error)

    poller = threading.Thread(target=poll)
    poller.start()
    consumer.close()
    poller.join(PATIENCE_S)
    assert isinstance(outcome[0], ClientClosed)


def test_closing_just_before_a_poll_waits_is_not_missed(cluster, topic):
    consumer = consumer_of(cluster, topic, consume_from_where="LAST_OFFSET")
    consumer.start()
    changed = consumer._queues._changed

    class ClosedMeanwhile:
        """The condition, which is got hold of only after the consumer was closed."""

        def __enter__(self):
            consumer._queues._changed = changed
            consumer.close()
            return changed.__enter__()

        def __exit__(self, *error):
            return changed.__exit__(*error)

    consumer._queues._changed = ClosedMeanwhile()
    watch = Stopwatch()
    with pytest.raises(ClientClosed):
        consumer.poll(30_000)
    assert watch.seconds < 10


def stale_commits(cluster):
    with AdminClient(cluster.namesrv_addr) as admin:
        (metrics,) = admin.runtime_info().values()
    return metrics.number("refusals_total", "stale_generation")


def test_where_reading_began_is_not_committed_behind_the_last_commit(cluster, topic, monkeypatch):
    """It comes some ms after the start; queues were given back by then if all ends at once."""
    late = []
    call_later, commit_last = ClientEngine.call_later, ConsumerEngine._commit_last

    def keep(engine, delay_ms, callback):
        if delay_ms == START_COMMIT_MS:
            late.append(callback)
        else:
            call_later(engine, delay_ms, callback)

    def close(engine, on_done):
        commit_last(engine, on_done)
        for callback in late:
            callback()

    monkeypatch.setattr(ClientEngine, "call_later", keep)
    monkeypatch.setattr(ConsumerEngine, "_commit_last", close)
    before = stale_commits(cluster)
    for group in ("first", "second"):  # by when this one has started, the first was answered
        consumer = consumer_of(cluster, f"{group}-{topic}")
        consumer.subscribe(topic)
        with consumer:
            assert late
        late.clear()
    assert stale_commits(cluster) == before


# ---- asyncio --------------------------------------------------------------------------


def aio_consumer_of(cluster, group, kind=aio_consumer.PullConsumer, **options):
    options = {"consume_from_where": "FIRST_OFFSET", **options}
    return kind(group, namesrv_addr=cluster.namesrv_addr, **options)


def test_iterating_gives_every_message_and_each_is_done_when_the_next_is_asked_for(cluster, topic):
    async def take(count):
        found = []
        async with aio_consumer_of(cluster, topic) as consumer:
            await consumer.subscribe(topic)
            async for message in consumer:
                found.append(message)
                if len(found) == count:
                    break
        return numbers_of(found)

    async def fail():
        async with aio_consumer_of(cluster, topic) as consumer:
            await consumer.subscribe(topic)
            async for _ in consumer:
                raise ZeroDivisionError

    async def main():
        done = await take(37)
        with pytest.raises(ZeroDivisionError):
            await fail()
        return done, await take(63)

    done, rest = asyncio.run(main())
    assert sorted(done + rest) == list(range(100))


def test_iterating_goes_on_where_it_was_left_by_whatever_means(cluster, topic):
    async def main():
        found = []
        async with aio_consumer_of(cluster, topic) as consumer:
            await consumer.subscribe(topic)
            for count in (3, 40):
                async for message in consumer:
                    found.append(message)
                    if len(found) >= count:
                        break
                found.append(await anext(consumer))
            while len(found) < 100:
                found.append(await anext(consumer))
            await consumer.close()
            assert [message async for message in consumer] == []
        return numbers_of(found)

    assert sorted(asyncio.run(main())) == list(range(100))


def test_an_asyncio_consumer_seeks_commits_and_polls(cluster, topic):
    async def main():
        async with aio_consumer_of(cluster, topic, auto_commit=False) as consumer:
            queues = await consumer.queues(topic)
            await consumer.assign(queues)
            found = []
            while len(found) < 100:
                found += await consumer.poll(1_000)
            assert await consumer.poll(20) == []
            await consumer.commit()
            assert await consumer.committed(queues[0]) == consumer.position(queues[0])
            await consumer.seek_to_begin(queues[0])
            count = (await consumer.lag(queues[0]))[queues[0]]
            again = []
            while len(again) < count:
                again += await consumer.poll(1_000)
            assert numbers_of(found) == list(range(100))
            assert {message.message_queue for message in again} == {queues[0]}

    asyncio.run(main())


def test_an_asyncio_consumer_that_is_sent_nowhere_goes_on_where_it_is(cluster, topic):
    async def main():
        async with aio_consumer_of(cluster, topic) as consumer:
            await consumer.subscribe(topic)
            found = []
            async for message in consumer:
                found.append(message)
                queue = message.message_queue
                for wrong, error in ((-1, OffsetIllegal), ("1", InvalidArgument)):
                    with pytest.raises(error):
                        await consumer.seek(queue, wrong)
                with pytest.raises(InvalidArgument):
                    await consumer.commit({queue: -5})
                if len(found) == 100:
                    break
            assert numbers_of(found) == list(range(100))

    asyncio.run(main())


def test_a_commit_while_iterating_covers_the_message_at_hand(cluster, topic):
    async def main():
        async with aio_consumer_of(cluster, topic, auto_commit=False) as consumer:
            await consumer.subscribe(topic)
            async for message in consumer:
                await consumer.commit()
                return message, await consumer.committed(message.message_queue)

    message, committed = asyncio.run(main())
    assert committed == message.queue_offset + 1


def test_a_plain_function_is_no_coroutine_listener(cluster, topic):
    async def main():
        consumer = aio_consumer_of(cluster, topic, aio_consumer.PushConsumer)
        with pytest.raises(InvalidArgument, match="coroutine"):
            await consumer.subscribe(topic, listener=print)
        await consumer.close()

    asyncio.run(main())


def test_an_asyncio_consumer_may_be_closed_by_its_listener(cluster, topic):
    async def main():
        closed = asyncio.Event()

        async def listen(_messages):
            await consumer.close()
            closed.set()
            return ConsumeResult.SUCCESS

        consumer = aio_consumer_of(
            cluster, topic, aio_consumer.PushConsumer, consume_thread_count=1
        )
        await consumer.subscribe(topic, listener=listen)
        await consumer.start()
        async with asyncio.timeout(PATIENCE_S):
            await closed.wait()

    asyncio.run(main())
