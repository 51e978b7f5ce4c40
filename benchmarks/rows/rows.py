"""The rows of the table: what each measures, its two sides, and its goal."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import msgspec

from rows.catch_up_sides import limit_catch_up, product_catch_up, product_catch_up_loaded
from rows.delay_sides import product_delay_accuracy, product_delay_drain
from rows.figure_sides import product_scrape
from rows.gateway_sides import product_gateway
from rows.labelled import SQL, TAGS
from rows.replica_sides import (
    limit_replicated,
    product_alone_cpu,
    product_elected,
    product_idle_slave,
    product_replicated,
    product_slave_cpu,
)
from rows.sides import (
    Conditions,
    Load,
    Sample,
    latency,
    limit_alone,
    limit_both,
    limit_drain,
    measured,
    product_alone,
    product_both,
    product_drain,
    product_endurance,
    product_filter,
    product_idle,
    product_new_topics,
    product_produce,
    product_topics,
    traced,
    uncounted,
)
from rows.store_sides import (
    product_backlog,
    product_indexed,
    product_lookup,
    product_restart,
)

IN_FLIGHT: Final = 64
"""Of the rows with single sends."""

OPEN_TRANSACTIONS: Final = 1_000
MANY_TOPICS: Final = 10_000

Side = Callable[[Conditions], Sample]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table.

    Attributes:
        name: As the user names it.
        unit: Of value and limit.
        what: One line for people.
        product: Runs mqmesh once.
        limit: Runs the limit once; None where there is none.
        least_ratio: The goal: value / limit at least so much.
        most_ratio: The goal: value / limit at most so much.
        least: The goal: value at least so much.
        most: The goal: value at most so much.
        least_extra: And further figures at least so much, by name.
        most_extra: And further figures at most so much.
        optional: Only run when named.
    """

    name: str
    unit: str
    what: str
    product: Side
    limit: Side | None = None
    least_ratio: float | None = None
    most_ratio: float | None = None
    least: float | None = None
    most: float | None = None
    least_extra: Mapping[str, float] = {}
    most_extra: Mapping[str, float] = {}
    optional: bool = False


def _throughput_rows(body_bytes: int, messages: int) -> list[Row]:
    load = Load(messages=messages, body_bytes=body_bytes)
    limit_produce = partial(limit_alone, "produce", load)
    goals = body_bytes == 128
    return [
        Row(
            name=f"produce_{body_bytes}",
            unit="msg/s",
            what=f"explicit batches of 500, {body_bytes} B each",
            product=partial(product_produce, "produce_batches", _windowed(load, 32)),
            limit=limit_produce,
            least_ratio=0.7 if goals else None,
        ),
        Row(
            name=f"async_{body_bytes}",
            unit="msg/s",
            what=f"one send_async a message of {body_bytes} B, natural batching",
            product=partial(product_produce, "produce_async", load),
            limit=limit_produce,
            least_ratio=0.3 if goals else None,
        ),
        Row(
            name=f"drain_{body_bytes}",
            unit="msg/s",
            what=f"a push consumer with a listener, {body_bytes} B each",
            product=partial(product_drain, _windowed(load, 32)),
            limit=partial(limit_drain, load),
            least_ratio=0.6 if goals else None,
        ),
        Row(
            name=f"both_{body_bytes}",
            unit="msg/s",
            what=f"producing and consuming at once, {body_bytes} B each",
            product=partial(product_both, "produce_batches", "drain", _windowed(load, 32)),
            limit=partial(limit_both, "", load),
            least_ratio=0.7 if goals else None,
        ),
    ]


