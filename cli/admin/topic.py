"""`mqmesh topic …`: lists, makes, changes and deletes topics."""

from collections.abc import Mapping
from typing import Any, Final

import click
import msgspec

from mqmesh.errors import ConfigError
from mqmesh.message import is_system_topic
from mqmesh.protocol.route import MAX_QUEUES_PER_TOPIC, Perm, TopicConfig
from mqmesh.sdk.admin.admin import AdminClient, masters_of
from mqmesh.sdk.admin.cluster_admin import ClusterAdmin
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.sdk.client.route_cache import RouteCache
from mqmesh.sdk.consumer.rebalance import ALLOCATE_STRATEGIES, allocate_strategy

from ..lazy_group import LazyGroup
from ..notes import tell_note, tell_warning
from ..options import broker_option, confirm, json_option, namesrv_option, yes_option
from ..render import Column, counted, print_json, print_records, print_table, rate, say, timestamp

PERMS: Final = {
    "rw": Perm.READ_WRITE,
    "r": Perm.READ,
    "w": Perm.WRITE,
    "none": Perm.NONE,
}
_NAME_OF_PERM: Final = {int(perm): name for name, perm in PERMS.items()}

_queues = click.IntRange(0, MAX_QUEUES_PER_TOPIC)
_TRAFFIC: Final = (
    Column("topic", "TOPIC"),
    Column("group", "GROUP"),
    Column("in_per_s", "IN/S", rate),
    Column("out_per_s", "OUT/S", rate),
    Column("in_today", "IN TODAY", rank=1),
    Column("out_today", "OUT TODAY", rank=2),
    Column("backlog", "BACKLOG"),
)

_some_queues = click.IntRange(1, MAX_QUEUES_PER_TOPIC)


@click.group(cls=LazyGroup, places={"probe": ("admin.probe", "probe_topic")})
def topic() -> None:
    """List, create, change and delete topics.

    \b
    Examples:
      mqmesh topic list
      mqmesh topic create orders --queues 8
      mqmesh topic update orders --write-queues 4
      mqmesh topic stats orders --json
    """


@topic.command("list")
@click.option("--all", "show_all", is_flag=True, help="System topics, too.")
@click.option("--consumers", is_flag=True, help="Also the groups that read each topic.")
@click.option("--cluster", default="", metavar="NAME", help="Only topics of this cluster.")
@broker_option
@namesrv_option
@json_option
def list_topics(
    show_all: bool, consumers: bool, cluster: str, broker: str, namesrv: str, as_json: bool
) -> None:
    """List all topics.

    \b
    Examples:
      mqmesh topic list
      mqmesh topic list --consumers --cluster DefaultCluster
    """
    with GroupAdmin(namesrv, broker_name=broker) as admin:
        by_broker = admin.topic_configs()
        groups = admin.groups() if consumers else {}
        members = admin.cluster().brokers if cluster else []
    readers: dict[str, set[str]] = {}
    for one in (summary for summaries in groups.values() for summary in summaries):
        for name in one.topics:
            readers.setdefault(name, set()).add(one.config.group)
    if cluster:
        clusters = {one.broker_name: one.cluster_name for one in members}
        if cluster not in clusters.values():
            known = ", ".join(sorted(set(clusters.values())))
            raise ConfigError(f"there is no cluster {cluster!r}; there are {known}")
        by_broker = {
            name: configs for name, configs in by_broker.items() if clusters.get(name) == cluster
        }
    found: dict[str, list[dict[str, Any]]] = {}
    for broker_name, configs in by_broker.items():
        for config in configs:
            if show_all or not is_system_topic(config.topic):
                found.setdefault(config.topic, []).append(_as_dict(broker_name, config))
    if as_json:
        told = {"groups": readers} if consumers else {}
        print_json(
            [
                {"topic": name, "brokers": found[name]}
                | {key: sorted(value.get(name, ())) for key, value in told.items()}
                for name in sorted(found)
            ]
        )
        return
    columns = ("TOPIC", "BROKER", "READ QUEUES", "WRITE QUEUES", "PERM", "ORDER")
    print_table(
        (*columns, "GROUPS") if consumers else columns,
        [
            (
                name,
                one["broker_name"],
                one["read_queue_nums"],
                one["write_queue_nums"],
                one["perm"],
                "yes" if one["order"] else "no",
                *([", ".join(sorted(readers.get(name, ()))) or "-"] if consumers else []),
            )
            for name in sorted(found)
            for one in found[name]
        ],
        optional=("ORDER", "PERM"),
    )


