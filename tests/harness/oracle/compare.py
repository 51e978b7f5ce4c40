"""The golden file of a real RocketMQ's answers, and the differences of others from it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

VERSION = "5.3.3"
MISSING = "(missing)"


class Difference(NamedTuple):
    """A field that is another than RocketMQ's.

    Attributes:
        answer: Scene and name of the answer.
        field: Path of the field in it.
        rocketmq: Value at RocketMQ.
        mqmesh: Value at mqmesh.
    """

    answer: str
    field: str
    rocketmq: Any
    mqmesh: Any

    def __str__(self) -> str:
        """Return a line of the field and both values."""
        return f"{self.answer} | {self.field} | {self.rocketmq!r} | {self.mqmesh!r}"


class Meant(NamedTuple):
    """A difference that is meant.

    Attributes:
        answer: Pattern of answers, as of the shell.
        field: Pattern of fields.
        why: The reason; docs/gateway.md has it for users.
    """

    answer: str
    field: str
    why: str


def golden_path(root: Path, kind: str) -> Path:
    """Returns the path of a golden file.

    Args:
        root: The checkout.
        kind: ``requests`` or ``client``.
    """
    return root / "tests" / "data" / f"rocketmq-{VERSION}-{kind}.json"


def load(path: Path) -> dict[str, Any]:
    """Reads a golden file."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def save(path: Path, answers: Mapping[str, Any]) -> None:
    """Writes a golden file: a line each answer."""
    lines = [
        f"{json.dumps(key)}: {json.dumps(one, sort_keys=True, ensure_ascii=False)}"
        for key, one in answers.items()
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def differences(golden: Mapping[str, Any], answers: Mapping[str, Any]) -> list[Difference]:
    """Returns each field that differs."""
    found = []
    for key in {**golden, **answers}:
        real, own = dict(_flat(golden.get(key, MISSING))), dict(_flat(answers.get(key, MISSING)))
        found += [
            Difference(key, path, real.get(path, MISSING), own.get(path, MISSING))
            for path in {**real, **own}
            if real.get(path, MISSING) != own.get(path, MISSING)
        ]
    return found


def judge(found: list[Difference], meant: list[Meant]) -> tuple[list[Difference], list[Meant]]:
    """Returns the differences that nobody meant, and what is said to be one and is none."""
    stale = [one for one in meant if not any(_covers(one, difference) for difference in found)]
    return [one for one in found if not any(_covers(rule, one) for rule in meant)], stale


def _covers(rule: Meant, one: Difference) -> bool:
    return fnmatchcase(one.answer, rule.answer) and fnmatchcase(one.field, rule.field)


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, one in value.items():
            yield from _flat(one, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value:
        for number, one in enumerate(value):
            yield from _flat(one, f"{path}.{number}")
    else:
        yield path, value
