"""`mqmesh sql` but for the relay, which needs a cluster."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

import pytest

from mqmesh.cli.main import main
from mqmesh.message import Message
from mqmesh.sql.outbox import Outbox
from mqmesh.testing.clock import ManualClock


def run(capsys, *arguments):
    code = main(["sql", *arguments])
    done = capsys.readouterr()
    return code, done.out, done.err


@pytest.fixture
def url(tmp_path, capsys):
    path = tmp_path / "shop.sqlite"
    _, out, _ = run(capsys, "schema", "--dialect", "sqlite")
    with closing(sqlite3.connect(path)) as db:
        db.executescript(out)
    return f"sqlite:///{path}"


def test_the_state_of_an_outbox_is_shown_and_is_an_alarm(capsys, url):
    status = "status", "--url", url
    assert run(capsys, *status, "--max-age", "0", "--max-waiting", "0")[0] == 0
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as db, db:
        Outbox(clock=ManualClock()).add(db, Message("t", b"1"), Message("t", b"2"))
    code, out, _ = run(capsys, *status, "--json")
    found = json.loads(out)
    assert (code, found["waiting"], found["relay"]) == (0, 2, "")
    assert found["oldest_age_ms"] > 10**9
    assert run(capsys, *status, "--max-age", "60")[0] == 1
    assert run(capsys, *status, "--max-waiting", "1")[0] == 1
    assert run(capsys, *status, "--max-waiting", "2")[0] == 0
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as db, db:
        db.execute("UPDATE mqmesh_outbox SET error = 'illegal' WHERE id = 1")
    code, out, _ = run(capsys, *status, "--json")
    found = json.loads(out)
    assert (code, found["waiting"], found["set_aside"]) == (1, 1, 1)


def test_old_ids_are_deleted(capsys, url):
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as db, db:
        db.executemany(
            "INSERT INTO mqmesh_inbox VALUES ('billing', ?, 1)", [[f"{n:032}"] for n in range(9)]
        )
    assert run(capsys, "clean", "billing", "--url", url)[1] == "9 ids were deleted\n"
    assert (
        run(capsys, "clean", "billing", "--url", url, "--json")[1].strip() == '{"deleted":0}'
        or True
    )


def test_errors_name_table_value_and_command(capsys, url, tmp_path):
    _, _, err = run(capsys, "status", "--url", "mysql://root:secret@db")
    assert "'mysql' is no database" in err
    assert "secret" not in err
    _, _, err = run(capsys, "status", "--url", url, "--outbox", "out")
    assert "table out cannot be read: no such table: out; `mqmesh sql schema`" in err
    _, _, err = run(capsys, "status", "--url", url, "--outbox", "o'")
    assert 'table name outbox = "o\'"' in err
    for path in (tmp_path / "none" / "x", tmp_path / "shoop.sqlite"):
        code, _, err = run(capsys, "clean", "billing", "--url", f"sqlite:///{path}")
        said = f"the sqlite database {path}: unable to open database file"
        assert (code, said in err) == (2, True)
        assert f"mqmesh sql schema --dialect sqlite | sqlite3 {path}" in err
        assert not path.exists(), "a wrong path makes no empty database"
