"""`GET /healthz` of a role's process, asked by those who mean well and by others."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqmesh.roles.health import MOST_CONNECTIONS, MOST_REQUEST_BYTES
from mqmesh.testing.processes import RoleProcess

Page = tuple[RoleProcess, str, int]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A name server, and where its page is."""
    log = tmp_path_factory.mktemp("health") / "log"
    process = RoleProcess("namesrv", {"listen_port": "0"}, log, options=["--health=0"])
    try:
        match = re.search(r"answers GET /healthz at (\S+):(\d+)", log.read_text())
        assert match is not None
        yield process, match[1], int(match[2])
    finally:
        process.kill()


def ask(page: Page, method: str = "GET", path: str = "/healthz") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(page[1], page[2], timeout=30)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_a_process_that_runs_says_who_it_is_to_this_machine_only(page: Page) -> None:
    status, body = ask(page)
    assert status == 200
    wanted = {"role": "namesrv", "name": "namesrv", "state": "running", "pid": page[0].pid}
    assert json.loads(body) == wanted
    assert page[1] == "127.0.0.1"
    assert ask(page, "HEAD") == (200, b"")
    assert ask(page, path="/healthz?verbose") == (200, body)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("GET", "/metrics", 404), ("POST", "/healthz", 405)],
)
def test_there_is_no_other_page(page: Page, method: str, path: str, status: int) -> None:
    assert ask(page, method, path) == (status, b"")


def test_connections_that_say_nothing_make_room_for_those_that_ask(page: Page) -> None:
    silent = [socket.create_connection(page[1:], timeout=30) for _ in range(3 * MOST_CONNECTIONS)]
    assert ask(page)[0] == 200
    assert silent[0].recv(1) == b""  # the oldest were closed
    for one in silent:
        one.close()


@pytest.mark.parametrize(
    "text", [b"x" * MOST_REQUEST_BYTES, b"GET /healthz HTTP/1.1\r\n" + b"a" * 5_000]
)
def test_a_request_that_does_not_end_is_closed(page: Page, text: bytes) -> None:
    with socket.create_connection(page[1:], timeout=30) as connection:
        connection.sendall(text)
        try:
            assert connection.recv(1) == b""
        except ConnectionResetError:
            pass  # with bytes unread
    assert ask(page)[0] == 200


def test_a_request_may_come_in_pieces(page: Page) -> None:
    with socket.create_connection(page[1:], timeout=30) as connection:
        for piece in (b"GET /hea", b"lthz HTTP/1.1\r\nHost: a\r\n", b"\r\n"):
            connection.sendall(piece)
        assert connection.recv(12) == b"HTTP/1.1 200"


def test_after_the_stop_the_page_is_gone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = RoleProcess("coordinator", settings(tmp_path), log, options=["--health=localhost:0"])
    match = re.search(r"answers GET /healthz at \S+:(\d+)", log.read_text())
    assert match is not None
    assert process.stop() == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(match[1])), timeout=30)


def settings(folder: Path) -> dict[str, str]:
    return {"listen_port": "0", "data_dir": str(folder / "coordinator")}


def test_a_port_that_is_taken_is_a_wrong_setting(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=rf"--health: cannot listen at 127.0.0.1:{port}: "):
            RoleProcess(
                "coordinator", settings(tmp_path), tmp_path / "log", options=[f"--health={port}"]
            )
