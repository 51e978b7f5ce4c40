"""One group, one subscription: finds members that subscribe differently from their group. Pure.

Each queue is read by one member, with that member's expression. If another member wants other
messages, it misses those of the queues it has not got, and nobody notices; so the broker warns.
"""

import msgspec

from mqmesh.errors import InvalidArgument
from mqmesh.filtering.tags import ALL, SEPARATOR, parse_tags
from mqmesh.message import retry_topic
from mqmesh.protocol.membership import ConsumerData, Subscription
from mqmesh.protocol.pulling import ExpressionType

MOST_SHOWN: int = 4
"""Topics that a sentence names; a group may have a thousand."""
_SHOWN_LENGTH = 80


class _Wish(msgspec.Struct, frozen=True):
    """Subscription of a member, in a form in which equal ones are equal."""

    model: str
    topics: frozenset[tuple[str, str]]


class SubscriptionCheck:
    """The subscriptions of one group's members."""

    def __init__(self) -> None:
        self._wishes: dict[str, _Wish] = {}
        self._counts: dict[_Wish, int] = {}

    def note(self, client_id: str, data: ConsumerData) -> None:
        """A member says what it subscribes to."""
        self.drop(client_id)
        wish = self._wishes[client_id] = _wish(data)
        self._counts[wish] = self._counts.get(wish, 0) + 1

    def drop(self, client_id: str) -> None:
        """A member left."""
        wish = self._wishes.pop(client_id, None)
        if wish is not None:
            self._counts[wish] -= 1
            if not self._counts[wish]:
                del self._counts[wish]

    @property
    def differing(self) -> int:
        """Members that differ from the group."""
        return len(self._wishes) - max(self._counts.values(), default=0)

    def difference(self, client_id: str) -> str:
        """Describe how a member differs from its group; empty if it does not.

        The group's subscription is that of most members; of those that came first, if equally
        many want different ones.
        """
        if len(self._counts) < 2:
            return ""
        usual = max(self._counts, key=self._counts.__getitem__)
        own = self._wishes.get(client_id)
        if own is None or own == usual:
            return ""
        parts = [] if own.model == usual.model else [f"{own.model} instead of {usual.model}"]
        mine, theirs = dict(own.topics), dict(usual.topics)
        topics = sorted(
            topic for topic in mine.keys() | theirs.keys() if mine.get(topic) != theirs.get(topic)
        )
        parts += [_topic_difference(topic, mine, theirs) for topic in topics[:MOST_SHOWN]]
        if len(topics) > MOST_SHOWN:
            parts.append(f"and {len(topics) - MOST_SHOWN} more topics")
        return "; ".join(parts)


def _wish(data: ConsumerData) -> _Wish:
    retries = retry_topic(data.group)
    return _Wish(
        data.message_model,
        frozenset(
            (one.topic, _expression(one)) for one in data.subscriptions if one.topic != retries
        ),
    )


def _expression(subscription: Subscription) -> str:
    text, kind = subscription.expression, subscription.expression_type
    if kind != ExpressionType.TAG:
        return f"{kind} {text.strip()}"
    try:
        tags = parse_tags(text)
    except InvalidArgument:
        return text
    return ALL if tags is None else f" {SEPARATOR} ".join(sorted(tags))


def _topic_difference(topic: str, mine: dict[str, str], theirs: dict[str, str]) -> str:
    if topic not in theirs:
        return f"topic {topic}: the others do not subscribe to it"
    if topic not in mine:
        return f"topic {topic}: not subscribed to, the others are"
    return f"topic {topic}: {_short(mine[topic])} instead of {_short(theirs[topic])}"


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_LENGTH else text[:_SHOWN_LENGTH] + "…")
