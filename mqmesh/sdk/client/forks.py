"""Notice for clients that their process is a forked child, without working threads and sockets."""

import os
import weakref
from collections.abc import Callable
from typing import Any

# No WeakMethod: one that outlives its module says so on standard error when a program ends.
_listeners: "weakref.WeakKeyDictionary[object, Callable[[Any], None]]" = weakref.WeakKeyDictionary()


def call_in_forks(listener: Callable[[], None]) -> None:
    """Calls a method in every child that is forked from now on, as long as its object lives.

    Args:
        listener: A bound method, one an object. Must take no lock: the parent may hold it for ever.
    """
    _listeners[listener.__self__] = listener.__func__  # type: ignore[attr-defined]


def _call_listeners() -> None:
    for owner, function in list(_listeners.items()):
        function(owner)


os.register_at_fork(after_in_child=_call_listeners)