def _order_rows() -> list[Row]:
    """Ordinary messages against plain ones of the same size on average."""
    load = Load(messages=2_000_000, window=32)
    drain_orders = partial(
        product_drain, load, producer_kind="produce_orders", consumer_kind="drain_orders"
    )
    return [
        Row(
            name="produce_order",
            unit="msg/s",
            what="explicit batches of ordinary messages, against plain ones",
            product=partial(product_produce, "produce_orders", load),
            limit=partial(product_produce, "produce_batches", load),
            least_ratio=0.5,
        ),
        Row(
            name="async_order",
            unit="msg/s",
            what="one send_async an ordinary message, against plain ones",
            product=partial(product_produce, "async_orders", load),
            limit=partial(product_produce, "produce_async", load),
            least_ratio=0.5,
        ),
        Row(
            name="drain_order",
            unit="msg/s",
            what="a listener reads id, body, tag and a property of each, against plain ones",
            product=drain_orders,
            limit=partial(product_drain, load),
            least_ratio=0.35,
        ),
        Row(
            name="both_order",
            unit="msg/s",
            what="both at once, against plain ones",
            product=partial(product_both, "produce_orders", "drain_orders", load),
            limit=partial(product_both, "produce_batches", "drain", load),
            least_ratio=0.5,
        ),
        Row(
            name="aio_order",
            unit="msg/s",
            what="gathered sends of asyncio's producer, against send_async",
            product=partial(
                product_produce, "aio_orders", msgspec.structs.replace(load, messages=300_000)
            ),
            limit=partial(product_produce, "async_orders", load),
            least_ratio=0.5,
        ),
    ]


def _receive_rows() -> list[Row]:
    """Messages that are acknowledged one by one, against a push consumer of whole queues."""
    load = Load(messages=1_000_000, window=32)
    drained = partial(
        product_drain, load, producer_kind="produce_orders", consumer_kind="drain_orders"
    )

    def received(kind: str, messages: int) -> Side:
        some = msgspec.structs.replace(load, messages=messages)
        return partial(product_drain, some, producer_kind="produce_orders", consumer_kind=kind)

    rows = (
        ("receive_order", 500, "two members", 1_000_000),
        ("receive_100", 100, "two members", 300_000),
        ("receive_32", 32, "four members", 100_000),
        ("receive_one", 1, "64 members", 10_000),
    )
    return [
        Row(
            name=name,
            unit="msg/s",
            what=f"{members}, up to {most} a receive, each acknowledged, against a listener",
            product=received(f"receive_{most}_orders", messages),
            limit=drained,
        )
        for name, most, members, messages in rows
    ] + [
        Row(
            name="receive_held",
            unit="msg/s",
            what="as receive_order with a message of each queue held, against none held",
            product=received("receive_held_orders", 1_000_000),
            limit=received("receive_500_orders", 1_000_000),
            least_ratio=0.95,
        ),
        Row(
            name="processing",
            unit="msg/s",
            what="a message made of each, stored with the progress in order, against both_order",
            product=received("process_queue_orders", 1_000_000),
            limit=partial(product_both, "produce_orders", "drain_orders", load),
            least_ratio=0.5,
        ),
        Row(
            name="processing_each",
            unit="msg/s",
            what="as receive_order, and a message made of each, stored with it, against both_order",
            product=received("process_orders", 500_000),
            limit=partial(product_both, "produce_orders", "drain_orders", load),
        ),
        Row(
            name="receive_crowd",
            unit="msg/s",
            # With less work the members wait for the lock of their interpreter, not for messages.
            what="200 members on 4 queues, 20 ms of work each; none gets twice another's share",
            product=received("receive_crowd_orders", 100_000),
        ),
        Row(
            name="redelivery",
            unit="µs",
            what="p99 from the end of a lease until another member has its messages",
            product=partial(latency, received("redeliver_orders", 500), 99.0),
            most=200_000,
        ),
    ]


