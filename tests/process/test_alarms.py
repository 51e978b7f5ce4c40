"""Each alarm of a monitor by the trouble itself, made in real processes, and over when that is.

A test makes a trouble, looks in its own rhythm, and ends the trouble. The 30 s between two looks
pass on the monitor's clock alone, so that what must last, and windows of minutes, take no time.
Rules are the defaults but for ``REAL_TIME``.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from harness.commands import run_command
from harness.failovers import ElectedGroup
from harness.faulty_hosts import FaultyHosts
from harness.keys import credentials, user
from harness.patience import until
from harness.secured import put_users, secured_folder

from mqmesh import (
    ClientOptions,
    ConsumeResult,
    LocalTransactionState,
    Message,
    Producer,
    PullConsumer,
    PushConsumer,
    TransactionListener,
    TransactionProducer,
)
from mqmesh.errors import AuthenticationFailed, BrokerNotAvailable, NoPermission
from mqmesh.protocol.membership import ConsumeFromWhere, MessageModel
from mqmesh.protocol.messaging import SendStatus
from mqmesh.protocol.transactions import Decision
from mqmesh.roles.exporter.alarm_board import Alarm
from mqmesh.roles.exporter.alarm_rules import RULES
from mqmesh.roles.exporter.monitor import Monitor
from mqmesh.roles.exporter.monitor_config import MonitorConfig, RuleChange
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.sdk.admin.transaction_admin import TransactionAdmin
from mqmesh.security.keys import load_credentials, save_credentials
from mqmesh.testing.clock import ManualClock
from mqmesh.testing.processes import PROGRAM, RoleProcess

INTERVAL_S = 30
PATIENT_MS = 20_000
"""What a healthy process has for its answer; slow machines are no trouble."""
HASTY_MS = 300
"""The same, where one hangs."""
REAL_TIME = [
    # What the cluster measures by clocks that nobody can set, or in what takes long to write.
    RuleChange(alarm="index-behind", threshold=1),
    RuleChange(alarm="replica-silent", threshold=4),
    RuleChange(alarm="replica-behind", threshold=100_000),
]
WINDOW_S = {
    "messages-lost-unread": 3_600,
    "dead-letters": 600,
    "busy": 60,
    "no-permission": 60,
    "unsafe-answers": 300,
    "bug-survived": 3_600,
}
"""For so long is told of what grew."""
DISK_BYTES = 64 * 1024 * 1024
SMALL_DISK = ("unshare", "--map-root-user", "--mount", "sh", "-c")
BUGGY = """
import os, runpy, sys
from mqmesh.roles.namesrv.route_table import RouteTable

bug, tick = sys.argv.pop(1), RouteTable.tick

def buggy(table, now_ms):
    if os.path.exists(bug):
        raise ValueError("planned")
    return tick(table, now_ms)

