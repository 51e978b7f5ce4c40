"""The note about where retention lets the log begin."""

from __future__ import annotations

import os

import pytest

from mqmesh.storage.log.log_start import read_log_start, write_log_start


def test_what_is_noted_reads_back_and_is_written_in_place(tmp_path):
    path = tmp_path / "log-beginning"
    assert read_log_start(path) is None
    write_log_start(path, 7)
    inode = path.stat().st_ino
    write_log_start(path, 1 << 40)
    assert read_log_start(path) == 1 << 40
    assert (path.stat().st_ino, path.stat().st_size) == (inode, 16)


@pytest.mark.parametrize("position", range(16))
def test_a_damaged_note_says_nothing(tmp_path, position):
    path = tmp_path / "log-beginning"
    write_log_start(path, 12_345)
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)
    assert read_log_start(path) is None
    path.write_bytes(data[:position])
    assert read_log_start(path) is None


def test_what_cannot_be_noted_is_not_known(tmp_path, monkeypatch):
    path = tmp_path / "log-beginning"
    write_log_start(path, 7)

    def full(*arguments):
        raise OSError(28, "no space")

    monkeypatch.setattr(os, "pwrite", full)
    write_log_start(path, 8)
    assert read_log_start(path) is None
