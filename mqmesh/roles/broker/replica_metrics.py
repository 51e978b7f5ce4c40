"""Status of a replica, and its counts, as metrics."""

from typing import Final

import msgspec

from mqmesh.metrics import Measured, counter, gauge, text
from mqmesh.protocol.replication import HaStatus
from mqmesh.roles.broker.stats import Stats


class ReplicaCounts(msgspec.Struct):
    """Counts of a process's replication, whichever roles it has one after the other.

    Attributes:
        chunks: Of a leader's log that were added.
        bytes: Of them.
        refused_chunks: Those in which something was wrong, and what else a leader said that cannot
            be.
        cuts: How often the log was cut.
        cut_bytes: Bytes of log that were cut off.
        copies: How often the store became a copy.
        nacks: Followers that had to cut their log or to copy it anew, and acknowledgements
            that were refused.
        repaired_bytes: Of the log that the disk had damaged, and the leader gave again.
        slave_timeouts: Followers that hung, and are not waited for.
        held_commits: Offsets that groups committed here while the master was gone, and that it has
            not got yet.
        stale_epochs: Leaders of an earlier epoch that were refused, and how often this one was.
    """

    chunks: int = 0
    bytes: int = 0
    refused_chunks: int = 0
    cuts: int = 0
    cut_bytes: int = 0
    copies: int = 0
    nacks: int = 0
    repaired_bytes: int = 0
    slave_timeouts: int = 0
    held_commits: int = 0
    stale_epochs: int = 0


REPLICA_METRICS: Final[tuple[Measured[HaStatus], ...]] = (
    text(
        "ha_role",
        "MASTER, STARTING_MASTER, HANDING_OVER, ISOLATED, FOLLOWING, CANDIDATE or OUTSIDE",
        lambda replica: replica.role,
    ),
    gauge("ha_connected", "the leader sends its log", lambda replica: replica.connected),
    gauge(
        "ha_leader_lag_bytes",
        "what a follower lacks of its leader's log",
        lambda replica: max(replica.leader_end - replica.log_end, 0),
    ),
)

COUNT_METRICS: Final[tuple[Measured[Stats[ReplicaCounts]], ...]] = (
    counter(
        "ha_copied_chunks_total",
        "pieces of a leader's log that were added",
        lambda replica: replica.total.chunks,
    ),
    counter(
        "ha_copied_bytes_total",
        "bytes of a leader's log that were added",
        lambda replica: replica.total.bytes,
    ),
    gauge(
        "ha_catch_up_bytes_per_s",
        "bytes of a leader's log that were added, of late",
        lambda replica: replica.rate("bytes"),
        unit="bytes",
    ),
    counter(
        "ha_refused_chunks_total",
        "damaged pieces and impossible reports of a leader: a disk or a network changes bytes",
        lambda replica: replica.total.refused_chunks,
    ),
    counter(
        "ha_cuts_total",
        "times that the end of the log was cut off",
        lambda replica: replica.total.cuts,
    ),
    counter("ha_cut_bytes_total", "what was cut off", lambda replica: replica.total.cut_bytes),
    counter(
        "ha_copies_total",
        "times that the store became a copy",
        lambda replica: replica.total.copies,
    ),
    counter(
        "ha_nacks_total",
        "followers that had to cut or copy, and acknowledgements that were refused",
        lambda replica: replica.total.nacks,
    ),
    counter(
        "ha_repaired_bytes_total",
        "bytes of the log that the disk had damaged, and the leader gave again",
        lambda replica: replica.total.repaired_bytes,
    ),
    counter(
        "ha_slave_timeouts_total",
        "followers that hung, and are not waited for",
        lambda replica: replica.total.slave_timeouts,
    ),
    gauge(
        "ha_held_commits",
        "offsets that groups committed here while the master was gone, and that it has not got yet",
        lambda replica: replica.total.held_commits,
    ),
    counter(
        "ha_stale_epoch_refusals_total",
        "leaders of an earlier epoch that were refused, and how often this one was",
        lambda replica: replica.total.stale_epochs,
    ),
)
