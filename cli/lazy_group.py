"""Groups with commands whose modules are loaded when they are called."""

import importlib
from collections.abc import Mapping
from typing import Any

import click

from .names import check_texts


class LazyGroup(click.Group):
    """A group with commands that are loaded when they are needed, beside those that it has.

    Args:
        places: Command -> module under this folder, and the name of the command in it. In help they
            stand in this order, behind the others.
        hidden: The same of commands that people need not know of.
    """

    def __init__(
        self,
        *args: Any,
        places: Mapping[str, tuple[str, str]],
        hidden: Mapping[str, tuple[str, str]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._places = places
        self._hidden = hidden or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names of the commands."""
        return [*super().list_commands(ctx), *self._places]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns the command of a name; None if there is none."""
        place = self._places.get(cmd_name) or self._hidden.get(cmd_name)
        if place is None:
            return super().get_command(ctx, cmd_name)
        module = importlib.import_module(f".{place[0]}", __package__)
        command = getattr(module, place[1])
        assert isinstance(command, click.Command)
        check_texts(command, self.name or "")
        return command