@topic.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option(
    "-q", "--queues", type=_some_queues, help="Read and write queues on each broker. [default: 4]"
)
@click.option("--read-queues", type=_some_queues, help="Queues that consumers are given.")
@click.option("--write-queues", type=_queues, help="Queues that producers are given.")
@click.option(
    "--perm", type=click.Choice(list(PERMS)), default="rw", show_default=True, help="Who may what."
)
@click.option("--order", is_flag=True, help="Routes keep the queues while their broker is down.")
@click.option("--if-missing", is_flag=True, help="Where it exists it is left as it is.")
@broker_option
@namesrv_option
@json_option
def create(
    names: tuple[str, ...],
    queues: int | None,
    read_queues: int | None,
    write_queues: int | None,
    perm: str,
    order: bool,
    if_missing: bool,
    broker: str,
    namesrv: str,
    as_json: bool,
) -> None:
    """Create topics on every broker, or on one.

    \b
    Examples:
      mqmesh topic create orders
      mqmesh topic create orders --queues 16
      mqmesh topic create ledger --queues 1 --order
      mqmesh topic create orders payments returns --queues 8
    """
    each = 4 if queues is None else queues
    configs = [
        TopicConfig(
            name,
            read_queue_nums=each if read_queues is None else read_queues,
            write_queue_nums=each if write_queues is None else write_queues,
            perm=int(PERMS[perm]),
            order=order,
        )
        for name in names
    ]
    with AdminClient(namesrv, broker_name=broker) as admin:
        if len(configs) == 1:
            done = {names[0]: admin.create_topic(configs[0], exist_ok=if_missing)}
        else:
            done = admin.create_topics(configs, exist_ok=if_missing)
    is_named = order or perm != "rw" or {queues, read_queues, write_queues} != {None}
    for config in configs:
        left = sorted(key for key, one in done[config.topic].items() if one != config)
        if left and is_named:
            tell_warning(
                f"topic {config.topic} was there with other settings, and was left as it was on "
                f"{', '.join(left)}"
            )
    if as_json and len(names) > 1:
        print_json([_configs_as_dict(name, done[name]) for name in names])
        return
    for name in names:
        _show_configs(name, done[name], as_json)


@topic.command()
@click.argument("name")
@click.option("-q", "--queues", type=_queues, help="Read and write queues on each broker.")
@click.option("--read-queues", type=_queues, help="Queues that consumers are given.")
@click.option("--write-queues", type=_queues, help="Queues that producers are given.")
@click.option("--perm", type=click.Choice(list(PERMS)), help="Who may what.")
@click.option("--order/--no-order", default=None, help="Routes keep the queues of a lost broker.")
@click.option("-y", "--yes", is_flag=True, help="Hide unread messages, and do not ask.")
@broker_option
@namesrv_option
@json_option
def update(
    name: str,
    queues: int | None,
    read_queues: int | None,
    write_queues: int | None,
    perm: str | None,
    order: bool | None,
    yes: bool,
    broker: str,
    namesrv: str,
    as_json: bool,
) -> None:
    """Change a topic on every broker that has it, or on one; what is not said stays.

    With fewer --queues producers leave the others at once, and consumers keep them while they
    hold unread messages: repeat the command when they are read. --read-queues and --perm take
    them away from consumers at once. What hides unread messages is asked first.

    \b
    Examples:
      mqmesh topic update orders --queues 16
      mqmesh topic update orders --queues 2
      mqmesh topic update orders --read-queues 2 --write-queues 2 --yes
      mqmesh topic update orders --perm r
    """
    changes: dict[str, Any] = {
        "read_queue_nums": queues if read_queues is None else read_queues,
        "write_queue_nums": queues if write_queues is None else write_queues,
        "perm": None if perm is None else int(PERMS[perm]),
        "order": order,
    }
    changes = {key: value for key, value in changes.items() if value is not None}
    if not changes:
        raise ConfigError("nothing to change; say --queues, --perm or --order")
    with AdminClient(namesrv, broker_name=broker) as admin:
        present = {key: one for key, (one,) in admin.topic_configs(name).items()}
        wanted = {key: msgspec.structs.replace(one, **changes) for key, one in present.items()}
        hidden = _hidden(admin, present, wanted)
        if read_queues is None and not yes:
            # Queues that were not named for consumers stay theirs until these have read them.
            for key in [key for key in hidden if wanted[key].perm & Perm.READ]:
                kept, count = present[key].read_queue_nums, hidden.pop(key)
                wanted[key] = msgspec.structs.replace(wanted[key], read_queue_nums=kept)
                tell_note(
                    f"{counted(count, 'unread message')} on {key} would be hidden: its read "
                    f"queues stay {kept}; repeat the command when they are read, or add --yes"
                )
        if hidden:
            what = f"{counted(sum(hidden.values()), 'unread message')} of topic {name}"
            confirm(f"this hides {what}", f"Hide {what}?", yes=yes, as_json=as_json)
        done = admin.put_topic(wanted, hide_messages=bool(hidden))
    _show_configs(name, done, as_json)


