"""The end of file descriptors has its own name, also where a connection is never made for it."""

from __future__ import annotations

import errno
import os

import pytest

from mqmesh.errors import EndpointUnreachable, TooManyOpenFiles
from mqmesh.transport.descriptors import shortage
from mqmesh.transport.requests import no_connection


@pytest.fixture
def none_left(monkeypatch, request):
    def refuse(*arguments):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(os, "eventfd", refuse)


def test_what_can_be_opened_is_no_error():
    assert shortage("a file") is None
    assert type(no_connection("broker a")) is EndpointUnreachable
    assert str(no_connection("broker a")) == "no connection to broker a in time"


@pytest.mark.parametrize(
    ("none_left", "whose"),
    [(errno.EMFILE, "this process"), (errno.ENFILE, "the system")],
    indirect=["none_left"],
)
def test_a_connection_that_no_descriptor_is_left_for_says_so(none_left, whose):
    error = no_connection("broker a")
    assert type(error) is TooManyOpenFiles
    assert str(error).startswith(
        f"a connection to broker a cannot be opened: {whose} has no file descriptor left; "
        "a process may have "
    )
    assert "ulimit -n" in str(error)


@pytest.mark.parametrize("none_left", [errno.ENOMEM], indirect=True)
def test_another_trouble_keeps_its_name(none_left):
    with pytest.raises(OSError, match="memory"):
        shortage("a file")
