"""Lock order of a client: a thread that holds a lock takes only later ones."""

import enum
import threading
from collections.abc import Callable


class LockRank(enum.IntEnum):
    """Rank of a lock; no two of one rank are ever held together."""

    LIFE = 1
    """A client starts once and closes once."""
    ROUTES = 2
    """Routes: the lanes that a topic has."""
    DIRECT = 3
    """The way of a lone send past the buffer; held until its answer is there."""
    TRANSACTIONS = 4
    """Transactions under way that are asynchronous, and their outcomes."""
    LANES = 5
    """Messages that wait to be sent, their capacity, and the outcomes of sends."""
    LEAF = 6
    """Tables and counters; a holder of this lock calls no other part."""
    TABLE = 7
    """Writes of a client to a table, one after the other; held until an answer is there."""
    ADMIN = 8
    """The connections of an administrator's client; held until an answer is there."""


def _plain_lock(_rank: LockRank) -> threading.Lock:
    return threading.Lock()


make_lock: Callable[[LockRank], threading.Lock] = _plain_lock
"""Makes a lock of a rank: a plain one, which costs nothing more. Tests put one here that looks."""


def ranked_lock(rank: LockRank) -> threading.Lock:
    """Return a lock at its place in the order."""
    return make_lock(rank)
