"""Which messages are traced: the right share, the same everywhere, and found without looking."""

from __future__ import annotations

import random

import pytest

from mqmesh.sdk.tracing.sampling import Sampler

RATES = [1e-6, 0.001, 0.01, 0.1, 0.3, 0.5, 0.618, 0.7, 0.99, 1 - 1e-12, 1.0]


@pytest.mark.parametrize("rate", RATES)
def test_what_is_chosen_of_a_batch_is_what_is_wanted_one_by_one(rate):
    chance = random.Random(rate)
    sampler, other = Sampler(rate), Sampler(rate)
    for count in (1, 2, 100, 1_000):
        producer_id, first = chance.getrandbits(64), chance.getrandbits(40)
        wanted = [n for n in range(count) if other.wants(producer_id, first + n)]
        assert list(sampler.chosen(producer_id, first, count)) == wanted


@pytest.mark.parametrize("rate", RATES[1:])
def test_the_share_is_the_rate(rate):
    chosen = Sampler(rate).chosen(7, 0, 100_000)
    assert len(chosen) == pytest.approx(rate * 100_000, abs=4)


@pytest.mark.parametrize("period", [2, 7, 60, 1_000])
def test_no_period_of_a_sender_is_favoured(period):
    sampler = Sampler(0.1)
    chosen = sum(sampler.wants(7, sequence) for sequence in range(0, 10_000 * period, period))
    assert chosen == pytest.approx(1_000, rel=0.1)


def test_producers_of_one_message_are_chosen_by_the_rate():
    sampler = Sampler(0.25)
    assert sum(sampler.wants(producer_id, 0) for producer_id in range(4_000)) == pytest.approx(
        1_000, rel=0.1
    )


def test_a_lower_rate_chooses_among_those_of_a_higher_one():
    few, many = Sampler(0.02), Sampler(0.2)
    assert set(few.chosen(9, 500, 5_000)) < set(many.chosen(9, 500, 5_000))


def test_the_choice_never_changes():
    # Clients of other versions choose the same messages.
    chosen = Sampler(0.01).chosen(0x0C6A9F0E5D3B7A12, 0, 500)
    assert list(chosen) == [47, 102, 191, 335, 424]


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.7])
def test_batches_that_follow_each_other_are_looked_at_from_where_the_last_one_ended(rate):
    chance = random.Random(rate)
    sampler, other = Sampler(rate), Sampler(rate)
    at = 0
    for _ in range(300):
        # On, mostly; sometimes over a gap, and sometimes back.
        at = max(at + chance.choice((0, 0, 0, 7, -300)), 0)
        count = chance.randrange(1, 200)
        wanted = [n for n in range(count) if other.wants(7, at + n)]
        assert list(sampler.chosen(7, at, count)) == wanted
        at += count
