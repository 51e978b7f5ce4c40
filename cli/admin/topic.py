"""`mqmesh topic …`: lists, makes, changes and deletes topics."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import msgspec

from mqmesh.errors import ConfigError
from mqmesh.message import is_system_topic
from mqmesh.protocol.route import (
    MAX_PRIORITIES,
    MAX_QUEUES_PER_TOPIC,
    OnExpired,
    Perm,
    TopicConfig,
)
from mqmesh.roles.process import ExitCode
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.cluster_admin import ClusterAdmin
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.sdk.admin.json_schema import schema_of
from mqmesh.sdk.admin.searches import MAX_LOOKED, MessageFilter, SearchClient
from mqmesh.sdk.admin.views.topics import (
    PERMS,
    DeletedTopicView,
    TopicBrokerView,
    TopicSchemaView,
    TopicView,
    allocation_views,
    checked_topic_view,
    route_view,
    topic_stats_view,
    topic_view,
    topic_views,
)
from mqmesh.sdk.client.route_cache import RouteCache
from mqmesh.sdk.consumer.rebalance import ALLOCATE_STRATEGIES, allocate_strategy
from mqmesh.user_times import parse_duration

from ..lazy_group import LazyGroup
from ..notes import print_note, print_warning, warn_of_silent
from ..options import broker_option, cluster_options, confirm, max_option, yes_option
from ..render import (
    Column,
    Table,
    counted,
    duration,
    print_answer,
    print_records,
    rate,
    timestamp,
)

_F = TypeVar("_F", bound=Callable[..., Any])
_queues = click.IntRange(0, MAX_QUEUES_PER_TOPIC)
_some_queues = click.IntRange(1, MAX_QUEUES_PER_TOPIC)

_TOPICS: Final = (
    Column("topic", "TOPIC"),
    Column("broker_name", "BROKER"),
    Column("read_queue_nums", "READ QUEUES", rank=2),
    Column("write_queue_nums", "WRITE QUEUES", rank=3),
    Column("perm", "PERM", rank=1),
    Column("priorities", "PRIORITIES", lambda count: count or "-", rank=4),
    Column("order", "ORDER", rank=5),
)
_READERS: Final = Column("groups", "GROUPS", lambda groups: ", ".join(groups) or "-")
_ROUTE: Final = (
    Column("cluster_name", "CLUSTER", rank=2),
    Column("broker_name", "BROKER"),
    Column("address", "ADDRESS", lambda address: address or "down"),
    Column("read_queue_nums", "READ QUEUES"),
    Column("write_queue_nums", "WRITE QUEUES"),
    Column("perm", "PERM", rank=1),
    Column("ipc", "LOCAL SOCKET", rank=3),
)
_SHARES: Final = (
    Column("client_id", "MEMBER"),
    Column("queues", "QUEUES", len),
    Column(
        "queues",
        "WHICH",
        lambda queues: " ".join(f"{one.broker_name}:{one.queue_id}" for one in queues) or "-",
    ),
)
_TRAFFIC: Final = (
    Column("topic", "TOPIC"),
    Column("group", "GROUP"),
    Column("in_per_s", "IN/S", rate),
    Column("out_per_s", "OUT/S", rate),
    Column("in_today", "IN TODAY", rank=1),
    Column("out_today", "OUT TODAY", rank=2),
    Column("backlog", "BACKLOG"),
)
_STATS: Final = (
    Column("broker_name", "BROKER"),
    Column("queue_id", "QUEUE"),
    Column("min_queue_offset", "FIRST OFFSET", rank=2),
    Column("max_queue_offset", "NEXT OFFSET", rank=1),
    Column("messages", "MESSAGES"),
    Column("first_timestamp", "OLDEST", timestamp, rank=3),
    Column("last_update_timestamp", "LAST UPDATE", timestamp),
)


_MISFITS: Final = (
    Column("message_id", "MESSAGE"),
    Column("broker_name", "BROKER", rank=2),
    Column("queue_id", "QUEUE", rank=1),
    Column("queue_offset", "OFFSET", rank=1),
    Column("reason", "WHY NOT"),
)


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


def _retention(function: _F) -> _F:
    """Adds the options of a topic's retention and of the life times of its messages."""
    for option in (
        click.option(
            "--on-expired",
            type=click.Choice([one.value for one in OnExpired]),
            help="Drop messages whose time to live is over, or make them dead letters of groups "
            "that acknowledge each message. [default: drop]",
        ),
        click.option(
            "--message-ttl",
            type=click.Choice(["allow", "deny"]),
            help="Messages may have a time to live of their own. [default: deny]",
        ),
        click.option(
            "--retention-messages",
            type=click.IntRange(0, 2**53),
            help="Readers see so many messages of a queue, the newest; 0 for no limit.",
        ),
        click.option(
            "--retention",
            metavar="TIME|none",
            help="Readers see no older messages, like 1h; none for no limit but the log's.",
        ),
    ):
        function = option(function)
    return function


