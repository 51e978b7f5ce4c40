"""Administration of replicas by the command line, over real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from harness.failovers import GROUP, ElectedGroup
from harness.patience import until

from mqmesh import Message, Producer
from mqmesh.roles.process import ExitCode


def mqmesh(group: ElectedGroup, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "mqmesh.cli", "ha", *arguments]
    command += ["--namesrv", group.namesrv.endpoint]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_replica_comes_and_another_goes_under_an_administrators_hands(short_tmp_path: Path):
    group = ElectedGroup(short_tmp_path)
    try:
        with Producer("shop", namesrv_addr=group.namesrv.endpoint) as producer:
            for number in range(20):
                producer.send(Message("t", b"%d" % number))
        assert json.loads(mqmesh(group, "pause", GROUP, "--json").stdout)["paused"] is True
        group.start(4, ha__total_replicas="4")
        added = json.loads(mqmesh(group, "add", GROUP, "4", "--json").stdout)
        assert added["voters"] == [1, 2, 3, 4]
        until(lambda: group.in_sync() == [1, 2, 3, 4])
        gone = next(one for one in (1, 2, 3) if one != group.master())
        removed = mqmesh(group, "remove", GROUP, str(gone))
        assert removed.returncode == ExitCode.OK, removed.stderr
        until(lambda: gone not in group.in_sync())
        late = mqmesh(group, "remove", GROUP, "4", "--epoch", str(added["epoch"] + 7))
        assert (late.returncode, "by now, not" in late.stderr) == (ExitCode.FAILED, True)
        assert mqmesh(group, "resume", GROUP).returncode == ExitCode.OK
    finally:
        group.close()
