"""The plan of an import: all pairs of states of each thing, and the document."""

from __future__ import annotations

import itertools
import json

import msgspec
import pytest

from mqmesh.errors import ConfigError
from mqmesh.protocol.groups import GroupConfig
from mqmesh.protocol.route import TopicConfig
from mqmesh.sdk.admin.cluster_plan import (
    BrokerSetup,
    ClusterSetup,
    GroupSetup,
    ImportAction,
    ImportThing,
    TopicSetup,
    make_plan,
    read_setup,
    write_setup,
)

FOUR = TopicSetup(4, 4, 6, order=False)
EIGHT = TopicSetup(8, 8, 6, order=False)
READABLE = TopicSetup(4, 4, 4, order=False)
ONE = GroupSetup(True, True, 3, True)
OTHER = GroupSetup(False, True, 3, True)
C, H, L, D, X = (
    ImportAction.CREATE,
    ImportAction.CHANGE,
    ImportAction.LEAVE,
    ImportAction.DELETE,
    ImportAction.CONFLICT,
)
BOTH = [False, True]

# Wanted, found: what is to be done without options.
TOPICS = {
    (None, None): None,
    (None, FOUR): None,
    (None, EIGHT): None,
    (None, READABLE): None,
    (FOUR, None): C,
    (FOUR, FOUR): L,
    (FOUR, EIGHT): X,
    (FOUR, READABLE): H,
    (EIGHT, None): C,
    (EIGHT, FOUR): H,
    (EIGHT, EIGHT): L,
    (EIGHT, READABLE): H,
    (READABLE, None): C,
    (READABLE, FOUR): H,
    (READABLE, EIGHT): X,
    (READABLE, READABLE): L,
}


def setup_of(topic=None, group=None, *, drained=False, kv=None, acl=""):
    broker = BrokerSetup(
        {} if topic is None else {"t": topic}, {} if group is None else {"g": group}, drained
    )
    return ClusterSetup(brokers={"a": broker}, kv=kv or {}, access_list=acl)


def actions(wanted, found, **options):
    return [one.action for one in make_plan(wanted, found, **options)]


def test_the_table_has_every_pair():
    states = [None, FOUR, EIGHT, READABLE]
    assert set(TOPICS) == set(itertools.product(states, states))


@pytest.mark.parametrize("prune", BOTH)
@pytest.mark.parametrize("force", BOTH)
@pytest.mark.parametrize("has_messages", BOTH)
@pytest.mark.parametrize(("pair", "plain"), list(TOPICS.items()))
def test_topics(pair, plain, prune, force, has_messages):
    wanted, found = pair
    expected = plain
    if wanted is None and found is not None and prune:
        expected = X if has_messages and not force else D
    elif plain is X and force:
        expected = H
    filled = {"a": frozenset({"t"} if has_messages else ())}
    made = actions(setup_of(wanted), setup_of(found), prune=prune, force=force, filled=filled)
    assert made == ([] if expected is None else [expected])


@pytest.mark.parametrize("prune", BOTH)
@pytest.mark.parametrize("pair", list(itertools.product([None, ONE, OTHER], repeat=2)))
def test_groups(pair, prune):
    wanted, found = pair
    if wanted is None:
        expected = [D] if prune and found is not None else []
    elif found is None:
        expected = [C]
    else:
        expected = [L] if wanted == found else [H]
    assert actions(setup_of(None, wanted), setup_of(None, found), prune=prune) == expected


@pytest.mark.parametrize("prune", BOTH)
@pytest.mark.parametrize("pair", list(itertools.product([None, "x", "y"], repeat=2)))
def test_keys_and_values(pair, prune):
    wanted, found = ({} if one is None else {"shop": {"k": one}} for one in pair)
    if not wanted:
        expected = [D] if prune and found else []
    elif not found:
        expected = [C]
    else:
        expected = [L] if wanted == found else [H]
    assert actions(setup_of(kv=wanted), setup_of(kv=found), prune=prune) == expected


@pytest.mark.parametrize("pair", list(itertools.product(BOTH, repeat=2)))
def test_drained_brokers(pair):
    wanted, found = (setup_of(drained=one) for one in pair)
    assert actions(wanted, found) == ([] if pair[0] is pair[1] else [H])


@pytest.mark.parametrize("pair", list(itertools.product(["", "a", "b"], repeat=2)))
def test_access_lists_are_compared_and_never_changed(pair):
    wanted, found = (setup_of(acl=one) for one in pair)
    expected = [L] if pair[0] == pair[1] else [X]
    assert actions(wanted, found) == (expected if pair[0] else [])


def test_a_broker_that_is_not_there_is_a_conflict_and_others_are_left_alone():
    wanted = ClusterSetup(brokers={"b": BrokerSetup({"t": FOUR})})
    (step,) = make_plan(wanted, setup_of(FOUR, ONE), prune=True)
    assert (step.action, step.thing, step.name) == (X, ImportThing.BROKER, "b")


def test_a_plan_that_was_carried_out_leaves_everything():
    wanted = setup_of(EIGHT, ONE, drained=True, kv={"shop": {"k": "x"}})
    assert set(actions(wanted, wanted, prune=True)) == {L}
    assert "read_queue_nums 4 -> 8" in make_plan(wanted, setup_of(FOUR, ONE))[0].detail


def test_a_document_is_read_as_it_was_written():
    setup = setup_of(EIGHT, ONE, drained=True, kv={"b": {"k": "x"}, "a": {"ö": "y"}}, acl="x")
    data = write_setup(setup)
    assert read_setup(data, "f") == setup
    turned = msgspec.structs.replace(setup, kv=dict(reversed(setup.kv.items())))
    assert write_setup(turned) == data


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"x", "export.json: not what `mqmesh cluster export` writes"),
        (b"[]", "export.json: not what"),
        (b"{}", "export.json: format None, this version reads 1"),
        (b'{"format": 3}', "export.json: format 3, this version reads 1"),
        (json.dumps({"format": 1, "x": 1}).encode(), "unknown field `x`"),
        (b'{"format": 1, "brokers": {"a": {"topics": {"t": {}}}}}', "export.json: .*read_queue"),
        (b"\xff", "export.json: not what"),
    ],
)
def test_a_file_that_is_no_document_is_told(data, told):
    with pytest.raises(ConfigError, match=told):
        read_setup(data, "export.json")


@pytest.mark.parametrize(
    ("config", "setup"), [(GroupConfig("g"), GroupSetup), (TopicConfig("t"), TopicSetup)]
)
def test_a_document_has_all_settings_of_brokers_with_their_defaults(config, setup):
    settings = msgspec.structs.asdict(config)
    del settings[config.__struct_fields__[0]]
    required = {one.name for one in msgspec.structs.fields(setup) if one.required}
    made = setup(**{name: settings[name] for name in required})
    beside = {"schema": ""} if setup is TopicSetup else {}
    assert msgspec.structs.asdict(made) == {**settings, **beside}
