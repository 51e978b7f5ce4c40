"""Rights of console users by the access list, to grey out refused actions. Pure."""

import datetime

import msgspec

from mqmesh.protocol.commands import Right
from mqmesh.security.access_list import AccessList, Action, UserRole
from mqmesh.security.permissions import Permissions

_ROLES = {
    Right.NONE: frozenset(UserRole),
    Right.VIEW: frozenset({UserRole.VIEW, UserRole.ADMIN}),
    Right.VIEW_OWN: frozenset({UserRole.VIEW, UserRole.ADMIN}),
    Right.ADMIN: frozenset({UserRole.ADMIN}),
    Right.ADMIN_OWN: frozenset({UserRole.ADMIN}),
}
_OWN = frozenset({Right.VIEW_OWN, Right.ADMIN_OWN})


class UserRights:
    """Rights of one user.

    Args:
        name: Name of the mqmesh user; "" where security is off, so that everything is allowed.
        access_list: In force; None where it is not known: then nothing is greyed out.
        today: By UTC.
    """

    def __init__(self, name: str, access_list: AccessList | None, today: datetime.date) -> None:
        self.name = name
        self._permissions = None if access_list is None else Permissions(access_list, today)

    def may(self, right: Right, topic: str = "", group: str = "") -> bool:
        """Return False if brokers would refuse.

        Args:
            right: Right that a command needs.
            topic: Topic of the command; "" for none in particular.
            group: Consumer group of the command.
        """
        if self._permissions is None:
            return True
        user = self._permissions.user(self.name)
        if user is None:
            return False
        if user.role in _ROLES.get(right, ()):
            return True
        if right is Right.PUB:
            return self._of_topic(Action.PUB, topic)
        if right is Right.SUB or (right in _OWN and bool(topic or group)):
            is_ours = not group or self._permissions.group(self.name, Action.SUB, group).allowed
            return is_ours and self._of_topic(Action.SUB, topic)
        return False

    def reads_messages(self) -> bool:
        """Return False for a user who may read no topic: role ``view`` alone reads no messages."""
        if self._permissions is None:
            return True
        user = self._permissions.user(self.name)
        if user is None:
            return False
        return user.role is UserRole.ADMIN or any(Action.SUB in one.actions for one in user.allow)

    def _of_topic(self, action: Action, topic: str) -> bool:
        assert self._permissions is not None
        return not topic or self._permissions.topic(self.name, action, topic).allowed


class RightsAnswer(msgspec.Struct, frozen=True):
    """Rights of a user, and whether name servers let the user see everything.

    Attributes:
        rights: To grey out.
        has_view: The user may see everything.
    """

    rights: UserRights
    has_view: bool
