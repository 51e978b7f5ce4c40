"""Tells clients that their process is a forked child, where neither threads nor sockets work."""

import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    """What wants to know of forks."""

    def on_fork(self) -> None:
        """This process is a child now. Must take no lock: the parent may hold it for ever."""


_listeners: "weakref.WeakSet[Forkable]" = weakref.WeakSet()


def tell_of_forks(listener: Forkable) -> None:
    """Calls ``on_fork`` in every child that is forked from now on, as long as it lives."""
    _listeners.add(listener)


def _tell() -> None:
    for listener in list(_listeners):
        listener.on_fork()


os.register_at_fork(after_in_child=_tell)
