"""Epochs and checksums of a replica's log, to compare it with those of other replicas."""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

from mqmesh.errors import CorruptRecord, InvalidArgument
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.replication import (
    ChecksumLogRequest,
    ChecksumLogResponse,
    EpochsRequest,
    LogEpochs,
)
from mqmesh.protocol.request import Request
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.dispatch import Handler
from mqmesh.storage.interface import replicable
from mqmesh.units import CommitLogOffset

DIGEST_BYTES: Final = 16


class LogChecksFeature(Feature):
    """Epochs and checksums of a replica's log, to compare it with those of other replicas."""

    works_at_followers = True

    def __init__(self, core: Core) -> None:
        self._settings = core.settings
        self._store = core.store
        self._leadership = core.leadership

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Return the commands that a replica serves in every role."""
        return {
            RequestCode.GET_EPOCHS: self.get_epochs,
            RequestCode.CHECKSUM_LOG: self.checksum_log,
        }

    follower_commands = commands

    def get_epochs(self, request: Request, header: EpochsRequest) -> LogEpochs:
        """Which epoch of the log begins where."""
        log, leadership = replicable(self._store), self._leadership
        found = log.identity()
        return LogEpochs(
            self._settings.now.broker_id,
            found.store_id,
            found.log_start,
            found.log_end,
            0 if leadership is None else leadership.confirmed(),
            found.epochs,
        )

    def checksum_log(self, request: Request, header: ChecksumLogRequest) -> ChecksumLogResponse:
        """The checksum of at most 1 MiB of the log."""
        log, broker_id = replicable(self._store), self._settings.now.broker_id
        if header.store_id != log.identity().store_id:
            raise InvalidArgument(
                f"replica {broker_id} has the log {log.identity().store_id:#010x}, not "
                f"{header.store_id:#010x}"
            )
        try:
            chunk = log.read_raw(
                CommitLogOffset(header.start),
                max_bytes=header.size,
                stop=min(CommitLogOffset(header.stop), log.log_end()),
            )
        except CorruptRecord as error:
            return ChecksumLogResponse(broker_id, header.start, problem=str(error))
        if not chunk.data:
            return ChecksumLogResponse(broker_id, header.start)
        digest = blake2b(chunk.data, digest_size=DIGEST_BYTES).digest()
        return ChecksumLogResponse(broker_id, chunk.end, digest)
