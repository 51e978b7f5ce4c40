"""Settings of the consumer groups of this broker. Pure; the server loads and saves it.

A group gets default settings by itself when it is first used, unless the broker is told
otherwise (``auto_create_subscription_group``). Kept as a JSON document like the topics.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from mqmesh.errors import (
    CorruptRecord,
    GroupNotFound,
    InvalidArgument,
    NoPermission,
    SystemBusy,
)
from mqmesh.protocol.groups import BY_CONSUMER, LOOK_GROUP_PREFIX, GroupConfig
from mqmesh.protocol.membership import MessageModel
from mqmesh.protocol.route import DataVersion
from mqmesh.roles.broker.features.groups.consumer_groups import check_client_group
from mqmesh.units import TimestampMs

DOCUMENT_VERSION: Final = 1
TOOL_GROUPS: Final = frozenset({"mqmesh-query"})
"""Under these, tools of mqmesh pull and commit nothing; they are no groups of anybody."""


class _SavedGroup(msgspec.Struct, frozen=True):
    consume_enable: bool = True
    consume_broadcast_enable: bool = True
    retry_max_times: int = BY_CONSUMER
    notify_consumer_ids_changed_enable: bool = True


class _GroupsDocument(msgspec.Struct, frozen=True):
    version: int
    data_version: DataVersion
    groups: dict[str, _SavedGroup]


class GroupTable:
    """Settings of all groups. Every change gives the table a new version.

    Args:
        most: Groups allowed.
        auto_create: A group that is used gets settings by itself.
        busy_retry_after_ms: What clients are told to wait when there are too many.
    """

    def __init__(
        self, most: int = 100_000, *, auto_create: bool = True, busy_retry_after_ms: int = 100
    ) -> None:
        self._most = most
        self._auto_create = auto_create
        self._busy_retry_after_ms = busy_retry_after_ms
        self._groups: dict[str, GroupConfig] = {}
        self._restricted: dict[str, GroupConfig] = {}
        self.version = DataVersion()

    def __len__(self) -> int:
        return len(self._groups)

    def get(self, group: str) -> GroupConfig | None:
        """Settings of a group, or None."""
        return self._groups.get(group)

    def names(self) -> list[str]:
        """Groups with settings, sorted."""
        return sorted(self._groups)

    def check_pull(self, group: str, model_of: Callable[[str], str]) -> None:
        """Tells whether members of a group may pull; cheap, for it is asked with every pull.

        Args:
            group: Consumer group.
            model_of: Tells the message model of its members.

        Raises:
            GroupNotFound: It has no settings, and gets none by itself.
            NoPermission: Its settings say no.
        """
        config = self._restricted.get(group)
        if config is not None:
            if not config.consume_enable:
                raise NoPermission(f"consumer group {group!r} may not consume (consume_enable)")
            broadcasting = model_of(group) == MessageModel.BROADCASTING
            if broadcasting and not config.consume_broadcast_enable:
                raise NoPermission(
                    f"consumer group {group!r} may not consume with {MessageModel.BROADCASTING} "
                    "(consume_broadcast_enable)"
                )
        elif not self._auto_create and group not in self._groups and not _is_tool(group):
            raise _not_found(group)

    def retry_limit(self, group: str, wanted: int) -> int:
        """How often a message may be sent back: as the group's settings say, else as wanted."""
        config = self._groups.get(group)
        if config is None or config.retry_max_times == BY_CONSUMER:
            return wanted
        return config.retry_max_times

    def note_used(self, group: str, now_ms: TimestampMs) -> bool:
        """A group is used: gives it settings if it has none.

        Args:
            group: Checked by ``check_client_group``.
            now_ms: Wall clock.

        Returns:
            True when they are new.

        Raises:
            GroupNotFound: Groups get no settings by themselves.
            SystemBusy: There are too many groups.
        """
        if group in self._groups or _is_tool(group):
            return False
        if not self._auto_create:
            raise _not_found(group)
        self._set(GroupConfig(group), now_ms)
        return True

    def update(
        self,
        config: GroupConfig,
        now_ms: TimestampMs,
        *,
        must_exist: bool = False,
        must_be_new: bool = False,
    ) -> bool:
        """Makes or changes settings because an administrator wants it.

        Args:
            config: Wanted.
            now_ms: Wall clock.
            must_exist: Refuse to create.
            must_be_new: Refuse to change.

        Returns:
            True when anything changed.

        Raises:
            InvalidArgument: The name is illegal or reserved, or the group exists already.
            GroupNotFound: ``must_exist``, and it does not.
            SystemBusy: There are too many groups.
        """
        check_client_group(config.group)
        old = self._groups.get(config.group)
        if must_exist and old is None:
            raise _not_found(config.group)
        if must_be_new and old is not None:
            raise InvalidArgument(f"consumer group {config.group!r} exists already")
        if old == config:
            return False
        self._set(config, now_ms)
        return True

    def delete(self, group: str, now_ms: TimestampMs) -> bool:
        """Forgets settings; returns False if there were none."""
        if self._groups.pop(group, None) is None:
            return False
        self._restricted.pop(group, None)
        self._changed(now_ms)
        return True

    def dump(self) -> bytes:
        """The table as a JSON document."""
        groups = {
            name: _SavedGroup(*msgspec.structs.astuple(self._groups[name])[1:])
            for name in self.names()
        }
        document = _GroupsDocument(DOCUMENT_VERSION, self.version, groups)
        return msgspec.json.format(msgspec.json.encode(document), indent=1)

    def load(self, document: bytes) -> None:
        """Takes over what ``dump`` wrote.

        Raises:
            CorruptRecord: It is not that.
        """
        try:
            saved = msgspec.json.decode(document, type=_GroupsDocument)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise CorruptRecord(f"the consumer groups cannot be read: {error}") from error
        if saved.version != DOCUMENT_VERSION:
            raise CorruptRecord(
                f"the consumer groups have version {saved.version}; this broker reads version "
                f"{DOCUMENT_VERSION}"
            )
        self._groups.clear()
        self._restricted.clear()
        for name, one in saved.groups.items():
            self._put(GroupConfig(name, *msgspec.structs.astuple(one)))
        self.version = saved.data_version

    def _set(self, config: GroupConfig, now_ms: TimestampMs) -> None:
        if config.group not in self._groups and len(self._groups) >= self._most:
            raise SystemBusy(
                f"this broker keeps {self._most} consumer groups, no more "
                "(max_subscription_groups)",
                retry_after_ms=self._busy_retry_after_ms,
            )
        self._put(config)
        self._changed(now_ms)

    def _put(self, config: GroupConfig) -> None:
        self._groups[config.group] = config
        self._restricted.pop(config.group, None)
        if not (config.consume_enable and config.consume_broadcast_enable):
            self._restricted[config.group] = config

    def _changed(self, now_ms: TimestampMs) -> None:
        self.version = DataVersion(now_ms, self.version.counter + 1)


def _is_tool(group: str) -> bool:
    return group in TOOL_GROUPS or group.startswith(LOOK_GROUP_PREFIX)


def _not_found(group: str) -> GroupNotFound:
    return GroupNotFound(
        f"consumer group {group[:300]!r} does not exist on this broker; create it with "
        f"`mqmesh group create` (auto_create_subscription_group is off, or it was never used)"
    )
