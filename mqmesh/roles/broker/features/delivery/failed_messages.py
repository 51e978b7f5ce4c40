"""Messages that failed: they wait in their window, come again as retries, or are dead letters."""

import logging
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import msgspec

from mqmesh.batch.delayed_batch import parse_delay_levels
from mqmesh.errors import MQMeshError
from mqmesh.message import retry_topic
from mqmesh.protocol.codes import ResponseCode, code_of
from mqmesh.protocol.delivery import BY_SCHEDULE
from mqmesh.protocol.policies import parse_retry_delays
from mqmesh.protocol.retries import (
    DEFAULT_MAX_RECONSUME_TIMES,
    FIRST_RETRY_LEVEL,
    TO_DEAD_LETTERS,
    SendBackEntry,
    SendBackRequest,
    SendBackResult,
)
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.delivery_state.runs import Run, stretches
from mqmesh.roles.broker.delivery_state.window import DeliveryWindow
from mqmesh.roles.broker.delivery_state.windows import DeliveryWindows, WindowKey
from mqmesh.roles.broker.features.delivery.lease_reader import LeaseReader
from mqmesh.roles.broker.features.delivery.receive_hold import ReceiveHold
from mqmesh.roles.broker.group_state.group_table import GroupTable
from mqmesh.roles.broker.state_log import PlannedChange

SHORT_NACK_MS: Final = 30_000
"""A message that comes again sooner waits in the window, others in the schedule service."""
NOT_SENT_BACK_MS: Final = 1_000
"""A message that could not be sent back is handed out again after so long."""
MAX_RETRIES: Final = 2**31
"""Limit of retries in place of the consumer's: here it is decided what is a dead letter."""

_OK: Final = int(ResponseCode.SUCCESS)

_log = logging.getLogger(__name__)


class SendsBack(Protocol):
    """The neighbour that makes retries and dead letters."""

    def send_back_now(
        self, back: SendBackRequest, plan: Callable[[list[tuple[int, int, int]]], PlannedChange]
    ) -> list[SendBackResult]:
        """Plan the next try of messages, or make them dead letters; stored in this call.

        Args:
            back: Which messages.
            plan: Returns the change that is stored with retries and dead letters, all or none, and
                made then. Called when the log knows all changes before, with the messages that they
                are of: index of the entry, first queue offset and number. Others of a batch that
                cannot be read may be among these.

        Returns:
            A result for each entry; what it says is not safe yet.

        Raises:
            MQMeshError: Nothing can be stored now.
        """

    def is_sent_back(self, group: str, queue: tuple[str, int], offsets: Iterable[int]) -> bool:
        """Return whether one of some messages was sent back, and comes again or is a dead letter.

        Args:
            group: Consumer group.
            queue: Topic and queue id.
            offsets: Queue offsets of the messages.

        Raises:
            CorruptRecord, CorruptBatch: Marks or messages cannot be read.
        """


class RunToSendBack(msgspec.Struct, frozen=True):
    """A run that waits, and is to be sent back.

    Attributes:
        key: Key of its window.
        window: Its window.
        run: The run.
        reason: Reason of the failure, from the consumer.
        failures: Failures before this one.
        level: Delay level, or ``TO_DEAD_LETTERS``; 0 for ``delay_ms``.
        delay_ms: Delay until the messages come again.
    """

    key: WindowKey
    window: DeliveryWindow
    run: Run
    reason: str
    failures: int
    level: int = TO_DEAD_LETTERS
    delay_ms: int = 0


