"""Messages that producers send: checked, written once a turn, answered when they are safe."""

from typing import Final

from mqmesh.protocol.codes import RequestCode
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.feature import BrokerTurn, Feature
from mqmesh.roles.broker.features.sends import send
from mqmesh.roles.broker.features.storing import storing


def _finish(context: BrokerContext, turn: BrokerTurn) -> None:
    if context.stage.sends:
        context.admission.frames_taken(turn.readable_ms)
    storing.finish_sends(context)


def _note_turn(context: BrokerContext, turn: BrokerTurn) -> None:
    now_ms = context.clock.monotonic_ms()
    context.admission.tick_ended(now_ms, turn.readable_ms, turn.drained_ms)


def _forget_producer(context: BrokerContext, peer: bytes, now_ms: int) -> None:
    context.producer_keys.on_disconnect(peer)


def _answer_all(context: BrokerContext) -> None:
    # None waits for longer.
    wait_ms = context.config.sync_flush_timeout_ms
    storing.answer_expired(context, context.clock.monotonic_ms() + wait_ms)


SENDS: Final = Feature(
    commands={
        RequestCode.SEND_MESSAGE: send.send_message,
    },
    turn_ended=_finish,
    turn_over=_note_turn,
    durable=storing.answer_confirmed,
    tick=storing.answer_expired,
    client_gone=_forget_producer,
    stopping=storing.finish_sends,
    stopped=_answer_all,
)
