"""The window of pages ahead of the log's end."""

import threading

import pytest

from mqmesh.storage.log.page_window import SMALLEST_BYTES, STEP_BYTES, PageWindow
from mqmesh.units import MIB

SIZE = 64 * MIB


class FakeFile:
    """A mapped file that notes what is brought in, and waits until it may be."""

    size = SIZE

    def __init__(self, *, good: bool = True) -> None:
        self.brought_in: list[tuple[int, int]] = []
        self.given_back: list[tuple[int, int]] = []
        self.stored: list[int] = []
        self.good = good
        self.gate = threading.Semaphore(0)
        self.done = threading.Semaphore(0)

    def bring_in(self, position: int, stop: int) -> bool:
        self.gate.acquire(timeout=20)
        self.brought_in.append((position, stop))
        self.done.release()
        return self.good

    def store(self, position: int, pieces: list[bytes]) -> None:
        self.stored.append(position)

    def give_back(self, position: int, stop: int) -> None:
        self.given_back.append((position, stop))

    def let(self, steps: int) -> None:
        """Lets so many steps happen, and waits for them."""
        for _ in range(steps):
            self.gate.release()
        for _ in range(steps):
            assert self.done.acquire(timeout=20)


@pytest.fixture
def window():
    made = PageWindow(4 * MIB)
    yield made
    made.close()


def ready_in(window: PageWindow, file: FakeFile) -> int:
    """Return the position up to which pages of a file are ready."""
    stretch = window._stretch
    return stretch.ready if stretch is not None and stretch.mapped is file else 0


def until_ready(window: PageWindow, file: FakeFile, position: int) -> None:
    while ready_in(window, file) < position:
        threading.Event().wait(0.001)


def test_nothing_is_ready_before_it_was_asked_for(window: PageWindow) -> None:
    file = FakeFile()
    assert ready_in(window, file) == 0
    assert window._thread is None


def test_pages_are_brought_in_behind_the_end(window: PageWindow) -> None:
    file = FakeFile()
    window.follow(file, 1000, SIZE)
    assert ready_in(window, file) == 1000
    file.let(1)
    until_ready(window, file, 1000 + SMALLEST_BYTES)
    assert file.brought_in == [(1000, 1000 + SMALLEST_BYTES)]
    # More than half is left.
    window.follow(file, 1100, SIZE)
    assert ready_in(window, file) == 1000 + SMALLEST_BYTES


def test_a_store_goes_only_into_ready_pages_and_moves_the_window(window: PageWindow) -> None:
    file, pieces = FakeFile(), [bytes(100)]
    assert not window.store(file, 0, pieces, 100, SIZE)
    window.follow(file, 0, SIZE)
    assert not window.store(file, 0, pieces, 100, SIZE)
    file.let(1)
    until_ready(window, file, SMALLEST_BYTES)
    assert window.store(file, 0, pieces, 100, SIZE)
    assert not window.store(FakeFile(), 0, pieces, 100, SIZE)
    half = SMALLEST_BYTES // 2
    assert window.store(file, half, pieces, half + 100, SIZE)
    assert not window.store(file, SMALLEST_BYTES, pieces, SMALLEST_BYTES + 100, SIZE)
    assert file.stored == [0, half]
    file.let(1)
    until_ready(window, file, half + 100 + SMALLEST_BYTES)


def test_the_window_doubles_when_it_was_too_small(window: PageWindow) -> None:
    file = FakeFile()
    position = 0
    for size in (1, 2, 4, 8, 16, 16):
        window.follow(file, position, SIZE)
        assert window.size == size * SMALLEST_BYTES
        # The log gets there before the thread does.
        position += window.size // 2 + 1
    for _ in range(100):
        file.gate.release()
    until_ready(window, file, position)
    assert all(stop - start <= STEP_BYTES for start, stop in file.brought_in)


def test_it_never_touches_what_has_no_room_on_the_disk(window: PageWindow) -> None:
    file = FakeFile()
    stop = STEP_BYTES
    window.follow(file, 0, stop)
    file.let(1)
    until_ready(window, file, stop)
    window.follow(file, stop - 100, stop)
    window.follow(file, stop, stop)
    # Now the room has grown.
    window.follow(file, stop, 2 * stop)
    file.let(1)
    until_ready(window, file, 2 * stop)
    assert file.brought_in == [(0, stop), (stop, 2 * stop)]


def test_another_file_begins_anew(window: PageWindow) -> None:
    first, second = FakeFile(), FakeFile()
    window.follow(first, 0, SIZE)
    first.let(1)
    until_ready(window, first, SMALLEST_BYTES)
    window.follow(second, 0, SIZE)
    assert ready_in(window, first) == 0
    assert ready_in(window, second) == 0
    second.let(1)
    until_ready(window, second, SMALLEST_BYTES)


def test_what_was_jumped_over_is_not_brought_in(window: PageWindow) -> None:
    file = FakeFile()
    window.follow(file, 0, SIZE)
    file.let(1)
    until_ready(window, file, SMALLEST_BYTES)
    window.follow(file, 9 * MIB, SIZE)
    assert ready_in(window, file) == 9 * MIB
    file.let(1)
    until_ready(window, file, 9 * MIB + STEP_BYTES)
    assert file.brought_in[1] == (9 * MIB, 9 * MIB + STEP_BYTES)


def test_pages_are_given_back_and_the_window_is_small_again(window: PageWindow) -> None:
    file = FakeFile()
    window.follow(file, 0, SIZE)
    window.follow(file, SMALLEST_BYTES - 1, SIZE)
    assert window.size == 2 * SMALLEST_BYTES
    for _ in range(10):
        file.gate.release()
    window.give_back()
    assert ready_in(window, file) == 0
    assert window.size == SMALLEST_BYTES
    assert file.given_back == [(0, SIZE)]
    window.give_back()
    assert len(file.given_back) == 1


def test_where_it_cannot_be_done_it_is_not_tried_again(window: PageWindow) -> None:
    file = FakeFile(good=False)
    window.follow(file, 0, SIZE)
    file.let(1)
    while window.size:
        threading.Event().wait(0.001)
    assert ready_in(window, file) == 0
    for position in range(0, SIZE, MIB):
        window.follow(file, position, SIZE)
        assert ready_in(window, file) <= position
    assert len(file.brought_in) == 1


def test_a_window_of_nothing_has_no_thread() -> None:
    window = PageWindow(0)
    file = FakeFile()
    window.follow(file, 0, SIZE)
    assert ready_in(window, file) == 0
    assert window._thread is None
    window.give_back()
    window.close()


def test_closing_ends_the_thread() -> None:
    window = PageWindow(4 * MIB)
    file = FakeFile()
    window.follow(file, 0, SIZE)
    file.gate.release()
    window.close()
    assert window._thread is not None
    assert not window._thread.is_alive()
    window.close()