def _life_rows() -> list[Row]:
    """Messages that expire, and those that have priorities."""
    load = Load(messages=1_000_000, window=32)
    return [
        Row(
            name="ttl",
            unit="msg/s",
            what="a listener of a topic whose messages expire, against one of an ordinary topic",
            product=partial(
                product_drain,
                load,
                producer_kind="produce_expiring_orders",
                consumer_kind="drain_orders",
            ),
            limit=partial(
                product_drain, load, producer_kind="produce_orders", consumer_kind="drain_orders"
            ),
            least_ratio=0.85,
        ),
        Row(
            name="priority",
            unit="us",
            what="p99 from send to receive of a high message behind a million low ones",
            product=partial(latency, partial(product_alone, "high_priority", load), 99.0),
            most=50_000,
        ),
        Row(
            name="priority_fair",
            unit="%",
            what="share of the lowest priority beside a backlog of the highest, fairness 10",
            product=partial(latency, partial(product_alone, "fair_priority", load), 50.0),
            least=9,
        ),
    ]


def _table_rows() -> list[Row]:
    """Tables of keys and values: 100,000 keys."""
    load = Load(messages=300_000)
    return [
        Row(
            name="kv_put",
            unit="keys/s",
            what="values of 128 B, 500 a request, one client",
            product=partial(product_alone, "put_table", load),
            least=50_000,
        ),
        Row(
            name="kv_get",
            unit="us p50",
            what="one read of a key after the other",
            product=partial(latency, partial(product_alone, "get_table", load), 50.0),
            most=400,
        ),
        Row(
            name="kv_get_many",
            unit="keys/s",
            what="reads of 1,000 keys, one client",
            product=partial(product_alone, "get_many_table", load),
            least=200_000,
        ),
    ]


def _secure_rows() -> list[Row]:
    """Security on against off, both mqmesh."""
    load = Load(messages=2_000_000, window=32)
    one = Load(messages=3_000, batch_messages=1)
    produce = partial(product_produce, "produce_batches", load)
    sends = partial(latency, partial(product_produce, "send_sync", one), 50.0)
    throughput: list[tuple[str, str, Side, str, float]] = [
        ("produce", "explicit batches of 500", produce, "tcp", 0.6),
        ("drain", "a push consumer with a listener", partial(product_drain, load), "tcp", 0.6),
        (
            "both",
            "both at once",
            partial(product_both, "produce_batches", "drain", load),
            "tcp",
            0.6,
        ),
        ("local", "explicit batches of 500 by Unix sockets", produce, "ipc", 0.97),
    ]
    return [
        *(
            Row(
                name=f"secure_{name}",
                unit="msg/s",
                what=f"{what}, security on against off by {transport}",
                product=partial(measured, side, transport, secure=True),
                limit=partial(measured, side, transport, secure=False),
                least_ratio=goal,
                optional=True,
            )
            for name, what, side, transport, goal in throughput
        ),
        Row(
            name="secure_sync_send",
            unit="us p50",
            what="one synchronous send after the other, security on against off by tcp",
            product=partial(measured, sends, "tcp", secure=True),
            limit=partial(measured, sends, "tcp", secure=False),
            most_ratio=1.25,
            optional=True,
        ),
    ]


def _counting_rows() -> list[Row]:
    """A broker that counts against one that does not, both mqmesh."""
    load = Load(messages=2_000_000, window=32)
    sides: dict[str, tuple[str, Side]] = {
        "produce": ("explicit batches of 500", partial(product_produce, "produce_batches", load)),
        "drain": ("a push consumer with a listener", partial(product_drain, load)),
        "both": ("both at once", partial(product_both, "produce_batches", "drain", load)),
    }
    return [
        Row(
            name=f"counting_{name}",
            unit="msg/s",
            what=f"{what}, against a broker that counts nothing",
            product=side,
            limit=partial(uncounted, side),
            least_ratio=0.98,
            optional=True,
        )
        for name, (what, side) in sides.items()
    ]