RouteTable.tick = buggy
runpy.run_module("mqmesh.cli", run_name="__main__", alter_sys=True)
"""


class Watch:
    """A monitor, and its clock.

    Args:
        namesrv: Name server.
        settings: Of the monitor.
    """

    def __init__(self, namesrv: str, **settings) -> None:
        self._clock = ManualClock(wall_ms=time.time_ns() // 1_000_000)
        config = {"timeout_ms": PATIENT_MS, "rule": REAL_TIME, **settings}
        self._monitor = Monitor(MonitorConfig(namesrv_addr=[namesrv], **config), self._clock)
        self.look()

    def look(self, alarm: str = "", labels: dict[str, str] | None = None) -> list[Alarm]:
        """Looks, 30 s after the last time; alarms of this name with these labels."""
        self._clock.advance(INTERVAL_S * 1_000)
        wanted = (labels or {}).items()
        found = self._monitor.look()
        return [one for one in found if one.alarm == alarm and wanted <= one.labels.items()]

    def fires(self, alarm: str, *, go_on: Callable[[], object] = int, **labels: str) -> Alarm:
        """It is told within two looks of its time.

        Args:
            alarm: Its name.
            go_on: Called before each look, for trouble that has to go on.
            labels: What it is about.
        """
        (rule,) = (rule for rule in RULES if rule.alarm == alarm)
        for _ in range(rule.for_s // INTERVAL_S + 2):
            go_on()
            if found := self.look(alarm, labels):
                return found[0]
        raise AssertionError(f"no {alarm} of {labels} in time")

    def ends(self, alarm: str, **labels: str) -> None:
        """It is over within two looks, or at the end of the time that growth is told for."""
        self._clock.advance(WINDOW_S.get(alarm, 0) * 1_000)
        assert not (self.look(alarm, labels) and self.look(alarm, labels)), f"{alarm} does not end"

    def close(self) -> None:
        self._monitor.close()


class Scene:
    """A master on a small disk of its own, its follower, a schedule service, a name server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._closing = ExitStack()
        self.hosts = FaultyHosts(folder, ["r0", "r1"])
        self.bug = folder / "bug"
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        settings = {"listen_port": "0", "scan_interval_ms": "50"}
        self.addr = self._run("namesrv", settings, ("-c", BUGGY, str(self.bug))).endpoint
        disk = self._folder / "r0"
        disk.mkdir()
        mount = f'mount -t tmpfs -o size={DISK_BYTES} none {disk} && exec "$@"'
        self.master = self._broker(0, before=(*SMALL_DISK, mount, "sh"))
        self._disk = Path(f"/proc/{self.master.pid}/root{disk}")
        self.admin = self._closing.enter_context(GroupAdmin(self.addr))
        with ThreadPoolExecutor() as pool:
            schedule = pool.submit(self.start_schedule)
            self.start_follower()
            schedule.result()
        producer = Producer("scene", namesrv_addr=self.addr)
        self.producer = self._closing.enter_context(producer)
        until(lambda: self.metric("ha_followers") == 1)
        self.watch = self._closing.enter_context(closing(Watch(self.addr)))

    def _run(self, role: str, settings: dict[str, str], program=PROGRAM, before=(), name=""):
        log = self._folder / f"{name or role}.log"
        process = RoleProcess(role, settings, log, program, before)
        self._closing.callback(process.stop)
        return process

    def _broker(self, number: int, before: tuple[str, ...] = (), **settings: str) -> RoleProcess:
        name = f"r{number}"
        return self._run(
            "broker",
            {
                "listen_port": "0",
                "broker_id": str(number),
                "namesrv_addr": f'["{self.addr}"]',
                "store_path_root_dir": str(self._folder / name),
                "transaction_timeout_ms": "10",
                "transaction_check_interval_ms": "10",
                "transaction_check_max": "1",
                "sync_flush_timeout_ms": "10",
                "storage.mapped_file_size_commit_log": str(256 * 1024),
                "storage.allocate_ahead_bytes": str(64 * 1024),
                "storage.disk_reserve_bytes": str(1024 * 1024),
                "storage.clean_file_forcibly_enable": "true",
                "storage.clean_resource_interval_ms": "100",
                "ha.mode": "manual",
                "ha.ack_replicas": "one",
                **{key.replace("__", "."): value for key, value in settings.items()},
            },
            before=(*before, *self.hosts.before(name)),
            name=name,
        )

    def start_follower(self) -> None:
        self.follower = self._broker(1, ha__master_addr=self.master.endpoint)
        self.wait_known(2)

    def wait_known(self, count: int) -> None:
        """Until the name server knows so many of the two brokers."""
        until(lambda: sum(len(one.addresses) for one in self.admin.cluster().brokers) == count)

    def start_schedule(self) -> None:
        settings = {
            "namesrv_addr": f'["{self.addr}"]',
            "store_path_root_dir": str(self._folder / "schedule"),
            "retry_ms": "50",
        }
        self.schedule = self._run("schedule", settings)

    def metric(self, name: str, endpoint: str = "", *labels: str) -> float:
        return self.admin.role_info(endpoint or self.master.endpoint).number(name, *labels)

    def lag(self, group: str) -> int:
        return self.admin.progress(group).lag

    def fill(self, share: float) -> None:
        """Somebody else fills the master's disk, at least so far."""

        def is_full() -> bool:
            disk = os.statvfs(self._disk)
            missing = int(DISK_BYTES * share) - (DISK_BYTES - disk.f_bavail * disk.f_frsize)
            with (self._disk / "ballast").open("ab") as ballast:
                ballast.write(bytes(max(missing, 0)))
            return self.metric("store_disk_used_percent") > share * 100 - 1

        until(is_full)

    def make_room(self) -> None:
        (self._disk / "ballast").unlink(missing_ok=True)

    def empty(self) -> None:
        self.make_room()
        until(lambda: self.metric("store_disk_used_percent") < 50)

    def pull(self, group: str) -> PullConsumer:
        first = {"consume_from_where": "FIRST_OFFSET", "auto_commit": False}
        return PullConsumer(group, namesrv_addr=self.addr, **first)

    def read(self, group: str, topic: str) -> int:
        """A member comes, takes all there is, and goes; how much that was."""
        found = 0
        with self.pull(group) as consumer:
            consumer.subscribe(topic)
            until(lambda: len(consumer.assignment()) == len(consumer.queues(topic)))
            while any(consumer.lag().values()):
                found += len(consumer.poll(1_000, 10_000))
            consumer.commit()
        return found

    def close(self) -> None:
        self._closing.close()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    scene = Scene(tmp_path_factory.mktemp("a"))
    yield scene
    scene.close()


