"""What setup.cfg says about packages is what lies in the checkout, and what a wheel holds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

INCLUDE = Path(sysconfig.get_path("include"))
COMPILERS = [
    found
    for name in ("cc", "gcc", "clang")
    if (found := shutil.which(name)) and (INCLUDE / "Python.h").exists()
]


def packages_on_disk(modules: dict[str, str]) -> set[str]:
    return {m.removesuffix(".__init__") for m in modules if m.endswith(".__init__")}


def folders_without_init(modules: dict[str, str]) -> set[str]:
    return {m.rpartition(".")[0] for m in modules} - packages_on_disk(modules)


def test_every_folder_with_code_has_an_init_file(modules):
    assert folders_without_init(modules) == set()


def test_a_folder_without_init_file_is_found():
    assert folders_without_init({"mqmesh.__init__": "", "mqmesh.sdk.admin": ""}) == {"mqmesh.sdk"}


FILES = (
    "pyspark_mqmesh.py",
    "setup.cfg",
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
)


def copied(project_root: Path, folder: Path) -> Path:
    """Copies the checkout, where setuptools leaves build/ and an egg-info behind."""
    source = folder / "source"
    source.mkdir()
    for name in ("mqmesh", "cli", "spark"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(project_root / name, source / name, ignore=ignored)
    for name in FILES:
        shutil.copy(project_root / name, source)
    return source


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_wheel_owns_the_one_name_mqmesh_and_is_typed(project_root, modules, tmp_path):
    source = str(copied(project_root, tmp_path))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path)]
    subprocess.run([*command, source], check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "mqmesh",
        "pyspark_mqmesh.py",
    }
    assert "mqmesh/py.typed" in names
    for folder in ("templates", "static"):  # what the console shows
        of_console = (project_root / "mqmesh/console" / folder).rglob("*.*")
        assert {one.relative_to(project_root).as_posix() for one in of_console} <= names
    expected = {Path(*module.split(".")).as_posix() + ".py" for module in modules}
    assert expected <= names
    assert sum(name.endswith(".so") for name in names) == (1 if COMPILERS else 0)


def test_a_machine_without_a_compiler_does_without_the_parts_in_c(project_root, tmp_path):
    source = copied(project_root, tmp_path)
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    environment = {**os.environ, "CC": "/no/such/compiler"}
    done = subprocess.run(
        command, cwd=source, env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "/no/such/compiler" in done.stderr, "it was asked for"
    assert not list(source.rglob("*.so"))


@pytest.mark.parametrize("compiler", COMPILERS)
def test_what_is_in_c_compiles_without_a_warning(project_root, compiler):
    sources = sorted(map(str, project_root.glob("mqmesh/**/*.c")))
    assert sources
    # Functions of one shape stand for slots of another: CPython's own way.
    quiet = ["-Wno-cast-function-type", "-Wno-missing-field-initializers"]
    command = [compiler, "-fsyntax-only", "-O2", "-Wall", "-Wextra", "-Werror", *quiet]
    done = subprocess.run(
        [*command, "-I", str(INCLUDE), *sources], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_headers_of_the_parts_in_c_go_into_source_distributions(project_root):
    # setuptools finds the sources by itself, and headers only since version 69.
    listed = (project_root / "MANIFEST.in").read_text().split()
    for source in project_root.glob("mqmesh/**/*.c"):
        for name in re.findall(r'#include "(.+)"', source.read_text()):
            header = (source.parent / name).resolve().relative_to(project_root)
            assert str(header) in listed