def _hidden(
    admin: AdminClient, present: Mapping[str, TopicConfig], wanted: Mapping[str, TopicConfig]
) -> dict[str, int]:
    """Return how many unread messages a change hides from consumers, by broker; none left out."""
    first = {
        key: one.read_queue_nums if one.perm & Perm.READ else 0
        for key, one in wanted.items()
        if present[key].perm & Perm.READ
    }
    if all(present[key].read_queue_nums <= place for key, place in first.items()):
        return {}
    (name,) = {one.topic for one in wanted.values()}
    stats = admin.topic_stats(name)
    counts = {
        key: sum(queue.unread_messages for queue in stats[key].queues if queue.queue_id >= place)
        for key, place in first.items()
        if key in stats
    }
    return {key: count for key, count in counts.items() if count}


@topic.command()
@click.argument("name")
@yes_option
@broker_option
@namesrv_option
@json_option
def delete(name: str, yes: bool, broker: str, namesrv: str, as_json: bool) -> None:
    """Delete a topic with all its messages from every broker, or from one.

    \b
    Examples:
      mqmesh topic delete orders
      mqmesh topic delete orders --broker broker-b --yes
    """
    confirm(
        "this deletes all messages of the topic",
        f"Delete topic {name} and all its messages?",
        yes=yes,
        as_json=as_json,
    )
    with AdminClient(namesrv, broker_name=broker) as admin:
        done = admin.delete_topic(name)
    if as_json:
        print_json(
            {"topic": name, "deleted_from": done.brokers, "silent_namesrvs": done.silent_namesrvs}
        )
        return
    say(f"topic {name} is deleted from {', '.join(done.brokers) or 'the name servers'}")
    if done.silent_namesrvs:
        tell_warning(f"no answer from name server {', '.join(done.silent_namesrvs)}")


@topic.command()
@click.argument("name")
@namesrv_option
@json_option
def route(name: str, namesrv: str, as_json: bool) -> None:
    """Show which brokers carry a topic, as clients are told.

    \b
    Examples:
      mqmesh topic route orders
    """
    with AdminClient(namesrv) as admin:
        found = admin.route(name)
    addresses = masters_of(found.brokers)
    clusters = {one.broker_name: one.cluster_name for one in found.brokers}
    rows = []
    for queue in found.queues:
        address = addresses.get(queue.broker_name)
        rows.append(
            {
                "cluster_name": clusters.get(queue.broker_name, ""),
                "broker_name": queue.broker_name,
                "address": address.tcp if address else "",
                "ipc": address.ipc if address else "",
                "read_queue_nums": queue.read_queue_nums,
                "write_queue_nums": queue.write_queue_nums,
                "perm": _NAME_OF_PERM.get(queue.perm & Perm.READ_WRITE, str(queue.perm)),
            }
        )
    if as_json:
        print_json({"topic": name, "order": found.order, "queues": rows})
        return
    print_table(
        ("CLUSTER", "BROKER", "ADDRESS", "READ QUEUES", "WRITE QUEUES", "PERM", "LOCAL SOCKET"),
        [
            (
                row["cluster_name"] or "-",
                row["broker_name"],
                row["address"] or "down",
                row["read_queue_nums"],
                row["write_queue_nums"],
                row["perm"],
                row["ipc"] or "-",
            )
            for row in rows
        ],
        optional=("LOCAL SOCKET", "CLUSTER", "PERM"),
    )