@pytest.fixture(autouse=True)
def _room_for_the_next(scene: Scene) -> Iterator[None]:
    yield
    scene.make_room()


NODE = {"node_id": "broker-a"}


def test_a_disk_fills_up_until_messages_go_unread_and_sends_and_deliveries_are_refused(scene):
    watch, topic = scene.watch, "disk"
    scene.fill(0.88)
    watch.fires("disk-filling", **NODE)
    scene.empty()
    watch.ends("disk-filling", **NODE)

    for _ in range(12):
        scene.producer.send(Message(topic, os.urandom(100_000)))
    with scene.pull("slow") as consumer:
        consumer.subscribe(topic)
        until(lambda: len(consumer.assignment()) == len(consumer.queues(topic)))
        consumer.commit(dict.fromkeys(consumer.assignment(), 0))
    watch.look()
    scene.fill(0.88)
    until(lambda: scene.metric("forced_lost_messages_total") > 0)
    watch.fires("messages-lost-unread", **NODE)

    now_ms = time.time_ns() // 1_000_000
    scene.producer.send(Message(topic, b"late", deliver_at_ms=now_ms + 60_000))
    scene.fill(0.95)
    until(lambda: scene.metric("store_disk_full") == 1)
    watch.fires("disk-full", **NODE)
    watch.ends("messages-lost-unread", **NODE)

    with Producer("hasty", namesrv_addr=scene.addr, retry_times_when_send_failed=0) as producer:

        def send_often() -> None:
            for _ in range(61):
                with pytest.raises(BrokerNotAvailable, match="full"):
                    producer.send(Message(topic, b"no room"))

        watch.fires("busy", go_on=send_often, **NODE)
    scene.hosts.set("r0", clock_ms=70_000)
    service = scene.schedule.endpoint
    until(lambda: scene.metric("late_ms", service) > 5_000)
    with closing(Watch(scene.addr, other_addr=[service])) as schedules:
        schedules.fires("delays-late")
        scene.empty()
        watch.ends("disk-full", **NODE)
        watch.ends("busy", **NODE)
        until(lambda: scene.metric("late_ms", service) == 0)
        schedules.ends("delays-late")


