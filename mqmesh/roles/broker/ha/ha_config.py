"""Settings of replication: the table ``[ha]`` of a broker's settings."""

import enum
from typing import Annotated

import msgspec

from mqmesh.coordination.interface import AckReplicas
from mqmesh.units import GIB, KIB, MIB


class HaMode(enum.Enum):
    """Who decides which replica is the master."""

    OFF = "off"
    """There are no replicas."""
    MANUAL = "manual"
    """The settings, and ``mqmesh ha promote``; RocketMQ's masters and slaves."""


class HaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of replication.

    Attributes:
        mode: ``off``, or ``manual``: the broker with broker_id 0 is the master of its group, others
            follow it until ``mqmesh ha promote`` makes one of them the master.
        master_addr: Of a follower: where its master listens, ``host:port``.
        ack_replicas: Of a master: ``none``, a send is answered when the master has it; ``one``,
            when a follower has it, too. SEND_OK of ``one`` survives the loss of a machine.
        slave_timeout_ms: With ``one``: after so long an answer says FLUSH_SLAVE_TIMEOUT instead of
            waiting on, 10 to 60,000 ms. The message is stored by the master.
        ha_slave_fallbehind_max: A follower that lacks more bytes of the log is not waited for, 64
            KiB to 64 GiB. Without any other the answer says SLAVE_NOT_AVAILABLE.
        ha_window_bytes: How far ahead of its acknowledgements a follower is sent the log, 64 KiB
            to 1 GiB; so much memory of the master one may take.
        ha_retain_for_slaves_ms: How long the log that a follower has not got yet is kept from
            retention after it was heard last, 0 to 86,400,000 ms.
        slave_read_enable: Of a follower: it answers reads.
    """

    mode: HaMode = HaMode.OFF
    master_addr: Annotated[str, msgspec.Meta(max_length=255)] = ""
    ack_replicas: AckReplicas = AckReplicas.NONE
    slave_timeout_ms: Annotated[int, msgspec.Meta(ge=10, le=60_000)] = 3_000
    ha_slave_fallbehind_max: Annotated[int, msgspec.Meta(ge=64 * KIB, le=64 * GIB)] = 256 * MIB
    ha_window_bytes: Annotated[int, msgspec.Meta(ge=64 * KIB, le=1 * GIB)] = 16 * MIB
    ha_retain_for_slaves_ms: Annotated[int, msgspec.Meta(ge=0, le=86_400_000)] = 600_000
    slave_read_enable: bool = True
