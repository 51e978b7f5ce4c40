"""Tables of keys and values for asyncio programs."""

import asyncio
import functools
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from mqmesh.sdk.aio.admin import AdminClient, awaited, stepped
from mqmesh.sdk.aio.signatures import signed_as
from mqmesh.sdk.tables.entries import KvEntry
from mqmesh.sdk.tables.key_value import KeyValue as BlockingKeyValue


class KeyValue(AdminClient):
    """Table for coroutines; names and meaning as in ``mqmesh.KeyValue``::

        async with KeyValue("settings", create=True) as kv:
            revision = await kv.put("shop/berlin", b"open")

    Calls are carried out one after the other, in a thread of the client's own; each watch has
    another one. Cancelling a call does not take its request back.

    Args:
        table, namesrv_addr, create, history, broker, options: As for ``mqmesh.KeyValue``.
    """

    _inner: BlockingKeyValue

    @signed_as(BlockingKeyValue.__init__)
    def __init__(self, table: str, *arguments: Any, **options: Any) -> None:
        self._inner = BlockingKeyValue(table, *arguments, **options)
        self._thread = ThreadPoolExecutor(1, "mqmesh-table")
        self._watchers: set[BlockingKeyValue] = set()

    async def __aenter__(self) -> Self:
        await self._run(self._inner.__enter__)
        return self

    @property
    def table(self) -> str:
        """Name of the table."""
        return self._inner.table

    put = awaited(BlockingKeyValue.put)
    create = awaited(BlockingKeyValue.create)
    update = awaited(BlockingKeyValue.update)
    delete = awaited(BlockingKeyValue.delete)
    put_many = awaited(BlockingKeyValue.put_many)
    get = awaited(BlockingKeyValue.get)
    get_many = awaited(BlockingKeyValue.get_many)
    history = awaited(BlockingKeyValue.history)
    keys = stepped(BlockingKeyValue.keys)
    entries = stepped(BlockingKeyValue.entries)

    async def watch(
        self, prefix: str = "", *, include_current: bool = True
    ) -> AsyncIterator[KvEntry]:
        """Yield the changes of keys as ``mqmesh.KeyValue.watch`` does, in a thread of its own."""
        watcher = self._inner.twin()
        steps = watcher.watch(prefix, include_current=include_current)
        thread = ThreadPoolExecutor(1, "mqmesh-watch")
        self._watchers.add(watcher)
        step = functools.partial(next, steps, None)
        try:
            while entry := await asyncio.get_running_loop().run_in_executor(thread, step):
                yield entry
        finally:
            self._watchers.discard(watcher)
            watcher.close()
            thread.shutdown(wait=False)

    async def close(self) -> None:
        """Closes all connections, and ends its watches."""
        for watcher in list(self._watchers):
            watcher.close()
        await super().close()
