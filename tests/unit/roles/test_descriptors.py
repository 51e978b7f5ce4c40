"""Descriptors: raised at the start, and kept for files before connections get any."""

from __future__ import annotations

import logging
import resource

import pytest

from mqmesh.errors import ConfigError
from mqmesh.roles.descriptors import RESERVED, raise_limit, room_for_connections


@pytest.fixture
def limits(monkeypatch):
    """The process's soft and hard limit, in a list."""
    now = [1_024, 20_000]

    def set_limit(which, both):
        assert which == resource.RLIMIT_NOFILE
        assert both[0] <= both[1]
        now[:] = both

    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(now))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    return now


def test_the_soft_limit_is_raised_as_far_as_the_hard_one_allows(limits):
    assert raise_limit(5_000) == 5_000
    assert limits == [5_000, 20_000]
    assert raise_limit(50_000) == 20_000
    assert raise_limit(10) == 20_000
    assert limits == [20_000, 20_000]


def test_without_a_hard_limit_there_is_as_much_as_is_wanted(limits):
    limits[1] = resource.RLIM_INFINITY
    limits[0] = resource.RLIM_INFINITY
    assert raise_limit(5_000_000) == 5_000_000


def test_files_come_before_connections(limits, caplog):
    assert room_for_connections(10_000, 256) == 10_000
    assert caplog.records == []
    limits[:] = [1_024, 2_048]
    with caplog.at_level(logging.WARNING):
        assert room_for_connections(10_000, 256) == 2_048 - 256 - RESERVED
    assert "raise the hard limit" in caplog.text
    limits[:] = [256, 256]
    with pytest.raises(ConfigError, match="the system allows 256 open files, and 512 are needed"):
        room_for_connections(10_000, 256)
