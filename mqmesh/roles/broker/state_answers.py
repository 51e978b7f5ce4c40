"""Changes of topics, groups and offsets on their way into the log, and answers that wait for it."""

from mqmesh.errors import MQMeshError, StorageError
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.command import Reply, Request
from mqmesh.protocol.messaging import BatchOutcome, SendStatus
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.features.storing.staging import OpenSend


def write_state(context: BrokerContext) -> None:
    """Writes all changes; who waits for that is told once the log is safe so far."""
    written = context.state.write()
    waiters, error = written.waiters, written.error

    def on_stored(outcomes: list[BatchOutcome]) -> None:
        late = None
        if outcomes[0].status != SendStatus.SEND_OK:
            name = SendStatus(outcomes[0].status).name
            late = StorageError(f"the change is in the log of this broker, but not safe: {name}")
        for on_saved in waiters:
            on_saved(error or late)

    if not waiters:
        return
    outcome = BatchOutcome(int(ResponseCode.SUCCESS), int(SendStatus.SEND_OK))
    if error is not None or context.commit_point.is_safe(written.end_offset):
        on_stored([outcome])
    else:
        send = OpenSend(None, [outcome], written.end_offset, on_stored=on_stored)
        context.commit_point.wait(send, send.end_offset, context.clock.monotonic_ms())


def reply_when_saved(context: BrokerContext, request: Request, reply: Reply) -> None:
    """Answers once all that has changed in this turn is in the log, and safe there.

    Args:
        context: The broker.
        request: To be answered.
        reply: The answer if all goes well.
    """
    asked = request.without_frame()

    def on_saved(error: MQMeshError | None) -> None:
        if error is not None:
            context.wire.fail(asked, error)
        else:
            context.wire.reply(asked, reply)

    context.state.save(on_saved)
