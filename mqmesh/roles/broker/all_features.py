"""The features of a broker, in the order in which their hooks are called. Read this first."""

from typing import Final

import msgspec

from mqmesh.protocol.codes import RequestCode
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.features.admin.feature import ADMIN
from mqmesh.roles.broker.features.asking.feature import ASKING
from mqmesh.roles.broker.features.delays.feature import DELAYS
from mqmesh.roles.broker.features.groups.feature import GROUPS
from mqmesh.roles.broker.features.pulls.feature import PULLS
from mqmesh.roles.broker.features.queries.feature import QUERIES
from mqmesh.roles.broker.features.replicas.feature import REPLICAS
from mqmesh.roles.broker.features.replies.feature import REPLIES
from mqmesh.roles.broker.features.retries.feature import RETRIES
from mqmesh.roles.broker.features.sends.feature import SENDS
from mqmesh.roles.broker.features.snapshots.feature import SNAPSHOTS
from mqmesh.roles.broker.features.transactions.feature import TRANSACTIONS

FEATURES: Final[tuple[Feature, ...]] = (
    SNAPSHOTS,
    ADMIN,
    QUERIES,
    TRANSACTIONS,  # decisions of a turn become sends of it
    SENDS,  # sends of a turn wake pulls
    PULLS,
    REPLIES,
    ASKING,
    GROUPS,
    RETRIES,
    DELAYS,  # told of what the turn stored
    REPLICAS,  # sent what the turn stored
)

_READS: Final[frozenset[RequestCode]] = frozenset(
    {
        RequestCode.GET_TOPIC_CONFIG,
        RequestCode.GET_TOPIC_STATS_INFO,
        RequestCode.VIEW_MESSAGE,
        RequestCode.QUERY_MESSAGE,
        RequestCode.QUERY_MESSAGE_BY_ID,
        RequestCode.PULL_MESSAGE,
        RequestCode.QUERY_QUEUE_BOUNDS,
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
        RequestCode.QUERY_CONSUMER_OFFSET,
        RequestCode.GET_CONSUME_STATS,
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
    }
)


def _reads_of(feature: Feature) -> Feature:
    """Return a feature with its reads alone, and with all of its hooks and figures."""
    commands = {code: one for code, one in feature.commands.items() if code in _READS}
    return msgspec.structs.replace(feature, commands=commands)


FOLLOWER_FEATURES: Final = (
    _reads_of(ADMIN),
    _reads_of(QUERIES),
    _reads_of(PULLS),
    _reads_of(GROUPS),
)
"""What a follower does of them: it reads."""
