"""A file that one process holds at a time."""

from __future__ import annotations

import errno
import fcntl
import os

import pytest

from mqmesh.errors import StorageError, StoreLocked, TooManyOpenFiles
from mqmesh.storage.files.directory_lock import hold_file


def test_a_file_that_is_held_is_not_waited_for_in_a_loop(tmp_path):
    path = tmp_path / "lock"
    wanted = hold_file(path, wait=False)
    with hold_file(path), pytest.raises(StoreLocked, match="another process holds"), wanted:
        pass
    with hold_file(path, wait=False):
        pass


@pytest.mark.parametrize(
    ("module", "call", "number", "kind"),
    [(os, "open", errno.EMFILE, TooManyOpenFiles), (fcntl, "flock", errno.ENOLCK, StorageError)],
)
def test_errors_of_the_system_are_those_of_a_store(
    tmp_path, monkeypatch, module, call, number, kind
):
    def fail(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module, call, fail)
    with pytest.raises(kind, match="lock cannot be"), hold_file(tmp_path / "lock"):
        pass
