"""The one part of the package that setup.cfg has no words for: modules in C.

They are optional. Without a compiler pip installs mqmesh all the same; ``send_async`` then takes
about 1 µs a message instead of 0.2 (mqmesh/sdk/fast_send.py), and batches take two to eight times
as long to be encoded and decoded (mqmesh/fast_encode.py, mqmesh/fast_decode.py).
"""

import os

from setuptools import Extension, setup

MODULES = ["mqmesh._fast_decode", "mqmesh._fast_encode", "mqmesh.sdk._fast_send"]
OPTIONAL = os.environ.get("MQMESH_NATIVE") != "required"  # scripts/release leaves nothing out
SHARED = ["mqmesh/_plain_message.h"]

setup(
    ext_modules=[
        Extension(name, [name.replace(".", "/") + ".c"], depends=SHARED, optional=OPTIONAL)
        for name in MODULES
    ]
)
