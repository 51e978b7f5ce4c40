"""Keyword arguments that editors and type checkers know are the options that there are."""

from __future__ import annotations

import enum
import inspect
import typing

import msgspec
import pytest

import mqmesh
import mqmesh.aio
from mqmesh.sdk.aio import app as aio_app
from mqmesh.sdk.app import app
from mqmesh.sdk.consumer.consumer_options import (
    PullConsumerKeywords,
    PullConsumerOptions,
    PushConsumerKeywords,
    PushConsumerOptions,
    SimpleConsumerKeywords,
    SimpleConsumerOptions,
)
from mqmesh.sdk.producer.producer_options import (
    ProducerKeywords,
    ProducerOptions,
    TransactionKeywords,
    TransactionOptions,
)


def without_texts(hint):
    """The enumeration alone, where the texts of all its members may be given for them."""
    match typing.get_args(hint):
        case (type() as kind, texts) if issubclass(kind, enum.Enum):
            assert set(typing.get_args(texts)) == {one.value for one in kind}
            return kind
    return hint


@pytest.mark.parametrize(
    ("keywords", "options"),
    [
        (ProducerKeywords, ProducerOptions),
        (TransactionKeywords, TransactionOptions),
        (PushConsumerKeywords, PushConsumerOptions),
        (PullConsumerKeywords, PullConsumerOptions),
        (SimpleConsumerKeywords, SimpleConsumerOptions),
    ],
)
def test_keywords_are_the_fields_of_the_options(keywords, options) -> None:
    hints = typing.get_type_hints(keywords)
    assert {name: without_texts(hint) for name, hint in hints.items()} == typing.get_type_hints(
        options
    )
    assert not keywords.__required_keys__
    assert len(msgspec.structs.fields(options)) == len(keywords.__optional_keys__)


@pytest.mark.parametrize(
    "name", ["Producer", "PushConsumer", "PullConsumer", "SimpleConsumer", "App"]
)
def test_clients_for_asyncio_take_what_the_blocking_ones_take(name) -> None:
    blocking = inspect.signature(getattr(mqmesh, name))
    assert inspect.signature(getattr(mqmesh.aio, name)) == blocking
    assert len(blocking.parameters) > 5


def parameters(method):
    """Return what a method takes, with the defaults."""
    found = inspect.signature(method).parameters.values()
    return {one.name: one.default for one in found if one.kind is not one.VAR_KEYWORD}


TWINS = [
    (blocking, other)
    for name in sorted({*dir(mqmesh)} & {*dir(mqmesh.aio)})
    if isinstance(blocking := getattr(mqmesh, name), type)
    and (other := getattr(mqmesh.aio, name)) is not blocking
] + [(app.TopicPublisher, aio_app.TopicPublisher)]


@pytest.mark.parametrize(("blocking", "other"), TWINS, ids=lambda kind: kind.__name__)
def test_methods_for_asyncio_take_what_the_blocking_ones_take(blocking, other):
    common = {name for name in {*dir(blocking)} & {*dir(other)} if not name.startswith("_")}
    if hasattr(blocking, "send_batch"):
        common.remove("send")  # of asyncio it has a dictionary of them
    methods = [name for name in common if inspect.isfunction(getattr(blocking, name))]
    wanted = {name: parameters(getattr(blocking, name)) for name in methods}
    assert {name: parameters(getattr(other, name)) for name in methods} == wanted
    made, own = parameters(blocking), parameters(other)
    if issubclass(blocking, mqmesh.AdminClient):
        made = {name: made[name] for name in own}  # one of asyncio is given no transport
    assert own == made
