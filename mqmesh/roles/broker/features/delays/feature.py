"""Delayed messages, and the schedule service that says when they are due."""

from typing import Final

from mqmesh.figures import counter, gauge, text
from mqmesh.log_identity import first_number
from mqmesh.protocol.codes import RequestCode
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.feature import Beginning, BrokerTurn, Feature
from mqmesh.roles.broker.features.delays import schedule
from mqmesh.roles.broker.features.delays.schedule_desk import ScheduleDesk
from mqmesh.units import MAX_OFFSET


def make_schedule(begins: Beginning) -> ScheduleDesk:
    """The desk of the schedule service, which has not come yet."""
    return ScheduleDesk(first_number(begins.epoch))


def _tell_service(context: BrokerContext, turn: BrokerTurn) -> None:
    schedule.tell_schedule_service(context)


def _tick(context: BrokerContext, now_ms: int) -> None:
    schedule.fail_cancels(context, context.schedule.tick(now_ms))


def _forget_service(context: BrokerContext, peer: bytes, now_ms: int) -> None:
    schedule.fail_cancels(context, context.schedule.on_disconnect(peer))


def _fail_all_cancels(context: BrokerContext) -> None:
    schedule.fail_cancels(context, context.schedule.tick(MAX_OFFSET))


def _sample(context: BrokerContext) -> None:
    schedule.hold_log(context)
    schedule.count_retries(context)


def _service(context: BrokerContext) -> str:
    return "off" if context.schedule.service is None else "on"


DELAYS: Final = Feature(
    commands={
        RequestCode.OPEN_SCHEDULE: schedule.open_schedule,
        RequestCode.PULL_SCHEDULE: schedule.pull_schedule,
        RequestCode.DELIVER_DUE: schedule.deliver_due,
        RequestCode.CANCEL_DELAYED: schedule.cancel_delayed,
        RequestCode.REFUSE_CANCEL: schedule.refuse_cancel,
    },
    turn_ended=_tell_service,
    durable=schedule.tell_schedule_service,
    tick=_tick,
    sample=_sample,
    client_gone=_forget_service,
    stopping=_fail_all_cancels,
    figures=(
        text("schedule_service", "whether the schedule service is there: on, off", _service),
        gauge(
            "schedule_sessions",
            "how often the schedule service came",
            lambda broker: broker.schedule.sessions,
        ),
        gauge(
            "schedule_pending",
            "delayed messages that wait, those for a retry too; -1 for unknown",
            schedule.pending,
            unit="messages",
            metric="rocketmq_timing_messages",
        ),
        gauge(
            "schedule_retries",
            "of them, messages that wait for a retry",
            lambda broker: broker.schedule.retries.total(),
            unit="messages",
        ),
        counter(
            "schedule_delivered_total",
            "delayed messages that went on their way",
            lambda broker: broker.schedule.delivered,
            unit="messages",
        ),
        counter(
            "schedule_cancelled_total",
            "delayed messages that were cancelled",
            lambda broker: broker.schedule.cancelled,
            unit="messages",
        ),
        counter(
            "schedule_rolled_total",
            "delayed messages written once more so that the log may go",
            lambda broker: broker.schedule.rolled,
            unit="messages",
        ),
        counter(
            "schedule_gone_total",
            "delayed messages that could not be read any more",
            lambda broker: broker.schedule.gone,
            unit="messages",
        ),
    ),
)
