"""Every request code, whatever its bytes: a reply or a documented error, and nothing harmed."""

from __future__ import annotations

import msgspec
from harness.served import OF_THE_PROCESS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mqmesh.protocol.commands import ServedBy, served_by

NAMES = st.sampled_from(
    ["t", "g", "", "%RETRY%g", "../x", "x" * 300, "A || B", "*", "TAG", "SQL92"]
)
NUMBERS = st.sampled_from([-1, 0, 1, 3, 4, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**64 - 1])
VALUES = st.recursive(
    NAMES | NUMBERS | st.booleans() | st.none() | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=20,
)
CODES = sorted(set(served_by(ServedBy.BROKER)) - set(served_by(ServedBy.ALL)) - OF_THE_PROCESS)
HEADERS = st.lists(VALUES, max_size=9).map(msgspec.msgpack.encode) | st.binary(max_size=40)


def test_every_command_that_the_table_gives_brokers_has_its_handler(stage):
    assert sorted(stage.features.commands()) == CODES


# The fixture only tells the class; each example makes a broker of its own.
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(CODES), HEADERS, st.binary(max_size=200))
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
