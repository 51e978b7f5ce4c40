"""Settings of the consumer groups of this broker; kept in the log, see ``state_log``.

A group gets default settings by itself when it is first used, unless that is switched off
(``auto_create_subscription_group``).
"""

from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from mqmesh.errors import (
    GroupNotFound,
    InvalidArgument,
    NoPermission,
    SystemBusy,
)
from mqmesh.namespaces import namespace_of
from mqmesh.protocol.delivery import DeliveryMode
from mqmesh.protocol.groups import BY_CONSUMER, GroupConfig, check_client_group, only_looks
from mqmesh.protocol.membership import MessageModel
from mqmesh.protocol.policies import check_group_policies
from mqmesh.roles.broker.state_records import GroupRecord, GroupSettings
from mqmesh.security.quotas import Quotas

_TAKES: Final[dict[str, str]] = {
    DeliveryMode.QUEUE: "use PushConsumer, PullConsumer or `mqmesh consume`",
    DeliveryMode.MESSAGE: 'use SimpleConsumer, PushConsumer with delivery = "message", or '
    "`mqmesh receive`",
    DeliveryMode.FIFO: 'use SimpleConsumer or PushConsumer with delivery = "fifo"',
}


class GroupTable:
    """Settings of all groups.

    Args:
        most: Groups allowed.
        auto_create: A group that is used gets settings by itself.
        busy_retry_after_ms: Retry delay of clients when there are too many.
        quotas: Limits of namespaces.

    Attributes:
        auto_create: May be changed.
        changed: Groups whose settings are to be written into the log; see ``state_log``.
        on_deleting: Called with a group that is about to go; what it raises keeps the group.
        on_deleted: Called with a group that is no more.
    """

    def __init__(
        self,
        most: int = 100_000,
        *,
        auto_create: bool = True,
        busy_retry_after_ms: int = 100,
        quotas: Quotas | None = None,
    ) -> None:
        self._most = most
        self.auto_create = auto_create
        self._busy_retry_after_ms = busy_retry_after_ms
        self._quotas = quotas or Quotas()
        self._used: Counter[str] = Counter()
        self._groups: dict[str, GroupConfig] = {}
        self._restricted: dict[str, GroupConfig] = {}
        self.changed: dict[str, None] = {}
        self.on_deleting: Callable[[str], None] = _nothing
        self.on_deleted: Callable[[str], None] = _nothing

    def __len__(self) -> int:
        return len(self._groups)

    def get(self, group: str) -> GroupConfig | None:
        """Settings of a group, or None."""
        return self._groups.get(group)

    def settings(self, group: str) -> GroupConfig:
        """Return the settings of a group, or those by default."""
        return self._groups.get(group) or GroupConfig(group)

    def names(self) -> list[str]:
        """Groups with settings, sorted."""
        return sorted(self._groups)

    def check_pull(self, group: str, model_of: Callable[[str], str]) -> GroupConfig | None:
        """Check that members of a group may pull; cheap, for each pull asks.

        Args:
            group: Consumer group.
            model_of: Returns the message model of its members.

        Returns:
            Settings that may hold back what it is handed out, see ``GroupLimits``; mostly None.

        Raises:
            GroupNotFound: It has no settings, and gets none by itself.
            NoPermission: Its settings say no.
        """
        config = self._restricted.get(group)
        if config is not None:
            self.check_consumes(group)
            self.check_delivery(group, DeliveryMode.QUEUE)
            broadcasting = model_of(group) == MessageModel.BROADCASTING
            if broadcasting and not config.consume_broadcast_enable:
                raise NoPermission(
                    f"consumer group {group!r} may not consume with {MessageModel.BROADCASTING} "
                    "(consume_broadcast_enable)"
                )
        elif not self.auto_create and group not in self._groups and not only_looks(group):
            raise _not_found(group)
        return config

    def limits_of(self, group: str) -> GroupConfig | None:
        """Return settings of a group that may hold back what it is handed out; mostly None."""
        return self._restricted.get(group)

    def limited(self) -> list[GroupConfig]:
        """Return settings of all groups that have limits, or had."""
        return list(self._restricted.values())

    def check_delivery(self, group: str, delivery: str) -> None:
        """Check that a member shares messages as its group does.

        Raises:
            NoPermission: Others of the group share them in another way.
        """
        if sentence := self.other_delivery(group, delivery):
            raise NoPermission(sentence)

    def other_delivery(self, group: str, delivery: str) -> str:
        """Return why a member does not share messages as its group does; empty if it does."""
        config = self._groups.get(group)
        wanted: str = DeliveryMode.QUEUE if config is None else config.delivery
        if delivery == wanted or only_looks(group):
            return ""
        return (
            f"consumer group {group!r} has delivery = {wanted}, this member has {delivery}: "
            f"{_TAKES[wanted]}, or change the group while it has no members"
        )

    def check_acknowledges(self, group: str) -> GroupConfig:
        """Check that members of a group acknowledge each message; return its settings.

        Raises:
            GroupNotFound: It has no settings: no member has come yet.
            InvalidArgument: Its members share queues.
        """
        config = self._groups.get(group)
        if config is None:
            raise GroupNotFound(f"no consumer group {group!r}; its members have not joined yet")
        # The heartbeat says it as a matter of rights; here it is one of the request.
        if config.delivery == DeliveryMode.QUEUE and not only_looks(group):
            raise InvalidArgument(self.other_delivery(group, DeliveryMode.MESSAGE))
        return config

    def check_consumes(self, group: str) -> None:
        """Check that members of a group may get messages.

        Raises:
            NoPermission: Its settings say no.
        """
        config = self._restricted.get(group)
        if config is not None and not config.consume_enable:
            raise NoPermission(f"consumer group {group!r} may not consume (consume_enable)")

    def retry_limit(self, group: str, wanted: int) -> int:
        """Return how often a message may be sent back: by the group's settings, else as wanted."""
        config = self._groups.get(group)
        if config is None or config.retry_max_times == BY_CONSUMER:
            return wanted
        return config.retry_max_times

    def makes(self, group: str) -> bool:
        """Return whether ``note_used`` would make settings for a group."""
        return self.auto_create and group not in self._groups and not only_looks(group)

    def note_used(self, group: str, delivery: str = DeliveryMode.QUEUE) -> None:
        """A group is used: gives it settings if it has none.

        Args:
            group: Checked by ``check_client_group``.
            delivery: Of its first member.

        Raises:
            GroupNotFound: Groups get no settings by themselves.
            SystemBusy: There are too many groups.
        """
        if group in self._groups or only_looks(group):
            return
        if not self.auto_create:
            raise _not_found(group)
        self._set(GroupConfig(group, delivery=delivery))

    def update(
        self,
        config: GroupConfig,
        *,
        must_exist: bool = False,
        must_be_new: bool = False,
    ) -> bool:
        """Makes or changes settings because an administrator wants it.

        Args:
            config: Wanted.
            must_exist: Refuse to create.
            must_be_new: Refuse to change.

        Returns:
            True when anything changed.

        Raises:
            InvalidArgument: The name is illegal or reserved, a policy or delivery mode makes no
                sense, or the group exists already.
            GroupNotFound: ``must_exist``, and it does not.
            SystemBusy: There are too many groups.
        """
        check_client_group(config.group)
        check_group_policies(config)
        if config.delivery not in tuple(DeliveryMode):
            raise InvalidArgument(
                f"delivery = {config.delivery!r} of group {config.group!r} is none of "
                f"{', '.join(DeliveryMode)}"
            )
        old = self._groups.get(config.group)
        if must_exist and old is None:
            raise _not_found(config.group)
        if must_be_new and old is not None:
            raise InvalidArgument(f"consumer group {config.group!r} exists already")
        if old == config:
            return False
        self._set(config)
        return True

    def delete(self, group: str) -> bool:
        """Forgets a group, and has all forget it who know of it; False if it had no settings."""
        self.on_deleting(group)
        had_settings = self._forget(group)
        self.on_deleted(group)
        return had_settings

    def _forget(self, group: str) -> bool:
        if not self._remove(group):
            return False
        self.changed[group] = None
        return True

    def state_keys(self) -> list[str]:
        """Names of all groups."""
        return list(self._groups)

    def records_of(self, group: str) -> tuple[GroupRecord]:
        """Return the state record of a group."""
        config = self._groups.get(group)
        if config is None:
            return (GroupRecord(group),)
        return (GroupRecord(group, GroupSettings(*msgspec.structs.astuple(config)[1:])),)

    def apply(self, record: GroupRecord) -> None:
        """Takes over what a record says."""
        self._remove(record.group)
        if record.settings is not None:
            self._put(GroupConfig(record.group, *msgspec.structs.astuple(record.settings)))

    def _set(self, config: GroupConfig) -> None:
        if config.group not in self._groups and len(self._groups) >= self._most:
            raise SystemBusy(
                f"this broker keeps {self._most} consumer groups, no more "
                "(max_subscription_groups)",
                retry_after_ms=self._busy_retry_after_ms,
            )
        namespace = namespace_of(config.group)
        if config.group not in self._groups and namespace in self._quotas.namespaces:
            used = {"groups": self._used[namespace]}
            self._quotas.check_namespace(namespace, used, {"groups": 1})
        self._put(config)
        self.changed[config.group] = None

    def _remove(self, group: str) -> bool:
        """Take a group out of the table; False if it is not there."""
        self._restricted.pop(group, None)
        if self._groups.pop(group, None) is None:
            return False
        self._used -= Counter([namespace_of(group)])
        return True

    def _put(self, config: GroupConfig) -> None:
        self._used[namespace_of(config.group)] += config.group not in self._groups
        self._groups[config.group] = config
        self._restricted.pop(config.group, None)
        if (
            not (config.consume_enable and config.consume_broadcast_enable)
            or config.paused_until
            or config.paused_topics
            or config.max_messages_per_s
            or config.delivery != DeliveryMode.QUEUE
        ):
            self._restricted[config.group] = config


def _not_found(group: str) -> GroupNotFound:
    return GroupNotFound(
        f"no consumer group {group[:300]!r}; create it with "
        f"`mqmesh group create` (auto_create_subscription_group is off, or it was never used)"
    )


def _nothing(group: str) -> None:
    """Do nothing: nobody knows the groups of this table."""
