"""The rows there are, and how they are chosen and run."""

import pytest

from mqmesh.errors import InvalidArgument
from rows.rows import ROWS, Row
from rows.runner import count_steps, run_row, select_rows
from rows.sides import Conditions, Sample

WANTED = {
    "produce_128",
    "async_128",
    "drain_128",
    "both_128",
    "produce_1024",
    "async_1024",
    "drain_1024",
    "both_1024",
    "sync_send",
    "latency_500",
    "queues_10000",
    "sync_flush_128",
    "single_many",
    "many_topics_send",
    "many_topics_drain",
    "new_topics",
    "filter_tag_128",
    "filter_sql_128",
}


def test_all_rows_are_there_under_their_own_names():
    assert set(ROWS) >= WANTED
    assert all(row.name == name for name, row in ROWS.items())


def test_a_row_is_chosen_by_its_name_and_several_by_a_beginning():
    assert [row.name for row in select_rows(["sync_send"])] == ["sync_send"]
    assert {row.name for row in select_rows(["produce_", "both_128"])} == {
        "produce_128",
        "produce_1024",
        "produce_order",
        "both_128",
    }


def test_a_whole_name_means_no_longer_one():
    assert [row.name for row in select_rows(["single_many"])] == ["single_many"]


def test_no_name_means_all_but_the_optional_rows():
    assert select_rows([]) == [row for row in ROWS.values() if not row.optional]


def test_an_unknown_row_is_refused_with_the_names_there_are():
    with pytest.raises(InvalidArgument, match=r"no row 'nonsense'.*produce_128"):
        select_rows(["nonsense"])


def test_limit_and_mqmesh_take_turns(tmp_path):
    order = []

    def side(name: str, value: float):
        def run(conditions: Conditions) -> Sample:
            order.append(name)
            return Sample(value=value, message_count=1)

        return run

    row = Row(name="r", unit="u", what="w", product=side("p", 6), limit=side("l", 10))
    told: list[str] = []
    line = run_row(row, Conditions(folder=tmp_path), 3, told.append)
    assert order == ["l", "p"] * 3
    assert len(told) == count_steps([row], 3) == 6
    assert line.ratio == 0.6


@pytest.mark.parametrize(
    ("scale", "messages", "multiple", "expected"),
    [
        (1.0, 2_000, 500, 2_000),
        (0.5, 2_000, 500, 1_000),
        (0.0001, 2_000, 500, 500),
        (1.0, 501, 500, 1_000),
    ],
)
def test_message_counts_scale_to_whole_batches(tmp_path, scale, messages, multiple, expected):
    conditions = Conditions(folder=tmp_path, scale=scale)
    assert conditions.count(messages, multiple) == expected
