"""Every header: it comes back equal, ignores what it does not know, and keeps its bounds."""

from __future__ import annotations

import enum
import functools
import importlib
import pkgutil
import types
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mqmesh.protocol
from mqmesh.errors import LocalProtocolError, RemoteProtocolError
from mqmesh.protocol import admin, membership, pulling, route
from mqmesh.protocol.command import ErrorHeader, decode_header, encode_header


def all_headers() -> list[type[msgspec.Struct]]:
    """Every header struct of the protocol, wherever it is defined."""
    found = []
    for info in pkgutil.iter_modules(mqmesh.protocol.__path__):
        module = importlib.import_module(f"mqmesh.protocol.{info.name}")
        for value in vars(module).values():
            if (
                isinstance(value, type)
                and issubclass(value, msgspec.Struct)
                and value.__module__ == module.__name__
                and value.__struct_config__.array_like
            ):
                found.append(value)
    return found


HEADERS = all_headers()

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


def values(kind: Any, meta: msgspec.Meta | None = None) -> st.SearchStrategy[Any]:
    """Legal values of a field's type."""
    if get_origin(kind) is Annotated:
        inner, *metas = get_args(kind)
        return values(inner, metas[-1])
    if get_origin(kind) in (Union, types.UnionType):
        return st.one_of([values(one) for one in get_args(kind)])
    if get_origin(kind) is list:
        return st.lists(values(get_args(kind)[0]), max_size=3)
    if get_origin(kind) is tuple:
        return st.lists(values(get_args(kind)[0]), max_size=3).map(tuple)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from(list(kind))
    if get_origin(kind) is dict:
        return st.dictionaries(*map(values, get_args(kind)), max_size=3)
    if kind is int:
        low = meta.ge if meta and meta.ge is not None else -(2**63)
        high = meta.le if meta and meta.le is not None else 2**64 - 1
        return st.one_of(st.integers(low, high), st.sampled_from([low, high]))
    if kind is str:
        least = meta.min_length if meta and meta.min_length is not None else 0
        most = meta.max_length if meta and meta.max_length is not None else 20
        return st.text(st.characters(codec="utf-8"), min_size=least, max_size=min(most, 20))
    if kind is bytes:
        most = meta.max_length if meta and meta.max_length is not None else 20
        return st.binary(max_size=min(most, 20))
    if kind is bool:
        return st.booleans()
    if kind is float:
        return st.floats(allow_nan=False)
    if kind is type(None):
        return st.none()
    assert issubclass(kind, msgspec.Struct), kind
    return structs(kind)


