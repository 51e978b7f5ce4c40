"""The one part of the package that setup.cfg has no words for: a module in C.

It is optional. Without a compiler pip installs mqmesh all the same; ``send_async`` then takes
about 1 µs a message instead of 0.2 (mqmesh/sdk/fast_send.py).
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension("mqmesh.sdk._fast_send", ["mqmesh/sdk/_fast_send.c"], optional=True),
    ]
)
