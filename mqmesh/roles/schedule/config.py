"""Settings of a schedule service."""

from typing import Annotated

import msgspec

from mqmesh.config import check_names
from mqmesh.security.config import SecurityConfig
from mqmesh.units import GIB, MIB


class ScheduleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the schedule service of one broker group.

    Attributes:
        broker_name: Broker group that it serves. One service each; a second one would take
            its place, again and again.
        namesrv_addr: Name servers as ``host:port``; they know where the group's master is.
        store_path_root_dir: Directory of the timetable. It can be lost: it is then made anew
            from the broker's log.
        use_ipc: Prefer the broker's Unix socket when it runs on this machine.
        security: Keys of the service; see docs/security.md.

        map_size: Room for the timetable at first, 1 MiB to 64 GiB; it grows by itself.
        max_requests_in_flight: Delivery requests at a time, 1 to 64. More are quicker only
            where the broker is far away.
        pace_ms: Messages that are due within so long are delivered together, 0 to 1,000 ms;
            so much later may a message be. More costs less where much is due.
        retry_ms: Pause after the broker refused, or could not be reached, 10 to 60,000 ms.
    """

    broker_name: Annotated[str, msgspec.Meta(min_length=1, max_length=255)] = "broker-a"
    namesrv_addr: Annotated[list[str], msgspec.Meta(min_length=1, max_length=16)] = msgspec.field(
        default_factory=lambda: ["127.0.0.1:9876", "127.0.0.1:9877"]
    )
    store_path_root_dir: Annotated[str, msgspec.Meta(min_length=1)] = (
        "./mqmesh-data/schedule-broker-a"
    )
    use_ipc: bool = True
    security: SecurityConfig = msgspec.field(default_factory=SecurityConfig)

    map_size: Annotated[int, msgspec.Meta(ge=1 * MIB, le=64 * GIB)] = 64 * MIB
    max_requests_in_flight: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    pace_ms: Annotated[int, msgspec.Meta(ge=0, le=1_000)] = 5
    retry_ms: Annotated[int, msgspec.Meta(ge=10, le=60_000)] = 500

    def __post_init__(self) -> None:
        """Checks the name.

        Raises:
            ConfigError: The name is illegal.
        """
        check_names(self, "broker_name")

    @property
    def name(self) -> str:
        """Name of the process, for logs and `mqmesh status`."""
        return f"schedule-{self.broker_name}"