@functools.cache
def structs(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Legal headers of one kind."""
    return st.builds(kind, *[values(field.type) for field in msgspec.structs.fields(kind)])


def test_the_headers_are_found():
    assert route.RegisterBrokerRequest in HEADERS
    assert ErrorHeader in HEADERS
    assert len(HEADERS) >= 40


@pytest.mark.parametrize("kind", HEADERS, ids=lambda kind: kind.__name__)
@settings(max_examples=10)
@given(data=st.data())
def test_a_header_comes_back_equal(kind, data):
    header = data.draw(structs(kind))
    encoded = encode_header(header)
    assert decode_header(kind, encoded) == header
    assert decode_header(kind, memoryview(encoded)) == header


@pytest.mark.parametrize("kind", HEADERS, ids=lambda kind: kind.__name__)
@settings(max_examples=3)
@given(data=st.data())
def test_fields_of_a_later_version_are_ignored(kind, data):
    header = data.draw(structs(kind))
    known = msgspec.msgpack.decode(encode_header(header))
    later = [*known, "new", {"of": ["a", "later", "version"]}, None]
    assert decode_header(kind, msgspec.msgpack.encode(later)) == header


@pytest.mark.parametrize("kind", HEADERS, ids=lambda kind: kind.__name__)
@settings(max_examples=3)
@given(data=st.data())
def test_a_header_of_an_earlier_version_gets_the_defaults(kind, data):
    header = data.draw(structs(kind))
    required = sum(field.required for field in msgspec.structs.fields(kind))
    shorter = msgspec.msgpack.decode(encode_header(header))[:required]
    fields = msgspec.structs.fields(kind)
    decoded = decode_header(kind, msgspec.msgpack.encode(shorter))
    for position, field in enumerate(fields):
        value = getattr(decoded, field.name)
        if position < required:
            assert value == getattr(header, field.name)
        elif field.default is not msgspec.NODEFAULT:
            assert value == field.default
        else:
            assert value == field.default_factory()


@pytest.mark.parametrize("kind", HEADERS, ids=lambda kind: kind.__name__)
def test_a_header_is_frozen_an_array_and_untracked_by_the_garbage_collector(kind):
    config = kind.__struct_config__
    assert config.frozen
    assert config.array_like
    assert not config.gc
    assert kind.__doc__


@pytest.mark.parametrize("kind", HEADERS, ids=lambda kind: kind.__name__)
def test_what_is_no_array_is_refused(kind):
    for value in (None, 5, "x", {"a": 1}, True, b"bytes"):
        with pytest.raises(RemoteProtocolError, match=kind.__name__):
            decode_header(kind, msgspec.msgpack.encode(value))
    for data in (b"", b"\xc1", b"\xdd\xff\xff\xff\xff", encode_header(ErrorHeader()) + b"x"):
        with pytest.raises(RemoteProtocolError):
            decode_header(kind, data)


LONG = "x" * 513
TOPIC = route.TopicConfig("t")
OUT_OF_BOUNDS = [
    (route.TopicConfig, [LONG]),
    (route.TopicConfig, ["t", -1]),
    (route.TopicConfig, ["t", 65_537]),
    (route.TopicConfig, ["t", 4, 65_537]),
    (route.TopicConfig, ["t", 4, 4, 8]),
    (route.GetRouteRequest, [LONG]),
    (route.GetRouteRequest, [5]),
    (route.GetRouteRequest, [None]),
    (route.DeleteTopicRequest, [LONG]),
    (route.BrokerAddress, [LONG]),
    (route.BrokerAddress, ["a:1", LONG]),
    (route.RegisterBrokerRequest, ["C", "b", -1, ["a"], [0, 0]]),
    (route.RegisterBrokerRequest, ["C", "b", 2**31 + 1, ["a"], [0, 0]]),
    (route.RegisterBrokerRequest, ["C", LONG, 0, ["a"], [0, 0]]),
    (route.RegisterBrokerRequest, ["C", "b", 0, ["a"], [0, 0], [["t"]] * 100_001]),
    (route.KvRequest, ["x" * 256]),
    (route.KvRequest, ["n", "x" * 256]),
    (route.KvRequest, ["n", "k", "x" * 65_537]),
    (route.TopicList, [["t"] * 100_001]),
    (pulling.PullRequest, ["g", "t", -1, 0]),
    (pulling.PullRequest, ["g", "t", 2**32, 0]),
    (pulling.PullRequest, ["g", "t", 0, -1]),
    (pulling.PullRequest, ["g", "t", 0, 2**63]),
    (pulling.PullRequest, ["g", "t", 0, 0, 0]),
    (pulling.PullRequest, ["g", "t", 0, 0, pulling.MAX_PULL_BYTES + 1]),
    (pulling.PullRequest, ["g", "t", 0, 0, 1, pulling.MAX_SUSPEND_MS + 1]),
    (pulling.PullRequest, ["g", "t", 0, 0, 1, 0, "x" * 16_385]),
    (pulling.QueueOffsetEntry, ["t", 0, -2]),
    (pulling.QueueOffsetEntry, ["t", 0, 2**63]),
    (pulling.SearchOffsetRequest, ["t", 0, -1]),
    (pulling.ViewMessageRequest, [-1]),
    (pulling.QueryConsumerOffsetRequest, ["g", [["t", 0]] * 65_537]),
    (membership.HeartbeatRequest, ["c", ["g"] * 257]),
    (membership.HeartbeatRequest, ["c", [], [["g", "CLUSTERING", "LAST_OFFSET", []]] * 257]),
    (membership.ConsumerData, ["g", "CLUSTERING", "LAST_OFFSET", [["t"]] * 16_385]),
    (membership.ConsumerData, ["g", "x" * 17, "LAST_OFFSET", []]),
    (membership.Subscription, ["t", "x" * 16_385]),
    (admin.UpdateTopicRequest, [["t", 65_537]]),
]


@pytest.mark.parametrize(("kind", "fields"), OUT_OF_BOUNDS, ids=lambda value: None)
def test_a_value_out_of_bounds_is_refused(kind, fields):
    with pytest.raises(RemoteProtocolError, match=kind.__name__):
        decode_header(kind, msgspec.msgpack.encode(fields))


def test_a_header_that_utf8_cannot_carry_is_not_sent():
    with pytest.raises(LocalProtocolError, match="GetRouteRequest"):
        encode_header(route.GetRouteRequest("\ud800"))
    with pytest.raises(LocalProtocolError):
        encode_header(route.WipeWritePermResponse(2**64))
