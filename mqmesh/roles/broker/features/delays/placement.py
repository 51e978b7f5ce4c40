"""Delayed messages, which are not due yet, on their way into ``SCHEDULE_TOPIC_XXXX``.

Messages that producers delay and consumers send back wait there under their message ids, with
their real topic and queue in the batch's meta, until the schedule service reports them as due.
"""

import msgspec

from mqmesh.batch.delayed_batch import (
    ANY_TIME_QUEUE,
    SCHEDULE_QUEUES,
    DelayedMeta,
    check_wish,
    parse_delay_levels,
    scheduled_batch,
)
from mqmesh.batch.record_batch import BatchHeader, read_header
from mqmesh.message import SCHEDULE_TOPIC
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.features.delays.schedule_link import ScheduleLink
from mqmesh.roles.broker.writing.writes import Writes
from mqmesh.storage.interface import BatchToPut


class DelayPlacement:
    """Places of delayed messages in ``SCHEDULE_TOPIC_XXXX``, where they wait until they are due."""

    def __init__(self, core: Core, writes: Writes, schedule: ScheduleLink) -> None:
        self._settings = core.settings
        self._writes = writes
        self._schedule = schedule

    def to_schedule(self, header: BatchHeader, data: memoryview, meta: DelayedMeta) -> BatchToPut:
        """Return the batch that is stored for a producer's batch of delayed messages.

        The same bytes for the same batch, but after the delay levels were changed: a send that is
        repeated across such a restart is refused as one with other content.

        Raises:
            MessageIllegal: It does not say when it is due.
            LocalProtocolError: It only just does not fit any more.
            SystemBusy: There are too many topics.
        """
        check_wish(meta)
        queue_id, meta = self.place(meta, header.queue_id)
        stored = scheduled_batch(data, header, meta, queue_id=queue_id)
        return BatchToPut(SCHEDULE_TOPIC, queue_id, read_header(stored), stored, meta.tag_hashes)

    def place(self, wish: DelayedMeta, real_queue_id: int) -> tuple[int, DelayedMeta]:
        """Return where messages wait that are to be delivered later.

        Args:
            wish: When, and the topic they go to then; a level above the highest counts as that.
            real_queue_id: Queue of that topic.

        Returns:
            The queue of ``SCHEDULE_TOPIC_XXXX``, and the meta of the batch there.

        Raises:
            SystemBusy: There are too many topics.
        """
        levels = parse_delay_levels(self._settings.now.message_delay_level)
        level = min(wish.level, len(levels))
        meta = msgspec.structs.replace(
            wish,
            topic=SCHEDULE_TOPIC,
            level=level,
            real_topic=wish.topic,
            real_queue_id=real_queue_id,
            delay_ms=levels[level - 1] if level else 0,
        )
        self._writes.ensure_topic(SCHEDULE_TOPIC, SCHEDULE_QUEUES)
        self._schedule.timer_changed = True
        return (level - 1 if level else ANY_TIME_QUEUE), meta
