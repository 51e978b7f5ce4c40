"""The parts of the package that setup.cfg cannot express: its folders, and the module in C.

The module in C is optional. Without a compiler pip installs mqmesh all the same; sending and
receiving then take two to fifteen times as much processor time
(docs/decisions/0018-one-codec-in-c.md).
"""

import os
from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("mqmesh/native")
OPTIONAL = os.environ.get("MQMESH_NATIVE") != "required"  # scripts/release leaves nothing out

ROOMS = {"mqmesh": "mqmesh", "cli": "mqmesh.cli", "spark": "mqmesh.spark"}
"""Folders of the checkout, and the packages that they are installed as."""


def packages() -> list[str]:
    """Return the names of all packages: every folder with an ``__init__.py``."""
    return sorted(
        ".".join((package, *path.parent.relative_to(folder).parts))
        for folder, package in ROOMS.items()
        for path in Path(folder).rglob("__init__.py")
    )


setup(
    packages=packages(),
    ext_modules=[
        Extension(
            "mqmesh._native",
            sorted(path.as_posix() for path in FOLDER.glob("*.c")),
            depends=sorted(path.as_posix() for path in FOLDER.glob("*.h")),
            optional=OPTIONAL,
        )
    ],
)
