"""The reference of the protocol names everything, and the page has an example that is sent."""

from __future__ import annotations

import re

import msgspec
import pytest
from reference_pages import described, protocol

from mqmesh.protocol import command, route
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.commands import COMMANDS, RequestCode

STRUCTS = [kind for module in protocol.modules() for kind in protocol.structs_of(module)]
WORDS = [kind for module in protocol.modules() for kind in protocol.words_of(module)]


@pytest.fixture(scope="module")
def page() -> str:
    return protocol.page()


@pytest.mark.parametrize("code", RequestCode)
def test_every_command_has_a_description_its_own_errors_and_a_section(page, code):
    spec = COMMANDS[code]
    parts = described.sections(protocol.description(spec))
    assert parts[""]
    assert set(described.entries(parts.get("Errors", ""))) <= set(ResponseCode.__members__)
    assert f"\n### {code.name} ({code.value})\n" in page
    for kind in (spec.request, spec.reply):
        assert kind is None or f"[{kind.__name__}](#{kind.__name__.lower()})" in page


@pytest.mark.parametrize("kind", STRUCTS)
def test_every_field_has_a_description_and_a_row(page, kind):
    section = page.partition(f"\n#### {kind.__name__}\n")[2].partition("\n###")[0]
    rows = re.findall(r"^\| \d* \| `(\w+)` \|.*\| (.+) \|$", section, re.MULTILINE)
    assert [name for name, _ in rows] == [one.name for one in msgspec.structs.fields(kind)]


@pytest.mark.parametrize("kind", [*WORDS, ResponseCode])
def test_every_value_on_the_wire_has_a_description(kind):
    assert set(kind.__members__) - described.members_of(kind).keys() == set()


def test_the_worked_example_is_what_the_code_sends(project_root):
    text = (project_root / "docs" / "protocol.md").read_text(encoding="utf-8")
    request, response = re.findall(r"^```hex\n(.*?)```", text, re.DOTALL | re.MULTILINE)
    asked = command.encode_frame(
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        7,
        header=command.encode_header(route.GetRouteRequest("flights")),
    )
    answered = command.encode_frame(
        ResponseCode.TOPIC_NOT_EXIST,
        7,
        header=command.encode_header(command.ErrorHeader("no")),
        flags=command.RESPONSE,
    )
    for example, frame in ((request, asked), (response, answered)):
        data = "".join(line.partition("#")[0] for line in example.splitlines())
        assert bytes.fromhex(data) == frame
