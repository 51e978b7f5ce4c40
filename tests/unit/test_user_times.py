"""Times as users write them."""

from __future__ import annotations

import click
import pytest

from mqmesh.cli import main
from mqmesh.errors import ConfigError
from mqmesh.user_times import parse_time

NOW_MS = 1_767_225_600_000


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("30s", NOW_MS - 30_000),
        ("10m", NOW_MS - 600_000),
        ("2h", NOW_MS - 7_200_000),
        ("1d", NOW_MS - 86_400_000),
        ("99999d", 0),
        ("1767225600000", NOW_MS),
        ("2026-01-01T00:00:00Z", NOW_MS),
        ("2026-01-01", NOW_MS),
        ("2026-01-01T01:00+01:00", NOW_MS),
        ("1960-01-01", 0),
    ],
)
def test_a_time_may_be_written_in_many_ways(text, ms):
    assert parse_time(text, NOW_MS, "--to") == ms


@pytest.mark.parametrize("text", ["", "yesterday", "10", "-5m", "10w", "2026-13-01"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ConfigError, match=r"--from .*: must be first, last, a time"):
        parse_time(text, NOW_MS, "--from", "first, last, ")


def options(command, path=""):
    """Yield every option of a command and those in it, each with its words on the command line."""
    context = click.Context(command)
    for parameter in command.params:
        yield f"{path} {parameter.opts[-1]}", parameter
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            yield from options(command.get_command(context, name), f"{path} {name}")


def test_help_says_that_times_are_utc(capsys):
    times = {
        words: option.help
        for words, option in options(main.root)
        if option.metavar in ("TIME", "WHEN", "WHERE", "DAY")
    }
    assert len(times) >= 12
    assert [words for words, said in times.items() if "UTC" not in said] == []
    assert main.main(["--help"]) == 0
    assert "Times are UTC" in capsys.readouterr().out
