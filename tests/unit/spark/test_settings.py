"""archive.toml: topics that an archive leaves out, and how long it keeps others."""

from __future__ import annotations

import pytest

from mqmesh.errors import ConfigError
from mqmesh.spark.selection import Selection
from mqmesh.spark.settings import ArchiveConfig, load_settings
from mqmesh.units import MIB


def test_an_archive_without_settings_has_defaults(tmp_path):
    assert load_settings(str(tmp_path)) == ArchiveConfig()
    assert load_settings("s3://bucket/archive") == ArchiveConfig()
    assert ArchiveConfig().days_of("orders") is None


def test_the_longest_name_that_fits_says_how_long_a_topic_is_kept(tmp_path):
    tmp_path.joinpath("archive.toml").write_text(
        'leave_out = ["debug*"]\nfile_bytes = 1_048_576\n'
        '[expire_days]\n"*" = 400\n"pay*" = 3650\n"pay-test" = 7\n'
    )
    found = load_settings(str(tmp_path))
    assert (found.leave_out, found.file_bytes) == (["debug*"], MIB)
    days = {topic: found.days_of(topic) for topic in ("orders", "pay", "pay-1", "pay-test")}
    assert days == {"orders": 400, "pay": 3650, "pay-1": 3650, "pay-test": 7}


@pytest.mark.parametrize(
    "text", ["leave = []", "file_bytes = 5", "leave_out = ['']", "[expire_days]\nt = 0", "= 3"]
)
def test_what_is_wrong_is_told_with_the_file(tmp_path, text):
    tmp_path.joinpath("archive.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"archive\.toml"):
        load_settings(str(tmp_path))


def test_topics_that_are_left_out_are_not_wanted():
    wanted = Selection(topics=("a*", "debug-1"), leave_out=("debug*", "ab"))
    assert [t for t in ("a", "ab", "abc", "debug-1") if wanted.has_topic(t)] == ["a", "abc"]
