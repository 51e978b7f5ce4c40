"""Offsets that groups committed at a follower: kept, shown there, and handed to the master."""

from __future__ import annotations

import msgspec
import pytest

from mqmesh.errors import CorruptRecord
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import ResetOffsetRequest, ResetWhere
from mqmesh.protocol.replication import HeldCommit
from mqmesh.roles.broker.features.groups.held_commits import HeldCommits, HeldDocument, decode_held
from mqmesh.roles.broker.group_state.committed_offsets import CommittedOffsets

GOLDEN = HeldDocument(7, [HeldCommit("g", "t", 0, -1, 70, 2), HeldCommit("h", "t", 4, 5, 6)])


def commit(offset: int, known: int = 40, epoch: int = 0, queue_id: int = 0) -> HeldCommit:
    return HeldCommit("g", "t", queue_id, known, offset, epoch)


@pytest.fixture
def offsets() -> CommittedOffsets:
    offsets = CommittedOffsets(1_000)
    offsets.commit("g", "t", 0, 40)
    return offsets


# ---- At the follower ----------------------------------------------------------------


def test_what_was_known_before_the_first_commit_stays_known():
    held = HeldCommits()
    held.hold(commit(50))
    held.hold(commit(60, known=50))
    assert held.some() == [commit(60)]


def test_the_document_comes_back_and_is_the_golden_one(project_root):
    golden = (project_root / "tests" / "data" / "held-commits-v1.json").read_bytes()
    assert decode_held(golden) == GOLDEN
    assert HeldCommits(GOLDEN).document() == golden


@pytest.mark.parametrize(
    "document",
    [b"", b"{", b"[]", b"\xff", msgspec.json.encode(msgspec.structs.replace(GOLDEN, version=2))],
)
def test_another_document_is_refused(document):
    with pytest.raises(CorruptRecord, match="held-commits"):
        decode_held(document)


def test_groups_go_on_there_where_they_came_there(offsets):
    held = HeldCommits(HeldDocument(7, [commit(70), HeldCommit("h", "t", 1, -1, 3)]))
    held.begin(7, offsets)
    assert (offsets.query("g", "t", 0), offsets.query("h", "t", 1)) == (70, 3)


def test_a_log_that_knows_better_is_believed(offsets):
    held = HeldCommits(HeldDocument(7, [commit(39)]))
    held.begin(7, offsets)
    assert offsets.query("g", "t", 0) == 40


def test_where_the_end_of_the_log_was_cut_less_is_known_of_the_group(offsets):
    held = HeldCommits(HeldDocument(7, [commit(70, known=45)]))
    held.begin(7, offsets)
    assert held.some() == [commit(70, known=40)]


def test_offsets_of_another_log_count_for_nothing(offsets):
    held = HeldCommits(HeldDocument(7, [commit(70)]))
    held.begin(8, offsets)
    assert not len(held)
    assert offsets.query("g", "t", 0) == 40


def test_what_changed_while_it_was_handed_over_is_handed_over_again():
    held = HeldCommits(HeldDocument(7, [commit(50), commit(9, queue_id=1)]))
    given = held.some()
    held.hold(commit(60))
    held.forget(given)
    assert held.some() == [commit(60)]


# ---- At the master ------------------------------------------------------------------


@pytest.fixture
def master(stage):
    """One with 100 messages in queue 0, of which the group has had 40."""
    stage.send(stage.batch(bodies=[b"x"] * 100))
    stage.features.state.committed.commit("g", "t", 0, 40)
    return stage


def taken(master, *commits: HeldCommit) -> int:
    master.features.handed_over.take_held_commits(commits)
    return master.features.state.committed.query("g", "t", 0)


@pytest.mark.parametrize(("offset", "at"), [(70, 70), (30, 40), (40, 40), (101, 100)])
def test_the_larger_offset_wins_within_the_queue(master, offset, at):
    assert taken(master, commit(offset)) == at


def test_a_group_that_went_back_since_stays_there(master):
    assert taken(master, commit(70, known=41)) == 40


def test_a_group_that_was_reset_since_stays_there(master):
    reset = ResetOffsetRequest("g", "t", ResetWhere.OFFSET, 0, queue_offset=60)
    master.begin(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, reset)
    assert taken(master, commit(70)) == 60


def test_what_is_gone_since_is_left_out(master):
    gone = HeldCommit("g", "gone", 0, -1, 5), commit(5, known=-1, queue_id=99)
    assert master.features.handed_over.take_held_commits(gone) == 0


def test_where_the_log_lost_its_end_the_group_goes_on_there(master, monkeypatch):
    monkeypatch.setattr(master.store, "epoch", lambda: 9)
    monkeypatch.setattr(master.store, "cut_offset", lambda topic, queue_id, epoch: 50)
    assert taken(master, commit(70, epoch=8)) == 50
    assert taken(master, commit(70, epoch=9)) == 70
