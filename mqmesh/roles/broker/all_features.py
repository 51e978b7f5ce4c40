"""The features of a broker, in the order in which their hooks are called. Read this first."""

from typing import Final

from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.features.admin.feature import ADMIN
from mqmesh.roles.broker.features.delays.feature import DELAYS
from mqmesh.roles.broker.features.groups.feature import GROUPS
from mqmesh.roles.broker.features.pulls.feature import PULLS
from mqmesh.roles.broker.features.queries.feature import QUERIES
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
    GROUPS,
    RETRIES,
    DELAYS,  # told of what the turn stored
)
