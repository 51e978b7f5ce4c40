"""Batches of messages that expire: their bytes, and what becomes of the point in time."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from mqmesh.batch.delayed_batch import ExpiringMeta, expires_ms, has_expired, read_delayed_meta
from mqmesh.batch.record_batch import Attributes, check_batch, decode_messages, read_header
from mqmesh.batch.redelivery import redeliver

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(scope="module")
def delayed():
    """A batch that is delayed, and lives for an hour after that."""
    return (DATA / "record-batch-v1-expiring.bin").read_bytes()


def test_the_golden_file_is_what_is_written_today(delayed):
    assert runpy.run_path(str(DATA / "make_golden.py"))["encode_case"]("expiring") == delayed


def test_its_meta_says_how_long_it_lives_from_its_delivery_on(delayed):
    header = check_batch(delayed)
    assert header.attributes & Attributes.HAS_EXPIRY
    meta = read_delayed_meta(delayed, header)
    assert isinstance(meta, ExpiringMeta)
    assert (meta.topic, meta.born_host, meta.expires_ms) == ("flights", "h:1", -3_600_000)
    assert not has_expired(delayed, header, 2**62), "it is not delivered yet"
    assert len(decode_messages(delayed, header)) == 3


@pytest.mark.parametrize("part", [{}, {"first": 1, "count": 1}])
def test_a_copy_expires_when_it_is_said_to(delayed, part):
    copy = redeliver(delayed, read_header(delayed), topic="t", queue_id=1, expires_ms=7_000, **part)
    header = check_batch(copy)
    assert expires_ms(copy, header) == 7_000
    assert not has_expired(copy, header, 6_999)
    assert has_expired(copy, header, 7_000)


def test_a_copy_lives_for_ever_if_nothing_is_said(delayed):
    copy = redeliver(delayed, read_header(delayed), topic="t", queue_id=1)
    assert not has_expired(copy, check_batch(copy), 2**62)


def test_a_meta_that_cannot_be_read_does_not_expire(delayed):
    header = read_header(delayed)
    broken = bytearray(delayed)
    broken[104] = 0xC1
    assert expires_ms(bytes(broken), header) == 0
