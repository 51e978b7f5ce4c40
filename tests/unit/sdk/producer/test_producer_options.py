from __future__ import annotations

import pytest

from mqmesh.errors import InvalidArgument
from mqmesh.sdk.client.options import make_options
from mqmesh.sdk.producer.producer_options import ProducerOptions
from mqmesh.units import MIB


def test_defaults_are_those_of_the_specification() -> None:
    options = make_options(ProducerOptions, {}, "producer option")
    assert options == ProducerOptions()
    assert options.send_msg_timeout_ms == 3_000
    assert options.retry_times_when_send_failed == 2
    assert options.retry_times_when_send_async_failed == 2
    assert not options.retry_another_broker_when_not_store_ok
    assert not options.send_latency_fault_enable
    assert options.max_message_size == 4 * MIB
    assert options.compress_msg_body_over_how_much == 4_096


@pytest.mark.parametrize(
    "values",
    [
        {"send_msg_timeout_ms": 0},
        {"send_msg_timeout_ms": 600_001},
        {"send_msg_timeout_ms": 1.5},
        {"send_msg_timeout_ms": "3000"},
        {"retry_times_when_send_failed": -1},
        {"max_message_size": 15 * MIB + 1},
        {"buffer_memory_bytes": 0},
        {"batch_size_bytes": 8 * MIB + 1},
        {"batch_messages": 65_537},
        {"max_requests_in_flight": 0},
        {"send_latency_fault_enable": "yes"},
        {"no_such_option": 1},
    ],
)
def test_what_is_out_of_bounds_or_unknown_is_named(values) -> None:
    with pytest.raises(InvalidArgument, match="producer option"):
        make_options(ProducerOptions, values, "producer option")


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"busy_poll_us": 10_001}, "busy_poll_us = 10001: must be a whole number of 0 to 10,000"),
        ({"batch_messages": "9"}, "batch_messages = '9': must be a whole number of 1 to 65,536"),
        ({"batch_mesages": 9}, "unknown key batch_mesages; did you mean batch_messages?"),
    ],
)
def test_an_error_names_the_option_its_value_and_what_would_be_right(values, line) -> None:
    with pytest.raises(InvalidArgument) as caught:
        make_options(ProducerOptions, values, "producer option")
    assert str(caught.value) == f"producer option: {line}"
