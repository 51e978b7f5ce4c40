"""Versions of pyspark that are refused, in a sentence."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from mqmesh.errors import ConfigError
from mqmesh.spark.versions import check_pyspark


@pytest.mark.parametrize("version", ["3.5.9", "4.0.1", "4.10.0", "5.0.0.dev1"])
def test_another_pyspark_is_refused(monkeypatch, version):
    monkeypatch.setitem(sys.modules, "pyspark", SimpleNamespace(__version__=version))
    wanted = f"mqmesh needs pyspark 4.1, and {version} is installed: pip install 'mqmesh[spark]'"
    with pytest.raises(ConfigError) as caught:
        check_pyspark()
    assert str(caught.value) == wanted


def test_the_one_that_fits_is_taken_and_none_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyspark", SimpleNamespace(__version__="4.1.1"))
    check_pyspark()
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(ConfigError, match="mqmesh\\[spark\\]"):
        check_pyspark()
