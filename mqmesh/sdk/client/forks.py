"""Tells clients that their process is a forked child, where neither threads nor sockets work."""

import os
import weakref
from collections.abc import Callable

_listeners: "set[weakref.WeakMethod[Callable[[], None]]]" = set()


def tell_of_forks(listener: Callable[[], None]) -> None:
    """Calls a method in every child that is forked from now on, as long as its object lives.

    Args:
        listener: Must take no lock: the parent may hold it for ever.
    """
    _listeners.add(weakref.WeakMethod(listener, _listeners.discard))


def _tell() -> None:
    for one in list(_listeners):
        listener = one()
        if listener is not None:
            listener()


os.register_at_fork(after_in_child=_tell)
