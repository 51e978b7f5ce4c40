"""Asks a real RocketMQ, and writes golden files or compares them; see ``scripts/oracle``."""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness.commands import free_ports
from harness.oracle.client import client_answers
from harness.oracle.compare import differences, golden_path, judge, load, save
from harness.oracle.grpc import grpc_answers
from harness.oracle.meant import MEANT
from harness.oracle.rights import play_rights
from harness.oracle.scenes import play
from harness.oracle.server import CHECKS_SOON, mqmesh_gateway, real_rocketmq
from harness.oracle.tools import mqadmin, tool_answers

ROOT = Path(__file__).parents[3]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/oracle", description=__doc__)
    parser.add_argument(
        "--at", metavar="HOST:PORT", help="ask this name server; by default a real one is started"
    )
    parser.add_argument(
        "--mqmesh", action="store_true", help="start mqmesh with a gateway instead of a real one"
    )
    parser.add_argument("--write", action="store_true", help="write the golden files")
    parser.add_argument("--scene", action="append", help="only this scene; may be repeated")
    parser.add_argument("--kind", choices=MEANT, help="only one golden file")
    parser.add_argument("--all", action="store_true", help="show differences that are meant, too")
    parser.add_argument("--remarks", action="store_true", help="show the remarks of answers")
    parser.add_argument(
        "--serve", action="store_true", help="only start a real one, until this is interrupted"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="oracle-") as folder:
        if options.at:
            return ask(options.at, Path(folder), options)
        with ExitStack() as stack:
            if options.mqmesh:
                namesrv, _ = stack.enter_context(mqmesh_gateway(Path(folder), CHECKS_SOON))
            else:
                namesrv = stack.enter_context(real_rocketmq(Path(folder)))
            if options.serve:
                print(f"name server {namesrv}", flush=True)
                signal.pause()
            return ask(namesrv, Path(folder), options)


def ask(namesrv: str, folder: Path, options: argparse.Namespace) -> int:
    """Asks by requests and by the Java client; shows what differs, or writes it."""
    failed, is_mqmesh = False, options.mqmesh or options.at
    for kind, meant in MEANT.items():
        if options.kind not in (None, kind):
            continue
        if kind in ("rights", "grpc") and is_mqmesh:
            continue  # they want another gateway: tests/process/test_gateway*.py
        begun = time.monotonic()
        answers = answers_of(kind, namesrv, folder, options)
        print(f"{kind}: {len(answers)} answers in {time.monotonic() - begun:.1f} s")
        path = golden_path(ROOT, kind)
        if options.write:
            save(path, answers)
            continue
        golden = load(path)
        if options.scene:
            golden = {
                key: one for key, one in golden.items() if key.partition(":")[0] in options.scene
            }
        allowed = meant if is_mqmesh and not options.all else []
        wrong, stale = judge(differences(golden, answers), allowed)
        for one in wrong:
            print(one)
        for rule in stale if not options.scene else ():
            print(f"no difference any more: {rule}")
        failed = failed or bool(wrong)
    return int(failed)


def answers_of(
    kind: str, namesrv: str, folder: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Asks what one golden file has, and returns the answers."""
    folder = folder / kind
    folder.mkdir()
    if kind == "requests":
        answers, said = play(namesrv, options.scene)
        for key, text in said.items() if options.remarks else ():
            print(f"{key} | {text[:200]!r}")
        return answers
    if kind == "client":
        answers = client_answers(namesrv, folder, *options.scene or ())
        print((folder / "client.log").read_text()[-600:])
        return answers
    if kind == "tools":
        with mqadmin(namesrv, folder) as admin:
            return tool_answers(admin, folder)
    if kind == "grpc":
        (port,) = free_ports(1)
        with real_rocketmq(folder, grpc_port=port) as own:
            return grpc_answers(own, f"127.0.0.1:{port}", folder)
    with real_rocketmq(folder, has_users=True) as own:
        return play_rights(own)


if __name__ == "__main__":
    raise SystemExit(main())