@topic.command()
@click.argument("name")
@click.option("--members", required=True, metavar="ID,…", help="Client ids of the group's members.")
@click.option("--group", default="group", help="Its name; strategies of your own may look at it.")
@click.option(
    "--strategy",
    type=click.Choice(list(ALLOCATE_STRATEGIES)),
    default="average",
    show_default=True,
    help="How queues are divided.",
)
@namesrv_option
@json_option
def allocate(
    name: str, members: str, group: str, strategy: str, namesrv: str, as_json: bool
) -> None:
    """Show who of a group would read which queues; nothing is changed, no member is asked.

    \b
    Examples:
      mqmesh topic allocate orders --members a,b,c
      mqmesh topic allocate orders --members a,b,c --strategy consistent_hash
    """
    ids = sorted({one.strip() for one in members.split(",")})
    if not all(ids):
        raise ConfigError(f"--members {members!r}: ids are separated by single commas")
    routes = RouteCache()
    with AdminClient(namesrv) as admin:
        routes.update(admin.route(name))
    queues = routes.subscribe_queues(name)
    division = allocate_strategy(strategy)
    shares = {one: division.allocate(group, one, queues, ids) for one in ids}
    if as_json:
        print_json(
            [
                {
                    "client_id": one,
                    "queues": [
                        {"broker_name": queue.broker_name, "queue_id": queue.queue_id}
                        for queue in shares[one]
                    ],
                }
                for one in ids
            ]
        )
        return
    print_table(
        ("MEMBER", "QUEUES", "WHICH"),
        [
            (
                one,
                len(shares[one]),
                " ".join(f"{queue.broker_name}:{queue.queue_id}" for queue in shares[one]) or "-",
            )
            for one in ids
        ],
    )


@topic.command()
@click.argument("name", default="")
@click.option("--all", "show_all", is_flag=True, help="All topics: what comes, and goes to whom.")
@click.option("--active", is_flag=True, help="With --all: only where something came or went today.")
@broker_option
@namesrv_option
@json_option
def stats(
    name: str, show_all: bool, active: bool, broker: str, namesrv: str, as_json: bool
) -> None:
    """Show where each queue begins and ends, and when it got its first and last message.

    OLDEST is the time of the first message that is still there: so far back one can read.

    \b
    Examples:
      mqmesh topic stats orders
      mqmesh topic stats --all --active
    """
    if show_all is bool(name) or (active and not show_all):
        raise click.UsageError("name one topic, or say --all; --active goes with --all")
    if show_all:
        with ClusterAdmin(namesrv, broker_name=broker) as whole:
            found = [one for one in whole.traffic() if one.is_active or not active]
        print_records(_TRAFFIC, found, as_json=as_json)
        return
    with AdminClient(namesrv, broker_name=broker) as admin:
        by_broker = admin.topic_stats(name)
    rows: list[dict[str, Any]] = [
        {
            "broker_name": broker_name,
            "queue_id": queue.queue_id,
            "min_queue_offset": queue.min_queue_offset,
            "max_queue_offset": queue.max_queue_offset,
            "messages": queue.max_queue_offset - queue.min_queue_offset,
            "first_timestamp": queue.first_timestamp,
            "last_update_timestamp": queue.last_update_timestamp,
        }
        for broker_name, found in by_broker.items()
        for queue in found.queues
    ]
    total = sum(row["messages"] for row in rows)
    if as_json:
        print_json({"topic": name, "messages": total, "queues": rows})
        return
    print_table(
        ("BROKER", "QUEUE", "FIRST OFFSET", "NEXT OFFSET", "MESSAGES", "OLDEST", "LAST UPDATE"),
        [
            (
                row["broker_name"],
                row["queue_id"],
                row["min_queue_offset"],
                row["max_queue_offset"],
                row["messages"],
                timestamp(row["first_timestamp"]),
                timestamp(row["last_update_timestamp"]),
            )
            for row in rows
        ],
        optional=("OLDEST", "FIRST OFFSET", "NEXT OFFSET"),
    )
    noun = "message" if total == 1 else "messages"
    say(f"{total:,} {noun} in {len(rows):,} queue{'' if len(rows) == 1 else 's'}")


def _as_dict(broker_name: str, config: TopicConfig) -> dict[str, Any]:
    return {
        "broker_name": broker_name,
        "read_queue_nums": config.read_queue_nums,
        "write_queue_nums": config.write_queue_nums,
        "perm": _NAME_OF_PERM.get(config.perm & Perm.READ_WRITE, str(config.perm)),
        "order": config.order,
    }


def _configs_as_dict(name: str, configs: dict[str, TopicConfig]) -> dict[str, Any]:
    rows = [_as_dict(broker_name, config) for broker_name, config in configs.items()]
    return {"topic": name, "brokers": rows}


def _show_configs(name: str, configs: dict[str, TopicConfig], as_json: bool) -> None:
    found = _configs_as_dict(name, configs)
    if as_json:
        print_json(found)
        return
    for row in found["brokers"]:
        say(
            f"topic {name} on {row['broker_name']}: {row['read_queue_nums']} read and "
            f"{row['write_queue_nums']} write queues, {row['perm']}"
            + (", ordered" if row["order"] else "")
        )