def _retention_ms(text: str | None) -> int | None:
    if text is None:
        return None
    return 0 if text == "none" else parse_duration(text, "--retention")


def _last(messages: int) -> str:
    return f", shows the last {counted(messages, 'message')} of a queue" if messages else ""


def _life(one: TopicBrokerView) -> str:
    if one.history:
        return f", a table with {counted(one.history, 'revision')} of each key"
    if not one.message_ttl:
        return ""
    buried = one.on_expired == OnExpired.DEAD_LETTER
    return f", messages may expire{' and become dead letters' if buried else ''}"


@topic.command("list")
@click.option("--all", "show_all", is_flag=True, help="System topics, too.")
@click.option("--consumers", is_flag=True, help="Also the groups that read each topic.")
@click.option("--cluster", default="", metavar="NAME", help="Only topics of this cluster.")
@broker_option
@cluster_options
def list_topics(show_all: bool, consumers: bool, cluster: str, broker: str, namesrv: str) -> None:
    """List all topics.

    \b
    Examples:
      mqmesh topic list
      mqmesh topic list --consumers --cluster DefaultCluster
    """
    with GroupAdmin(namesrv, broker_name=broker) as admin:
        by_broker = admin.topic_configs()
        groups = admin.groups() if consumers else None
        members = admin.cluster().brokers if cluster else []
    if cluster:
        clusters = {one.broker_name: one.cluster_name for one in members}
        if cluster not in clusters.values():
            known = ", ".join(sorted(set(clusters.values())))
            raise ConfigError(f"there is no cluster {cluster!r}; there are {known}")
        by_broker = {
            name: configs for name, configs in by_broker.items() if clusters.get(name) == cluster
        }
    found = [
        one for one in topic_views(by_broker, groups) if show_all or not is_system_topic(one.topic)
    ]
    if print_answer(found):
        rows = [
            {"topic": one.topic, "groups": one.groups, **msgspec.structs.asdict(part)}
            for one in found
            for part in one.brokers
        ]
        Table((*_TOPICS, _READERS) if consumers else _TOPICS, rows).print()


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
@click.option(
    "--priorities",
    type=click.IntRange(2, MAX_PRIORITIES),
    help="Queues are priorities, so many on each broker, 0 the lowest; fixed for ever.",
)
@_retention
@click.option("--if-missing", is_flag=True, help="Where it exists it is left as it is.")
@broker_option
@cluster_options
def create(
    names: tuple[str, ...],
    queues: int | None,
    read_queues: int | None,
    write_queues: int | None,
    perm: str,
    order: bool,
    priorities: int | None,
    retention: str | None,
    retention_messages: int | None,
    message_ttl: str | None,
    on_expired: str | None,
    if_missing: bool,
    broker: str,
    namesrv: str,
) -> None:
    """Create topics on every broker, or on one.

    \b
    Examples:
      mqmesh topic create orders
      mqmesh topic create orders --queues 16
      mqmesh topic create ledger --queues 1 --order
      mqmesh topic create orders payments returns --queues 8
      mqmesh topic create jobs --priorities 8
    """
    if priorities is not None and {queues, read_queues, write_queues} != {None}:
        raise ConfigError("--priorities says how many queues there are; leave out --queues")
    each = priorities or (4 if queues is None else queues)
    configs = [
        TopicConfig(
            name,
            read_queue_nums=each if read_queues is None else read_queues,
            write_queue_nums=each if write_queues is None else write_queues,
            perm=int(PERMS[perm]),
            order=order,
            retention_ms=_retention_ms(retention) or 0,
            retention_messages=retention_messages or 0,
            priorities=priorities or 0,
            message_ttl=message_ttl == "allow",
            on_expired=on_expired or OnExpired.DROP,
        )
        for name in names
    ]
    with AdminClient(namesrv, broker_name=broker) as admin:
        if len(configs) == 1:
            done = {names[0]: admin.create_topic(configs[0], exist_ok=if_missing)}
        else:
            done = admin.create_topics(configs, exist_ok=if_missing)
    has_retention = bool(retention or retention_messages or message_ttl or on_expired)
    is_named = (
        order
        or has_retention
        or perm != "rw"
        or {queues, read_queues, write_queues, priorities} != {None}
    )
    for config in configs:
        left = sorted(key for key, one in done[config.topic].items() if one != config)
        if left and is_named:
            print_warning(
                f"topic {config.topic} was there with other settings, and was left as it was on "
                f"{', '.join(left)}"
            )
    views = [topic_view(name, done[name]) for name in names]
    if len(views) == 1 or print_answer(views):
        for view in views:
            _print_topic(view)