def _trace_rows() -> list[Row]:
    """Clients that trace one message of a hundred against those that trace none."""
    load = Load(messages=6_000_000, window=32)
    sides: dict[str, tuple[str, str, Side]] = {
        "produce": (
            "producer",
            "explicit batches of 500",
            partial(product_produce, "produce_batches", load),
        ),
        "async": (
            "producer",
            "one send_async a message",
            partial(product_produce, "produce_async", load),
        ),
        "drain": ("consumer", "a push consumer with a listener", partial(product_drain, load)),
    }
    return [
        Row(
            name=f"trace_{name}",
            unit="ns CPU/msg",
            what=f"{what}, one message of a hundred traced, against none",
            product=partial(traced, side, process, 0.01),
            limit=partial(traced, side, process, 0.0),
            most_ratio=1.03,
            optional=True,
        )
        for name, (process, what, side) in sides.items()
    ]


def _windowed(load: Load, window: int) -> Load:
    return msgspec.structs.replace(load, window=window)


def _latency_rows() -> list[Row]:
    one = Load(messages=3_000, batch_messages=1)
    paced = Load(messages=2_000, batch_messages=1)
    echo = partial(limit_alone, "echo", one)
    send = partial(product_produce, "send_sync", one)
    return [
        Row(
            name="sync_send",
            unit="us p50",
            what="one synchronous send after the other, against a bare ZeroMQ echo",
            product=partial(latency, send, 50.0),
            limit=partial(latency, echo, 50.0),
            most_ratio=1.5,
        ),
        Row(
            name="latency_500",
            unit="us p99",
            what="from send to listener at 500 messages a second",
            product=partial(
                latency,
                partial(product_both, "produce_paced", "drain_paced", paced, rate=500),
                99.0,
            ),
            limit=partial(latency, partial(limit_both, "_paced", paced, rate=500), 99.0),
            most=5_000.0,
        ),
    ]


