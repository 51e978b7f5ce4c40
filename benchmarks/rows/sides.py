"""The two sides of every row: one run of the limit, one run of mqmesh, in fresh processes."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, TypeVar

import msgspec

from mqmesh.errors import NoRoute, TopicNotFound
from mqmesh.protocol.route import TopicConfig
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.units import MIB
from rows.memory import level_memory
from rows.processes import READY_TIMEOUT_S, BenchError, Child, Crew, Usage
from rows.secured import BROKER, NAMESRV, Security
from rows.workload import TOPIC, WARM_UP_SENDS, Report, Task, percentile, topic_names

_Answer = TypeVar("_Answer")

OVERHEAD_BYTES: Final = 32
"""More than a message needs in the log beside its body, its share of the batch included."""
RUN_TIMEOUT_S: Final = 600.0


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions that are the same for all rows of a call.

    Attributes:
        folder: Where data goes; on the disk that is to be measured.
        transport: ``ipc`` or ``tcp``, for both sides alike.
        scale: Factor for every row's number of messages.
        secure: mqmesh refuses clients without a key.
        counted: The broker counts, as that of users does.
        msg_trace: Share of the messages that clients trace.
    """

    folder: Path
    transport: str = "ipc"
    scale: float = 1.0
    secure: bool = False
    counted: bool = True
    msg_trace: float = 0.0

    def count(self, messages: int, multiple: int = 1) -> int:
        """A row's number of messages, rounded up to whole batches."""
        return max(-(-int(messages * self.scale) // multiple), 1) * multiple


class Sample(msgspec.Struct, kw_only=True):
    """One run of one side of a row.

    Attributes:
        value: In the row's unit.
        message_count: Acknowledged, or consumed.
        cpu_s_per_million: CPU seconds a million messages, by process.
        extra: Further figures, by name with unit.
    """

    value: float
    message_count: int
    cpu_s_per_million: dict[str, float] = {}
    extra: dict[str, float] = {}


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Messages of a throughput row.

    Attributes:
        messages: At scale 1.
        body_bytes: Each.
        batch_messages: In an explicit batch.
        window: Requests, batches or messages in flight.
        queues: Of the topic.
        topics: Topics that the messages go to in turn.
        sync_flush: Answers wait for the disk.
        keys: Business keys on each message.
        key_pool: After so many messages the same keys come again; 0 for never.
        index: The broker indexes keys and ids.
        creates_topics: The first message to each topic makes it.
        backlog: Messages that the store holds already when the measurement begins.
    """

    messages: int
    body_bytes: int = 128
    batch_messages: int = 500
    window: int = 8
    queues: int = 4
    topics: int = 1
    sync_flush: bool = False
    keys: int = 0
    key_pool: int = 0
    index: bool = True
    creates_topics: bool = False
    backlog: int = 0

    def task(self, kind: str, address: str, conditions: Conditions) -> Task:
        """The task of a client process."""
        return Task(
            kind=kind,
            address=address,
            message_count=conditions.count(self.messages, self.batch_messages),
            body_bytes=self.body_bytes,
            batch_messages=self.batch_messages,
            window=self.window,
            queue_count=self.queues,
            topic_count=self.topics,
            use_ipc=conditions.transport == "ipc",
            key_count=self.keys,
            key_pool=self.key_pool,
            msg_trace=conditions.msg_trace,
        )


# ---- The limit ---------------------------------------------------------------------------


class BareBroker:
    """A running bare broker.

    Args:
        crew: Where its process belongs.
        load: Messages that its log must hold.
        conditions: Of the call.
        slave: As ``Task.slave``.
    """

    def __init__(
        self, crew: Crew, load: Load, conditions: Conditions, *, slave: str = "none"
    ) -> None:
        count = conditions.count(load.messages, load.batch_messages)
        per_message = load.body_bytes + OVERHEAD_BYTES + 256 // load.batch_messages
        ipc = conditions.transport == "ipc"
        task = Task(
            kind="broker",
            address=f"ipc://{crew.folder}/s" if ipc else "tcp://127.0.0.1:*",
            folder=str(crew.folder),
            log_bytes=count * per_message + 16 * MIB,
            sync_flush=load.sync_flush,
            slave=slave,
        )
        self.child = crew.limit(task)
        self.address, _, slave_address = self.child.wait_ready().partition(" ")
        self.slave: Child | None = None
        if slave_address:
            folder = crew.folder / "slave"
            folder.mkdir()
            self.slave = crew.limit(
                msgspec.structs.replace(
                    task, kind="slave", address=slave_address, folder=str(folder)
                )
            )
            self.slave.wait_ready()


def limit_alone(kind: str, load: Load, conditions: Conditions) -> Sample:
    """One bare client and the bare broker."""
    with new_crew(conditions) as crew:
        broker = BareBroker(crew, load, conditions)
        client = crew.limit(load.task(kind, broker.address, conditions))
        return measure_alone("producer", client, broker.child, conditions)


def limit_drain(load: Load, conditions: Conditions) -> Sample:
    """The bare consumer reads what the bare producer stored before."""
    with new_crew(conditions) as crew:
        broker = BareBroker(crew, load, conditions)
        _fill(crew.limit(load.task("produce", broker.address, conditions)))
        client = crew.limit(load.task("drain", broker.address, conditions))
        return measure_alone("consumer", client, broker.child, conditions)


def limit_both(suffix: str, load: Load, conditions: Conditions, rate: int = 0) -> Sample:
    """Bare producer and bare consumer at once."""
    with new_crew(conditions) as crew:
        broker = BareBroker(crew, load, conditions)
        tasks = [load.task(kind + suffix, broker.address, conditions) for kind in _BOTH]
        for task in tasks:
            task.rate = rate
        producer, consumer = (crew.limit(task) for task in tasks)
        for child in (producer, consumer):
            child.wait_ready()
        return _measure_both(producer, consumer, broker.child, conditions)


# ---- mqmesh ------------------------------------------------------------------------------


class Cluster:
    """A name server and a broker, started as users start them.

    Args:
        crew: Where their processes belong.
        load: Messages of the row.
        conditions: Of the call.
        settings: Further ones of the broker.
    """

    def __init__(
        self, crew: Crew, load: Load, conditions: Conditions, settings: Sequence[str] = ()
    ) -> None:
        self._crew = crew
        self._module = "mqmesh.cli" if conditions.counted else "rows.uncounted"
        security = Security(crew.folder, enable=conditions.secure)
        _, self.namesrv = crew.role("namesrv", ["listen_port=0", *security.settings(NAMESRV)])
        ipc = conditions.transport == "ipc"
        self._settings = [
            f'namesrv_addr=["{self.namesrv}"]',
            "listen_port=0",
            f"store_path_root_dir={crew.folder}/broker",
            f"enable_ipc={str(ipc).lower()}",
            f"index.enable={str(load.index).lower()}",
            *security.settings(BROKER),
            *settings,
        ]
        if load.sync_flush:
            self._settings.append("storage.flush_disk_type=SYNC_FLUSH")
        self.child, self.endpoint = self._start()
        self._create_topics(load)
        self.idle = self.child.usage()

    def _start(self) -> tuple[Child, str]:
        """The broker that takes messages, and where it listens."""
        return self._crew.role("broker", self._settings, self._module)

    def restart(self) -> float:
        """Starts the broker again, which has ended; returns the seconds until it serves."""
        begin_s = time.monotonic()
        self.child, _ = self._start()
        return time.monotonic() - begin_s

    def check_stored(self, expected_count: int) -> None:
        """Asks the broker how much its queues hold.

        Raises:
            BenchError: Not so many messages.
        """
        with AdminClient(self.namesrv) as admin:
            stats = _once_registered(lambda: admin.topic_stats(TOPIC).values())
        stored = sum(
            queue.max_queue_offset - queue.min_queue_offset
            for topic in stats
            for queue in topic.queues
        )
        if stored != expected_count:
            raise BenchError(f"the broker holds {stored} messages instead of {expected_count}")

    def _create_topics(self, load: Load) -> None:
        names = [TOPIC] if load.creates_topics else [TOPIC, *topic_names(load.topics)]
        topics = {name: TopicConfig(name, load.queues, load.queues) for name in names}
        with AdminClient(self.namesrv) as admin:
            _once_registered(lambda: admin.create_topics(topics.values(), exist_ok=True))

    def memory(self, sample: Sample) -> Sample:
        """Adds the broker's memory to a sample."""
        sample.extra["broker_rss_idle_mib"] = self.idle.rss_bytes / MIB
        usage = self.child.usage()
        sample.extra["broker_rss_peak_mib"] = usage.peak_rss_bytes / MIB
        sample.extra["broker_private_mib"] = usage.private_bytes / MIB
        return sample


def _once_registered(ask: Callable[[], _Answer]) -> _Answer:
    """Return the answer of the cluster; a broker serves before it is registered."""
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            return ask()
        except (NoRoute, TopicNotFound):
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)


def product_produce(kind: str, load: Load, conditions: Conditions) -> Sample:
    """A producer alone."""
    with new_crew(conditions) as crew:
        cluster = Cluster(crew, load, conditions)
        before = WARM_UP_SENDS if kind == "send_sync" else 0
        task = load.task(kind, cluster.namesrv, conditions)
        sample = measure_alone("producer", crew.client(task), cluster.child, conditions)
        cluster.check_stored(sample.message_count + before)
        return cluster.memory(sample)


def product_topics(kind: str, load: Load, conditions: Conditions, rate: int = 0) -> Sample:
    """A producer to many topics; the value is the processor time of both sides, in us a message."""
    with new_crew(conditions) as crew:
        cluster = Cluster(crew, load, conditions)
        task = load.task(kind, cluster.namesrv, conditions)
        task.rate = rate
        sample = measure_alone("producer", crew.client(task), cluster.child, conditions)
        sample.extra["msg_per_s"] = sample.value
        sample.value = sum(sample.cpu_s_per_million.values())
        return cluster.memory(sample)


def product_new_topics(load: Load, conditions: Conditions) -> Sample:
    """A producer whose messages make their topics; the value is how many seconds that takes."""
    count = conditions.count(load.topics)
    sample = product_topics(
        "create_topics", msgspec.structs.replace(load, topics=count), conditions
    )
    sample.value = count / sample.extra["msg_per_s"]
    return sample


def product_drain(
    load: Load,
    conditions: Conditions,
    *,
    producer_kind: str = "produce_batches",
    consumer_kind: str = "drain",
) -> Sample:
    """A push consumer reads what was stored before."""
    with new_crew(conditions) as crew:
        cluster = Cluster(crew, load, conditions)
        _fill(crew.client(load.task(producer_kind, cluster.namesrv, conditions)))
        client = crew.client(load.task(consumer_kind, cluster.namesrv, conditions))
        return cluster.memory(measure_alone("consumer", client, cluster.child, conditions))


def product_alone(kind: str, load: Load, conditions: Conditions) -> Sample:
    """A program that stores, sends and receives by itself."""
    with new_crew(conditions) as crew:
        cluster = Cluster(crew, load, conditions)
        client = crew.client(load.task(kind, cluster.namesrv, conditions))
        return cluster.memory(measure_alone("consumer", client, cluster.child, conditions))


def product_filter(
    expression: str, expression_type: str, load: Load, conditions: Conditions
) -> Sample:
    """A push consumer wants some of the messages that were stored before; they are labelled.

    The value counts messages scanned, whether they are wanted or not.
    """
    with new_crew(conditions) as crew:
        cluster = Cluster(crew, load, conditions)
        _fill(crew.client(load.task("produce_labelled", cluster.namesrv, conditions)))
        task = load.task("drain_labelled", cluster.namesrv, conditions)
        task.expression, task.expression_type = expression, expression_type
        return cluster.memory(
            measure_alone("consumer", crew.client(task), cluster.child, conditions)
        )


def product_both(
    producer_kind: str,
    consumer_kind: str,
    load: Load,
    conditions: Conditions,
    rate: int = 0,
) -> Sample:
    """Producer and push consumer at once."""
    with new_crew(conditions) as crew:
        cluster = Cluster(crew, load, conditions)
        warm_up = crew.client(load.task("warm_up", cluster.namesrv, conditions))
        warm_up.wait_ready()
        warm = warm_up.wait_report(RUN_TIMEOUT_S)
        consumer_task = load.task(consumer_kind, cluster.namesrv, conditions)
        consumer_task.ready_count = warm.message_count
        consumer = crew.client(consumer_task)
        consumer.wait_ready()
        producer_task = load.task(producer_kind, cluster.namesrv, conditions)
        producer_task.rate = rate
        producer = crew.client(producer_task)
        producer.wait_ready()
        return cluster.memory(_measure_both(producer, consumer, cluster.child, conditions))


def product_idle(seconds: float, conditions: Conditions) -> Sample:
    """A broker that has nothing to do; the value is its memory in MiB, programs included."""
    with new_crew(conditions) as crew:
        broker = Cluster(crew, Load(messages=1), conditions).child
        time.sleep(1.0)  # what a start leaves to be done is no idling
        before = broker.usage()
        time.sleep(seconds)
        after = broker.usage()
        percent = (after.cpu_s - before.cpu_s) / seconds * 100
        extra = {"cpu_percent": percent, "broker_private_mib": after.private_bytes / MIB}
        return Sample(value=after.rss_bytes / MIB, message_count=0, extra=extra)


def product_endurance(load: Load, conditions: Conditions) -> Sample:
    """Stores and drains a tenth of the messages, then the others.

    The value is by how many MiB the broker's private memory has grown in between: pages of the
    log that it has mapped are the page cache's. A consumer that goes on where another one stopped
    gets each message once.
    """
    with new_crew(conditions) as crew:
        cluster = Cluster(crew, load, conditions)
        private, shared = [], []
        for part in (0.1, 0.9):
            portion = msgspec.structs.replace(conditions, scale=conditions.scale * part)
            for kind in ("produce_batches", "drain"):
                _fill(crew.client(load.task(kind, cluster.namesrv, portion)))
            usage = cluster.child.usage()
            private.append(usage.private_bytes / MIB)
            shared.append((usage.rss_bytes - usage.private_bytes) / MIB)
        grown = private[1] - private[0]
        sample = Sample(value=grown, message_count=conditions.count(load.messages))
        sample.extra["broker_private_after_a_tenth_mib"] = private[0]
        sample.extra["broker_shared_mib"] = shared[1]
        return cluster.memory(sample)


# ---- Both sides --------------------------------------------------------------------------


def measured(
    side: Callable[[Conditions], Sample], transport: str, conditions: Conditions, *, secure: bool
) -> Sample:
    """A side by this transport, with security on or off."""
    return side(msgspec.structs.replace(conditions, transport=transport, secure=secure))


def uncounted(side: Callable[[Conditions], Sample], conditions: Conditions) -> Sample:
    """A side whose broker counts nothing."""
    return side(msgspec.structs.replace(conditions, counted=False))


def traced(
    side: Callable[[Conditions], Sample], process: str, share: float, conditions: Conditions
) -> Sample:
    """A side whose clients trace; the value is a process's processor time in ns a message."""
    return cpu(side(msgspec.structs.replace(conditions, msg_trace=share)), process)


def cpu(sample: Sample, process: str) -> Sample:
    """Makes the processor time of a process, in ns a message, the value of a run."""
    sample.value = sample.cpu_s_per_million[process] * 1_000
    return sample


def latency(side: Callable[[Conditions], Sample], percent: float, conditions: Conditions) -> Sample:
    """Makes a percentile the value of a run that took latencies."""
    sample = side(conditions)
    sample.value = sample.extra[f"p{percent:g}_us"]
    return sample


_BOTH: Final = ("produce", "drain")


@contextmanager
def new_crew(conditions: Conditions) -> Iterator[Crew]:
    """A crew in an empty directory, which is gone afterwards."""
    folder = TemporaryDirectory(prefix="mqmesh-bench-", dir=conditions.folder)
    with folder as name, Crew(Path(name)) as crew:
        yield crew


def fill(crew: Crew, cluster: Cluster, load: Load, conditions: Conditions, messages: int) -> int:
    """Stores messages before a measurement begins; returns how many."""
    earlier = msgspec.structs.replace(load, messages=messages)
    task = earlier.task("produce_batches", cluster.namesrv, conditions)
    _fill(crew.client(task))
    return task.message_count


def _fill(client: Child) -> None:
    client.wait_ready()
    client.go()
    client.wait_report(RUN_TIMEOUT_S)
    client.stop()


def measure_alone(name: str, client: Child, broker: Child, conditions: Conditions) -> Sample:
    """Runs one client; the value is its rate."""
    client.wait_ready()
    level_memory(conditions.scale, conditions.folder)
    before = broker.usage()
    client.go()
    report = client.wait_report(RUN_TIMEOUT_S)
    return _sample(report.rate, {name: report}, before, broker.usage())


def _measure_both(
    producer: Child, consumer: Child, broker: Child, conditions: Conditions
) -> Sample:
    level_memory(conditions.scale, conditions.folder)
    before = broker.usage()
    consumer.go()
    producer.go()
    sent = producer.wait_report(RUN_TIMEOUT_S)
    read = consumer.wait_report(RUN_TIMEOUT_S)
    rate = read.message_count / max(read.end_s - sent.begin_s, 1e-9)
    return _sample(rate, {"producer": sent, "consumer": read}, before, broker.usage())


def _sample(rate: float, reports: dict[str, Report], before: Usage, after: Usage) -> Sample:
    count = max(report.message_count for report in reports.values())
    per_million = 1e6 / max(count, 1)
    cpu = {"broker": (after.cpu_s - before.cpu_s) * per_million}
    extra: dict[str, float] = {}
    for name, report in reports.items():
        cpu[name] = report.cpu_s * per_million
        if report.latencies_us:
            for percent in (50.0, 99.0, 100.0):
                extra[f"p{percent:g}_us"] = percentile(report.latencies_us, percent)
    return Sample(value=rate, message_count=count, cpu_s_per_million=cpu, extra=extra)
