"""A client in C on the distribution's libzmq: with a key it gets in, without one not."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from harness import keys as harness_keys
from harness.debian_package import debian_folder, leave_out
from harness.keys import credentials, user
from harness.secured import put_users, secured_folder

from mqmesh.message import AUTO_CREATE_TOPIC
from mqmesh.protocol.codes import ResponseCode
from mqmesh.security.access_list import Action, Rule
from mqmesh.security.keys import load_credentials
from mqmesh.testing.processes import ProcessCluster

SOURCE = Path(harness_keys.__file__).with_name("curve_client.c")
ANSWERED, REFUSED = 0, 3
SHOP = credentials("shop")
THIEF = credentials("thief")


@cache
def build(folder: Path) -> Path:
    """Compiles it, with the headers and the library of the distribution's packages."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        leave_out("no compiler: neither cc nor gcc is on PATH")
    root = debian_folder("libzmq3-dev", "libzmq5")
    libraries = [str(one) for one in (root / "usr" / "lib").glob("*-linux-gnu*")]
    program = folder / "curve_client"
    options = ("-L", "-Wl,-rpath,", "-Wl,-rpath-link,")
    places = [option + one for one in libraries for option in options]
    # The old kind of path, in which what a library needs itself is looked for, too.
    subprocess.run(
        [compiler, "-std=c99", "-Wall", "-Wextra", "-Werror", "-O1", f"-I{root}/usr/include",
         SOURCE, "-o", program, *places, "-Wl,--disable-new-dtags", "-l:libzmq.so.5"],
        check=True,
    )  # fmt: skip
    return program


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("c")


@pytest.fixture(scope="module")
def ask(folder):
    """Runs it against a secured name server; returns its exit code and what it said."""
    program = build(folder)
    keys = secured_folder(folder)
    put_users(keys, [user(SHOP, allow=[Rule([Action.PUB], ["orders"])])])
    server_key = load_credentials(keys / "namesrv.toml").public_key
    with ProcessCluster(folder, keys=keys) as cluster:

        def ask(own, topic=AUTO_CREATE_TOPIC, server_key=server_key):
            words = [] if own is None else [server_key, own.public_key, own.secret_key]
            place = f"tcp://{cluster.namesrv_addr}"
            asked = [program, place, topic, *words]
            done = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
            assert not done.stderr
            return done.returncode, done.stdout.strip()

        yield ask


def test_with_a_key_its_request_is_answered(ask):
    told = {AUTO_CREATE_TOPIC: ResponseCode.SUCCESS, "secret": ResponseCode.TOPIC_NOT_EXIST}
    for topic, response in told.items():
        code, said = ask(SHOP, topic)
        assert code == ANSWERED
        assert said.startswith(f"code {int(response)}, ")


@pytest.mark.parametrize("own", [None, THIEF])
def test_without_a_key_that_is_known_it_does_not_get_in(ask, own):
    assert ask(own)[0] == REFUSED


def test_it_does_not_talk_to_a_server_that_has_not_the_key(ask):
    assert ask(SHOP, server_key=THIEF.public_key)[0] == REFUSED
