"""Delayed messages, and the schedule service that says when they are due."""

from typing import Final

from mqmesh.protocol.codes import RequestCode
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.feature import BrokerTurn, Feature
from mqmesh.roles.broker.features.delays import schedule


def _tell_service(context: BrokerContext, turn: BrokerTurn) -> None:
    schedule.tell_schedule_service(context)


def _tick(context: BrokerContext, now_ms: int) -> None:
    schedule.fail_cancels(context, context.schedule.tick(now_ms))


def _forget_service(context: BrokerContext, peer: bytes, now_ms: int) -> None:
    schedule.fail_cancels(context, context.schedule.on_disconnect(peer))


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
    sample=schedule.hold_log,
    client_gone=_forget_service,
)
