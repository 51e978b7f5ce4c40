"""Where the histories of two logs part."""

from __future__ import annotations

import pytest

from mqmesh.log_identity import CommonEnd, EpochStart, common_end


def starts(*pairs):
    return [EpochStart(*pair) for pair in pairs]


@pytest.mark.parametrize(
    ("ours", "our_end", "theirs", "their_end", "expected"),
    [
        # A follower that is behind its leader, and one that is ahead of it in the same epoch.
        (((1, 0),), 500, ((1, 0),), 800, (1, 500)),
        (((1, 0),), 800, ((1, 0),), 500, (1, 500)),
        # The old leader comes back with a tail: the new one began its epoch before the tail's end.
        (((1, 0),), 900, ((1, 0), (2, 700)), 1_000, (1, 700)),
        # KIP-101, the follower that would have cut too much: nothing of epoch 1 is gone.
        (((1, 0),), 600, ((1, 0), (2, 600)), 600, (1, 600)),
        # KIP-101, both lost their end, and each wrote at the same place, in epochs of their own.
        (((1, 0), (2, 300)), 400, ((1, 0), (3, 300)), 500, (1, 300)),
        # KIP-279, two changes of leader without this follower: its epoch 2 the leader never had.
        (((1, 0), (2, 100)), 300, ((1, 0), (3, 150)), 400, (1, 100)),
        # KIP-279, the other way: the leader has epochs that the follower missed.
        (((1, 0), (4, 500)), 900, ((1, 0), (2, 100), (3, 200), (4, 500)), 700, (4, 700)),
        # One number that two stores began by themselves, at different places, is not one epoch.
        (((1, 0), (2, 100)), 300, ((1, 0), (2, 150)), 300, (1, 100)),
        # An epoch that begins at the end, with nothing in it.
        (((1, 0), (2, 300)), 300, ((1, 0), (2, 300)), 700, (2, 300)),
        # Nothing in common; and an empty log.
        (((1, 0),), 300, ((5, 0),), 300, None),
        ((), 0, ((1, 0),), 300, None),
    ],
)
def test_histories_part_behind_the_newest_epoch_that_both_began_at_one_place(
    ours, our_end, theirs, their_end, expected
):
    sides = (starts(*ours), our_end), (starts(*theirs), their_end)
    wanted = None if expected is None else CommonEnd(*expected)
    assert common_end(*sides[0], *sides[1]) == wanted
    assert common_end(*sides[1], *sides[0]) == wanted


def test_where_the_records_differ_after_all_an_older_epoch_is_looked_at():
    ours, theirs = starts((1, 0), (2, 100), (3, 200)), starts((1, 0), (2, 100), (3, 200))
    assert common_end(ours, 300, theirs, 250) == CommonEnd(3, 250)
    assert common_end(ours, 300, theirs, 250, below=3) == CommonEnd(2, 200)
    assert common_end(ours, 300, theirs, 250, below=2) == CommonEnd(1, 100)
    assert common_end(ours, 300, theirs, 250, below=1) is None
