"""Certificates of servers, read again when their files change."""

import logging
import os
import ssl
from collections.abc import Sequence
from typing import Final

from mqmesh.errors import ConfigError

LOOK_MS: Final = 1_000
"""Interval at which the files of certificates are looked at."""

_log = logging.getLogger(__name__)


class ServerCertificate:
    """Certificate and key of a server, from files.

    Args:
        cert_file: Setting ``tls_cert_file``.
        key_file: Setting ``tls_key_file``.
        protocols: Protocols of ALPN that clients may choose of; others do not ask.

    Attributes:
        context: Context for connections that come now.

    Raises:
        ConfigError: A file cannot be used.
    """

    def __init__(self, cert_file: str, key_file: str, *, protocols: Sequence[str] = ()) -> None:
        self._files = (cert_file, key_file)
        self._protocols = list(protocols)
        self._seen = file_marks(self._files)
        self.context = self._load()

    def look(self) -> None:
        """Read the files again if they changed; an unusable new pair is logged and not taken."""
        found = file_marks(self._files)
        if found == self._seen:
            return
        self._seen = found
        try:
            self.context = self._load()
        except ConfigError as error:
            _log.error("the certificate stays the old one: %s", error)
        else:
            _log.info("connections have the new certificate of %s from now on", self._files[0])

    def _load(self) -> ssl.SSLContext:
        context = tls_context(*self._files)
        if self._protocols:
            context.set_alpn_protocols(self._protocols)
        return context


def file_marks(paths: Sequence[str]) -> list[tuple[int, int, int] | None]:
    """Return something that changes when a file does; None for one that is not there."""
    marks: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            found = os.stat(path)
        except OSError:
            marks.append(None)
        else:
            marks.append((found.st_ino, found.st_mtime_ns, found.st_size))
    return marks


def tls_context(cert_file: str, key_file: str) -> ssl.SSLContext:
    """Return the TLS context of a server.

    Args:
        cert_file: Setting ``tls_cert_file``.
        key_file: Setting ``tls_key_file``.

    Raises:
        ConfigError: A file cannot be used.
    """
    for name, path in (("tls_cert_file", cert_file), ("tls_key_file", key_file)):
        try:
            with open(path, "rb"):
                pass  # ssl does not say which file it cannot read
        except OSError as error:
            raise ConfigError(f"{name} {path}: {error.strerror or error}") from error
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # With no password a key that needs one is an error; ssl would ask the terminal for it.
        context.load_cert_chain(cert_file, key_file, password="")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tls_cert_file {cert_file} and tls_key_file {key_file} are no "
            f"certificate and its key, both PEM and the key without a passphrase: {error}"
        ) from error
    return context
