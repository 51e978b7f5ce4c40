"""FastStream's broker without a cluster: what handlers get, what they decide, what is sent."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import Annotated

import pydantic
import pytest
from faststream import AckPolicy, BaseMiddleware, Context, FastStream, TestApp
from faststream._internal.logger.logger_proxy import RealLoggerObject
from faststream.exceptions import (
    AckMessage,
    FeatureNotSupportedException,
    NackMessage,
    RejectMessage,
    SubscriberNotFound,
)
from faststream.message import AckStatus

from mqmesh import (
    MSGPACK_CODEC,
    ConsumeResult,
    Message,
    MessageSelector,
    Reject,
    StoredMessage,
)
from mqmesh.errors import ClientClosed, InvalidArgument
from mqmesh.faststream import (
    Delivery,
    MQMeshBroker,
    MQMeshCodec,
    MQMeshMessage,
    MQMeshResponse,
    MQMeshRoute,
    MQMeshRoutePublisher,
    MQMeshRouter,
    TestMQMeshBroker,
)
from mqmesh.message import BatchInfo
from mqmesh.sdk.consumer.outputs import Outputs
from mqmesh.sdk.faststream.message import parse


class Order(pydantic.BaseModel):
    id: int


@pytest.fixture
def broker():
    return MQMeshBroker("127.0.0.1:1")


def with_broker(broker, run):
    async def program():
        async with TestMQMeshBroker(broker) as one:
            return await run(one)

    return asyncio.run(program())


def test_a_handler_gets_what_was_published_and_its_result_is_published(broker):
    @broker.subscriber("orders", group="billing")
    @broker.publisher("bills", tag="bill")
    async def bill(order: Order) -> dict[str, int]:
        return {"billed": order.id}

    @broker.subscriber("bills", group="post", expression="bill")
    async def post(bill: dict[str, int], message: Annotated[MQMeshMessage, Context("message")]):
        assert message.stored.tag == "bill"
        seen.append(message.correlation_id)

    async def run(one):
        await one.publish(Order(id=7), "orders", correlation_id="c-1")

    seen = []
    with_broker(broker, run)
    assert seen == ["c-1"]


def test_only_what_the_own_broker_publishes_is_an_output_of_its_messages(broker, monkeypatch):
    other, out, sent, joined = MQMeshBroker("127.0.0.1:2"), Outputs(), [], []
    subscriber = broker.subscriber("orders", group="billing", exactly_once=True)

    class Sender:
        async def send(self, message, **options):
            sent.append(message.topic)

        async def send_batch(self, messages, **options):
            sent.extend(message.topic for message in messages)

    class Consumer:
        @asynccontextmanager
        async def processing(self, messages):
            yield out

    async def join(subscription):
        joined.append(subscription)

    async def listen(messages):
        for one, topic in ((broker, "bills"), (other, "copies")):
            await one.publish("x", topic)
            await one.publish_batch("y", topic=topic)
        return ConsumeResult.SUCCESS

    @subscriber
    async def bill(order: bytes) -> None: ...

    async def handle_one():
        await subscriber.start()
        await joined[0].listener_of(Consumer())([StoredMessage("orders", b"1")])

    monkeypatch.setattr(other.config.producer, "_producer", Sender())
    broker.config.logger.logger = RealLoggerObject(logging.getLogger("shop"))
    monkeypatch.setattr(broker.config.consumers, "join", join)
    monkeypatch.setattr(subscriber, "_listen", listen)
    asyncio.run(handle_one())
    assert sent == ["copies", "copies"]
    assert out.end().topics == {"bills"}


def test_mocks_say_what_was_handled_and_published(broker):
    bills = broker.publisher("bills")

    @broker.subscriber("orders", group="billing")
    @bills
    async def bill(order: Order) -> str:
        return f"bill {order.id}"

    async def run(one):
        await one.publish({"id": 7}, "orders")
        bill.mock.assert_called_once_with({"id": 7})
        bills.mock.assert_called_once_with("bill 7")

    with_broker(broker, run)


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("*", ["a", "b"]),
        ("a || c", ["a"]),
        (MessageSelector.by_sql("size > 5 AND TAGS = 'b'"), ["b"]),
    ],
)
def test_each_group_gets_what_it_asked_for(broker, expression, wanted):
    got = []

    @broker.subscriber("orders", group="one", expression=expression)
    async def one(message: Annotated[MQMeshMessage, Context("message")]) -> None:
        got.append(message.stored.tag)

    @broker.subscriber("orders", group="two")
    async def two(body: str) -> None:
        all_of_them.append(body)

    async def run(sender):
        for tag in "a", "b":
            await sender.publish(tag, "orders", tag=tag, headers={"size": "7"})

    all_of_them = []
    with_broker(broker, run)
    assert (got, all_of_them) == (wanted, ["a", "b"])


def test_a_request_is_answered_with_what_the_handler_returns(broker):
    @broker.subscriber("prices", group="shop")
    async def price(item: str) -> MQMeshResponse:
        return MQMeshResponse({"item": item, "price": 3}, headers={"currency": "eur"})

    async def run(one):
        reply = await one.request("apple", "prices")
        assert await reply.decode() == {"item": "apple", "price": 3}
        assert reply.headers == {"currency": "eur"}
        again = await one.publisher("prices").request("pear")
        assert (await again.decode())["item"] == "pear"
        with pytest.raises(SubscriberNotFound):
            await one.request("apple", "nobody")

    with_broker(broker, run)


def test_the_result_goes_to_the_topic_that_waits_for_it(broker):
    @broker.subscriber("questions", group="g")
    async def answer(question: str) -> str:
        return question + "!"

    @broker.subscriber("answers", group="g")
    async def take(answer: str) -> None: ...

    async def run(one):
        await one.publish("why", "questions", reply_to="answers")
        take.mock.assert_called_once_with("why!")

    with_broker(broker, run)


def test_a_batch_is_handled_message_by_message_and_nothing_is_null(broker):
    @broker.subscriber("orders", group="g")
    async def take(body: int | None) -> None: ...

    async def run(one):
        sent = await one.publish_batch(None, 1, 2, topic="orders")
        assert sent.message_count == len(set(sent.message_ids)) == 3
        assert [call.args for call in take.mock.call_args_list] == [(None,), (1,), (2,)]

    with_broker(broker, run)


def test_routers_have_prefixes_and_middlewares_see_all(broker):
    seen = []

    class Sees(BaseMiddleware):
        async def consume_scope(self, call_next, msg):
            seen.append(("consume", msg.body))
            return await call_next(msg)

        async def publish_scope(self, call_next, cmd):
            seen.append(("publish", cmd.destination))
            return await call_next(cmd)

    async def route(body: str) -> str:
        return body + "!"

    out = [MQMeshRoutePublisher("out")]
    router = MQMeshRouter("eu.", [MQMeshRoute(route, "in", group="g", publishers=out)])
    broker.include_router(router)
    broker.add_middleware(Sees)

    async def run(one):
        await one.publish("a", "eu.in")

    with_broker(broker, run)
    assert seen == [
        ("publish", "eu.in"),
        ("consume", b"a"),
        ("publish", "eu.out"),
        ("consume", b"a!"),
    ]


def test_an_application_has_the_brokers_life_and_a_document(broker):
    app = FastStream(broker)

    @broker.subscriber("orders", group="billing", title="Orders", description="to be billed")
    @broker.publisher("bills")
    async def bill(order: Order) -> Order:
        return order

    async def program():
        async with TestMQMeshBroker(broker), TestApp(app):
            await broker.publish(Order(id=1), "orders")

    asyncio.run(program())
    document = app.schema.to_specification().to_jsonable()
    assert document["servers"]["development"]["protocol"] == "mqmesh"
    assert document["channels"]["Orders"]["address"] == "orders"
    assert document["channels"]["Orders"]["description"] == "to be billed"
    assert document["channels"]["bills:Publisher"]["address"] == "bills"
    assert "Order" in document["components"]["schemas"]


# ---- Lists of messages ------------------------------------------------------------------


def test_a_handler_gets_what_was_published_at_once_as_one_list(broker):
    @broker.subscriber("orders", group="billing", batch=True)
    async def bill(orders: list[Order], message: Annotated[MQMeshMessage, Context("message")]):
        stored = message.raw_message.messages
        assert message.stored is stored[0]
        assert [headers["size"] for headers in message.batch_headers] == ["7"] * len(orders)
        seen.append([order.id for order in orders] + [one.queue_offset for one in stored])

    async def run(one):
        await one.publish(Order(id=1), "orders", headers={"size": "7"})
        await one.publish_batch(Order(id=2), {"id": 3}, topic="orders", headers={"size": "7"})
        await bill.assert_called_with([Order(id=2), Order(id=3)])

    seen = []
    with_broker(broker, run)
    assert seen == [[1, 0], [2, 3, 1, 2]]


def test_a_publisher_of_lists_sends_one_batch_and_nothing_for_an_empty_list(broker):
    bills, posts = broker.publisher("bills", batch=True, tag="bill"), broker.publisher("posts")

    @broker.subscriber("orders", group="billing", batch=True)
    @bills
    async def bill(orders: list[int]) -> list[int]:
        return [number for number in orders if number]

    @broker.subscriber("copies", group="billing")
    @bills
    async def copy(order: int) -> MQMeshResponse:
        return MQMeshResponse((order, order), tag="copy")

    @broker.subscriber("bills", group="post", expression="bill")
    async def post(bill: int | None) -> None: ...

    @broker.subscriber("bills", group="copies", expression="copy", batch=True)
    async def keep(bills: list[int]) -> None: ...

    async def run(one):
        await one.publish_batch(1, 0, 2, topic="orders")
        await one.publish(0, "orders")
        await bills.publish(3, None)
        assert [call.args for call in post.mock.call_args_list] == [(1,), (2,), (3,), (None,)]
        await one.publish(5, "copies")
        keep.mock.assert_called_once_with([5, 5])
        with pytest.raises(InvalidArgument, match="several with batch=True"):
            await posts.publish(1, 2)

    with_broker(broker, run)


def test_a_call_without_a_value_sends_nothing_and_says_so(broker):
    bills, posts = broker.publisher("bills", batch=True), broker.publisher("posts")

    async def run(one):
        for publisher in bills, posts:
            with pytest.raises(InvalidArgument, match="publish needs a value"):
                await publisher.publish()
        with pytest.raises(InvalidArgument, match="at least one value"):
            await one.publish_batch(topic="bills")

    with_broker(broker, run)


def test_a_publisher_of_lists_that_nobody_handles_has_a_mock(broker):
    bills = broker.publisher("bills", batch=True)

    async def run(one):
        await bills.publish(1, 2)
        bills.mock.assert_called_once_with([1, 2])

    with_broker(broker, run)


def test_what_lists_are_made_of_stands_in_the_document(broker):
    @broker.subscriber("orders", group="billing", batch=True)
    @broker.publisher("bills", batch=True)
    async def bill(orders: list[Order]) -> list[Order | int]: ...

    @broker.subscriber("others", group="billing", batch=True)
    async def any_order(orders) -> None: ...

    document = FastStream(broker).schema.to_specification().to_jsonable()
    schemas = document["components"]["schemas"]
    order = {"$ref": "#/components/schemas/Order"}
    title = "Bill:Message:Payload"
    assert schemas[title] == {"title": title, **order}
    title = "bills:Publisher:Message:Payload"
    assert schemas[title] == {"title": title, "anyOf": [order, {"type": "integer"}]}
    assert set(schemas) >= {"Order", "AnyOrder:Message:Payload"}


def test_a_handler_of_lists_answers_nobody(broker):
    @broker.subscriber("questions", group="g", batch=True)
    async def answer(questions: list[str]) -> str:
        return "?"

    @broker.subscriber("answers", group="g")
    async def take(answer: str) -> None: ...

    async def run(one):
        await one.publish("why", "questions", reply_to="answers")
        assert not take.mock.called
        with pytest.raises(SubscriberNotFound):
            await one.request("why", "questions")
        answer.mock.assert_called_once_with(["why"])

    with_broker(broker, run)


def test_a_codec_decodes_a_list_if_it_can():
    class Lengths:
        async def encode(self, msg, serializer=None):
            return msg.encode(), None

        async def decode(self, msg):
            return len(msg.body)

        async def encode_batch(self, msgs, serializer=None):
            raise AssertionError("who decodes a list of them has others, perhaps")

        async def decode_batch(self, msg):
            return [len(body) for body in msg.body]

    broker = MQMeshBroker("127.0.0.1:1", codec=Lengths())

    @broker.subscriber("orders", group="g", batch=True)
    async def take(lengths: list[int]) -> None: ...

    async def run(one):
        await one.publish_batch("a", "bcd", topic="orders")
        take.mock.assert_called_once_with([1, 3])

    with_broker(broker, run)


def test_a_group_takes_lists_or_it_does_not_and_nobody_asks_for_lists(broker):
    def subscriber(topic, **options):
        made = broker.subscriber(topic, group="g", **options)
        made(print)
        return made

    async def run(one):
        await subscriber("a", batch=True).start()
        with pytest.raises(InvalidArgument, match="one set of options"):
            await subscriber("b").start()
        with pytest.raises(InvalidArgument, match="batch=True"):
            await subscriber("c", consume_message_batch_max_size=32).start()
        await subscriber("d", batch=True, consume_message_batch_max_size=32).start()
        with pytest.raises(FeatureNotSupportedException, match="needs a function"):
            await broker.subscriber("e", group="other", batch=True).start()

    with_broker(broker, run)


# ---- What becomes of a message, or of a list of them ------------------------------------


def outcome(broker, raised=None, decide=None, body=b"7", **options):
    """What the consumer is told of a message whose handler raises or decides something."""

    @broker.subscriber("orders", group="g", **options)
    async def handle(
        body: int | list[int], message: Annotated[MQMeshMessage, Context("message")]
    ) -> None:
        if decide is not None:
            await getattr(message, decide)()
        if raised is not None:
            raise raised

    async def run(one):
        (subscriber,) = one.subscribers
        others = [stored(b"1")] if subscriber.settings.batch else []
        delivery = Delivery(*others, stored(body))
        await subscriber.consume(delivery)
        return delivery.result()

    return with_broker(broker, run)


def stored(body):
    info = BatchInfo("orders", 0, "b", 0, 0, 1, 0, 0, "", "", 1, 1, 0)
    message = StoredMessage("orders", body, properties={"content_type": "application/json"})
    message.batch = info
    return message


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"raised": AckMessage()},
        {"decide": "ack", "raised": KeyError("late")},
        {"decide": "ack", "ack_policy": AckPolicy.MANUAL},
        {"raised": KeyError("x"), "ack_policy": AckPolicy.ACK},
        {"raised": KeyError("x"), "ack_policy": AckPolicy.ACK_FIRST},
    ],
)
@pytest.mark.parametrize("batch", [False, True])
def test_it_is_done(broker, case, batch):
    assert outcome(broker, **case, batch=batch) is ConsumeResult.SUCCESS


@pytest.mark.parametrize(
    "case",
    [
        {"raised": NackMessage()},
        {"decide": "nack"},
        {"ack_policy": AckPolicy.MANUAL},
    ],
)
@pytest.mark.parametrize("batch", [False, True])
def test_it_comes_again(broker, case, batch):
    assert outcome(broker, **case, batch=batch) is ConsumeResult.RECONSUME_LATER


@pytest.mark.parametrize("policy", [AckPolicy.NACK_ON_ERROR, AckPolicy.MANUAL])
def test_it_comes_again_and_the_consumer_knows_why(broker, policy):
    with pytest.raises(KeyError, match="x"):
        outcome(broker, raised=KeyError("x"), ack_policy=policy)


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ({"raised": RejectMessage()}, "the handler rejected the message"),
        ({"decide": "reject"}, "the handler rejected the message"),
        ({"raised": Reject("too old")}, "too old"),
        ({"raised": KeyError("x"), "dead_letter_on": (LookupError,)}, "KeyError: 'x'"),
        ({"raised": KeyError("x"), "ack_policy": AckPolicy.REJECT_ON_ERROR}, "KeyError: 'x'"),
        ({"body": b'"seven"'}, "ValidationError"),
        ({"body": b"{"}, "the body is no application/json"),
    ],
)
@pytest.mark.parametrize("batch", [False, True])
def test_it_is_a_dead_letter_at_once(broker, case, told, batch):
    with pytest.raises(Reject, match=told):
        outcome(broker, **case, batch=batch)


class Stop(BaseException):
    """No Exception, as those that a program ends its own work with."""


@pytest.mark.parametrize(
    ("policy", "result"),
    [
        (AckPolicy.NACK_ON_ERROR, Stop),
        (AckPolicy.MANUAL, Stop),
        (AckPolicy.REJECT_ON_ERROR, Reject),
        (AckPolicy.ACK, None),
        (AckPolicy.ACK_FIRST, None),
    ],
)
def test_the_policy_holds_for_every_exception_of_a_handler(broker, policy, result):
    @broker.subscriber("orders", group="g", ack_policy=policy)
    async def handle(number: int) -> None:
        raise Stop

    async def run(one):
        (subscriber,) = one.subscribers
        return await subscriber._listen([stored(b"7")])

    if result is None:
        assert with_broker(broker, run) is ConsumeResult.SUCCESS
    else:
        with pytest.raises(result):
            with_broker(broker, run)


@pytest.mark.parametrize(
    ("body", "caused", "told"),
    [
        (b'"seven"', False, "ValidationError: 1 validation error"),
        (b"{", False, "Reject: the body is no application/json"),
        (b"0", False, "Reject: nothing to do"),
        (b"1", True, "ZeroDivisionError: division by zero"),
    ],
)
def test_the_log_has_one_line_of_what_is_a_dead_letter_on_purpose(
    broker, caplog, body, caused, told
):
    @broker.subscriber("orders", group="g", dead_letter_on=(ZeroDivisionError,))
    async def handle(number: int) -> float:
        if number == 0:
            raise Reject("nothing to do")
        return number / 0

    async def run(one):
        one.config.logger.logger = RealLoggerObject(logging.getLogger("shop"))
        delivery = Delivery(stored(body))
        await one.subscribers[0].consume(delivery)
        with pytest.raises(Reject) as raised:
            delivery.result()
        assert (raised.value.__cause__ is not None) == caused

    with_broker(broker, run)
    (line,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert line.getMessage().startswith(told)
    assert "\n" not in line.getMessage()
    assert line.exc_info is None


def test_the_log_has_a_trace_of_other_errors_and_no_more_than_a_part_of_a_long_text(broker, caplog):
    @broker.subscriber("orders", group="g", dead_letter_on=(KeyError,))
    async def handle(number: int) -> None:
        raise ValueError("x" * 10_000_000)

    async def run(one):
        one.config.logger.logger = RealLoggerObject(logging.getLogger("shop"))
        await one.subscribers[0].consume(Delivery(stored(b"1")))

    with_broker(broker, run)
    (line,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert line.exc_info[0].__name__ == "ValueError"
    assert len(caplog.text) < 20_000


def test_what_a_handler_validates_by_itself_may_be_better_next_time(broker):
    @broker.subscriber("orders", group="g")
    async def handle(body: int) -> None:
        Order.model_validate_json("<html>Bad gateway</html>")

    async def run(one):
        delivery = Delivery(stored(b"7"))
        await one.subscribers[0].consume(delivery)
        with pytest.raises(pydantic.ValidationError):
            delivery.result()

    with_broker(broker, run)


def test_the_brokers_policy_is_that_of_its_handlers():
    broker = MQMeshBroker("127.0.0.1:1", ack_policy=AckPolicy.ACK)
    assert outcome(broker, raised=KeyError("x")) is ConsumeResult.SUCCESS


# ---- What is refused --------------------------------------------------------------------


def test_a_handlers_error_is_raised_to_who_tests_it(broker):
    @broker.subscriber("orders", group="g")
    async def handle(order: Order) -> None: ...

    async def run(one):
        with pytest.raises(pydantic.ValidationError):
            await one.publish({"id": "seven"}, "orders")
        with pytest.raises(TypeError, match="not stored"):
            _ = (await parse(Delivery(Message("orders", b"1")))).stored

    with_broker(broker, run)


def test_who_has_a_function_is_not_asked_for_messages_nor_who_was_not_started(broker):
    async def handle(order: Order) -> None: ...

    async def iterate(subscriber):
        async for _ in subscriber:
            pass

    subscriber = broker.subscriber("orders", group="g")
    for ask in (subscriber.get_one(), iterate(subscriber)):
        with pytest.raises(ClientClosed, match="start it"):
            asyncio.run(ask)
    subscriber(handle)
    for ask in (subscriber.get_one(), iterate(subscriber)):
        with pytest.raises(FeatureNotSupportedException, match="has a function"):
            asyncio.run(ask)


def test_a_subscriber_without_a_function_stays_so_in_tests(broker):
    subscriber, publisher = broker.subscriber("orders", group="g"), broker.publisher("orders")

    async def run(one):
        await publisher.publish({"id": 1})
        publisher.mock.assert_called_once_with({"id": 1})

    with_broker(broker, run)
    assert not subscriber.calls


def test_what_was_asked_for_can_be_done_but_not_sent_back():
    async def run():
        delivery = Delivery(Message("orders", b"1"), is_requested=True)
        message = await parse(delivery)
        for send_back in message.nack, message.reject:
            with pytest.raises(FeatureNotSupportedException, match="cannot be sent back"):
                await send_back()
        assert delivery.decision is None
        await message.ack()
        assert delivery.decision is AckStatus.ACKED

    asyncio.run(run())


@pytest.mark.parametrize(
    ("topic", "options", "told"),
    [
        ("a b", {}, "topic"),
        ("orders", {"group": "a b"}, "group"),
        ("orders", {"group": "%RETRY%g"}, "reserved"),
        ("orders", {"expression": "a ||"}, "tag"),
        ("orders", {"consume_thread_counts": 3}, "consume_thread_counts"),
        ("orders", {"consume_thread_count": 0}, "consume_thread_count"),
        ("orders", {"pull_batch_size": 0}, "pull_batch_size"),
        ("orders", {"consume_message_batch_max_size": 2}, "batch=True"),
    ],
)
def test_what_no_subscriber_can_have_is_refused_before_the_start(broker, topic, options, told):
    with pytest.raises(InvalidArgument, match=told):
        broker.subscriber(topic, **{"group": "g", **options})
    assert broker.subscribers == []


def test_a_subscriber_without_a_function_may_have_options_of_pull_consumers(broker):
    subscriber = broker.subscriber("orders", group="g", pull_batch_size=1, auto_commit=False)
    assert subscriber.settings.options == {"pull_batch_size": 1, "auto_commit": False}


def test_a_publishers_topic_and_options_are_checked_before_the_start(broker):
    with pytest.raises(InvalidArgument, match="topic"):
        broker.publisher("a b")
    with pytest.raises(InvalidArgument, match="unknown option of a publisher: tags"):
        broker.publisher("orders", tags="a")


def test_names_are_checked_with_the_prefixes_of_their_router():
    router = MQMeshRouter("eu.")
    router.subscriber(".", group="g")  # no name of a topic, but "eu.." is one
    with pytest.raises(InvalidArgument, match="topic"):
        MQMeshRouter("e u.").subscriber("orders", group="g")
    with pytest.raises(InvalidArgument, match="topic"):
        router.publisher("x" * 127)


def test_who_is_not_connected_has_no_answer(broker):
    assert asyncio.run(broker.ping()) is False


def test_a_codec_of_an_app_gives_bodies_its_form():
    codec = MQMeshCodec(MSGPACK_CODEC)
    broker = MQMeshBroker("127.0.0.1:1", codec=codec)

    @broker.subscriber("orders", group="billing")
    async def bill(order: dict[str, int]) -> None: ...

    @broker.subscriber("lists", group="lists", batch=True)
    async def take(orders: list[dict[str, int]]) -> None: ...

    async def run(one):
        await one.publish({"n": 1}, "orders")
        bill.mock.assert_called_once_with({"n": 1})
        await one.publish_batch({"n": 2}, {"n": 3}, topic="lists")
        take.mock.assert_called_once_with([{"n": 2}, {"n": 3}])
        with pytest.raises(InvalidArgument, match="application/msgpack"):
            await one.publish(object(), "orders")
        for body, kind in ((b"{}", "application/json"), (b"\xc1", None)):
            properties = None if kind is None else {"CONTENT_TYPE": kind}
            message = await parse(Delivery(Message("orders", body, properties=properties)))
            with pytest.raises(Reject, match="application/msgpack"):
                await codec.decode(message)

    with_broker(broker, run)
