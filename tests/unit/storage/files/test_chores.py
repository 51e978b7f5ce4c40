"""The thread for long calls."""

import threading

import pytest

from mqmesh.storage.files.chores import Chores


def test_chores_are_done_in_order_on_another_thread() -> None:
    chores = Chores("test")
    done: list[int] = []
    futures = [chores.submit(lambda number=number: done.append(number)) for number in range(5)]
    thread = chores.submit(threading.current_thread).result(10)
    assert [future.done() for future in futures] == [True] * 5
    assert done == [0, 1, 2, 3, 4]
    assert thread.name == "test"
    chores.close()
    chores.close()
    assert not thread.is_alive()


def test_an_error_is_kept_for_whoever_asked() -> None:
    chores = Chores("test")

    def fail() -> None:
        raise ValueError("no")

    failed = chores.submit(fail)
    assert chores.submit(lambda: 7).result(10) == 7
    with pytest.raises(ValueError, match="no"):
        failed.result(0)
    chores.close()


def test_closing_does_what_is_left() -> None:
    chores = Chores("test")
    futures = [chores.submit(lambda: 1) for _ in range(100)]
    chores.close()
    assert all(future.done() for future in futures)
