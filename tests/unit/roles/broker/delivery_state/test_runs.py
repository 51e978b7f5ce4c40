"""Lists of runs: what reaches into a span, without a look at what does not."""

from random import Random

import pytest

from mqmesh.roles.broker.delivery_state.runs import MAX_RUN, Run, RunList


class CountedRun:
    """A run of one message that counts how often it is looked at."""

    is_wide = False
    looks = 0

    def __init__(self, first: int) -> None:
        self.first, self.end = first, first + 1

    @property
    def bits(self) -> int:
        CountedRun.looks += 1
        return 1


@pytest.mark.parametrize("seed", range(20))
def test_what_reaches_into_a_span_is_found(seed):
    random, runs, every = Random(seed), RunList(), []
    for _ in range(300):
        width = random.choice((1, 2, 31, 32, 33, 500, MAX_RUN))
        run = Run(random.randrange(5_000), random.getrandbits(width) | 1 << (width - 1), 1)
        runs.add(run)
        every.append(run)
        if random.random() < 0.3:
            gone = every.pop(random.randrange(len(every)))
            gone.bits = 1
            runs.remove(gone)
        first = random.randrange(5_000)
        end = first + random.choice((1, 20, 2_000))
        span = (1 << (end - first)) - 1
        wanted = {id(one): mask for one in every if (mask := one.within(first, span))}
        assert {id(one): mask for one, mask in runs.reaching(first, end)} == wanted
    assert len(runs) == len(every)


def test_a_search_looks_at_few_single_messages_before_its_span():
    runs = RunList()
    for first in range(3_000):
        runs.add(CountedRun(first))
    CountedRun.looks = 0
    assert len(list(runs.reaching(2_000, 2_010))) == 10
    assert CountedRun.looks < 50
