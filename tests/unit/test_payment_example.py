"""Balances of the payment example: each bill counts once, whoever counts it."""

from __future__ import annotations

import json
import runpy
from types import SimpleNamespace

import pytest

from mqmesh import RevisionConflict


@pytest.fixture(scope="module")
def count(project_root):
    return runpy.run_path(str(project_root / "examples" / "payments" / "balances.py"))["count"]


class Table:
    """A table of one broker; ``meanwhile`` is called between a read and its write."""

    def __init__(self):
        self.values = {}
        self.meanwhile = lambda: None

    def get(self, key):
        found = self.values.get(key)
        self.meanwhile()
        return found

    def update(self, key, value, *, revision):
        before = self.values.get(key)
        if revision != (before.revision if before else 0):
            raise RevisionConflict("somebody else", code=41)
        self.values[key] = SimpleNamespace(value=value, revision=revision + 1)


def bill(offset, cents, queue_id=0):
    body = json.dumps({"order_id": "x", "customer": "ada", "cents": cents}).encode()
    info = SimpleNamespace(broker_name="b", queue_id=queue_id)
    return SimpleNamespace(body=body, queue_offset=offset, info=info)


def cents(table):
    return json.loads(table.values["ada"].value)["cents"]


def test_a_bill_that_comes_again_changes_nothing(count):
    table = Table()
    for offset in (0, 3, 3, 0, 7, 3):
        count(table, bill(offset, 10 + offset))
    assert cents(table) == 10 + 13 + 17
    count(table, bill(0, 5, queue_id=1))  # of another queue
    assert cents(table) == 45


def test_two_that_count_at_once_lose_nothing_and_count_nothing_twice(count):
    table = Table()

    def other():
        table.meanwhile = lambda: None
        count(table, bill(0, 10))

    table.meanwhile = other
    count(table, bill(0, 10))
    assert cents(table) == 10
