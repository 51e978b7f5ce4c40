"""Every request code, whatever its bytes: a reply or a documented error, and nothing harmed."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mqmesh.errors import BrokerNotAvailable
from mqmesh.protocol.codes import RequestCode
from mqmesh.roles.broker.dispatch import HANDLERS, bind_handlers, refuse_all

NAMES = st.sampled_from(
    ["t", "g", "", "%RETRY%g", "../x", "x" * 300, "A || B", "*", "TAG", "SQL92"]
)
NUMBERS = st.sampled_from([-1, 0, 1, 3, 4, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**64 - 1])
VALUES = st.recursive(
    NAMES | NUMBERS | st.booleans() | st.none() | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=20,
)
HEADERS = st.lists(VALUES, max_size=9).map(msgspec.msgpack.encode) | st.binary(max_size=40)


def test_every_request_that_brokers_serve_has_its_handler(stage):
    name_server = {code for code in RequestCode if 100 <= code < 200}
    name_server |= {
        RequestCode.WIPE_WRITE_PERM_OF_BROKER,
        RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
        RequestCode.DELETE_TOPIC_IN_NAMESRV,
        RequestCode.LIST_KV_CONFIG,
    }
    to_clients = {
        RequestCode.NOTIFY_CONSUMER_IDS_CHANGED,
        RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT,
        RequestCode.CHECK_TRANSACTION_STATE,
        RequestCode.RESET_CONSUMER_CLIENT_OFFSET,
        RequestCode.NOTIFY_SCHEDULE,
    }
    by_the_server = {RequestCode.PING, RequestCode.PROBE_CLIENT}
    by_others = {
        RequestCode.ADVANCE_INDEX,
        RequestCode.COPY_INDEX,
        RequestCode.REGISTER_MESSAGE_FILTER_CLASS,
    }
    assert set(HANDLERS) == (
        set(RequestCode) - name_server - to_clients - by_the_server - by_others
    )
    assert set(bind_handlers(stage.context)) == set(map(int, HANDLERS))


def test_a_broker_that_cannot_serve_refuses_everything_with_its_reason():
    for handler in refuse_all("broker-a is starting").values():
        with pytest.raises(BrokerNotAvailable, match="is starting"):
            handler(None)


# The fixture only tells the class; each example makes a broker of its own.
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(HANDLERS)), HEADERS, st.binary(max_size=200))
def test_no_bytes_raise_anything_but_documented_errors(make_stage, code, header, body):
    # The harness lets everything through that is no MQMeshError.
    stage = make_stage()
    stage.send(stage.batch())
    stage.begin(code, header, body)
    stage.end_tick()
    stage.begin(code, header, body, oneway=True)
    stage.end_tick()
    (outcome,) = stage.send(stage.batch("other"))
    assert outcome.code == 0
