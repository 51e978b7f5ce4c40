"""Processes of real clusters are killed and paused under load: the short form of scripts/chaos.

Each test judges everything that producers and consumers saw by the invariants of
``harness.checker``; docs/reliability.md says which promise it proves.
"""

from __future__ import annotations

import pytest
from harness.chaos import (
    carry,
    kill_broker_async,
    kill_broker_sync,
    kill_consumer,
    kill_in_delays,
    kill_in_kv,
    kill_in_processing,
    kill_in_receives,
    kill_in_transactions,
    kill_name_servers,
    kill_outbox,
    kill_producers,
    kill_under_policies,
    main,
    pause_broker,
)

ROUNDS = 3
CLUSTER_ROUNDS = 5
"""More than a cluster lives for (``KILLS_A_LIFE``): it is stopped and started again, too."""


@pytest.fixture
def harm(short_tmp_path):
    """Runs a scenario; whatever a client saw must keep the promises."""

    def run(scenario, seed, rounds=ROUNDS):
        outcome = scenario(short_tmp_path, seed, rounds)
        assert outcome.report.good, outcome.report.text()
        assert outcome.report.counts["acked"] > 0
        return outcome

    return run


@pytest.mark.timeout(120)
def test_a_broker_that_is_killed_again_and_again_loses_nothing_with_async_flush(harm):
    assert harm(kill_broker_async, 1, CLUSTER_ROUNDS).metrics["kills"] >= CLUSTER_ROUNDS


@pytest.mark.timeout(120)
def test_a_broker_that_is_killed_again_and_again_loses_nothing_with_sync_flush(harm):
    assert harm(kill_broker_sync, 2).metrics["kills"] >= ROUNDS


def test_clients_go_on_without_name_servers_and_new_ones_are_served_after_their_return(harm):
    assert harm(kill_name_servers, 3).metrics["new clients served after s"] < 30.0


def test_the_queues_of_a_killed_consumer_are_taken_by_the_others_and_nothing_is_lost(harm):
    assert harm(kill_consumer, 4).metrics["queues taken after s"] < 10.0


def test_what_killed_producers_sent_is_there_once_or_not_at_all(harm):
    harm(kill_producers, 5)


@pytest.mark.timeout(120)
def test_transactions_end_once_whoever_dies_at_whichever_step(harm):
    assert sum(harm(kill_in_transactions, 9).metrics.values()) >= ROUNDS


@pytest.mark.timeout(120)
def test_delayed_messages_come_once_whoever_dies(harm):
    assert sum(harm(kill_in_delays, 7).metrics.values()) >= ROUNDS


@pytest.mark.timeout(120)
def test_nothing_acknowledged_comes_again_whoever_dies_among_broker_and_members(harm):
    metrics = harm(kill_in_receives, 1).metrics
    assert metrics["killed (broker)"] + metrics["killed (member)"] >= ROUNDS


@pytest.mark.timeout(120)
def test_counters_of_a_table_are_what_was_acknowledged(short_tmp_path):
    outcome = kill_in_kv(short_tmp_path, 1, 3)
    assert outcome.report.good, outcome.report.text()


@pytest.mark.timeout(120)
def test_a_table_outlives_the_log(short_tmp_path):
    outcome = carry(short_tmp_path, 1, 2)
    assert outcome.report.good, outcome.report.text()


@pytest.mark.timeout(120)
def test_rows_of_an_outbox_are_sent_once_whichever_relay_dies(harm):
    harm(kill_outbox, 10)


@pytest.mark.timeout(120)
def test_each_order_is_billed_once_when_broker_and_members_die(harm):
    assert sum(harm(kill_in_processing, 1).metrics.values()) >= ROUNDS


def test_policies_of_topics_and_groups_hold_while_the_broker_is_killed(harm):
    harm(kill_under_policies, 3)


def test_a_broker_that_hangs_for_three_seconds_loses_and_repeats_nothing(harm):
    harm(pause_broker, 6)


def test_the_long_form_tells_how_to_replay_a_failure(monkeypatch, tmp_path, capsys):
    def fail(folder, seed, rounds):
        raise AssertionError(f"planted with {seed} and {rounds}")

    monkeypatch.setattr("harness.chaos.SCENARIOS", {"planted": fail})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    out = tmp_path / "runs.jsonl"
    assert main(["--scenario", "planted", "--seed", "7", "--rounds", "2", "--out", str(out)]) == 1
    said = capsys.readouterr().out
    assert "planted with 7 and 2" in said
    assert "replay: scripts/chaos --scenario planted --seed 7 --rounds 2" in said
    assert '"seed":7' in out.read_text()
