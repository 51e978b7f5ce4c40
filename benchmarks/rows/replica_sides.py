"""Sides of the rows about replicas: a master with one follower, or two, and what they cost."""

import time
from contextlib import suppress
from typing import Final

from mqmesh.errors import NoRoute
from mqmesh.protocol.replication import HaStatus
from mqmesh.sdk.admin.ha_admin import HaAdmin
from mqmesh.units import MIB
from rows.processes import BenchError, Child, Crew
from rows.sides import (
    RUN_TIMEOUT_S,
    BareBroker,
    Cluster,
    Conditions,
    Load,
    Sample,
    cpu,
    measure_alone,
    new_crew,
    product_produce,
)
from rows.workload import WARM_UP_SENDS

_LOOK_S: Final = 0.005


class Pair(Cluster):
    """A master, and a follower when it is wanted.

    Args:
        crew: Where their processes belong.
        load: Messages of the row.
        conditions: Of the call.
        ack_replicas: As the setting of that name.
    """

    def __init__(
        self, crew: Crew, load: Load, conditions: Conditions, ack_replicas: str = "none"
    ) -> None:
        settings = ["ha.mode=manual", f"ha.ack_replicas={ack_replicas}"]
        super().__init__(crew, load, conditions, settings)
        self._follower_settings = [
            *settings,
            f'namesrv_addr=["{self.namesrv}"]',
            "listen_port=0",
            "broker_id=1",
            f"ha.master_addr={self.endpoint}",
            f"store_path_root_dir={crew.folder}/slave",
        ]
        self._role = crew.role

    def start_follower(self) -> Child:
        """Starts the follower; it has nothing, or what it had when it was stopped."""
        follower, _ = self._role("broker", self._follower_settings)
        return follower

    def wait_caught_up(self) -> int:
        """Waits until the follower has all that the master has.

        Returns:
            How many bytes of the log that is.

        Raises:
            BenchError: It takes too long.
        """
        deadline_s = time.monotonic() + RUN_TIMEOUT_S
        with HaAdmin(self.namesrv) as admin:
            while time.monotonic() < deadline_s:
                statuses = {one.broker_id: one.status for one in admin.ha_status()}
                master, follower = statuses.get(0), statuses.get(1)
                if _has_all(master, follower):
                    assert master is not None
                    return master.log_end
                time.sleep(_LOOK_S)
        raise BenchError(f"the follower does not catch up in {RUN_TIMEOUT_S:.0f} s")


def _has_all(master: HaStatus | None, follower: HaStatus | None) -> bool:
    return (
        master is not None
        and follower is not None
        and follower.connected
        and follower.log_end == master.log_end
    )


class Trio(Cluster):
    """Three replicas that elect their master, and their coordinator.

    Args:
        crew: Where their processes belong.
        load: Messages of the row.
        conditions: Of the call.
        ack_replicas: As the setting of that name.

    Attributes:
        followers: The processes of those that do not lead.
    """

    def __init__(self, crew: Crew, load: Load, conditions: Conditions, ack_replicas: str) -> None:
        self.followers: list[Child] = []
        settings = ["listen_port=0", f"data_dir={crew.folder}/coordinator"]
        _, coordinator = crew.role("coordinator", settings)
        super().__init__(
            crew,
            load,
            conditions,
            [
                "ha.mode=auto",
                f"ha.ack_replicas={ack_replicas}",
                "ha.total_replicas=3",
                f"ha.coordinator=embedded://{coordinator}",
            ],
        )

    def _start(self) -> tuple[Child, str]:
        replicas = {}
        for number in (1, 2, 3):
            folder = f"store_path_root_dir={self._crew.folder}/r{number}"
            settings = [*self._settings, f"broker_id={number}", folder]
            child, endpoint = self._crew.role("broker", settings)
            replicas[endpoint] = child
        master = self._wait_complete()
        self.followers = [child for endpoint, child in replicas.items() if endpoint != master]
        return replicas[master], master

    def _wait_complete(self) -> str:
        """Waits until one leads and the others follow; where it listens."""
        deadline_s = time.monotonic() + RUN_TIMEOUT_S
        with HaAdmin(self.namesrv) as admin:
            while time.monotonic() < deadline_s:
                with suppress(NoRoute):
                    found = [one for one in admin.ha_status() if one.broker_id == 0]
                    status = found[0].status if found else None
                    if status is not None and len(status.in_sync) == len(status.replicas) + 1 == 3:
                        return found[0].endpoint
                time.sleep(_LOOK_S)
        raise BenchError(f"no three replicas are in sync in {RUN_TIMEOUT_S:.0f} s")


