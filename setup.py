"""The one part of the package that setup.cfg has no words for: two modules in C.

They are optional. Without a compiler pip installs mqmesh all the same; ``send_async`` then takes
about 1 µs a message instead of 0.2 (mqmesh/sdk/fast_send.py), and encoding a batch twice as long
(mqmesh/fast_encode.py).
"""

from setuptools import Extension, setup

SHARED = ["mqmesh/_plain_message.h"]

setup(
    ext_modules=[
        Extension("mqmesh._fast_encode", ["mqmesh/_fast_encode.c"], depends=SHARED, optional=True),
        Extension(
            "mqmesh.sdk._fast_send", ["mqmesh/sdk/_fast_send.c"], depends=SHARED, optional=True
        ),
    ]
)
