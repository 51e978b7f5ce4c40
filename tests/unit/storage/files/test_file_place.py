"""A file is told from its copies."""

from __future__ import annotations

import shutil

import pytest

from mqmesh.errors import StorageError
from mqmesh.storage.files.file_place import file_place


def test_a_file_has_one_place_and_a_copy_another(tmp_path):
    path, copy = tmp_path / "it", tmp_path / "copy"
    place = file_place(path)
    assert file_place(path) == place
    shutil.copy2(path, copy)
    path.unlink()
    copy.rename(path)
    assert file_place(path) != place


def test_what_cannot_be_made_is_an_error_that_names_it(tmp_path):
    with pytest.raises(StorageError, match="none/it"):
        file_place(tmp_path / "none" / "it")
