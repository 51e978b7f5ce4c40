"""Keyword arguments that editors and type checkers know are the options that there are."""

from __future__ import annotations

import typing

import msgspec
import pytest

from mqmesh.sdk.consumer.consumer_options import (
    PullConsumerKeywords,
    PullConsumerOptions,
    PushConsumerKeywords,
    PushConsumerOptions,
)
from mqmesh.sdk.producer.producer_options import (
    ProducerKeywords,
    ProducerOptions,
    TransactionKeywords,
    TransactionOptions,
)


@pytest.mark.parametrize(
    ("keywords", "options"),
    [
        (ProducerKeywords, ProducerOptions),
        (TransactionKeywords, TransactionOptions),
        (PushConsumerKeywords, PushConsumerOptions),
        (PullConsumerKeywords, PullConsumerOptions),
    ],
)
def test_keywords_are_the_fields_of_the_options(keywords, options) -> None:
    assert typing.get_type_hints(keywords) == typing.get_type_hints(options)
    assert not keywords.__required_keys__
    assert len(msgspec.structs.fields(options)) == len(keywords.__optional_keys__)
