"""Named clusters that commands find: the file behind `mqmesh context`."""

import codecs
import os
from pathlib import Path
from typing import Annotated, Final

import msgspec

from mqmesh.errors import ConfigError
from mqmesh.sdk.client.options import DEFAULT_NAMESRV, namesrv_addresses

VERSION: Final = 1
MAX_CONTEXTS: Final = 1_000
NAMESRV_VARIABLE: Final = "MQMESH_NAMESRV"
MODE: Final = 0o600
"""The file says where clusters are, and where keys to them are kept."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]


class Contexts(msgspec.Struct, forbid_unknown_fields=True):
    """Content of the file of contexts.

    Attributes:
        version: Version of the format.
        current: Name of the context that commands use; empty for none.
        contexts: Name servers by name.
        credentials: Absolute path of a file with keys, by name; those without need none.
        namespaces: Namespace of topics and groups, by name; those without have none.
    """

    version: Annotated[int, msgspec.Meta(ge=VERSION, le=VERSION)] = VERSION
    current: str = ""
    contexts: Annotated[dict[Name, list[str]], msgspec.Meta(max_length=MAX_CONTEXTS)] = {}
    credentials: Annotated[dict[Name, str], msgspec.Meta(max_length=MAX_CONTEXTS)] = {}
    namespaces: Annotated[dict[Name, str], msgspec.Meta(max_length=MAX_CONTEXTS)] = {}

    def namesrv(self, name: str) -> str:
        """Returns the name servers of a context, as commands take them.

        Raises:
            ConfigError: There is no context of that name.
        """
        if name not in self.contexts:
            known = ", ".join(sorted(self.contexts)) or "there are none"
            raise ConfigError(f"no context {name!r} ({known}); `mqmesh context add` makes one")
        return ";".join(self.contexts[name])


def contexts_file() -> Path:
    """Returns the path of the contexts: ``mqmesh/contexts.json`` below ``XDG_CONFIG_HOME``."""
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    # A relative one is to be ignored: https://specifications.freedesktop.org/basedir-spec/
    base = Path(folder) if folder.startswith("/") else Path.home() / ".config"
    return base / "mqmesh" / "contexts.json"


def load_contexts() -> Contexts:
    """Reads the file; without one there are no contexts.

    Raises:
        ConfigError: The file cannot be read.
    """
    path = contexts_file()
    try:
        return msgspec.json.decode(path.read_bytes().removeprefix(codecs.BOM_UTF8), type=Contexts)
    except FileNotFoundError:
        return Contexts()
    except (OSError, msgspec.DecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(f"{path}: {reason}; mend or remove it") from error


def save_contexts(contexts: Contexts) -> None:
    """Writes the file, as a whole; only its owner may read it.

    Raises:
        ConfigError: The file cannot be written, or there are too many contexts.
    """
    if len(contexts.contexts) > MAX_CONTEXTS:
        raise ConfigError(f"{MAX_CONTEXTS} contexts are there already; remove one")
    path = contexts_file()
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new.unlink(missing_ok=True)
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE)
        with os.fdopen(file, "wb") as out:
            out.write(msgspec.json.format(msgspec.json.encode(contexts)) + b"\n")
            out.flush()
            os.fsync(out.fileno())
        new.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error


def find_cluster(namesrv: str | None, context: str | None) -> tuple[str, str, str]:
    """Return the name servers for a command, and the keys and the namespace of their context.

    Args:
        namesrv: Value of ``--namesrv``.
        context: ``--context``.

    Returns:
        The given name servers; else those of the variable ``MQMESH_NAMESRV``; else those
        of the context in use; else those of `mqmesh up`. A path, and the name of a namespace; ""
        where no context says one.

    Raises:
        ConfigError: Both options are given, or there is no such context.
    """
    if namesrv is not None and context is not None:
        raise ConfigError("--namesrv and --context exclude each other")
    if namesrv is None and context is None:
        namesrv = os.environ.get(NAMESRV_VARIABLE) or None
    if namesrv is not None:
        namesrv_addresses(namesrv)
        return namesrv, "", ""
    contexts = load_contexts()
    name = contexts.current if context is None else context
    if not name:
        return DEFAULT_NAMESRV, "", ""
    keys, namespace = contexts.credentials.get(name, ""), contexts.namespaces.get(name, "")
    return contexts.namesrv(name), keys, namespace
