"""Answers that wait until a table is on disk."""

from collections.abc import Callable

from mqmesh.errors import StorageError
from mqmesh.protocol.command import Reply, Request
from mqmesh.roles.broker.context import BrokerContext, OnSaved


def reply_when_saved(
    context: BrokerContext,
    request: Request,
    reply: Reply,
    *saves: Callable[[OnSaved | None], None],
) -> None:
    """Has tables saved, and answers when all of them are on disk, or could not be saved.

    Args:
        context: The broker.
        request: To be answered.
        reply: The answer if all goes well.
        saves: Methods of ``context.keeper``, at least one.
    """
    asked = request.without_frame()
    waiting = len(saves)
    failures: list[StorageError] = []

    def on_saved(error: StorageError | None) -> None:
        nonlocal waiting
        waiting -= 1
        if error is not None:
            failures.append(error)
        if waiting:
            return
        if failures:
            context.wire.fail(asked, failures[0])
        else:
            context.wire.reply(asked, reply)

    for save in saves:
        save(on_saved)