@topic.command()
@click.argument("name")
@click.option("-q", "--queues", type=_queues, help="Read and write queues on each broker.")
@click.option("--read-queues", type=_queues, help="Queues that consumers are given.")
@click.option("--write-queues", type=_queues, help="Queues that producers are given.")
@click.option("--perm", type=click.Choice(list(PERMS)), help="Who may what.")
@click.option("--order/--no-order", default=None, help="Routes keep the queues of a lost broker.")
@_retention
@click.option(
    "--schema",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with a JSON Schema of the bodies, for `topic check`; an empty one removes it.",
)
@click.option("-y", "--yes", is_flag=True, help="Hide unread messages, and do not ask.")
@broker_option
@cluster_options
def update(
    name: str,
    queues: int | None,
    read_queues: int | None,
    write_queues: int | None,
    perm: str | None,
    order: bool | None,
    retention: str | None,
    retention_messages: int | None,
    message_ttl: str | None,
    on_expired: str | None,
    schema: Path | None,
    yes: bool,
    broker: str,
    namesrv: str,
) -> None:
    """Change a topic on every broker that has it, or on one; settings that are left out stay.

    With fewer --queues producers leave the others at once, and consumers keep them while they
    hold unread messages: repeat the command when they are read. --read-queues and --perm take
    them away from consumers at once. Before a change that hides unread messages the command asks
    for confirmation.

    \b
    Examples:
      mqmesh topic update orders --queues 16
      mqmesh topic update orders --queues 2
      mqmesh topic update orders --read-queues 2 --write-queues 2 --yes
      mqmesh topic update orders --perm r
      mqmesh topic update orders --retention 1h --retention-messages 1000000
      mqmesh topic update orders --retention none
      mqmesh topic update orders --message-ttl allow --on-expired dead-letter
    """
    changes: dict[str, Any] = {
        "read_queue_nums": queues if read_queues is None else read_queues,
        "write_queue_nums": queues if write_queues is None else write_queues,
        "perm": None if perm is None else int(PERMS[perm]),
        "order": order,
        "retention_ms": _retention_ms(retention),
        "retention_messages": retention_messages,
        "message_ttl": None if message_ttl is None else message_ttl == "allow",
        "on_expired": on_expired,
    }
    changes = {key: value for key, value in changes.items() if value is not None}
    if not changes and schema is None:
        raise ConfigError("nothing to change; say --queues, --perm, --order or --retention")
    with AdminClient(namesrv, broker_name=broker) as admin:
        if schema is not None:
            admin.put_topic_schema(name, _text_of(schema))
        present = {key: one for key, (one,) in admin.topic_configs(name).items()}
        wanted = {key: msgspec.structs.replace(one, **changes) for key, one in present.items()}
        hidden = _hidden(admin, present, wanted)
        if read_queues is None and not yes:
            # Queues that were not named for consumers stay theirs until these have read them.
            for key in [key for key in hidden if wanted[key].perm & Perm.READ]:
                kept, count = present[key].read_queue_nums, hidden.pop(key)
                wanted[key] = msgspec.structs.replace(wanted[key], read_queue_nums=kept)
                print_note(
                    f"{counted(count, 'unread message')} on {key} would be hidden: its read "
                    f"queues stay {kept}; repeat the command when they are read, or add --yes"
                )
        if hidden:
            what = f"{counted(sum(hidden.values()), 'unread message')} of topic {name}"
            confirm(f"this hides {what}", f"Hide {what}?", yes=yes)
        done = admin.put_topic(wanted, hide_messages=bool(hidden))
    _print_topic(topic_view(name, done))
    if changes.get("retention_ms") or retention_messages:
        print_note(
            "older messages are hidden from readers; this frees no disk: whole segments of the log "
            "go, by file_reserved_time of the broker"
        )


