"""The version of mqmesh, for clients, servers and packaging alike."""

from typing import Final

VERSION: Final = "0.1.0"
