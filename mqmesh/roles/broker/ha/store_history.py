"""Which roles a store may begin, by those that it had: nobody is served an older state. Pure.

A replica's store may lack what other replicas have. So it leads alone only where somebody says that
there are no others, by removing what remembers them.
"""

from pathlib import Path

import msgspec

from mqmesh.errors import ConfigError
from mqmesh.roles.broker.config import MASTER_ID, BrokerConfig
from mqmesh.roles.broker.ha.replica_state import NAME as REPLICA_STATE
from mqmesh.roles.broker.ha.replica_state import ReplicaState
from mqmesh.roles.broker.ha_config import HaMode
from mqmesh.roles.started_as import NAME as STARTED_AS


class StoreHistory(msgspec.Struct, frozen=True, kw_only=True):
    """The roles that a store had.

    Attributes:
        follows: It was a follower's last, in a group whose master is set.
        is_promoted: An administrator has made that follower the master since.
        replica: Of a store that was started in a group that elects its master.
    """

    follows: bool = False
    is_promoted: bool = False
    replica: ReplicaState | None = None

    @property
    def has_joined(self) -> bool:
        """Return whether it belonged to a group with elections, whose others may have more."""
        return self.replica is not None and self.replica.promised_epoch > 0

    def leads_alone(self, config: BrokerConfig) -> bool:
        """Returns True if a start with these settings takes sends, without an election."""
        is_master = config.broker_id == MASTER_ID or self.is_promoted
        return config.ha.mode is not HaMode.AUTO and is_master

    def follows_next(self, config: BrokerConfig) -> bool:
        """Returns ``follows`` as it is after a start with these settings."""
        if config.ha.mode is HaMode.AUTO:
            return self.follows and not self.has_joined
        return not self.leads_alone(config)

    def check_start(self, root: Path, config: BrokerConfig) -> None:
        """Checks that a start with these settings hides nothing.

        Args:
            root: Of the store.
            config: The settings.

        Raises:
            ConfigError: It would lead, and may lack what other replicas have.
        """
        alone = self.leads_alone(config)
        if alone and self.replica is not None and self.has_joined:
            raise ConfigError(
                f"{root} is the store of replica {self.replica.replica_id} of a group that elects "
                "its master, and alone it may lack what the others have: start it with ha.mode = "
                '"auto" (mqmesh up --replicas). If the others are gone for good, remove '
                f"{root / REPLICA_STATE}"
            )
        # The first replica may begin a group with what it has, see GroupBootstrap.
        begins = config.ha.mode is HaMode.AUTO and config.broker_id == 1 and not self.has_joined
        if self.follows and not self.is_promoted and (alone or begins):
            raise ConfigError(
                f"{root} is the store of a follower, and may lack what its master has: start the "
                "master's, or make this one the master (mqmesh ha promote). If the master is gone "
                f"for good, remove {root / STARTED_AS}"
            )
