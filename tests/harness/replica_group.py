"""A name server, and the replicas of a broker group whose master an administrator chooses."""

from __future__ import annotations

from pathlib import Path

from harness.patience import until
from harness.topic_reader import read_topic
from mqmesh.protocol.replication import HaStatus
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.ha_admin import HaAdmin
from mqmesh.testing.processes import RoleProcess

SEGMENT_BYTES = 4 * 1024 * 1024


class Group:
    """A name server, and the replicas of one broker group.

    Attributes:
        replicas: Their processes, by id.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.namesrv = RoleProcess("namesrv", {"listen_port": "0"}, folder / "namesrv.log")
        self.replicas: dict[int, RoleProcess] = {}
        self.endpoints: dict[int, str] = {}
        self.admin = HaAdmin(self.namesrv.endpoint)

    def start(self, broker_id: int, master: str = "", *, store: str = "", **settings: str) -> None:
        """Starts a replica, or starts it again at its old address."""
        endpoint = self.endpoints.get(broker_id, ":0")
        process = RoleProcess(
            "broker",
            {
                "broker_id": str(broker_id),
                "listen_port": endpoint.rpartition(":")[2],
                "namesrv_addr": f'["{self.namesrv.endpoint}"]',
                "store_path_root_dir": str(self.folder / (store or f"r{broker_id}")),
                "storage.mapped_file_size_commit_log": str(SEGMENT_BYTES),
                "ha.mode": "manual",
                **({"ha.master_addr": master} if master else {}),
                **{name.replace("__", "."): value for name, value in settings.items()},
            },
            self.folder / f"r{broker_id}.log",
        )
        self.replicas[broker_id], self.endpoints[broker_id] = process, process.endpoint

    def status(self, broker_id: int) -> HaStatus | None:
        """Returns the status of the replica that has an id at the name server, or None."""
        reports = {one.broker_id: one.status for one in self.admin.ha_status("broker-a")}
        return reports.get(broker_id)

    def is_caught_up(self, broker_id: int = 1) -> bool:
        master, follower = self.status(0), self.status(broker_id)
        return (
            master is not None
            and follower is not None
            and follower.connected
            and follower.log_end == master.log_end
        )

    def close(self) -> None:
        self.admin.close()
        for process in (*self.replicas.values(), self.namesrv):
            process.stop()


def pair(group: Group, **settings: str) -> None:
    """Starts a master and a follower that has all of its log."""
    group.start(0, **settings)
    group.start(1, group.endpoints[0], **settings)
    until(lambda: group.is_caught_up())


def bodies_of(group: Group, topic: str = "t") -> list[bytes]:
    """Returns all messages of a topic, sorted."""
    return sorted(message.body for message in read_topic(group.namesrv.endpoint, topic))


def indexed_batches_at(endpoint: str) -> float:
    """Returns how many batches the index process beside a replica has indexed."""
    with AdminClient(endpoint) as admin:
        return admin.role_info(endpoint).number("index_batches_total")
