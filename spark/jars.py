"""Delta Lake's jars: which, and how Spark comes by them."""

import importlib.metadata
from pathlib import Path
from typing import Final

from mqmesh.errors import ConfigError

SCALA: Final = "2.13"


def delta_package() -> str:
    """Maven coordinates of the jars that fit the installed pyspark and delta-spark.

    Raises:
        ConfigError: One of them is not installed.
    """
    try:
        spark = importlib.metadata.version("pyspark")
        delta = importlib.metadata.version("delta-spark")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'mqmesh[spark]'") from error
    series = ".".join(spark.split(".")[:2])
    return f"io.delta:delta-spark_{series}_{SCALA}:{delta}"


def jar_files(directory: Path) -> list[Path]:
    """The jars in a directory that somebody has filled by ``mqmesh archive jars``.

    Raises:
        ConfigError: There are none.
    """
    found = sorted(directory.glob("*.jar"))
    if not any(path.name.startswith(("delta-spark", "io.delta_delta-spark")) for path in found):
        raise ConfigError(
            f"{directory} holds no jar of delta-spark; `mqmesh archive jars --to {directory}` puts "
            "it there"
        )
    return found