def test_a_group_that_is_slow_has_nobody_gets_nowhere_or_gives_up(scene):
    watch, topic, group = scene.watch, "orders", "billing"
    mine = {"consumer_group": group}
    scene.producer.send(Message(topic, b"first"))
    assert scene.read(group, topic) == 1
    sends = [scene.producer.send_async(Message(topic, b"more")) for _ in range(10_001)]
    assert {one.result().status for one in sends} == {SendStatus.SEND_OK}
    watch.fires("group-without-members", **mine)
    scene.hosts.set("r0", clock_ms=200_000)
    watch.fires("group-behind", **mine)
    assert scene.read(group, topic) == 10_001
    watch.ends("group-behind", **mine)
    watch.ends("group-without-members", **mine)

    go_on, met = threading.Event(), threading.Event()

    def listen(messages):
        met.set()
        go_on.wait()
        return ConsumeResult.RECONSUME_LATER

    with PushConsumer(group, namesrv_addr=scene.addr, max_reconsume_times=0) as consumer:
        consumer.subscribe(topic, listener=listen)
        try:
            scene.producer.send(Message(topic, b"bad"))
            until(met.is_set)
            watch.fires("group-stuck", **mine)
        finally:
            go_on.set()
        until(lambda: scene.lag(group) == 0)
        watch.fires("dead-letters", **mine)
        watch.ends("group-stuck", **mine)
    watch.ends("dead-letters", **mine)


def test_a_group_whose_listener_always_fails(scene):
    topic, group = "failing", "hopeless"
    for number in range(20):
        scene.producer.send(Message(topic, b"%d" % number))

    def fail(messages):
        raise ValueError("planned")

    with PushConsumer(
        group,
        client=ClientOptions(namesrv_addr=scene.addr, heartbeat_broker_interval_ms=100),
        consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
    ) as consumer:
        consumer.subscribe(topic, listener=fail)

        def waits() -> bool:
            progress = scene.admin.progress(group)
            told = (progress.lag, progress.retrying, progress.failures.failed >= 20)
            return told == (20, 20, True)

        until(waits)
        alarm = scene.watch.fires("group-failing", consumer_group=group)
        assert alarm.value == 1
    scene.watch.ends("group-failing", consumer_group=group)


def test_members_that_want_different_messages(scene):
    group = {"consumer_group": "mixed"}
    scene.producer.send(Message("colours", b"-", tag="red"))

    def member(colour: str) -> PushConsumer:
        consumer = PushConsumer("mixed", namesrv_addr=scene.addr)
        consumer.subscribe("colours", colour, listener=lambda _: None)
        return consumer

    with member("red"), member("red"):
        until(lambda: len(scene.admin.connections("mixed")) == 2)
        assert scene.watch.look("mixed-subscriptions", group) == []
        with member("blue"):
            until(lambda: scene.admin.progress("mixed").differing == 1)
            scene.watch.fires("mixed-subscriptions", **group)
        until(lambda: scene.admin.progress("mixed").differing == 0)
        scene.watch.ends("mixed-subscriptions", **group)


def test_a_group_that_broadcasts_is_no_trouble(scene, tmp_path):
    group, seen = "news", threading.Event()
    with PushConsumer(
        group,
        namesrv_addr=scene.addr,
        message_model=MessageModel.BROADCASTING,
        offsets_dir=str(tmp_path),
        consume_from_where="FIRST_OFFSET",
    ) as consumer:
        consumer.subscribe(group, listener=lambda _: seen.set())
        scene.producer.send(Message(group, b"-"))
        until(seen.is_set)
        assert scene.lag(group) == 0, "how far its members are brokers do not know"
        for _ in range(13):
            assert scene.watch.look("group-stuck", {"consumer_group": group}) == []


class Undecided(TransactionListener):
    """Knows no outcome."""

    def execute_local_transaction(self, message, argument):
        return LocalTransactionState.UNKNOWN

    def check_local_transaction(self, message):
        return LocalTransactionState.UNKNOWN


def test_transactions_that_nobody_decides(scene):
    with TransactionProducer("pay", Undecided(), namesrv_addr=scene.addr) as producer:
        sent = producer.send_message_in_transaction(Message("payments", b"?"))
        until(lambda: scene.metric("half_messages_parked") == 1)
    scene.watch.fires("half-messages-parked", **NODE)
    with TransactionAdmin(scene.addr) as admin:
        admin.end_half_message(sent.message_id, Decision.ROLLBACK)
    scene.watch.ends("half-messages-parked", **NODE)


