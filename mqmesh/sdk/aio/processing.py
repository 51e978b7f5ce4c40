"""Blocks that process messages, for coroutines."""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType

from mqmesh.errors import ClientClosed, MQMeshError, SendInDoubt
from mqmesh.sdk.consumer.outputs import Outputs
from mqmesh.sdk.consumer.processing import Processing as BlockingProcessing

OnFailed = Callable[[Exception], Awaitable[None]]


class Processing:
    """Block that processes messages; names and meaning as in ``mqmesh.PushConsumer.processing``::

        async with consumer.processing(messages) as out:
            out.send(Message("bills", await bill(messages)))

    Args:
        block: The blocking one, of which the commit is taken.
        on_failed: Awaited with an error of the block, or of the commit after which nothing is
            stored.
    """

    def __init__(self, block: BlockingProcessing, on_failed: OnFailed | None = None) -> None:
        self._block = block
        self._on_failed = on_failed

    async def __aenter__(self) -> Outputs:
        return self._block.outputs

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Commit, and await the outcome; errors as of the blocking one."""
        if error is not None:
            self._block.outputs.end()
            if isinstance(error, Exception):
                await self._fail(error)
            return
        try:
            await asyncio.wrap_future(self._block.commit_later())
        except (ClientClosed, SendInDoubt):
            raise
        except MQMeshError as refusal:
            await self._fail(refusal)
            raise

    async def _fail(self, error: Exception) -> None:
        if self._on_failed is not None:
            await self._on_failed(error)
