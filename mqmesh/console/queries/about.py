"""Versions and licences, and the description of the JSON API."""

from importlib import metadata
from pathlib import Path
from typing import Final

import msgspec

from mqmesh.console.forms import describe_arguments
from mqmesh.console.page import ConsoleAction, NoArguments, Route, Visit
from mqmesh.version import VERSION

_VENDOR: Final = Path(__file__).parents[1] / "static" / "vendor"
_PACKAGES: Final = {
    "starlette": "BSD-3-Clause",
    "uvicorn": "BSD-3-Clause",
    "jinja2": "BSD-3-Clause",
    "python-multipart": "Apache-2.0",
    "msgspec": "BSD-3-Clause",
    "pyzmq": "BSD-3-Clause",
}
_SCRIPTS: Final = {"htmx": "0BSD", "uPlot": "MIT"}


class SoftwareRow(msgspec.Struct, frozen=True):
    """A piece of software that the console is made of.

    Attributes:
        name: Its name.
        version: That is used here.
        licence: SPDX identifier.
    """

    name: str
    version: str
    licence: str


class AboutView(msgspec.Struct, frozen=True):
    """Versions and licences.

    Attributes:
        version: Version of mqmesh.
        software: Software that the console uses.
    """

    version: str
    software: list[SoftwareRow]


class ApiRow(msgspec.Struct, frozen=True):
    """A path of the API.

    Attributes:
        method: ``GET`` or ``POST``.
        path: With placeholders.
        about: One sentence.
        right: Right that it needs, as docs/protocol.md names them.
        arguments: Name, type and default of each argument; of ``POST`` they are a JSON object.
    """

    method: str
    path: str
    about: str
    right: str
    arguments: list[str]


async def about(visit: Visit, arguments: NoArguments) -> AboutView:
    """Return versions and licences."""
    software = [
        SoftwareRow(name, metadata.version(name), licence) for name, licence in _PACKAGES.items()
    ]
    lines = (_VENDOR / "VERSIONS").read_text(encoding="utf-8").splitlines()
    versions = {line.split()[0].partition(".")[0]: line.split()[1] for line in lines}
    software += [SoftwareRow(name, versions[name], of) for name, of in _SCRIPTS.items()]
    return AboutView(VERSION, software)


async def api(visit: Visit, arguments: NoArguments) -> list[ApiRow]:
    """Return the description of the API."""
    return [_api_row(one) for one in sorted(visit.routes, key=lambda one: one.path)]


def _api_row(route: Route) -> ApiRow:
    path = "/overview" if route.path == "/" else route.path
    about = route.about
    if isinstance(route, ConsoleAction):
        typed = "; dry_run: true says what it would do"
        about = about or f"{route.title.split(' {')[0]}{typed}."
    return ApiRow(
        "POST" if isinstance(route, ConsoleAction) else "GET",
        f"/api/v1{path}",
        about or route.title,
        route.right.value,
        describe_arguments(route.arguments),
    )