def test_a_transaction_that_waits_for_long(scene):
    patient = {"CHECK_IMMUNITY_TIME_IN_SECONDS": "3600"}  # nobody is asked, so it is not parked
    with TransactionProducer("pay", Undecided(), namesrv_addr=scene.addr) as producer:
        message = Message("payments", b"?", properties=patient)
        sent = producer.send_message_in_transaction(message)
    scene.hosts.set("r0", clock_ms=600_000)
    scene.watch.fires("half-messages-waiting", **NODE)
    with TransactionAdmin(scene.addr) as admin:
        admin.end_half_message(sent.message_id, Decision.ROLLBACK)
    scene.watch.ends("half-messages-waiting", **NODE)


def test_delayed_messages_that_no_service_delivers(scene):
    in_a_year_ms = time.time_ns() // 1_000_000 + 365 * 86_400_000
    scene.producer.send(Message("later", b"-", deliver_at_ms=in_a_year_ms))
    until(lambda: scene.metric("schedule_pending") == 1)
    scene.schedule.kill()
    scene.watch.fires("no-schedule-service", **NODE)
    scene.start_schedule()
    until(lambda: scene.admin.role_info(scene.master.endpoint)["schedule_service"] == "on")
    scene.watch.ends("no-schedule-service", **NODE)


def test_an_index_that_hangs(scene):
    scene.producer.send(Message("looked-up", b"-", keys=["1"]))
    pid = int(until(lambda: scene.metric("index_pid")))
    os.kill(pid, signal.SIGSTOP)
    try:
        scene.producer.send(Message("looked-up", b"-", keys=["2"]))
        until(lambda: scene.metric("index_lag_ms") > 1_000)
        scene.watch.fires("index-behind", **NODE)
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: scene.metric("index_lag_ms") == 0)
    scene.watch.ends("index-behind", **NODE)


def test_a_process_that_hangs_and_a_follower_that_is_gone(scene, tmp_path):
    state = str(tmp_path / "state.json")
    hung = {"node_type": "broker", "node_id": "broker-a-r1"}
    with closing(Watch(scene.addr, timeout_ms=HASTY_MS, state_file=state)) as watch:
        scene.follower.suspend()
        try:
            watch.fires("process-down", **hung)
        finally:
            scene.follower.resume()
    with closing(Watch(scene.addr, state_file=state)) as watch:
        watch.ends("process-down", **hung)

    watch, replica = scene.watch, {"node_id": "broker-a", "replica": "1"}
    until(lambda: scene.metric("ha_followers") == 1)
    scene.follower.kill()
    until(lambda: scene.metric("ha_followers") == 0)
    sent = scene.producer.send(Message("unsafe", os.urandom(200_000)))
    assert sent.status is SendStatus.SLAVE_NOT_AVAILABLE
    watch.fires("process-down", **hung)
    watch.fires("unsafe-answers", send_status="slave_not_available", **NODE)
    watch.fires("replica-behind", **replica)
    until(lambda: scene.metric("ha_replica_silent_ms", "", "1") > 4_000)
    watch.fires("replica-silent", **replica)
    scene.start_follower()
    until(lambda: scene.metric("ha_replica_lag_bytes", "", "1") == 0)
    watch.ends("process-down", **hung)
    watch.ends("replica-behind", **replica)
    watch.ends("replica-silent", **replica)
    watch.ends("unsafe-answers", **NODE)


def test_a_broker_whose_disk_refuses_to_sync_ends(scene):
    """A store that stopped writing is told by its broker's end; ``store-not-writable`` is for one
    that could not end."""
    down = {"node_type": "broker", "node_id": "broker-a-r1"}
    scene.hosts.set("r1", sync_errno=errno.EIO)
    scene.producer.send(Message("t", b"more"))
    until(lambda: not scene.follower.running)
    scene.watch.fires("process-down", **down)
    scene.follower.stop()
    scene.hosts.set("r1")
    scene.start_follower()
    scene.watch.ends("process-down", **down)


def test_a_bug_that_a_process_survives(scene):
    scene.bug.touch()
    until(lambda: scene.metric("callback_failures_total", scene.addr) > 0)
    scene.watch.fires("bug-survived", node_type="namesrv", node_id=scene.addr)
    scene.bug.unlink()
    scene.watch.look("bug-survived", {})  # knows of all of them
    scene.watch.ends("bug-survived", node_type="namesrv")