@topic.command("schema")
@click.argument("name")
@cluster_options
def show_schema(name: str, namesrv: str) -> int:
    """Show the schema of a topic's bodies, as `topic update --schema` put it.

    \b
    Examples:
      mqmesh topic update orders --schema order.json
      mqmesh topic schema orders
    """
    with AdminClient(namesrv) as admin:
        text = admin.topic_schema(name)
    if not text:
        print_note(f"topic {name} has no schema")
    print_answer(TopicSchemaView(topic=name, schema=text), *text.splitlines())
    return ExitCode.OK if text else ExitCode.FAILED


@topic.command()
@click.argument("name")
@max_option(1_000, "Messages to try: the newest ones.", MAX_LOOKED)
@click.option(
    "--schema",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with a JSON Schema, in place of the topic's own.",
)
@broker_option
@cluster_options
def check(name: str, most: int, schema: Path | None, broker: str, namesrv: str) -> int:
    """Try the newest messages of a topic against its schema; exit code 1 if one does not fit.

    Bodies are JSON, or msgpack where their property CONTENT_TYPE says so. At most 8 MiB are read.

    \b
    Examples:
      mqmesh topic check orders
      mqmesh topic check orders --schema new-order.json --max 10000
    """
    with SearchClient(namesrv) as client:
        text = _text_of(schema) if schema else client.topic_schema(name)
        if not text:
            raise ConfigError(
                f"topic {name} has no schema; name one with --schema, or keep one with "
                "`mqmesh topic update`"
            )
        rules = schema_of(text)
        found = client.search(name, MessageFilter(broker_name=broker), max_looked=most)
    view = checked_topic_view(name, found, rules)
    if print_answer(view):
        Table(_MISFITS, view.misfits).print()
        print_note(f"{counted(view.looked, 'message')} tried, {len(view.misfits):,} do not fit")
    return ExitCode.FAILED if view.misfits else ExitCode.OK


def _text_of(file: Path) -> str:
    try:
        return file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from error


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
@cluster_options
def delete(name: str, yes: bool, broker: str, namesrv: str) -> None:
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
    )
    with AdminClient(namesrv, broker_name=broker) as admin:
        done = admin.delete_topic(name)
    view = DeletedTopicView(
        topic=name, deleted_from=done.brokers, silent_namesrvs=done.silent_namesrvs
    )
    print_answer(
        view, f"topic {name} is deleted from {', '.join(done.brokers) or 'the name servers'}"
    )
    warn_of_silent(done.silent_namesrvs, "")


@topic.command()
@click.argument("name")
@cluster_options
def route(name: str, namesrv: str) -> None:
    """Show which brokers carry a topic, as name servers answer clients.

    \b
    Examples:
      mqmesh topic route orders
    """
    with AdminClient(namesrv) as admin:
        found = route_view(name, admin.route(name))
    print_answer(found, Table(_ROUTE, found.queues))


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
@cluster_options
def allocate(name: str, members: str, group: str, strategy: str, namesrv: str) -> None:
    """Show which queues each member of a group would read; no member gets a request.

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
    print_records(_SHARES, allocation_views(shares))


@topic.command()
@click.argument("name", default="")
@click.option("--all", "show_all", is_flag=True, help="All topics: what comes, and goes to whom.")
@click.option("--active", is_flag=True, help="With --all: only where something came or went today.")
@broker_option
@cluster_options
def stats(name: str, show_all: bool, active: bool, broker: str, namesrv: str) -> None:
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
            traffic = [one for one in whole.traffic() if one.is_active or not active]
        print_records(_TRAFFIC, traffic)
        return
    with AdminClient(namesrv, broker_name=broker) as admin:
        found = topic_stats_view(name, admin.topic_stats(name))
    print_answer(
        found,
        Table(_STATS, found.queues),
        f"{counted(found.messages, 'message')} in {counted(len(found.queues), 'queue')}",
    )


def _print_topic(view: TopicView) -> None:
    print_answer(
        view,
        *(
            f"topic {view.topic} on {one.broker_name}: {one.read_queue_nums} read and "
            f"{one.write_queue_nums} write queues, {one.perm}{', ordered' if one.order else ''}"
            f"{f', {one.priorities} priorities' if one.priorities else ''}"
            f"{f', shows the last {duration(one.retention_ms)}' if one.retention_ms else ''}"
            f"{_last(one.retention_messages)}"
            f"{_life(one)}"
            for one in view.brokers
        ),
    )
