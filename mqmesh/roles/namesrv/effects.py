"""Effects of the name server's tables: actions that ``server.py`` carries out."""

import msgspec


class Announce(msgspec.Struct, frozen=True):
    """Publish a route-change hint.

    Attributes:
        brokers: Broker groups that came, went or changed.
        topics: Topics concerned; empty when they are too many to list, so any may be.
    """

    brokers: frozenset[str]
    topics: frozenset[str]


class Persist(msgspec.Struct, frozen=True):
    """Save what must outlive a restart: it has changed."""


Effect = Announce | Persist
