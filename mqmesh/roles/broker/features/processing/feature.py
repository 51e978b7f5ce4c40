"""COMMIT_PROCESSED: commits progress and stores the outputs of the messages, all or none.

The request is answered when the log has its records and they are safe. The tables of progress
change in the turn that writes the records: until then the member owns the messages, after that no
member does. So a failover keeps or loses both, progress and outputs.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from mqmesh.errors import (
    InvalidArgument,
    MessageIllegal,
    MQMeshError,
    SequenceConflict,
    SystemBusy,
    TopicNotFound,
)
from mqmesh.message import SCHEDULE_TOPIC
from mqmesh.metrics import counter
from mqmesh.producer_key import KEY_SIZE
from mqmesh.protocol.command import EMPTY_REPLY, Reply
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import check_lasting_group
from mqmesh.protocol.processing import (
    MAX_BATCHES_PER_QUEUE,
    MAX_COMMIT_BYTES,
    MAX_DELAYED_BATCHES,
    CommitProcessedRequest,
)
from mqmesh.protocol.request import Peer, Request
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.state_log import PlannedChange
from mqmesh.roles.broker.writing.writes import Writes
from mqmesh.roles.dispatch import Handler
from mqmesh.storage.interface import BatchToPut

AdmitOutputs = Callable[[Request, int, bytes], list[BatchToPut]]
"""Function that checks the batches in a request's body, given their number and their producer's
key. It makes no topic."""
PlanMessages = Callable[[Peer, CommitProcessedRequest], PlannedChange]
"""Function that plans the settlement of messages of a member."""
PlanOffsets = Callable[[Request, CommitProcessedRequest], PlannedChange]
"""Function that plans the progress of the owner of queues."""


class ProcessingFeature(Feature):
    """Commits of messages that were processed.

    Args:
        core: The core of the broker.
        writes: Writes of the turn.
        admit: Checks messages as those that producers send.
        plan_messages: Plans for groups whose members acknowledge each message.
        plan_offsets: Plans for groups whose members share queues.
    """

    def __init__(
        self,
        core: Core,
        writes: Writes,
        admit: AdmitOutputs,
        plan_messages: PlanMessages,
        plan_offsets: PlanOffsets,
    ) -> None:
        self._core = core
        self._writes = writes
        self._admit = admit
        self._plan_messages = plan_messages
        self._plan_offsets = plan_offsets
        self._commits = self._refused = 0

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {RequestCode.COMMIT_PROCESSED: self.commit_processed}

    def commit_processed(self, request: Request, wanted: CommitProcessedRequest) -> Reply | None:
        """Store what was made of messages, and that these are done; answered once that is safe."""
        core = self._core
        try:
            end_offset = self._commit(request, wanted)
        except MQMeshError as error:
            self._refused += 1
            core.stats.total.busy_refusals += isinstance(error, SystemBusy)
            raise
        pending = request.later()

        def on_safe(error: MQMeshError | None) -> None:
            if error is not None:
                pending.fail(error)
                return
            self._commits += 1
            if status := core.commit_point.status_of(end_offset):
                core.stats.note_unsafe(status)
            pending.done(EMPTY_REPLY)

        core.when_safe(end_offset, on_safe)
        return None

    def _commit(self, request: Request, wanted: CommitProcessedRequest) -> int:
        """Put a commit into the log; return where it ends there."""
        check_lasting_group(wanted.group)
        most_bytes = min(MAX_COMMIT_BYTES, self._writes.group_bytes)
        if len(request.command.body) > most_bytes:
            raise MessageIllegal(
                f"{len(request.command.body)} bytes are to be stored all or none; a commit may "
                f"have {most_bytes}"
            )
        if bool(wanted.settlements) == bool(wanted.offsets):
            raise InvalidArgument("a commit has either settlements or offsets")
        if wanted.batch_count and len(wanted.producer_key) != KEY_SIZE:
            raise InvalidArgument(f"a producer's key has {KEY_SIZE} bytes")
        self._writes.write()  # in front of it: it keeps the order of a connection
        try:
            change = self._plan(request, wanted)
        except MQMeshError as error:
            if not wanted.batch_count:
                raise
            return self._end_of_known(request, wanted, error)
        outputs = self._admit(request, wanted.batch_count, wanted.producer_key)
        _check_counts(outputs)
        if any(self._core.state.urgent):
            self._core.require_state()  # a topic that was made a moment ago stands in front of them
        return self._writes.put_changed(change, outputs)

    def _plan(self, request: Request, wanted: CommitProcessedRequest) -> PlannedChange:
        if wanted.settlements:
            return self._plan_messages(request.peer, wanted)
        return self._plan_offsets(request, wanted)

    def _end_of_known(
        self, request: Request, wanted: CommitProcessedRequest, refusal: MQMeshError
    ) -> int:
        """Return where a commit ends that is refused now, since it was stored before.

        Raises:
            MQMeshError: The refusal: it was not. Nothing has come of it, a topic neither. Or why
                that cannot be said.
            SequenceConflict: Some of its sequences are stored, and others are not.
        """
        try:
            outputs = self._admit(request, wanted.batch_count, wanted.producer_key)
        except TopicNotFound:
            raise refusal from None
        ends = [self._end_of(output) for output in outputs]
        if not any(ends):
            raise refusal
        if not all(ends):
            raise SequenceConflict(
                "some of these outputs were stored before, by another commit: a producer has one "
                "commit in flight"
            ) from refusal
        return max(ends)

    def _end_of(self, output: BatchToPut) -> int:
        """Return where a batch that is stored ends in the log; 0 for one that is not known."""
        header = output.header
        wanted = header.first_sequence, header.message_count, header.producer_crc
        queue = output.topic, output.queue_id
        for one in self._core.store.producer_window(*queue, header.producer_id):
            if (one.first_sequence, one.message_count, one.producer_crc) == wanted:
                return one.end_offset
        return 0

    metrics = (
        counter(
            "processed_commits_total",
            "commits of processed messages that were answered as stored, now or before",
            lambda feature: feature._commits,
        ),
        counter(
            "processed_refused_total",
            "commits of processed messages of which nothing was stored",
            lambda feature: feature._refused,
        ),
    )


def _check_counts(outputs: Sequence[BatchToPut]) -> None:
    """Check that outputs push nothing out of what is remembered of their producer.

    Raises:
        MessageIllegal: There are too many of a queue, or delayed ones.
    """
    counts = Counter((one.topic, one.queue_id) for one in outputs)
    delayed = sum(count for (topic, _), count in counts.items() if topic == SCHEDULE_TOPIC)
    if delayed > MAX_DELAYED_BATCHES:
        raise MessageIllegal(
            f"{delayed} batches of delayed messages are to be stored all or none; a commit may "
            f"have {MAX_DELAYED_BATCHES}"
        )
    for (topic, queue_id), count in counts.items():
        if topic != SCHEDULE_TOPIC and count > MAX_BATCHES_PER_QUEUE:
            raise MessageIllegal(
                f"{count} batches for queue {queue_id} of {topic!r} are to be stored all or none; "
                f"a commit may have {MAX_BATCHES_PER_QUEUE} for each queue"
            )