def product_elected(ack_replicas: str, load: Load, conditions: Conditions) -> Sample:
    """A producer alone, an elected master and its two followers."""
    with new_crew(conditions) as crew:
        trio = Trio(crew, load, conditions, ack_replicas)
        client = crew.client(load.task("produce_batches", trio.namesrv, conditions))
        before_s = sum(one.usage().cpu_s for one in trio.followers)
        sample = measure_alone("producer", client, trio.child, conditions)
        used_s = sum(one.usage().cpu_s for one in trio.followers) - before_s
        sample.cpu_s_per_million["slaves"] = used_s * 1e6 / sample.message_count
        trio.check_stored(sample.message_count)
        return trio.memory(sample)


def product_replicated(kind: str, ack_replicas: str, load: Load, conditions: Conditions) -> Sample:
    """A producer alone, a master and its follower.

    Further figures: the follower's processor time, how long it takes to catch up afterwards.
    """
    with new_crew(conditions) as crew:
        pair = Pair(crew, load, conditions, ack_replicas)
        follower = pair.start_follower()
        pair.wait_caught_up()
        client = crew.client(load.task(kind, pair.namesrv, conditions))
        before = follower.usage()
        sample = measure_alone("producer", client, pair.child, conditions)
        begin_s = time.monotonic()
        pair.wait_caught_up()
        sample.extra["slave_catch_up_ms"] = (time.monotonic() - begin_s) * 1_000
        used_s = follower.usage().cpu_s - before.cpu_s
        sample.cpu_s_per_million["slave"] = used_s * 1e6 / sample.message_count
        warm_up = WARM_UP_SENDS if kind == "send_sync" else 0
        pair.check_stored(sample.message_count + warm_up)
        return pair.memory(sample)


def limit_replicated(kind: str, slave: str, load: Load, conditions: Conditions) -> Sample:
    """A bare producer, the bare broker and its bare slave."""
    with new_crew(conditions) as crew:
        broker = BareBroker(crew, load, conditions, slave=slave)
        assert broker.slave is not None
        client = crew.limit(load.task(kind, broker.address, conditions))
        before = broker.slave.usage()
        sample = measure_alone("producer", client, broker.child, conditions)
        used_s = broker.slave.usage().cpu_s - before.cpu_s
        sample.cpu_s_per_million["slave"] = used_s * 1e6 / sample.message_count
        return sample


def product_slave_cpu(load: Load, conditions: Conditions) -> Sample:
    """The value is the follower's processor time in ns a message."""
    return cpu(product_replicated("produce_batches", "none", load, conditions), "slave")


def product_alone_cpu(load: Load, conditions: Conditions) -> Sample:
    """The value is the processor time in ns a message of a broker without a follower."""
    return cpu(product_produce("produce_batches", load, conditions), "broker")


def product_idle_slave(seconds: float, conditions: Conditions) -> Sample:
    """A follower that has nothing to do; the value is its CPU in percent."""
    with new_crew(conditions) as crew:
        pair = Pair(crew, Load(messages=1), conditions)
        follower = pair.start_follower()
        pair.wait_caught_up()
        time.sleep(1.0)  # what a start leaves to be done is no idling
        processes = {"slave": follower, "master": pair.child}
        before = {name: child.usage() for name, child in processes.items()}
        time.sleep(seconds)
        after = {name: child.usage() for name, child in processes.items()}
        used = {
            name: (after[name].cpu_s - before[name].cpu_s) / seconds * 100 for name in processes
        }
        extra = {
            "master_cpu_percent": used["master"],
            "slave_rss_mib": after["slave"].rss_bytes / MIB,
            "slave_private_mib": after["slave"].private_bytes / MIB,
        }
        return Sample(value=used["slave"], message_count=0, extra=extra)
