"""Half messages on their way in: whether they may come, and what follows when they are stored."""

from typing import Final

from mqmesh.batch.half_batch import HALF_QUEUE
from mqmesh.batch.record_batch import BatchHeader
from mqmesh.errors import BrokerNotAvailable, SystemBusy
from mqmesh.message import TRANS_HALF_TOPIC
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.messaging import BatchOutcome
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.features.storing.inner_send import ensure_topic

_OK: Final = int(ResponseCode.SUCCESS)


def admit_half(context: BrokerContext, header: BatchHeader) -> BatchOutcome | None:
    """Lets a half batch in; where its messages go was checked.

    Returns:
        What became of it when it was stored before; else None.

    Raises:
        SystemBusy: Too many half messages wait.
        SequenceConflict: Others are stored under their ids.
        BrokerNotAvailable: Its twin is not safe yet, or a crash is still being mended.
    """
    desk = context.transactions
    if desk.torn:
        raise BrokerNotAvailable("commits that a crash cut off could not be written again yet")
    try:
        twin = desk.table.admit(
            header.producer_id, header.first_sequence, header.message_count, header.producer_crc
        )
    except SystemBusy:
        context.stats.total.busy_refusals += 1
        raise
    if twin is None:
        ensure_topic(context, TRANS_HALF_TOPIC, HALF_QUEUE + 1)
        return None
    if not context.commit_point.is_safe(twin.end_offset):
        raise BrokerNotAvailable("the same half messages are on their way to the disk")
    context.stats.total.put_duplicates += 1
    return BatchOutcome(_OK, 0, 0, twin.base, twin.commitlog_offset, twin.store_timestamp)
