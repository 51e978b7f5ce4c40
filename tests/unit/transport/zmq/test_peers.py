"""Who is gone when a connection breaks, whatever the order of the news."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mqmesh.transport.zmq.peers import PeerTable, is_automatic


def peer(number: int) -> bytes:
    return b"\0" + (number % 2**32).to_bytes(4, "big")


A, B, C = peer(1), peer(2), peer(3)


def test_a_connection_that_breaks_names_its_peer():
    table = PeerTable()
    table.accept(7)
    assert table.meet(A, 7) is None
    assert table.living == {A: 7}
    assert table.disconnect(7) == A
    assert table.living == {}


def test_a_connection_that_never_said_anything_names_nobody():
    table = PeerTable()
    table.accept(7)
    assert table.disconnect(7) is None


def test_a_frame_read_after_the_break_leaves_no_ghost():
    table = PeerTable()
    table.accept(7)
    table.disconnect(7)
    assert table.meet(A, 7) == A
    assert table.living == {}


def test_later_frames_of_a_peer_that_was_reported_leave_no_ghost():
    table = PeerTable()
    table.accept(7)
    table.meet(A, 7)
    table.disconnect(7)
    assert table.meet(A, 7) == A
    table.accept(7)
    assert table.meet(A, 7) == A, "the descriptor has a new, silent owner"
    assert table.meet(B, 7) is None
    assert table.meet(A, 7) == A
    assert table.living == {B: 7}
    assert table.disconnect(7) == B


def test_the_new_owner_of_a_descriptor_is_not_taken_for_the_old_one():
    table = PeerTable()
    table.accept(7)
    table.disconnect(7)
    table.accept(7)
    assert table.meet(B, 7) is None
    assert table.meet(A, 7) == A, "frames of the first owner, read late"
    assert table.disconnect(7) == B


def test_a_wrong_owner_is_found_out_when_the_right_one_speaks():
    table = PeerTable()
    table.accept(7)
    table.disconnect(7)
    table.accept(7)
    assert table.meet(A, 7) is None, "nobody can know better yet"
    assert table.meet(B, 7) == A
    assert table.living == {B: 7}
    assert table.meet(A, 7) == A
    assert table.disconnect(7) == B


def test_a_lost_disconnect_is_made_up_for_by_the_next_accept():
    table = PeerTable()
    table.accept(7)
    table.meet(A, 7)
    assert table.accept(7) == A
    assert table.meet(B, 7) is None
    assert table.living == {B: 7}


def test_the_numbers_of_peers_wrap_around():
    table = PeerTable()
    table.accept(7)
    assert table.meet(peer(2**32 - 1), 7) is None
    table.disconnect(7)
    table.accept(7)
    assert table.meet(peer(0), 7) is None
    assert table.meet(peer(2**32 - 1), 7) == peer(2**32 - 1)


def test_ids_that_clients_chose_are_told_from_those_that_zeromq_gave():
    assert is_automatic(A)
    assert not is_automatic(b"mine!")
    assert not is_automatic(b"\0\0\0\0")
    assert not is_automatic(b"")


@given(st.data())
def test_nobody_lives_for_ever_and_nobody_alive_is_called_dead(data):
    """Connections one after the other on few descriptors, their frames read at any later time."""
    table = PeerTable()
    open_now: dict[int, bytes] = {}
    unread: list[tuple[bytes, int]] = []
    reported: set[bytes] = set()
    met: set[bytes] = set()
    number = 0
    for _ in range(data.draw(st.integers(0, 40))):
        action = data.draw(st.sampled_from(["open", "close", "send", "read"]))
        descriptor = data.draw(st.integers(1, 2))
        if action == "open" and descriptor not in open_now:
            number += 1
            open_now[descriptor] = peer(number)
            assert table.accept(descriptor) is None
        elif action == "close" and descriptor in open_now:
            del open_now[descriptor]
            gone = table.disconnect(descriptor)
            if gone is not None:
                reported.add(gone)
        elif action == "send" and descriptor in open_now:
            unread.append((open_now[descriptor], descriptor))
        elif action == "read" and unread:
            one, by = unread.pop(data.draw(st.integers(0, len(unread) - 1)))
            met.add(one)
            if one not in table.living:
                gone = table.meet(one, by)
                if gone is not None:
                    reported.add(gone)
                    assert gone not in table.living
                    assert gone not in open_now.values()
    for one, by in unread:
        met.add(one)
        if one not in table.living and (gone := table.meet(one, by)) is not None:
            reported.add(gone)
    for descriptor in list(open_now):
        gone = table.disconnect(descriptor)
        if gone is not None:
            reported.add(gone)
    assert table.living == {}
    assert reported == met