def test_a_look_from_cron_misses_a_broker_that_name_servers_have_forgotten(scene, tmp_path):
    options = {"namesrv_addr": f'["{scene.addr}"]', "state_file": str(tmp_path / "state.json")}
    options |= {"timeout_ms": str(PATIENT_MS)}

    def down() -> list[str]:
        arguments = [word for one in options.items() for word in ("--set", "=".join(one))]
        done = run_command("monitor", "--once", "--json", *arguments)
        alarms = json.loads("".join(done.out))
        return [one["labels"]["node_id"] for one in alarms if one["alarm"] == "process-down"]

    assert down() == []
    scene.follower.kill()
    scene.wait_known(1)
    assert down() == ["broker-a-r1"]
    scene.start_follower()
    assert down() == []


def test_somebody_who_asks_for_what_is_not_his_and_somebody_without_a_key(short_tmp_path):
    keys = secured_folder(short_tmp_path)
    own = load_credentials(keys / "namesrv.toml")
    nobody = credentials("nobody", own)
    save_credentials(keys / "nobody.toml", nobody)
    put_users(keys, [user(nobody)])
    settings = {
        "listen_port": "0",
        "security.enable": "true",
        "security.key_file": str(keys / "namesrv.toml"),
        "security.access_list_file": str(keys / "access_list.toml"),
    }
    namesrv = RoleProcess("namesrv", settings, short_tmp_path / "namesrv.log")
    addr = namesrv.endpoint
    try:
        with closing(Watch(addr, credentials=str(keys / "client.toml"))) as watch:
            with AdminClient(addr, credentials=str(keys / "nobody.toml")) as admin:
                for _ in range(11):
                    with pytest.raises(NoPermission):
                        admin.role_info(addr)
            watch.fires("no-permission", node_id=addr)
            watch.ends("no-permission", node_id=addr)
            save_credentials(keys / "unknown.toml", credentials("unknown", own))
            for _ in range(11):
                with (
                    AdminClient(addr, credentials=str(keys / "unknown.toml")) as admin,
                    pytest.raises(AuthenticationFailed),
                ):
                    admin.role_info(addr)
            watch.fires("no-permission", node_id=addr)
            watch.ends("no-permission", node_id=addr)
    finally:
        namesrv.stop()


def test_replicas_without_a_coordinator_and_one_that_its_new_master_never_heard(short_tmp_path):
    settings = {
        "ha__ack_replicas": "none",
        "ha__min_in_sync_replicas": "1",
        "ha__lease_ttl_ms": "2000",
    }
    group = ElectedGroup(short_tmp_path, count=2, **settings)

    def metric(replica_id: int, name: str, *labels: str) -> float:
        told = group.admin.role_info(group.replicas[replica_id].endpoint)
        return told.number(name, *labels)

    try:
        rule = [RuleChange(alarm="replica-silent", threshold=2)]
        with closing(Watch(group.namesrv.endpoint, rule=rule)) as watch:
            gone = group.master()
            node = {"node_id": f"broker-a-r{gone}"}
            group.coordinator.kill()
            until(lambda: metric(gone, "ha_coordinator_up") == 0)
            watch.fires("no-failover", **node)
            group.start_coordinator()
            # A session of 2 s may be lost once more, on a machine that is busy.
            until(lambda: metric(gone, "ha_coordinator_up") and not watch.look("no-failover", node))

            leads = 3 - gone
            until(lambda: group.in_sync() == [1, 2])
            group.replicas[gone].stop()
            until(lambda: group.master() == leads)
            until(lambda: metric(leads, "ha_replica_silent_ms", str(gone)) > 2_000)
            replica = {"node_id": f"broker-a-r{leads}", "replica": str(gone)}
            watch.fires("replica-silent", **replica)
            group.start(gone)
            until(lambda: metric(leads, "ha_replica_silent_ms", str(gone)) < 1_000)
            watch.ends("replica-silent", **replica)
    finally:
        group.close()
