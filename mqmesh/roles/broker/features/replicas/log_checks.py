"""What a replica tells of its log, so that it can be compared with those of the others."""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

from mqmesh.errors import CorruptRecord, InvalidArgument
from mqmesh.protocol.codes import RequestCode
from mqmesh.protocol.command import Reply, Request, reply_with
from mqmesh.protocol.replication import (
    ChecksumLogRequest,
    ChecksumLogResponse,
    EpochsRequest,
    LogEpochs,
)
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.feature import BrokerHandler
from mqmesh.storage.interface import replicable
from mqmesh.units import CommitLogOffset

DIGEST_BYTES: Final = 16


def get_epochs(context: BrokerContext, request: Request, asked: EpochsRequest) -> Reply:
    """Which epoch of the log begins where."""
    log, leadership = replicable(context.store), context.leadership
    found = log.identity()
    return reply_with(
        LogEpochs(
            context.config.broker_id,
            found.store_id,
            found.log_start,
            found.log_end,
            0 if leadership is None else leadership.confirmed(),
            found.epochs,
        )
    )


def checksum_log(context: BrokerContext, request: Request, asked: ChecksumLogRequest) -> Reply:
    """The checksum of at most 1 MiB of the log."""
    log, broker_id = replicable(context.store), context.config.broker_id
    if asked.store_id != log.identity().store_id:
        raise InvalidArgument(
            f"replica {broker_id} has the log {log.identity().store_id:#010x}, not "
            f"{asked.store_id:#010x}"
        )
    try:
        chunk = log.read_raw(
            CommitLogOffset(asked.start),
            max_bytes=asked.size,
            stop=min(CommitLogOffset(asked.stop), log.log_end()),
        )
    except CorruptRecord as error:
        return reply_with(ChecksumLogResponse(broker_id, asked.start, problem=str(error)))
    if not chunk.data:
        return reply_with(ChecksumLogResponse(broker_id, asked.start))
    digest = blake2b(chunk.data, digest_size=DIGEST_BYTES).digest()
    return reply_with(ChecksumLogResponse(broker_id, chunk.end, digest))


COMMANDS: Final[Mapping[RequestCode, BrokerHandler]] = {
    RequestCode.GET_EPOCHS: get_epochs,
    RequestCode.CHECKSUM_LOG: checksum_log,
}
"""Served by whoever has a log, in every role."""
