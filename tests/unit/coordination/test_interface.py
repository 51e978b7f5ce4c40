"""What is asked of a coordinator is checked before it is asked, and read back as it was."""

import msgspec
import pytest

from mqmesh.coordination.interface import (
    MAX_TTL_MS,
    MIN_TTL_MS,
    AckReplicas,
    Conflict,
    CoordinatorUnavailable,
    GroupState,
    MemberIncarnation,
    OutcomeUnknown,
    Presence,
    SessionLost,
    StateRecord,
    check_session,
    decode,
    encode_presence,
    encode_settings,
    encode_state,
)
from mqmesh.errors import InvalidArgument, RemoteProtocolError

STATE = GroupState(
    log_id=2**32 - 1,
    epoch=7,
    master=2,
    in_sync=(MemberIncarnation(1, 0), MemberIncarnation(2, 3)),
    mode=AckReplicas.QUORUM,
    copies=2,
    voters=(1, 2, 3),
    mode_since_epoch=5,
    unclean_since=4,
    reason="lease over",
    switched_ms=1_700_000_000_000,
)
PRESENCE = Presence(group="broker-a", replica_id=64, identity="ab", end_offset=2**63 - 1)


def test_a_state_is_read_as_it_was_written():
    assert decode(GroupState, encode_state(STATE)) == STATE
    assert (
        decode(GroupState, encode_state(msgspec.structs.replace(STATE, master=None))).master is None
    )


def test_a_presence_is_read_as_it_was_written():
    assert decode(Presence, encode_presence(PRESENCE)) == PRESENCE


def test_fields_of_a_newer_program_are_left_out():
    data = msgspec.json.decode(encode_state(STATE)) | {"colour": "blue"}
    assert decode(GroupState, msgspec.json.encode(data)) == STATE


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff", b'{"epoch": "seven"}'])
def test_what_is_no_state_is_an_error(data):
    with pytest.raises(RemoteProtocolError, match="GroupState"):
        decode(GroupState, data)


@pytest.mark.parametrize(
    "wrong",
    [{"epoch": -1}, {"master": 0}, {"master": 65}, {"reason": "x" * 256}, {"copies": 0}],
)
def test_a_state_out_of_bounds_is_refused(wrong):
    with pytest.raises(InvalidArgument):
        encode_state(msgspec.structs.replace(STATE, **wrong))


@pytest.mark.parametrize("ttl_ms", [MIN_TTL_MS - 1, MAX_TTL_MS + 1])
def test_a_session_out_of_bounds_is_refused(ttl_ms):
    with pytest.raises(InvalidArgument, match="lease_ttl_ms"):
        check_session(ttl_ms, PRESENCE)


def test_a_session_within_bounds_gives_its_presence():
    assert check_session(MIN_TTL_MS, PRESENCE) == encode_presence(PRESENCE)
    assert check_session(MAX_TTL_MS, PRESENCE)


def test_texts_that_cannot_be_written_are_refused():
    with pytest.raises(InvalidArgument):
        encode_presence(msgspec.structs.replace(PRESENCE, zone="\ud800"))


def test_settings_have_a_limit():
    assert decode(dict[str, str], encode_settings({"a": "b"})) == {"a": "b"}
    with pytest.raises(InvalidArgument, match="65536"):
        encode_settings({str(number): "x" * 100 for number in range(700)})


def test_only_an_unavailable_coordinator_may_be_asked_the_same_again():
    assert CoordinatorUnavailable.retriable
    assert not (SessionLost.retriable or OutcomeUnknown.retriable or Conflict.retriable)
    assert Conflict("newer", StateRecord(8, STATE)).record == StateRecord(8, STATE)
