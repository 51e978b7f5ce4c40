"""Version of Spark that mqmesh works with."""

from typing import Final

from mqmesh.errors import ConfigError

SERIES: Final = "4.1"
"""Series of pyspark: its interface for data sources, and the one that Delta Lake has jars for."""


def check_pyspark() -> None:
    """Refuses a pyspark that mqmesh does not work with.

    Raises:
        ConfigError: It is another one, or not installed.
    """
    hint = "pip install 'mqmesh[spark]'"
    try:
        # A cluster's own pyspark is a file on the path, which pip does not know.
        from pyspark import __version__ as found
    except ImportError as error:
        raise ConfigError(f"{error}: {hint}") from error
    if ".".join(found.split(".")[:2]) != SERIES:
        raise ConfigError(f"mqmesh needs pyspark {SERIES}, and {found} is installed: {hint}")
