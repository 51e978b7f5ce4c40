"""Typed handlers: what they are called with, and what becomes of what they raise."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec
import pydantic
import pytest

import mqmesh.aio
from mqmesh import App, Reject, StoredMessage
from mqmesh.errors import InvalidArgument
from mqmesh.faststream import MQMeshBroker
from mqmesh.sdk.app.bodies import JSON_CODEC, MSGPACK_CODEC, Codec, decoder_of, encoder_of
from mqmesh.sdk.app.message_maker import MessageMaker
from mqmesh.sdk.app.subscriptions import Subscriptions, TypedHandler, TypedSubscription


class Struct(msgspec.Struct):
    id: int


@dataclass
class Plain:
    id: int


class Model(pydantic.BaseModel):
    id: int


def message(body=b'{"id": 7}'):
    return StoredMessage("orders", body)


@pytest.mark.parametrize("kind", [Struct, Plain, Model])
def test_a_value_comes_back_as_it_was_sent(kind):
    body = encoder_of(kind)(kind(id=7))
    assert decoder_of(kind)(message(body)) == kind(id=7)


@pytest.mark.parametrize(
    ("kind", "value", "body"),
    [(bytes, b"\xff", b"\xff"), (str, "ä", b"\xc3\xa4"), (dict[str, int], {"a": 1}, b'{"a":1}')],
)
def test_bytes_text_and_plain_json_need_no_model(kind, value, body):
    assert encoder_of(kind)(value) == body
    assert decoder_of(kind)(message(body)) == value


@pytest.mark.parametrize("kind", [Struct, Plain, Model, dict[str, int]])
@pytest.mark.parametrize("body", [b'{"id": "seven"}', b"{", b"\xff"])
def test_a_body_that_is_none_is_rejected(kind, body):
    with pytest.raises(Reject, match="the body is no") as raised:
        decoder_of(kind)(message(body))
    assert raised.value.__cause__ is None  # its trace would tell the log nothing


@pytest.mark.parametrize("kind", [Struct, Plain, Model, dict[str, int]])
@pytest.mark.parametrize("codec", [JSON_CODEC, MSGPACK_CODEC])
def test_a_codec_says_how_bodies_look(kind, codec):
    value = {"id": 7} if kind == dict[str, int] else kind(id=7)
    made = MessageMaker("orders", kind, codec).message(value, properties={"origin": "EWR"})
    assert made.properties == {"CONTENT_TYPE": codec.content_type, "origin": "EWR"}
    sent = StoredMessage("orders", made.body, properties=made.properties)
    assert decoder_of(kind, codec)(sent) == value
    assert decoder_of(kind, codec)(message(made.body)) == value, "the note may be missing"
    with pytest.raises(Reject, match="the body is no"):
        decoder_of(kind, codec)(message(b"\xc1"))
    with pytest.raises(InvalidArgument, match="cannot be encoded"):
        encoder_of(object, codec)(object())


def test_any_callables_are_a_codec():
    class Wire:
        def __init__(self, text):
            self.text = text

    codec = Codec(
        "text/x-wire", lambda one: one.text.encode(), lambda body, kind: kind(body.decode())
    )
    made = MessageMaker("orders", Wire, codec).message(Wire("hello"))
    assert (made.body, made.properties) == (b"hello", {"CONTENT_TYPE": "text/x-wire"})
    assert decoder_of(Wire, codec)(message(b"hello")).text == "hello"
    with pytest.raises(Reject, match="the body is no Wire"):
        decoder_of(Wire, codec)(message(b"\xff"))
    for wrong in "", "x" * 256:
        with pytest.raises(InvalidArgument, match="it must have 1 to 255"):
            Codec(wrong, codec.encode, codec.decode)


def test_a_body_of_another_form_is_rejected_by_its_name():
    other = StoredMessage("orders", b"{}", properties={"CONTENT_TYPE": "application/json"})
    with pytest.raises(Reject, match="the body is application/json; this handler decodes"):
        decoder_of(dict, MSGPACK_CODEC)(other)


def test_text_that_is_no_text_is_rejected():
    with pytest.raises(Reject, match="the body is no str"):
        decoder_of(str)(message(b"\xff"))


@pytest.mark.parametrize("kind", [Struct, Model, bytes, str])
def test_another_value_is_not_sent(kind):
    with pytest.raises(InvalidArgument, match="int is no"):
        encoder_of(kind)(7)


def test_nobody_decodes_a_lock_or_sends_a_stored_message():
    with pytest.raises(InvalidArgument, match="no JSON"):
        decoder_of(lambda: None)
    with pytest.raises(InvalidArgument, match="use a Producer"):
        encoder_of(StoredMessage)


def test_a_publisher_sets_the_fields_of_a_message():
    made = MessageMaker("orders", Struct).message(Struct(7), tag="new", keys=["7"], delay_level=3)
    assert (made.topic, made.body, made.tag) == ("orders", b'{"id":7}', "new")
    assert (list(made.keys), made.delay_level) == (["7"], 3)


# ---- Handlers -----------------------------------------------------------------------------


def test_a_handler_gets_the_value_and_the_message_if_it_wants_it():
    seen = []

    def both(order: Struct, stored: StoredMessage):
        seen.append((order, stored))

    def one(order: Plain):
        seen.append(order)

    given = message()
    TypedHandler(both, ()).listen([given])
    TypedHandler(one, ()).listen([given])
    assert seen == [(Struct(7), given), Plain(7)]


def test_what_a_handler_answers_is_the_answer_of_the_listener():
    def handle(body: bytes):
        return mqmesh.ConsumeResult.RECONSUME_LATER

    assert TypedHandler(handle, ()).listen([message()]) is mqmesh.ConsumeResult.RECONSUME_LATER


def test_chosen_errors_reject_and_others_are_retried():
    def handle(order: Struct):
        raise KeyError("unknown customer") if order.id == 7 else ConnectionError("database")

    handler = TypedHandler(handle, (LookupError,))
    with pytest.raises(Reject, match="KeyError: 'unknown customer'"):
        handler.listen([message()])
    with pytest.raises(ConnectionError):
        handler.listen([message(b'{"id": 8}')])


def test_a_coroutine_function_is_awaited():
    async def handle(order: Struct):
        await asyncio.sleep(0)
        raise ValueError(order.id)

    handler = TypedHandler(handle, (ValueError,))
    assert handler.is_coroutine
    with pytest.raises(Reject, match="ValueError: 7"):
        asyncio.run(handler.listen_async([message()]))


def _none():
    pass


def _unannotated(order):
    pass


def _three(a: bytes, b: StoredMessage, c: int):
    pass


def _other_second(a: bytes, b: int):
    pass


def _unknown(a: Nowhere):  # noqa: F821 - that is the point
    pass


@pytest.mark.parametrize("function", [_none, _unannotated, _three, _other_second, _unknown])
def test_other_parameters_are_refused_when_the_handler_is_made(function):
    with pytest.raises(InvalidArgument, match=function.__name__):
        TypedHandler(function, ())


# ---- Applications -------------------------------------------------------------------------


def _handle(body: bytes):
    pass


def subscription(topic="orders", group="billing", **options):
    return TypedSubscription(topic, group, "*", TypedHandler(_handle, ()).listen, options)


def test_a_group_has_one_consumer_for_its_topics():
    made = Subscriptions()
    for topic, group in (("orders", "billing"), ("refunds", "billing"), ("orders", "audit")):
        made.add(subscription(topic, group))
    topics = {group: [one.topic for one in some] for group, some in made.by_group().items()}
    assert topics == {"billing": ["orders", "refunds"], "audit": ["orders"]}


@pytest.mark.parametrize(
    ("second", "told"),
    [
        (subscription(), "two handlers of topic 'orders'"),
        (subscription("refunds", consume_thread_count=2), "one set of options"),
        (subscription("a b"), "topic"),
        (subscription("refunds", "a b"), "group"),
        (subscription("refunds", "audit", consume_thread_count=0), "consume_thread_count"),
        (subscription("refunds", "audit", consume_message_batch_max_size=2), "must be 1"),
        (
            TypedSubscription("refunds", "audit", "a ||", TypedHandler(_handle, ()).listen, {}),
            "tag",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_the_start(second, told):
    made = Subscriptions()
    made.add(subscription())
    with pytest.raises(InvalidArgument, match=told):
        made.add(second)


def test_a_handler_stays_the_function_it_was():
    app = App("shop")

    @app.subscriber("orders", group="billing")
    def handle(order: Struct):
        return order.id

    assert handle(Struct(7)) == 7
    app.close()


@pytest.mark.parametrize("wrong", [{"consume_orderly": False}, {"message_model": "BROADCASTING"}])
def test_a_group_without_progress_in_order_is_not_processed_exactly_once(wrong):
    app = App("shop")

    @app.publisher("bills")
    def bill(order: Struct) -> Struct: ...

    for subscriber in (app.subscriber, MQMeshBroker("127.0.0.1:1").subscriber):
        with pytest.raises(InvalidArgument, match="in order, or one by one"):
            subscriber("orders", group="billing", exactly_once=True, **wrong)(bill)


def test_a_publisher_above_the_subscriber_is_refused():
    def bill(order: Struct) -> Struct: ...

    async def bill_later(order: Struct) -> Struct: ...

    async def refused():
        for app, function in ((App("shop"), bill), (mqmesh.aio.App("shop"), bill_later)):
            app.subscriber("orders", group="billing")(function)
            with pytest.raises(InvalidArgument, match=r"put @app\.publisher below"):
                app.publisher("bills")(function)

    asyncio.run(refused())


def test_functions_and_coroutine_functions_have_applications_of_their_own():
    async def handle(order: Struct):
        pass

    app = App("shop")
    with pytest.raises(InvalidArgument, match=r"mqmesh\.aio"):
        app.subscriber("orders", group="billing")(handle)
    app.close()

    async def refused():
        app = mqmesh.aio.App("shop")
        with pytest.raises(InvalidArgument, match="coroutine function"):
            app.subscriber("orders", group="billing")(_handle)
        await app.close()

    asyncio.run(refused())
