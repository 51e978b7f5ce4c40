"""Codes and errors: one table, both ways."""

from __future__ import annotations

import inspect

import pytest

from mqmesh import errors
from mqmesh.protocol.codes import ResponseCode, code_of, error_of
from mqmesh.protocol.command import MAX_REMARK_CHARACTERS, ErrorHeader, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import SendStatus
from mqmesh.protocol.pulling import PullStatus
from mqmesh.protocol.route import Perm

BROKER_ERRORS = [
    kind
    for kind in vars(errors).values()
    if inspect.isclass(kind) and issubclass(kind, errors.BrokerError)
]
ALL_ERRORS = [
    kind
    for kind in vars(errors).values()
    if inspect.isclass(kind) and issubclass(kind, errors.MQMeshError)
]


@pytest.mark.parametrize("code", [code for code in ResponseCode if code])
def test_a_code_survives_the_way_through_an_error(code):
    error = error_of(code, "remark", 7)
    assert (error.code, error.remark, error.retry_after_ms) == (code, "remark", 7)
    assert str(error) == "remark"


def test_an_unknown_code_is_a_plain_broker_error():
    error = error_of(60_000, "later version")
    assert type(error) is errors.BrokerError
    assert error.code == 60_000


@pytest.mark.parametrize("kind", BROKER_ERRORS, ids=lambda kind: kind.__name__)
def test_a_brokers_error_arrives_as_the_same_class(kind):
    assert type(error_of(code_of(kind("remark")), "remark")) is kind


@pytest.mark.parametrize("kind", ALL_ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_has_a_code(kind):
    assert code_of(kind("remark")) in set(ResponseCode) - {ResponseCode.SUCCESS}


def test_a_bug_is_a_system_error():
    assert code_of(ZeroDivisionError()) is ResponseCode.SYSTEM_ERROR


def test_a_retriable_error_stays_retriable():
    for kind in BROKER_ERRORS:
        assert type(error_of(code_of(kind("remark")), "")).retriable == kind.retriable
    assert error_of(code_of(errors.DiskFull("full")), "").retriable
    assert error_of(code_of(errors.QueueFull("full")), "").retriable


def test_an_error_header_with_the_longest_remark_is_small():
    assert len(encode_header(ErrorHeader("\U0001f40c" * MAX_REMARK_CHARACTERS, 2**31))) < 5_000


@pytest.mark.parametrize("status", list(SendStatus))
def test_a_send_status_is_told_by_its_name(status):
    assert f"{status} {status!s}" == f"{status.name} {status.name}"
    assert status == int(status)


def test_the_numbers_on_the_wire_never_change():
    assert {code.name: code.value for code in SendStatus} == {
        "SEND_OK": 0,
        "FLUSH_DISK_TIMEOUT": 1,
        "FLUSH_SLAVE_TIMEOUT": 2,
        "SLAVE_NOT_AVAILABLE": 3,
    }
    assert {code.name: code.value for code in PullStatus} == {
        "FOUND": 0,
        "NO_NEW_MSG": 1,
        "NO_MATCHED_MSG": 2,
        "OFFSET_ILLEGAL": 3,
        "OFFSET_RESET": 4,
        "OFFSET_CUT": 5,
        "MESSAGES_LOST": 6,
    }
    assert (Perm.NONE, Perm.WRITE, Perm.READ, Perm.READ_WRITE) == (0, 2, 4, 6)
    assert len({code.value for code in RequestCode}) == len(RequestCode)
    known = {
        "SEND_MESSAGE": 10,
        "PULL_MESSAGE": 11,
        "QUERY_CONSUMER_OFFSET": 14,
        "UPDATE_CONSUMER_OFFSET": 15,
        "UPDATE_AND_CREATE_TOPIC": 17,
        "GET_TOPIC_CONFIG": 21,
        "GET_BROKER_RUNTIME_INFO": 28,
        "SEARCH_OFFSET_BY_TIMESTAMP": 29,
        "QUERY_QUEUE_BOUNDS": 30,
        "VIEW_MESSAGE": 33,
        "HEART_BEAT": 34,
        "UNREGISTER_CLIENT": 35,
        "GET_CONSUMER_LIST_BY_GROUP": 38,
        "NOTIFY_CONSUMER_IDS_CHANGED": 40,
        "PUT_KV_CONFIG": 100,
        "GET_KV_CONFIG": 101,
        "DELETE_KV_CONFIG": 102,
        "REGISTER_BROKER": 103,
        "UNREGISTER_BROKER": 104,
        "GET_ROUTEINFO_BY_TOPIC": 105,
        "GET_BROKER_CLUSTER_INFO": 106,
        "GET_TOPIC_STATS_INFO": 202,
        "WIPE_WRITE_PERM_OF_BROKER": 205,
        "GET_ALL_TOPIC_LIST_FROM_NAMESERVER": 206,
        "DELETE_TOPIC_IN_BROKER": 215,
        "DELETE_TOPIC_IN_NAMESRV": 216,
        "LIST_KV_CONFIG": 219,
        "SEND_REPLY_MESSAGE": 324,
        "PUSH_REPLY_MESSAGE_TO_CLIENT": 326,
        "ACKNOWLEDGE_REPLY": 1_010,
        "PING": 1,
    }
    assert known.items() <= {code.name: code.value for code in RequestCode}.items()
