"""Settings of a session of Spark that need no session to be tested."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from mqmesh.spark.session import _path_with_source as path_with_source


def test_workers_find_the_data_source_of_an_editable_install():
    origin = importlib.util.find_spec("pyspark_mqmesh").origin
    folder = str(Path(origin).parent)
    assert path_with_source("", ["/a"]) == folder
    assert path_with_source("/b", ["/a"]) == os.pathsep.join(["/b", folder])
    # Nothing is added to where it is anyway.
    assert path_with_source("/b", ["/a", folder]) == "/b"
    assert path_with_source(folder, ["/a"]) == folder
