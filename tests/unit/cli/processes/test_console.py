"""`mqmesh console`: who may log in, and a console in a cluster's file."""

from __future__ import annotations

import io
import json
import stat
from pathlib import Path

import pytest

from mqmesh.cli.main import main
from mqmesh.cli.processes.console import EXTRA, check_extra
from mqmesh.cli.processes.layout import load_cluster, role_specs
from mqmesh.cli.processes.secure import make_console_user, make_security
from mqmesh.config import load_config
from mqmesh.console.config import ConsoleConfig
from mqmesh.console.users import is_password, load_users
from mqmesh.errors import ConfigError
from mqmesh.roles.access_keeper import read_access_file
from mqmesh.security.access_list import UserRole
from mqmesh.security.keys import Credentials, load_credentials, save_credentials

KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs `mqmesh console` on a file of users, with a password; returns code and output."""
    keys = tmp_path / "bob.toml"
    own = Credentials(user="bob", public_key=KEY, secret_key=KEY, namesrv_server_key=KEY)
    save_credentials(keys, own)

    def run(command, *arguments, password=""):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{password}\n"))
        users = ("--users-file", str(tmp_path / "users.toml"))
        code = main(["console", command, *arguments, *users, "--json"])
        told = capsys.readouterr()
        return code, json.loads(told.out or told.err)

    run.keys = str(keys)
    return run


def test_a_user_is_added_shown_and_removed(run, tmp_path):
    added = run("add-user", "bob", "--credentials", run.keys, password="correct horse")
    assert added == (0, {"name": "bob", "credentials": run.keys})
    path = tmp_path / "users.toml"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "correct horse" not in path.read_text()
    assert is_password(load_users(path).find("bob"), "correct horse")
    assert run("users") == (0, [{"name": "bob", "credentials": run.keys}])
    assert run("remove-user", "bob") == (0, {"removed": "bob"})
    assert run("remove-user", "bob")[0] == 2


def test_a_new_password_replaces_the_former_one(run, tmp_path):
    for password in ("correct horse", "battery staple"):
        run("add-user", "bob", "--credentials", run.keys, password=password)
    (user,) = load_users(tmp_path / "users.toml").user
    assert is_password(user, "battery staple")
    assert not is_password(user, "correct horse")


@pytest.mark.parametrize(("name", "password"), [("bob", "short"), ("b b", "correct horse")])
def test_a_user_that_cannot_be_is_refused(run, name, password):
    code, told = run("add-user", name, "--credentials", run.keys, password=password)
    assert code == 2
    assert "8 to 1024" in told["error"] or "64 letters" in told["error"]


def test_a_missing_extra_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'mqmesh\[console\]'") as refused:
        check_extra()
    assert EXTRA[0] in str(refused.value)


def test_a_cluster_s_console_has_keys_of_its_own_and_one_user(tmp_path):
    settings = ["console.enable=true", "security.enable=true", f"data_dir={tmp_path / 'data'}"]
    config = load_cluster(None, settings)
    make_security(config)
    password = make_console_user(config)
    assert make_console_user(config) == "", "it is shown only once"
    folder = tmp_path / "data" / "security"
    listed = read_access_file(folder / "access_list.toml")
    assert listed.find("console").role is UserRole.VIEW
    (spec,) = (one for one in role_specs(config) if one.role == "console")
    written = load_config(ConsoleConfig, tmp_path / "data" / "run" / "console.toml")
    assert spec.argv[-1] != password
    assert load_credentials(Path(written.credentials)).user == "console"
    (admin,) = load_users(folder / "console-users.toml").user
    assert admin.name == "admin"
    assert is_password(admin, password)
    assert load_credentials(Path(admin.credentials)).user == "client"


def test_a_console_of_an_open_cluster_asks_nobody(tmp_path):
    config = load_cluster(None, ["console.enable=true", f"data_dir={tmp_path / 'data'}"])
    assert make_console_user(load_cluster(None)) == ""
    role_specs(config)
    written = load_config(ConsoleConfig, tmp_path / "data" / "run" / "console.toml")
    assert (written.users_file, written.credentials) == ("", "")
    assert written.data_dir == str(tmp_path / "data")
