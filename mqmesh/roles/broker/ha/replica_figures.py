"""How a replica is, as figures: by what it answers to GET_HA_STATUS."""

from typing import Final

from mqmesh.figures import Measured, gauge, text
from mqmesh.protocol.replication import HaStatus

REPLICA_FIGURES: Final[tuple[Measured[HaStatus], ...]] = (
    text(
        "ha_role", "MASTER, STARTING_MASTER, FOLLOWING or CANDIDATE", lambda replica: replica.role
    ),
    gauge("ha_connected", "the leader sends its log", lambda replica: replica.connected),
    gauge(
        "ha_leader_lag_bytes",
        "what a follower lacks of its leader's log",
        lambda replica: max(replica.leader_end - replica.log_end, 0),
        unit="bytes",
    ),
)
