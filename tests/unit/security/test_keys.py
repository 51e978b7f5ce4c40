"""Keys, the files they are kept in, and which server must prove which one."""

from __future__ import annotations

import stat

import msgspec
import pytest

from mqmesh.errors import ConfigError
from mqmesh.security.keys import (
    MAX_KNOWN_SERVERS,
    Credentials,
    KeyRing,
    load_credentials,
    save_credentials,
)

PUBLIC = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
SECRET = "D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs"
OWN = Credentials(user="shop", public_key=PUBLIC, secret_key=SECRET, namesrv_server_key=PUBLIC)


def test_what_is_saved_is_read_back_and_nobody_else_may_read_it(tmp_path):
    path = tmp_path / "shop.toml"
    save_credentials(path, OWN)
    assert load_credentials(path) == OWN
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_is_there_is_not_overwritten(tmp_path):
    path = tmp_path / "shop.toml"
    path.write_text("mine")
    with pytest.raises(ConfigError, match=r"shop\.toml: File exists"):
        save_credentials(path, OWN)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o601])
def test_a_file_that_others_may_use_is_refused(tmp_path, mode):
    path = tmp_path / "shop.toml"
    save_credentials(path, OWN)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode 0{mode:o} lets others read.*chmod 600 it"):
        load_credentials(path)


@pytest.mark.parametrize(
    "wrong", [SECRET[:-1], SECRET + "a", SECRET[:-1] + "~", "", SECRET[:39] + "\\n"]
)
def test_what_is_no_key_is_refused_and_a_secret_is_not_shown(tmp_path, wrong):
    path = tmp_path / "shop.toml"
    save_credentials(path, OWN)
    path.write_text(path.read_text().replace(SECRET, wrong))
    with pytest.raises(
        ConfigError, match=r"shop\.toml: secret_key is no key of 40 char"
    ) as refused:
        load_credentials(path)
    assert SECRET[:8] not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.toml: No such file"):
        load_credentials(tmp_path / "gone.toml")


def test_what_is_no_text_is_refused(tmp_path):
    path = tmp_path / "shop.toml"
    save_credentials(path, OWN)
    path.write_bytes(b"user = '\xff'")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 8"):
        load_credentials(path)


def test_the_secret_is_in_no_repr():
    assert SECRET not in f"{OWN!r} {OWN}"


def test_a_server_must_prove_the_key_that_was_learnt_of_it():
    ring = KeyRing(OWN, PUBLIC)
    ring.learn("tcp://b:1", SECRET)
    ring.learn("tcp://c:1", "")
    assert ring.server_key("tcp://b:1") == SECRET
    assert ring.server_key("tcp://c:1") == PUBLIC


def test_not_more_servers_than_the_limit_are_remembered():
    ring = KeyRing(OWN, PUBLIC)
    for number in range(MAX_KNOWN_SERVERS + 1):
        ring.learn(f"tcp://b:{number}", SECRET)
    assert ring.server_key("tcp://b:0") == PUBLIC
    assert ring.server_key("tcp://b:1") == SECRET


def test_a_server_of_two_possible_keys_is_tried_with_the_other_one_when_it_has_not_the_first():
    ring = KeyRing(OWN, PUBLIC, SECRET)
    assert ring.server_key("tcp://b:1") == PUBLIC
    assert ring.try_another("tcp://b:1", PUBLIC)
    assert ring.server_key("tcp://b:1") == SECRET
    assert ring.try_another("tcp://b:1", PUBLIC), "somebody else found that out before"
    assert ring.server_key("tcp://b:1") == SECRET
    assert ring.server_key("tcp://c:1") == PUBLIC
    ring.learn("tcp://b:1", PUBLIC)
    assert ring.server_key("tcp://b:1") == PUBLIC
    assert not ring.try_another("tcp://b:1", PUBLIC)


@pytest.mark.parametrize("keys", [PUBLIC, [PUBLIC], [PUBLIC, SECRET]])
def test_name_servers_have_one_key_or_one_of_two(tmp_path, keys):
    path = tmp_path / "shop.toml"
    save_credentials(path, msgspec.structs.replace(OWN, namesrv_server_key=keys))
    loaded = load_credentials(path)
    assert list(loaded.namesrv_keys) == ([keys] if isinstance(keys, str) else keys)


def test_name_servers_have_no_three_keys(tmp_path):
    path = tmp_path / "shop.toml"
    save_credentials(path, msgspec.structs.replace(OWN, namesrv_server_key=[PUBLIC] * 3))
    with pytest.raises(ConfigError, match="namesrv_server_key"):
        load_credentials(path)
