"""What a data folder remembers of the starts before."""

from __future__ import annotations

import pytest

from mqmesh.errors import ConfigError, CorruptRecord
from mqmesh.roles.started_as import NAME, StartedAs, begin_in, read_started_as, remember_start
from mqmesh.security.config import SecurityConfig
from mqmesh.storage.files.atomic_file import load_document, save_document

ON = SecurityConfig(enable=True, key_file="k")
OFF = SecurityConfig()
SAID = SecurityConfig(insecure=True)


@pytest.mark.parametrize(
    ("before", "security", "is_refused"),
    [
        (False, OFF, False),
        (False, ON, False),
        (False, SAID, False),
        (True, OFF, True),
        (True, ON, False),
        (True, SAID, False),
    ],
)
def test_what_was_secured_is_opened_only_where_somebody_says_so(
    tmp_path, before, security, is_refused
):
    if before:
        begin_in(tmp_path, ON)
    if is_refused:
        with pytest.raises(ConfigError, match=f"{tmp_path} was used with security on.*--insecure"):
            begin_in(tmp_path, security)
    else:
        begin_in(tmp_path, security)
    # One start that was opened on purpose makes the next one no less deliberate.
    assert read_started_as(tmp_path).secured == (before or security.enable)


def test_a_folder_with_nothing_to_remember_has_no_document(tmp_path):
    begin_in(tmp_path, OFF)
    assert list(tmp_path.iterdir()) == []


def test_the_document_of_every_version_can_be_read(project_root, tmp_path):
    golden = (project_root / "tests" / "data" / "started-as-v1.json").read_bytes()
    save_document(tmp_path / NAME, golden)
    assert read_started_as(tmp_path) == StartedAs(secured=True, follows=True)
    remember_start(StartedAs(), tmp_path, ON, follows=True)
    assert load_document(tmp_path / NAME) == golden


@pytest.mark.parametrize("document", [b"", b"[]", b'{"secured":1}', b'{"version":2}', b"\xff"])
def test_a_document_that_cannot_be_read_opens_nothing(tmp_path, document):
    save_document(tmp_path / NAME, document)
    with pytest.raises(CorruptRecord):
        begin_in(tmp_path, OFF)


def test_security_cannot_be_on_and_off():
    with pytest.raises(ConfigError, match=r"leave one out"):
        SecurityConfig(enable=True, key_file="k", insecure=True)
