"""Settings of a process that administrators change while it runs.

Only keys of a list may be changed. The role's own struct checks a value, as at the start. Changed
values are kept beside the process's data; the configuration file of the start stays as it is. Pure.
"""

import difflib
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec

from mqmesh.config import key_names, override_config
from mqmesh.errors import ConfigError, InvalidArgument
from mqmesh.protocol.admin import ConfigChange, ConfigEntry

VERSION: Final = 1
_SIMILARITY: Final = 0.5

_T = TypeVar("_T", bound=msgspec.Struct)


class Overrides(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The document of changed settings; see ``docs/storage-format.md``.

    Attributes:
        version: Version of the format.
        overrides: Dotted keys, and values as they stand behind ``--set key=``.
    """

    version: int = VERSION
    overrides: dict[str, str] = {}


class SettingsPlan(msgspec.Struct, Generic[_T], frozen=True):
    """An allowed change.

    Attributes:
        now: All settings after the change.
        overrides: Overrides to keep after the change.
        changes: Settings that get another value.
    """

    now: _T
    overrides: dict[str, str]
    changes: list[ConfigChange]


class LiveSettings(Generic[_T]):
    """The settings that are in force.

    Args:
        start: Settings that the process was started with.
        changeable: Dotted keys that may be changed.
        who: Name of the process, for sentences.

    Attributes:
        now: Settings in force.
        overrides: Settings that were changed; see ``Overrides``.
    """

    def __init__(self, start: _T, changeable: Sequence[str] = (), who: str = "") -> None:
        self._start = start
        self._changeable = frozenset(changeable)
        self._who = who
        self.now = start
        self.overrides: dict[str, str] = {}

    def load(self, document: bytes) -> None:
        """Takes over the settings that were kept before.

        Raises:
            ConfigError: The document is malformed, or a value fits no more; nothing was taken.
        """
        try:
            kept = msgspec.json.decode(document, type=Overrides)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"not understood: {error}") from error
        if kept.version != VERSION:
            raise ConfigError(f"version {kept.version}; this program reads {VERSION} only")
        self.take(kept.overrides)

    def take(self, overrides: dict[str, str]) -> None:
        """Puts settings in force that were changed before.

        Raises:
            ConfigError: A value fits no more; nothing was taken.
        """
        try:
            self.adopt(self.plan(overrides, ()))
        except InvalidArgument as error:
            raise ConfigError(str(error)) from error

    def dump(self, overrides: dict[str, str]) -> bytes:
        """Return the document that keeps changed settings."""
        return msgspec.json.format(msgspec.json.encode(Overrides(VERSION, overrides)))

    def plan(self, settings: Mapping[str, str], unset: Iterable[str]) -> SettingsPlan[_T]:
        """Checks a change; nothing happens yet.

        Args:
            settings: Dotted keys, and values as they stand behind ``--set key=``.
            unset: Keys that are to have the value of the start again.

        Raises:
            InvalidArgument: A key is unknown, or may not be changed, or a value is wrong.
        """
        unset = list(unset)
        for key in (*settings, *unset):
            self._check(key)
        both = set(settings) & set(unset)
        if both:
            raise InvalidArgument(f"{min(both)} is to be set and to be unset")
        kept = {key: text for key, text in self.overrides.items() if key not in unset}
        overrides = dict(sorted((kept | dict(settings)).items()))
        try:
            now = override_config(self._start, overrides, self._who)
        except ConfigError as error:
            raise InvalidArgument(str(error)) from error
        changes = [
            ConfigChange(key, _text(_value(self.now, key)), _text(_value(now, key)))
            for key in sorted(self._changeable)
            if _value(self.now, key) != _value(now, key)
        ]
        return SettingsPlan(now, overrides, changes)

    def adopt(self, plan: SettingsPlan[_T]) -> None:
        """Puts a change in force."""
        self.now, self.overrides = plan.now, plan.overrides

    def entries(self) -> list[ConfigEntry]:
        """Return all settings, in the order of the struct."""
        kind = type(self._start)
        usual = kind()
        return [
            ConfigEntry(
                key,
                value=_text(_value(self.now, key)),
                default=_text(_value(usual, key)),
                at_start=_text(_value(self._start, key)),
                is_overridden=key in self.overrides,
                is_changeable=key in self._changeable,
            )
            for key in key_names(kind)
        ]

    def _check(self, key: str) -> None:
        if key in self._changeable:
            return
        known = key_names(type(self._start))
        if key in known:
            raise InvalidArgument(
                f"{key} cannot be changed while {self._who} runs; change it in its configuration "
                "file, and start it again"
            )
        # A table's name may be forgotten, too.
        names = known + [one.rpartition(".")[2] for one in sorted(self._changeable)]
        near = difflib.get_close_matches(key, names, n=1, cutoff=_SIMILARITY)
        found = [one for one in known if near and (one == near[0] or one.endswith(f".{near[0]}"))]
        advice = (
            f"did you mean {found[0]}?"
            if found
            else f"may be: {', '.join(sorted(self._changeable))}"
        )
        raise InvalidArgument(f"unknown key {key[:100]}; {advice}")


def _value(config: msgspec.Struct, key: str) -> Any:
    return operator.attrgetter(key)(config)


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()
