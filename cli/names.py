"""Names of topics and groups as arguments: the shell completes them by asking the cluster."""

import math
from abc import abstractmethod
from pathlib import Path
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from mqmesh.errors import MQMeshError

from .credentials import choose_cluster
from .options import DEFAULT_DATA_DIR

MAX_INTEGER: Final = 2**63 - 1
PATIENCE_MS: Final = 1_000
"""A shell that waits for a cluster that is not there must not seem to hang."""


class TextArgument(click.types.StringParamType):
    """An argument that is a text, not a file's name: it is UTF-8 at terminals of any encoding."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the text if it has a UTF-8 form."""
        text = super().convert(value, param, ctx)
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail(f"{text!r} is not valid UTF-8", param, ctx)
        return text


class Integer(click.IntRange):
    """A whole number, which is refused where the wire has no room for it."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the number."""
        number = super().convert(value, param, ctx)
        if abs(number) > MAX_INTEGER:
            self.fail(f"{number} is more than {MAX_INTEGER}", param, ctx)
        return number


class Number(click.FloatRange):
    """A number; ``nan``, which no comparison finds out of bounds, and infinity are none."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the number."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a number", param, ctx)
        return number


class ClusterName(TextArgument):
    """A name that the cluster knows."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Returns the names that begin so; none when no name server answers."""
        given = [one.params for one in (ctx, ctx.find_root())]
        namesrv = next((one["namesrv"] for one in given if one.get("namesrv")), None)
        try:
            root = ctx.find_root().params
            context, namespace = root.get("context_name"), root.get("namespace")
            folder = Path(DEFAULT_DATA_DIR)
            found = self.known(choose_cluster(namesrv, context, folder, namespace))
        except (MQMeshError, OSError):
            return []
        # A foreign broker may announce anything; no shell should be given that.
        names = filter(str.isprintable, sorted(found))
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]

    @abstractmethod
    def known(self, namesrv: str) -> set[str]:
        """Returns all names of the kind."""


class TopicName(ClusterName):
    """The name of a topic."""

    def known(self, namesrv: str) -> set[str]:
        """Returns all topics of users."""
        from mqmesh.message import is_system_topic
        from mqmesh.sdk.admin.admin import AdminClient

        with AdminClient(namesrv, timeout_ms=PATIENCE_MS) as admin:
            return {name for name in admin.topics() if not is_system_topic(name)}


class GroupName(ClusterName):
    """The name of a consumer group."""

    def known(self, namesrv: str) -> set[str]:
        """Returns all consumer groups."""
        from mqmesh.sdk.admin.group_admin import GroupAdmin

        with GroupAdmin(namesrv, timeout_ms=PATIENCE_MS) as admin:
            return {one.config.group for found in admin.groups().values() for one in found}


def _bounds(kind: click.ParamType[Any]) -> tuple[Any, ...]:
    if isinstance(kind, click.IntRange | click.FloatRange):
        return kind.min, kind.max, kind.min_open, kind.max_open, kind.clamp
    return ()


_TYPES: Final = {
    "topic": TopicName,
    "group": GroupName,
    "source": GroupName,
    "target": GroupName,
}
_NAMED: Final = {"topic": TopicName, "group": GroupName}
"""Type of the argument ``NAME``, by the group of commands."""


def check_texts(command: click.Command, inside: str = "") -> None:
    """Adds checks to all text arguments of a command and of its subcommands.

    Numbers get a name for errors in place of click's "a valid integer range".

    Args:
        command: Command to check.
        inside: Name of the group of commands that it belongs to.
    """
    for param in command.params:
        if type(param.type) is click.types.StringParamType:
            kind = _NAMED.get(inside) if param.name == "name" else _TYPES.get(param.name or "")
            param.type = (kind or TextArgument)()
        elif isinstance(param.type, click.types.IntParamType):
            param.type = Integer(*_bounds(param.type))
        elif isinstance(param.type, click.types.FloatParamType):
            param.type = Number(*_bounds(param.type))
    for inner in getattr(command, "commands", {}).values():
        check_texts(inner, command.name or "")
