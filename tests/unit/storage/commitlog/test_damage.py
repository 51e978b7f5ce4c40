"""The list of damaged ranges."""

from pathlib import Path

from mqmesh.storage.commitlog.damage import DamageList


def test_ranges_are_kept_and_known_ones_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "damaged-ranges"
    damage = DamageList(path)
    damage.save()
    assert not path.exists()
    damage.add(500, 600, "bad checksum", 1)
    damage.add(100, 200, "no magic", 2)
    damage.add(500, 600, "again", 3)
    damage.save()
    again = DamageList(path)
    assert [(one.start_offset, one.end_offset, one.reason) for one in again.ranges] == [
        (100, 200, "no magic"),
        (500, 600, "bad checksum"),
    ]


def test_a_range_may_turn_out_larger(tmp_path: Path) -> None:
    damage = DamageList(tmp_path / "damaged-ranges")
    damage.add(500, 600, "bad", 1)
    damage.add(500, 700, "worse", 2)
    assert [one.end_offset for one in damage.ranges] == [700]


def test_a_damaged_list_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "damaged-ranges"
    path.write_bytes(b"garbage")
    damage = DamageList(path)
    assert damage.ranges == []
    damage.add(1, 2, "bad", 3)
    damage.save()
    assert len(DamageList(path).ranges) == 1
