"""The one part of the package that setup.cfg has no words for: the module in C.

It is optional. Without a compiler pip installs mqmesh all the same; sending and receiving then take
two to fifteen times as much processor time (docs/decisions/0018-one-codec-in-c.md).
"""

import os
from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("mqmesh/native")
OPTIONAL = os.environ.get("MQMESH_NATIVE") != "required"  # scripts/release leaves nothing out

setup(
    ext_modules=[
        Extension(
            "mqmesh._native",
            sorted(path.as_posix() for path in FOLDER.glob("*.c")),
            depends=sorted(path.as_posix() for path in FOLDER.glob("*.h")),
            optional=OPTIONAL,
        )
    ]
)
