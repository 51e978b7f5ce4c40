"""Names of topics and groups in headers: every field that holds one has a type that says so."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
import pytest
from harness.filled_headers import filled
from msgspec import inspect

from mqmesh.protocol.admin import TopicConfigs
from mqmesh.protocol.commands import COMMANDS
from mqmesh.protocol.groups import GetGroupsRequest, GroupConfig, GroupSummaries, GroupSummary
from mqmesh.protocol.membership import HeartbeatRequest
from mqmesh.protocol.names import has_names, names_in, renamed
from mqmesh.protocol.pulling import PullRequest
from mqmesh.protocol.replication import HandOverCommitsRequest
from mqmesh.protocol.route import TopicConfig, TopicList, TopicRoute

_OTHERS = """
after_client_id after_user archive at_start before broker_name brokers client_id client_ids
cluster_name consume_from_where correlation_id default delivery difference digest directory
expression expression_type filter_id help hint_endpoint host host_id in_force ipc key keys kind
labels language leader member message_id message_model name namespace namespaces on_expired own
owners pairs path problem properties protocol reason remark result retry_delays rocketmq_name role
rungs schema server_key service session settings stacks state target tcp text unit unset user
value version waiting warnings where zone
"""
OTHERS = set(re.findall(r"\w+", _OTHERS))
"""Fields with texts that are names of nothing that has a namespace."""
BY_KIND = {
    ("GatewayClient", "address"),
    ("ConfigChange", "after"),
    ("GroupsProgress", "after_topic"),
    ("GroupsProgressRequest", "after_topic"),
    ("ReadTableRequest", "after"),
    ("ReadTableRequest", "prefix"),
    ("TableEntries", "after"),
}


def texts(kind: inspect.Type, owner: str, field: str) -> Iterator[tuple[str, str]]:
    """Yields the fields of a header, at any depth, that hold texts and no names."""
    match kind:
        case inspect.Metadata(extra={"names": _}):
            return
        case inspect.Metadata(type=inner):
            yield from texts(inner, owner, field)
        case inspect.StructType(cls=cls, fields=fields):
            for one in fields:
                yield from texts(one.type, cls.__name__, one.name)
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            yield from texts(item, owner, field)
        case inspect.DictType(key_type=key, value_type=value):
            yield from texts(key, owner, field)
            yield from texts(value, owner, field)
        case inspect.UnionType(types=types):
            for one in types:
                yield from texts(one, owner, field)
        case inspect.StrType():
            yield owner, field


@pytest.mark.parametrize("spec", COMMANDS.values(), ids=lambda spec: spec.code.name)
def test_every_text_of_a_header_is_a_name_or_is_known_to_be_none(spec):
    kinds = [one for one in (spec.request, spec.reply) if one is not None]
    found = {pair for kind in kinds for pair in texts(inspect.type_info(kind), "", "")}
    unknown = {(owner, field) for owner, field in found - BY_KIND if field not in OTHERS}
    assert not unknown, "types of protocol/names.py for names; OTHERS for what is none"


@pytest.mark.parametrize("spec", COMMANDS.values(), ids=lambda spec: spec.code.name)
def test_what_the_table_of_commands_calls_a_topic_or_group_has_the_type_of_one(spec):
    if spec.request is None or spec.fixed is not None:
        return
    header = filled(spec.request, {"topic": "T", "group": "G", "dead letters": "D"})
    assert set(spec.topic_names(header)) <= {"T"}
    assert set(spec.group_names(header)) <= {"G"}
    assert bool(names_in(header)) == has_names(spec.request)
    assert all(name in "TGD" for _, name in names_in(header))


def lower(kind: str, name: str) -> str | None:
    return None if name.startswith("bank") else name.lower()


def test_names_are_changed_wherever_they_stand():
    beat = filled(HeartbeatRequest, {"topic": "T", "group": "G"})
    changed = renamed(beat, lower)
    assert changed.producer_groups == ["g"]
    (consumer,) = changed.consumers
    assert (consumer.group, consumer.subscriptions[0].topic) == ("g", "t")
    assert (changed.stats[0].group, changed.stats[0].topic) == ("g", "t")
    assert changed.client_id == beat.client_id
    assert beat.producer_groups == ["G"]


def test_what_is_not_to_be_shown_goes_out_of_lists_and_stays_alone():
    configs = [TopicConfig("A"), TopicConfig("bank%x")]
    assert renamed(TopicConfigs(configs, ["bank%x", "A"]), lower) == TopicConfigs(
        [TopicConfig("a")], ["a"]
    )
    assert renamed(TopicList(["bank%x"]), lower) == TopicList([])
    assert renamed(TopicRoute("bank%x", [], []), lower).topic == "bank%x"
    group = GroupConfig("A", dead_letter="B", paused_topics={"C": 1, "bank%x": 2})
    summaries = GroupSummaries([GroupSummary(group, True), GroupSummary(GroupConfig("bank%g"))])
    (left,) = renamed(summaries, lower).groups
    assert left.config == GroupConfig("a", dead_letter="b", paused_topics={"c": 1})


def test_an_empty_name_is_none():
    assert names_in(GetGroupsRequest()) == []
    assert names_in(PullRequest("g", "t", 0, 0)) == [("group", "g"), ("topic", "t")]


def test_headers_without_names_stay_as_they_are():
    kinds = {kind for spec in COMMANDS.values() if (kind := spec.request) and not has_names(kind)}
    assert len(kinds) > 20
    for kind in kinds:
        header = filled(kind)
        assert renamed(header, lower) is header
    assert has_names(HandOverCommitsRequest)
    assert not has_names(msgspec.defstruct("Empty", []))
