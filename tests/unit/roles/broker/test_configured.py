"""What parts of a broker keep of the settings changes with them."""

from __future__ import annotations

from mqmesh.roles.broker.config import CHANGEABLE
from mqmesh.roles.live_settings import LiveSettings


def change(stage, **settings):
    live = stage.features.core.settings
    live.adopt(LiveSettings(live.now, CHANGEABLE).plan(settings, ()))
    stage.features.configured()


def test_parts_that_keep_settings_take_them_anew(stage):
    features, before = stage.features, stage.features.state.topics.version
    change(
        stage,
        max_held_pulls="7",
        wait_time_mills_in_send_queue="11",
        os_page_cache_busy_timeout_mills="12",
        auto_create_subscription_group="false",
        transaction_timeout_ms="21",
        transaction_check_interval_ms="22",
        transaction_check_max="23",
        long_polling_max_ms="5",
        **{"ha.max_ha_transfer_byte_in_second": "9"},
    )
    assert (features.pulling.holds.most, features.pulling.turns.most) == (7, 7)
    assert (features.state.admission.wait_limit_ms, features.state.admission.busy_timeout_ms) == (
        11,
        12,
    )
    assert features.state.group_table.auto_create is False
    table = features.state.half_messages.table
    assert (table.settings.timeout_ms, table.settings.check_max) == (21, 23)
    assert table.timetable.settings.check_interval_ms == 22
    assert features.core.config.long_polling_max_ms == 5
    assert features.replication.followers.catch_up_rate.rate == 9
    # Name servers take the topics anew, and what topics that make themselves are like.
    assert features.state.topics.version.counter > before.counter
