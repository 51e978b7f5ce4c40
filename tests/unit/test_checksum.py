"""CRC-32: whatever computes it, the values are zlib's, which all files and frames hold."""

import importlib.util
import platform
import sys
import zlib
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh import checksum
from mqmesh.checksum import crc32

LARGE = bytes(range(256)) * 1024


def imported_anew() -> ModuleType:
    spec = importlib.util.spec_from_file_location("checksum_again", checksum.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_value_that_every_description_of_this_crc_gives() -> None:
    assert crc32(b"123456789") == 0xCBF43926
    assert crc32(b"") == 0


@given(st.binary(max_size=600), st.integers(0, 2**32 - 1))
def test_values_are_those_of_zlib_from_any_start(data: bytes, start: int) -> None:
    assert crc32(data, start) == zlib.crc32(data, start)


@given(st.integers(0, 300), st.integers(0, len(LARGE)))
def test_stretches_of_any_place_and_length(begin: int, length: int) -> None:
    view = memoryview(LARGE)[begin : begin + length]
    assert crc32(view) == zlib.crc32(view)
    assert crc32(bytearray(view)) == zlib.crc32(view)


@given(st.binary(max_size=5_000), st.integers(0, 5_000))
def test_pieces_make_the_value_of_the_whole(data: bytes, cut: int) -> None:
    assert crc32(data[cut:], crc32(data[:cut])) == zlib.crc32(data)


def test_a_whole_number_of_tag_hashes_is_taken_as_its_bytes() -> None:
    assert crc32(memoryview(LARGE).cast("Q")) == zlib.crc32(LARGE)


def test_the_largest_batch() -> None:
    data = LARGE * 17
    assert len(data) > 4 * 1024 * 1024
    assert crc32(data) == zlib.crc32(data)


def test_isa_l_is_used_where_setup_cfg_installs_it() -> None:
    expected = "isal.isal_zlib" if platform.machine() in {"x86_64", "aarch64"} else "zlib"
    assert sys.modules[expected].crc32 is crc32


def test_without_isa_l_zlib_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "isal", None)
    monkeypatch.delitem(sys.modules, "isal.isal_zlib", raising=False)
    assert imported_anew().crc32 is zlib.crc32
