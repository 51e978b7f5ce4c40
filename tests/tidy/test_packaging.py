"""What setup.cfg says about packages is what lies in the checkout, and what a wheel holds."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


def packages_on_disk(modules: dict[str, str]) -> set[str]:
    return {m.removesuffix(".__init__") for m in modules if m.endswith(".__init__")}


def folders_without_init(modules: dict[str, str]) -> set[str]:
    return {m.rpartition(".")[0] for m in modules} - packages_on_disk(modules)


def listed_packages(setup_cfg: str) -> list[str]:
    config = configparser.ConfigParser()
    config.read_string(setup_cfg)
    return config["options"]["packages"].split()


def test_every_folder_with_code_is_a_listed_package(texts, modules):
    listed = listed_packages(texts["setup.cfg"])
    assert set(listed) == packages_on_disk(modules)
    assert listed == sorted(set(listed))


def test_every_folder_with_code_has_an_init_file(modules):
    assert folders_without_init(modules) == set()


def test_a_folder_missing_from_the_list_is_found():
    listed = listed_packages("[options]\npackages =\n    mqmesh\n")
    assert packages_on_disk({"mqmesh.__init__": "", "mqmesh.sdk.__init__": ""}) - set(listed) == {
        "mqmesh.sdk"
    }


def test_a_folder_without_init_file_is_found():
    assert folders_without_init({"mqmesh.__init__": "", "mqmesh.sdk.producer": ""}) == {
        "mqmesh.sdk"
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_wheel_owns_the_one_name_mqmesh_and_is_typed(project_root, modules, tmp_path):
    # A copy, because setuptools leaves build/ and an egg-info behind where it builds.
    source = tmp_path / "source"
    source.mkdir()
    for name in ("mqmesh", "cli", "spark"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(project_root / name, source / name, ignore=ignored)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(project_root / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path)]
    subprocess.run([*command, str(source)], check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"mqmesh"}
    assert "mqmesh/py.typed" in names
    expected = {Path(*module.split(".")).as_posix() + ".py" for module in modules}
    assert expected <= names