def _other_rows() -> list[Row]:
    wide = Load(messages=2_000_000, batch_messages=100, window=32)
    synced = Load(messages=500_000, window=32, sync_flush=True)
    singles = Load(messages=200_000, window=IN_FLIGHT)
    threads = Load(messages=50_000, window=IN_FLIGHT)
    bare_singles = partial(
        limit_alone, "produce", Load(messages=400_000, batch_messages=IN_FLIGHT // 2, window=2)
    )
    return [
        Row(
            name="queues_10000",
            unit="msg/s",
            what="explicit batches of 100 over 10,000 queues, against 4 queues",
            product=partial(
                product_produce,
                "produce_batches",
                msgspec.structs.replace(wide, queues=10_000),
            ),
            limit=partial(product_produce, "produce_batches", wide),
            least_ratio=0.8,
        ),
        Row(
            name="sync_flush_128",
            unit="msg/s",
            what="explicit batches, each on disk before its answer",
            product=partial(product_produce, "produce_batches", synced),
            limit=partial(limit_alone, "produce", synced),
        ),
        Row(
            name="single_many",
            unit="msg/s",
            what="64 single sends in flight, no explicit batch",
            product=partial(product_produce, "produce_singles", singles),
            limit=bare_singles,
            least=60_000.0,
        ),
        Row(
            name="single_many_threads",
            unit="msg/s",
            what="the same by 64 threads with synchronous sends",
            product=partial(product_produce, "produce_singles_threads", threads),
            limit=bare_singles,
        ),
    ]


def _topic_rows() -> list[Row]:
    """Many topics against one, both mqmesh."""
    rounds = Load(messages=200_000, batch_messages=MANY_TOPICS, window=MANY_TOPICS)
    drained = Load(messages=4_000_000, window=32)
    new = Load(messages=MANY_TOPICS, batch_messages=1, topics=MANY_TOPICS, creates_topics=True)
    paced = Load(messages=50_000, batch_messages=1)

    def of(load: Load, topics: int) -> Load:
        return msgspec.structs.replace(load, topics=topics)

    return [
        Row(
            name="many_topics_send",
            unit="us CPU/msg",
            what="send_async of one message to each of 10,000 topics, against 10,000 to one",
            product=partial(product_topics, "produce_rounds", of(rounds, MANY_TOPICS)),
            limit=partial(product_topics, "produce_rounds", rounds),
            most_ratio=3.0,
        ),
        Row(
            name="many_topics_paced",
            unit="us CPU/msg",
            what="send_async at 10,000 a second to 100 topics in turn, against one",
            product=partial(product_topics, "produce_paced", of(paced, 100), rate=10_000),
            limit=partial(product_topics, "produce_paced", paced, rate=10_000),
            most_ratio=1.3,
        ),
        Row(
            name="many_topics_drain",
            unit="msg/s",
            what="a push consumer with a listener of 100 topics, against one",
            product=partial(product_drain, of(drained, 100)),
            limit=partial(product_drain, drained),
            least_ratio=0.5,
        ),
        Row(
            name="new_topics",
            unit="s",
            what="10,000 first messages by one producer, each of which makes its topic",
            product=partial(product_new_topics, new),
            most=60.0,
        ),
    ]


def _store_rows() -> list[Row]:
    plain = Load(messages=2_000_000, window=32)
    keyed = msgspec.structs.replace(plain, keys=2, key_pool=200_000)
    singles = Load(messages=3_000, batch_messages=1, keys=2)
    not_indexed = msgspec.structs.replace(singles, index=False)
    flushed = Load(messages=20_000, batch_messages=1, window=IN_FLIGHT, sync_flush=True)
    one_at_a_time = msgspec.structs.replace(flushed, messages=2_000, window=1)
    wide = Load(messages=2_000_000, batch_messages=100, window=32, queues=10_000)
    full = msgspec.structs.replace(wide, backlog=20_000_000)
    return [
        Row(
            name="keys_128",
            unit="msg/s",
            what="explicit batches with two keys on each message, against none",
            product=partial(product_indexed, keyed),
            limit=partial(product_produce, "produce_batches", plain),
            least_ratio=0.6,
        ),
        Row(
            name="keys_latency",
            unit="us p99",
            what="one synchronous send after the other with two keys, against no index",
            product=partial(latency, partial(product_produce, "send_sync", singles), 99.0),
            limit=partial(latency, partial(product_produce, "send_sync", not_indexed), 99.0),
            most_ratio=2.0,
        ),
        Row(
            name="sync_flush_64",
            unit="msg/s",
            what="64 single sends in flight, each on disk before its answer, against one",
            product=partial(product_produce, "produce_singles", flushed),
            limit=partial(product_produce, "produce_singles", one_at_a_time),
            least_ratio=20.0,
        ),
        Row(
            name="clean_start_10000",
            unit="ms",
            what="start of a broker that was stopped with 10,000 queues, until it serves",
            product=partial(product_restart, wide, kill=False),
            most=2_000.0,
        ),
        Row(
            name="scrape_10000",
            unit="ms",
            what="longest turn of a broker while an exporter asks for 10,000 topics and groups",
            product=partial(product_scrape, 10_000),
            most=5.0,
            optional=True,
        ),
        Row(
            name="backlog_20m",
            unit="msg/s",
            what="producing to 10,000 queues that hold 20 million messages, against empty ones",
            product=partial(product_backlog, full),
            limit=partial(product_backlog, full, elsewhere=True),
            least_ratio=0.9,
            optional=True,
        ),
    ]


def _delay_rows() -> list[Row]:
    million = Load(messages=1_000_000)
    return [
        Row(
            name="delay_accuracy",
            unit="ms p99",
            what="how late messages come, 1,000 due a second while a million others wait",
            product=partial(product_delay_accuracy, million, 10),
            most=100.0,
        ),
        Row(
            name="delay_drain",
            unit="msg/s",
            what="delayed messages that are overdue when the schedule service starts",
            product=partial(product_delay_drain, million),
            least=100_000.0,
        ),
    ]


def _large_rows() -> list[Row]:
    return [
        Row(
            name="recovery_10g",
            unit="ms",
            what="start of a broker that was killed with a log of 10 GB, until it serves",
            product=partial(
                product_restart,
                Load(messages=9_000_000, body_bytes=1_024, window=32),
                kill=True,
            ),
            most=5_000.0,
            optional=True,
        ),
        Row(
            name="lookup_10m",
            unit="us p99",
            what="one message by its key among 10 million with two keys each, index at rest",
            product=partial(product_lookup, Load(messages=10_000_000, keys=2, window=32)),
            most=5_000.0,
            optional=True,
        ),
    ]


def _transaction_rows() -> list[Row]:
    singles = Load(messages=200_000, window=IN_FLIGHT)
    transactions = Load(messages=100_000, window=OPEN_TRANSACTIONS)
    return [
        Row(
            name="tx_throughput",
            unit="msg/s",
            what="transactions in flight, half and commit, against single_many",
            product=partial(product_produce, "produce_transactions", transactions),
            limit=partial(product_produce, "produce_singles", singles),
            least_ratio=0.3,
        ),
    ]


def _filter_rows() -> list[Row]:
    load = Load(messages=2_000_000, window=32)
    everything = partial(product_filter, "*", "TAG", load)
    return [
        Row(
            name="filter_tag_128",
            unit="msg/s",
            what=f"messages scanned for the tags {TAGS}, against consuming all of them",
            product=partial(product_filter, TAGS, "TAG", load),
            limit=everything,
            least_ratio=0.7,
        ),
        Row(
            name="filter_sql_128",
            unit="msg/s",
            what=f"messages scanned for {SQL}, against consuming all of them",
            product=partial(product_filter, SQL, "SQL92", load),
            limit=everything,
            least_ratio=0.25,
        ),
    ]


def _replica_rows() -> list[Row]:
    load = Load(messages=2_000_000, window=32)
    bare = Load(messages=2_000_000)
    asynchronous = partial(product_replicated, "produce_batches", "none", load)
    double = partial(product_replicated, "produce_batches", "one", load)
    alone = partial(product_produce, "produce_batches", load)
    return [
        Row(
            name="ha_async_128",
            unit="msg/s",
            what="explicit batches, a slave gets them too, against a bare chain of three",
            product=asynchronous,
            limit=partial(limit_replicated, "produce", "async", bare),
            least_ratio=0.7,
        ),
        Row(
            name="ha_async_cost",
            unit="msg/s",
            what="the same against a broker without a slave",
            product=asynchronous,
            limit=alone,
            least_ratio=0.7,
        ),
        Row(
            name="ha_sync_128",
            unit="msg/s",
            what="explicit batches, answered when a slave has them, against a bare chain",
            product=double,
            limit=partial(limit_replicated, "produce", "sync", bare),
            least_ratio=0.7,
        ),
        Row(
            name="ha_sync_cost",
            unit="msg/s",
            what="the same against a broker without a slave",
            product=double,
            limit=alone,
            least_ratio=0.6,
        ),
        *(
            Row(
                name=f"ha_{mode}3_cost",
                unit="msg/s",
                what=f"explicit batches, three replicas that elect their master, mode {mode}, "
                "against a broker alone",
                product=partial(product_elected, mode, load),
                limit=alone,
                least_ratio=0.45,
            )
            for mode in ("all", "quorum")
        ),
    ]


def _slave_rows() -> list[Row]:
    load = Load(messages=2_000_000, window=32)
    one = Load(messages=3_000, batch_messages=1)
    log = Load(messages=1_000_000, body_bytes=1_024)
    missed = Load(messages=9_500_000, body_bytes=1_024, window=32)
    return [
        Row(
            name="ha_sync_send",
            unit="us p50",
            what="one synchronous send with double write after the other, against a bare chain",
            product=partial(latency, partial(product_replicated, "send_sync", "one", one), 50.0),
            limit=partial(latency, partial(limit_replicated, "echo", "sync", one), 50.0),
            most_ratio=1.5,
        ),
        Row(
            name="ha_slave_cpu",
            unit="ns CPU/msg",
            what="processor time of a slave, against that of a broker without one",
            product=partial(product_slave_cpu, load),
            limit=partial(product_alone_cpu, load),
            most_ratio=0.8,
        ),
        Row(
            name="ha_catch_up",
            unit="MB/s",
            what="a new slave gets a log of 1 GB, against reading, sending and writing it bare",
            product=partial(product_catch_up, log),
            limit=partial(limit_catch_up, log),
            least_ratio=0.4,
        ),
        *(
            Row(
                name=f"ha_catch_up_{name}",
                unit="MiB/s",
                what=f"a slave that was away while 10 GB came catches up beside producers, {what}",
                product=partial(product_catch_up_loaded, missed, cold=cold),
                least=80.0,
                least_extra={"load_ratio": 0.9},
                most_extra={"master_growth_mib": 64.0},
                optional=True,
            )
            for name, what, cold in (
                ("loaded", "the log is in memory", False),
                ("cold", "the log is on the disk only", True),
            )
        ),
        Row(
            name="ha_idle",
            unit="% CPU",
            what="a slave without work; its memory is among the further figures",
            product=partial(product_idle_slave, 10.0),
            most=1.0,
        ),
    ]


def _gateway_rows() -> list[Row]:
    one = Load(messages=2_000, body_bytes=200, batch_messages=1, window=1)
    many = Load(messages=20_000, body_bytes=200, batch_messages=1, window=IN_FLIGHT)
    stored = Load(messages=200_000, body_bytes=200)
    lone = partial(product_gateway, "send_remoting_foreign", one)
    native = partial(product_produce, "send_sync", one)
    return [
        Row(
            name="gateway_sync_send",
            unit="us p50",
            what="one send of RocketMQ's kind after the other by a gateway, against a native one",
            product=partial(latency, lone, 50.0),
            limit=partial(latency, native, 50.0),
            most=1_500.0,
        ),
        Row(
            name="gateway_send",
            unit="us CPU/msg",
            what="processor time of a gateway, sends by remoting, 64 in flight",
            product=partial(product_gateway, "send_remoting_foreign", many),
            least_extra={"msg_per_s": 12_000.0},
        ),
        Row(
            name="gateway_pull",
            unit="us CPU/msg",
            what="processor time of a gateway, pulls of 32 messages by remoting",
            product=partial(product_gateway, "pull_remoting_foreign", stored),
            least_extra={"msg_per_s": 60_000.0},
        ),
        Row(
            name="gateway_grpc_send",
            unit="us CPU/msg",
            what="processor time of a gateway, sends by gRPC, 64 in flight",
            product=partial(product_gateway, "send_grpc_foreign", many),
            most=160.0,
        ),
    ]


def _memory_rows() -> list[Row]:
    return [
        Row(
            name="idle",
            unit="MiB",
            what="memory of an idle broker; its CPU is among the further figures",
            product=partial(product_idle, 3.0),
            most=80.0,
        ),
        Row(
            name="memory_10m",
            unit="MiB",
            what="growth of the broker while 10 million messages are stored and drained",
            product=partial(product_endurance, Load(messages=10_000_000, window=32)),
            most=10.0,
            optional=True,
        ),
    ]


ROWS: Final = {
    row.name: row
    for row in [
        *_throughput_rows(128, 4_000_000),
        *_throughput_rows(1024, 800_000),
        *_order_rows(),
        *_receive_rows(),
        *_life_rows(),
        *_table_rows(),
        *_latency_rows(),
        *_other_rows(),
        *_topic_rows(),
        *_store_rows(),
        *_delay_rows(),
        *_large_rows(),
        *_transaction_rows(),
        *_filter_rows(),
        *_replica_rows(),
        *_slave_rows(),
        *_gateway_rows(),
        *_memory_rows(),
        *_secure_rows(),
        *_counting_rows(),
        *_trace_rows(),
    ]
}
