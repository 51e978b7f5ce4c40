"""Settings that must be equal at all replicas: those of the cluster above a replica's own. Pure.

The coordinator keeps them, as values by name. A replica uses its own value where the coordinator
has none. The number of copies that a send waits for is in the group's record from the beginning,
and counts here, too. A replica ignores a value that it cannot use, and reports it.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from mqmesh.coordination.interface import AckReplicas, SettingsRecord, SettingValue
from mqmesh.errors import ConfigError, InvalidArgument
from mqmesh.protocol.replication import HaSetting, SettingDiffers
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.ha_config import HaConfig

CLUSTER_WIDE: Final = ("failsafe", "lease_ttl_ms", "min_in_sync_replicas", "replica_lag_max_ms")
"""Settings that the cluster may set, names of ``HaConfig``."""
_ACKS: Final = "ack_replicas"


class ClusterSettings:
    """The settings of one replica, with those of its cluster above them.

    Args:
        own: Of the replica.

    Attributes:
        config: Settings in force.
        version: Of the cluster's, 0 before they were read or if there are none.
        problems: Why some of them are not in force, by name.
    """

    def __init__(self, own: BrokerConfig) -> None:
        self._own = own
        self._record = SettingsRecord(0)
        self._mode: AckReplicas | None = None
        self.config = own
        self.problems: dict[str, str] = {}

    @property
    def version(self) -> int:
        """Version of the cluster's settings, 0 if none were read."""
        return self._record.version

    def check(self, settings: dict[str, SettingValue]) -> None:
        """Check that this replica could use settings.

        Raises:
            InvalidArgument: Says which it could not, and why.
        """
        tried = ClusterSettings(self._own)
        tried.on_mode(self.config.ha.ack_replicas)
        tried.take(SettingsRecord(1, settings))
        if tried.problems:
            raise InvalidArgument("; ".join(tried.problems.values()))

    def take(self, record: SettingsRecord) -> bool:
        """The cluster's settings, as they were read; True if they are others than before."""
        if record == self._record:
            return False
        self._record = record
        self._make()
        return True

    def on_mode(self, mode: AckReplicas) -> None:
        """The group's record says how many copies a send waits for."""
        if mode is not self._mode:
            self._mode = mode
            self._make()

    def in_force(self) -> list[HaSetting]:
        """Return the settings that must be equal everywhere, as they are in force here."""
        return [HaSetting(name, _text_of(self.config.ha, name)) for name in (_ACKS, *CLUSTER_WIDE)]

    def differing(self) -> list[SettingDiffers]:
        """The replica's own settings that are not in force, since the cluster has others."""
        found = []
        for one in self.in_force():
            own = _text_of(self._own.ha, one.name)
            if own != one.value:
                found.append(SettingDiffers(one.name, own, one.value))
        return found

    def _make(self) -> None:
        self.config, self.problems = self._own, {}
        if self._mode is not None and self._mode is not self._own.ha.ack_replicas:
            ha = self._own.ha
            # Own settings may only fit together with another mode.
            most = ha.min_in_sync_replicas if self._mode is AckReplicas.ALL else 1
            changed = msgspec.structs.replace(
                ha, ack_replicas=self._mode, min_in_sync_replicas=most
            )
            self._put(_ACKS, changed)
        for name, value in self._record.settings.items():
            if name not in CLUSTER_WIDE:
                continue  # a newer program's
            is_idle = name == "min_in_sync_replicas" and self._mode not in (None, AckReplicas.ALL)
            if is_idle:
                continue  # it says something with all only
            try:
                self._put(name, _with(self.config.ha, name, value))
            except ConfigError as error:
                self.problems[name] = str(error)

    def _put(self, name: str, ha: HaConfig) -> None:
        try:
            self.config = msgspec.structs.replace(self.config, ha=ha)
        except ConfigError as error:
            self.problems[name] = str(error)


def settings_of(record: SettingsRecord) -> list[HaSetting]:
    """Return a cluster's settings, as answers list them."""
    return [
        HaSetting(name, msgspec.json.encode(value).decode().strip('"'))
        for name, value in sorted(record.settings.items())
    ]


def checked(settings: Sequence[HaSetting]) -> dict[str, SettingValue]:
    """Return the cluster settings that an administrator wants, as they are kept.

    Raises:
        InvalidArgument: Names the setting, its bounds, or those that there are.
    """
    found: dict[str, SettingValue] = {}
    for one in settings:
        if one.name not in CLUSTER_WIDE:
            raise InvalidArgument(
                f"{one.name!r} is no setting of a cluster; there are {', '.join(CLUSTER_WIDE)}"
            )
        try:
            found[one.name] = getattr(_with(HaConfig(), one.name, one.value), one.name)
        except ConfigError as error:
            raise InvalidArgument(str(error)) from error
    return found


def _with(ha: HaConfig, name: str, value: SettingValue) -> HaConfig:
    try:
        values = {**msgspec.to_builtins(ha), name: value}
        return msgspec.convert(values, HaConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name} = {value!r}: {error}") from error


def _text_of(ha: HaConfig, name: str) -> str:
    return msgspec.json.encode(getattr(ha, name)).decode().strip('"')