class FailedMessages:
    """Messages that failed, or that nobody settled in time.

    Args:
        core: The core of the broker.
        group_table: Settings of groups.
        windows: Messages that groups hold.
        reader: Reads how often messages of retry topics failed before.
        hold: Receives that wait.
        back: Makes retries and dead letters.
    """

    def __init__(
        self,
        core: Core,
        group_table: GroupTable,
        windows: DeliveryWindows,
        reader: LeaseReader,
        hold: ReceiveHold,
        back: SendsBack,
    ) -> None:
        self._settings = core.settings
        self._clock = core.clock
        self._group_table = group_table
        self._windows = windows
        self._reader = reader
        self._hold = hold
        self._back = back

    def release(self, group: str, member: str, reason: str) -> int:
        """Take from a member what it holds; return the number of messages."""
        leaving: list[RunToSendBack] = []
        count = 0
        for key, window in self._windows.of_group(group).items():
            released = window.release(member)
            if released:
                count += sum(run.count for run in released)
                leaving += self.judge_all(key, window, released, reason)
                self._hold.stir(key[1])
        self.send_back(leaving)
        return count

    def judge_all(
        self, key: WindowKey, window: DeliveryWindow, runs: Iterable[Run], reason: str
    ) -> list[RunToSendBack]:
        """Decide about runs of a window, as ``judge``; what that fails for comes again at once."""
        leaving: list[RunToSendBack] = []
        for run in runs:
            try:
                leaving += self.judge(key, window, run, reason)
            except MQMeshError as error:
                _log.error(
                    "messages of group %s failed, and nothing is done about it: %s", key[0], error
                )
        return leaving

    def judge(
        self,
        key: WindowKey,
        window: DeliveryWindow,
        run: Run,
        reason: str,
        delay_ms: int = 0,
    ) -> list[RunToSendBack]:
        """Decide about a run that waits since it failed.

        Args:
            key: Of its window.
            window: Its window.
            run: The run.
            reason: Reason of the failure, from the consumer.
            delay_ms: Its messages come again after so long; ``BY_SCHEDULE`` for the group's.

        Returns:
            Parts of it that are to be sent back; others wait in the window.
        """
        leaving: list[RunToSendBack] = []
        group, topic, queue_id = key
        by_failures = {0: run.bits}
        if topic == retry_topic(group):
            # Each has failed by itself before.
            by_failures = self._reader.failures_of((topic, queue_id), run.first, run.bits)
            if self._windows.numbers.is_full:
                by_failures = {min(by_failures): run.bits}
        for failures, bits in by_failures.items():
            part = window.split(run, bits)
            failures += part.attempt - 1
            one = self._judge_part(key, window, part, failures, reason, delay_ms)
            if one is not None:
                leaving.append(one)
        window.hold_back(run)
        return leaving

    def _judge_part(
        self,
        key: WindowKey,
        window: DeliveryWindow,
        run: Run,
        failures: int,
        reason: str,
        delay_ms: int,
    ) -> RunToSendBack | None:
        """Decide about messages that failed so often before; None if they wait in the window."""
        group, topic, queue_id = key
        limit = self._group_table.retry_limit(group, DEFAULT_MAX_RECONSUME_TIMES)
        if failures >= limit:
            return self.leaving(key, window, run, reason, failures)
        levels = parse_delay_levels(self._settings.now.message_delay_level)
        config = self._group_table.settings(group)
        if delay_ms == BY_SCHEDULE:
            own = parse_retry_delays(config.retry_delays)
            delay_ms = levels[min(FIRST_RETRY_LEVEL + failures, len(levels)) - 1]
            if own is not None:
                delay_ms = own.delay_ms(failures, f"{topic}/{queue_id}/{run.low}")
        is_crowded = window.unsettled > config.max_unsettled * 3 // 4
        if not window.is_strict and (delay_ms > SHORT_NACK_MS or (delay_ms and is_crowded)):
            level = levels.index(delay_ms) + 1 if delay_ms in levels else 0
            return self.leaving(key, window, run, reason, failures, level, delay_ms)
        if delay_ms:
            window.leave(run)
            window.wait(run, self._clock.monotonic_ms() + delay_ms)
        return None

    def leaving(
        self,
        key: WindowKey,
        window: DeliveryWindow,
        run: Run,
        reason: str,
        failures: int = 0,
        level: int = TO_DEAD_LETTERS,
        delay_ms: int = 0,
    ) -> RunToSendBack:
        """Hold back a run that waits, which is to be sent back; by default as dead letters."""
        window.leave(run)
        failures = max(failures, run.attempt - 1)
        return RunToSendBack(key, window, run, reason, failures, level, delay_ms)

    def send_back(self, leaving: list[RunToSendBack]) -> list[int]:
        """Store runs as retries or dead letters; of both it is in the log that they are settled.

        Args:
            leaving: Runs, all of one group.

        Returns:
            A response code for each run.
        """
        if not leaving:
            return []
        entries: list[SendBackEntry] = []
        owners: list[int] = []
        for index, one in enumerate(leaving):
            for first, count in stretches(one.run.first, one.run.bits):
                entries.append(
                    SendBackEntry(
                        one.key[1],
                        one.key[2],
                        first,
                        count,
                        one.reason,
                        one.level,
                        one.failures,
                        one.delay_ms,
                    )
                )
                owners.append(index)

        def plan(stored: list[tuple[int, int, int]]) -> PlannedChange:
            settled: dict[WindowKey, dict[Run, int]] = {}
            for index, first, count in stored:
                one = leaving[owners[index]]
                runs = settled.setdefault(one.key, {})
                runs[one.run] = runs.get(one.run, 0) | one.run.within(first, (1 << count) - 1)
            return self._windows.plan_settled(settled)

        back = SendBackRequest(leaving[0].key[0], entries, MAX_RETRIES)
        try:
            results = self._back.send_back_now(back, plan)
        except MQMeshError as error:
            _log.error("messages of group %s cannot be sent back: %s", back.group, error)
            results = [SendBackResult(int(code_of(error)))] * len(entries)
        codes = [_OK] * len(leaving)
        for index, result in zip(owners, results, strict=True):
            codes[index] = codes[index] or result.code
        due_ms = self._clock.monotonic_ms() + NOT_SENT_BACK_MS
        for one, code in zip(leaving, codes, strict=True):
            if one.run.bits and code == _OK:
                one.window.settle(one.run)  # of these nothing had to be stored
            elif one.run.bits:
                one.window.wait(one.run, due_ms)
                one.window.hold_back(one.run)
            self._hold.stir(one.key[1])
        return codes
