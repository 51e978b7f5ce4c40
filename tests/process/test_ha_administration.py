"""Administration of replicas by the command line, over real processes."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from unittest import mock

import pytest
from harness.failovers import GROUP, ElectedGroup
from harness.patience import until

from mqmesh import Message, Producer
from mqmesh.cli import main
from mqmesh.roles.process import ExitCode


class Line:
    """The command line: exit code and output of `mqmesh ha …`."""

    def __init__(self, group: ElectedGroup, capsys: pytest.CaptureFixture[str]) -> None:
        self._group, self._capsys = group, capsys

    def __call__(self, *arguments: str) -> tuple[int, str]:
        code = main.main(["ha", *arguments, "--namesrv", self._group.namesrv.endpoint])
        told = self._capsys.readouterr()
        return code, told.out + told.err


def damage(folder: Path, position: int) -> None:
    """Changes a bit of a log, as a disk does."""
    with next((folder / "commitlog").iterdir()).open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


@pytest.mark.timeout(240)
def test_a_replica_comes_and_another_goes_under_an_administrators_hands(short_tmp_path, capsys):
    group = ElectedGroup(short_tmp_path)
    line = Line(group, capsys)
    try:
        with Producer("shop", namesrv_addr=group.namesrv.endpoint) as producer:
            for number in range(20):
                producer.send(Message("t", b"%d" % number))
        assert json.loads(line("pause", GROUP, "--json")[1])["paused"] is True
        given = next(one for one in (1, 2, 3) if one != group.master())
        group.replicas[given].stop()
        shutil.copytree(short_tmp_path / f"r{given}", short_tmp_path / "r4")
        group.start(given)
        group.start(4, ha__total_replicas="4")  # it begins with another one's store
        added = json.loads(line("add", GROUP, "4", "--json")[1])
        assert added["voters"] == [1, 2, 3, 4]
        until(lambda: group.in_sync() == [1, 2, 3, 4])
        gone = next(one for one in (1, 2, 3) if one != group.master())
        code, told = line("remove", GROUP, str(gone))
        assert (code, "belong to broker-a" in told) == (ExitCode.OK, True)
        until(lambda: gone not in group.in_sync())
        code, told = line("remove", GROUP, "4", "--epoch", str(added["epoch"] + 7))
        assert (code, "by now, not" in told) == (ExitCode.FAILED, True)
        assert line("resume", GROUP)[0] == ExitCode.OK
        code, told = line("settings", "--set", "replica_lag_max_ms=4000", "--json")
        kept = json.loads(told)
        assert (code, kept["settings"]) == (ExitCode.OK, {"replica_lag_max_ms": "4000"})
        until(lambda: "replica_lag_max_ms = 3000 is not in force, 4000 is" in line("settings")[1])
        code, told = line("status", GROUP)
        assert (code, "OUTSIDE" in told) == (ExitCode.OK, True)
        assert "is not in force" in told
        looks = iter([None, KeyboardInterrupt])
        with mock.patch.object(time, "sleep", side_effect=looks):
            code, told = line("status", GROUP, "--watch", "--json")
        assert code != ExitCode.OK
        assert [len(json.loads(one)) for one in told.splitlines() if one.startswith("[")] == [4, 4]
        code, told = line("verify", GROUP, "--json")
        same = json.loads(told)
        assert (code, same["differences"]) == (ExitCode.OK, [])
        assert sorted(same["broker_ids"]) == sorted({1, 2, 3, 4} - {gone})
        assert same["compared"] > same["start"]
        logs = json.loads(line("epochs", GROUP, "--json")[1])
        of_group = [one["epochs"] for one in logs if one["broker_id"] != gone]
        assert all(one == of_group[0] for one in of_group)
        damage(short_tmp_path / "r4", same["start"] + 100)
        code, told = line("verify", GROUP)
        assert (code, "replicas 4 differ" in told) == (ExitCode.FAILED, True)
    finally:
        group.close()
