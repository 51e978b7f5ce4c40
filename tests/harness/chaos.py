"""Harms a cluster under load, and judges what its clients saw.

Run as a program (``scripts/chaos``) it runs one seed after the other, for the time given. A seed
decides about bodies, sizes and the times of kills; how the machine schedules processes it does
not, so a failure that is replayed comes soon rather than at once.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final

import msgspec

from harness.chaos_scene import BROKER, GROUP, OFFSETS_SAVED_MS, Scene, UpCluster
from harness.checker import Report, Verdict
from harness.delay_scene import run_delay_rounds
from harness.history import Outage
from harness.outbox_scene import OutboxScene
from harness.payment_scene import PaymentScene
from harness.policy_rounds import run_policy_rounds
from harness.postgres import Postgres
from harness.processing_scene import LOST_GRACE_MS, run_processing_rounds
from harness.receives import Seen, judge
from harness.secured import CLIENT, keys_in, secured_folder
from harness.table_rounds import run_carry_rounds, run_table_rounds
from harness.transaction_scene import run_rounds
from harness.workload import now_ms
from mqmesh.errors import MQMeshError
from mqmesh.protocol.delivery import DeliveryMode
from mqmesh.protocol.groups import GroupConfig
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.sdk.client.options import CREDENTIALS_VARIABLE
from mqmesh.testing.processes import ProcessCluster
from mqmesh.units import MIB

ROUNDS: Final = 20
KILLS_A_LIFE: Final = 4
"""After so many kills everything is stopped cleanly and started again: the supervisor's delays
begin anew, and clients see that, too."""
AGAIN_SHARE: Final = 0.2
"""Share of the kills that hit a broker that is starting."""
CLIENT_SHARE: Final = 0.3
"""Share of the kills at which a client dies, too."""
LOAD_S: Final = (0.3, 1.5)
START_S: Final = (0.0, 0.6)
PAUSE_S: Final = 3.0
BACK_MS: Final = 20_000.0
"""Until a killed broker serves again: the supervisor waits longer after each of several kills in
a row, and recovery reads what was not synced."""
HEARTBEAT_MS: Final = 30_000.0
LOST_CONSUMER_MS: Final = 10_000.0
AWAKE_MS: Final = 10_000.0
RECEIVERS: Final = 4
RECEIVE_RATE: Final = 100
MEMBER_SHARE: Final = 0.4
"""Share of the kills in receives that hit a member."""
_SEGMENT_BYTES: Final = 16 * MIB


class Outcome(msgspec.Struct, frozen=True):
    """Result of one run of a scenario.

    Attributes:
        report: Report of the checker.
        metrics: Measured values, by name.
    """

    report: Report
    metrics: dict[str, float]


def kill_broker(folder: Path, seed: int, rounds: int, flush: str) -> Outcome:
    """Kills the broker at random times under load (kill -9); the supervisor starts it again."""
    settings = _settings(flush)
    silences: list[float] = []
    with UpCluster(folder / "data", settings) as cluster, Scene(cluster, folder, seed) as scene:
        scene.start_all()
        kills_before = 0
        while len(scene.kills_ms) < rounds:
            if len(scene.kills_ms) - kills_before >= KILLS_A_LIFE:
                kills_before = len(scene.kills_ms)
                cluster.restart()
                scene.wait_progress()
            scene.run_for(scene.chance.uniform(*LOAD_S))
            began = time.monotonic()
            if scene.chance.random() < AGAIN_SHARE:
                cluster.kill_broker()
                scene.kills_ms.append(now_ms())
                cluster.wait_killed()
                cluster.wait_started()
                scene.run_for(scene.chance.uniform(*START_S))
            cluster.kill_broker()
            scene.kills_ms.append(now_ms())
            if scene.chance.random() < CLIENT_SHARE:
                _replace(scene, scene.chance.choice(("consume", "sync", "async", "batch")))
            cluster.wait_killed()
            cluster.wait_ready()
            scene.wait_progress()
            silences.append(time.monotonic() - began)
            scene.outages.append(Outage("a killed broker", silences[-1] * 1_000, BACK_MS))
        metrics = {
            "kills": len(scene.kills_ms),
            "clients killed": scene.clients_killed,
            "longest silence in s": max(silences),
        }
        return Outcome(scene.finish(), metrics)


def _replace(scene: Scene, kind: str) -> None:
    """Kills a worker of a kind and starts another one."""
    workers = scene.living(scene.consumers if kind == "consume" else scene.producers)
    scene.kill(scene.chance.choice([one for one in workers if one.plan.kind == kind]))
    scene.start(kind)


def kill_broker_async(folder: Path, seed: int, rounds: int) -> Outcome:
    """Runs ``kill_broker`` with ASYNC_FLUSH."""
    return kill_broker(folder, seed, rounds, "ASYNC_FLUSH")


def kill_broker_sync(folder: Path, seed: int, rounds: int) -> Outcome:
    """Runs ``kill_broker`` with SYNC_FLUSH."""
    return kill_broker(folder, seed, rounds, "SYNC_FLUSH")


def kill_name_servers(folder: Path, seed: int, rounds: int) -> Outcome:
    """Kills all name servers under load, which come back empty; new clients find everything."""
    del rounds
    with Processes(folder, namesrvs=2) as cluster, Scene(cluster, folder, seed) as scene:
        scene.start_all()
        for namesrv in cluster.namesrvs:
            namesrv.kill()
        for _ in range(2):
            scene.run_for(1.0)
            scene.wait_progress()
        began = time.monotonic()
        for number in range(len(cluster.namesrvs)):
            cluster.restart_namesrv(number)
        scene.start("sync")
        scene.start("consume")
        scene.wait_progress()
        scene.wait_shares(3, 3, 2)
        back_s = time.monotonic() - began
        scene.outages.append(Outage("no name server", back_s * 1_000, HEARTBEAT_MS))
        return Outcome(scene.finish(), {"new clients served after s": back_s})


def kill_consumer(folder: Path, seed: int, rounds: int) -> Outcome:
    """Kills one of three consumers that share eight queues; the others take its queues."""
    del rounds
    with Processes(folder) as cluster, Scene(cluster, folder, seed) as scene:
        scene.start_all(consumers=3)
        scene.wait_shares(3, 3, 2)
        scene.run_for(scene.chance.uniform(*LOAD_S))
        scene.kill(scene.chance.choice(scene.consumers))
        taken_s = scene.wait_shares(4, 4)
        scene.outages.append(Outage("a killed consumer", taken_s * 1_000, LOST_CONSUMER_MS))
        scene.wait_progress()
        return Outcome(scene.finish(), {"queues taken after s": taken_s})


def pause_broker(folder: Path, seed: int, rounds: int) -> Outcome:
    """Stops the broker for three seconds, longer than its clients wait for a sign of life."""
    del rounds
    with Processes(folder) as cluster, Scene(cluster, folder, seed) as scene:
        scene.start_all()
        scene.run_for(scene.chance.uniform(*LOAD_S))
        broker = cluster.brokers[BROKER]
        broker.suspend()
        scene.run_for(PAUSE_S)
        broker.resume()
        silence_s = scene.wait_progress()
        scene.outages.append(Outage("a broker that hung", silence_s * 1_000, AWAKE_MS))
        scene.run_for(1.0)
        return Outcome(scene.finish(), {"going on after s": silence_s})


def kill_producers(folder: Path, seed: int, rounds: int) -> Outcome:
    """Producers die while they send; others go on and new ones come."""
    del rounds
    with Processes(folder) as cluster, Scene(cluster, folder, seed) as scene:
        scene.start_all()
        for victim in list(scene.producers):
            scene.start(victim.plan.kind)
            scene.run_for(scene.chance.uniform(0.1, 0.5))
            scene.kill(victim)
        scene.wait_progress()
        return Outcome(scene.finish(), {"producers killed": 3})


def kill_in_transactions(folder: Path, seed: int, rounds: int) -> Outcome:
    """Producers die at every step of their transactions, and brokers at any time."""
    report, kills = run_rounds(folder, seed, rounds, _flush(seed))
    return Outcome(report, {f"killed ({who})": count for who, count in sorted(kills.items())})


def kill_in_delays(folder: Path, seed: int, rounds: int) -> Outcome:
    """Kills broker and schedule service while messages wait, leave and are cancelled."""
    report, kills = run_delay_rounds(folder, seed, rounds, _flush(seed))
    return Outcome(report, {f"killed ({who})": count for who, count in sorted(kills.items())})


def kill_in_receives(folder: Path, seed: int, rounds: int) -> Outcome:
    """Kills the broker, and members that acknowledge each message, at random times."""
    settings = _settings(_flush(seed))
    group = GroupConfig(GROUP, delivery=DeliveryMode.MESSAGE, lost_grace_ms=LOST_GRACE_MS)
    kills: Counter[str] = Counter()
    dead_ms: dict[str, float] = {}
    with UpCluster(folder / "data", settings) as cluster, Scene(cluster, folder, seed) as scene:
        with GroupAdmin(cluster.namesrv_addr) as admin:
            admin.put_group(group)
        scene.start("receive", RECEIVERS)
        for kind in ("sync", "async", "batch"):
            scene.start(kind, rate=RECEIVE_RATE)
        scene.wait_progress()
        while kills.total() < rounds:
            scene.run_for(scene.chance.uniform(*LOAD_S))
            if scene.chance.random() < MEMBER_SHARE:
                member = scene.chance.choice(scene.living(scene.consumers))
                dead_ms[member.plan.name] = now_ms()
                scene.kill(member)
                scene.start("receive")
                kills["member"] += 1
            else:
                if kills["broker"] and kills["broker"] % KILLS_A_LIFE == 0:
                    cluster.restart()
                    scene.wait_progress()
                cluster.kill_broker()
                scene.kills_ms.append(now_ms())
                kills["broker"] += 1
                cluster.wait_killed()
                cluster.wait_ready()
            scene.wait_progress()
        report = scene.finish()
        judged = judge(
            [
                Seen(line.time_ms, line.event, one.plan.name, [(line.producer, line.number)])
                for one in scene.consumers
                for line in one.lines()
            ],
            dead_ms,
        )
    # Members overtake each other.
    verdicts = [one for one in report.verdicts if one.invariant != "C4"]
    report = Report([*verdicts, Verdict("D2", judged.again)], report.counts)
    metrics = {f"killed ({who})": float(times) for who, times in sorted(kills.items())}
    metrics |= {"acknowledged": len(judged.acked), "had by two": len(judged.twice)}
    return Outcome(report, metrics)


def kill_under_policies(folder: Path, seed: int, rounds: int) -> Outcome:
    """Kills the broker while topics have retention and times to live, groups a pause and a rate."""
    settings = _settings(_flush(seed))
    return Outcome(*run_policy_rounds(folder, seed, rounds, settings))


def kill_in_kv(folder: Path, seed: int, rounds: int) -> Outcome:
    """Kills the broker while 64 writers increment counters of a table by their revisions."""
    settings = _settings(_flush(seed))
    return Outcome(*run_table_rounds(folder, seed, rounds, settings))


def carry(folder: Path, seed: int, rounds: int) -> Outcome:
    """Turns the log over while a table lives, and makes a new replica the master."""
    return Outcome(*run_carry_rounds(folder, seed, rounds))


def kill_outbox(folder: Path, seed: int, rounds: int) -> Outcome:
    """Kills relays of an outbox, and the broker, while rows are added and sent."""
    (folder / "outbox.sqlite").touch()  # the relay's `connect` makes no file
    return _kill_outbox(folder, seed, rounds, f"sqlite:///{folder / 'outbox.sqlite'}", 1, None)


def kill_outbox_postgres(folder: Path, seed: int, rounds: int) -> Outcome:
    """Runs ``kill_outbox`` with two relays on PostgreSQL; stops them, and kills PostgreSQL, too."""
    with Postgres() as postgres:
        return _kill_outbox(folder, seed, rounds, postgres.url, 2, postgres.crash)


def _kill_outbox(
    folder: Path,
    seed: int,
    rounds: int,
    database: str,
    relays: int,
    crash_database: Callable[[], None] | None,
) -> Outcome:
    settings = _settings(_flush(seed))
    with ProcessCluster(folder, broker_settings=settings, keys=keys_in(folder)) as cluster:
        chance = random.Random(seed)
        scene = OutboxScene(
            cluster,
            database,
            folder / "relay.log",
            chance,
            partial(_restart_broker, cluster),
            relays=relays,
            crash_database=crash_database,
        )
        return Outcome(scene.run(rounds), {"relays killed or stopped": rounds})


def kill_in_processing(folder: Path, seed: int, rounds: int) -> Outcome:
    """Kills the broker, and members that make messages of messages."""
    settings = {
        **_settings(_flush(seed)),
        "rebalance_lock_lost_grace_ms": str(LOST_GRACE_MS),
    }
    with ProcessCluster(folder, broker_settings=settings, keys=keys_in(folder)) as cluster:
        report, kills = run_processing_rounds(cluster, folder / "members.log", seed, rounds)
    return Outcome(report, {f"killed ({who})": count for who, count in sorted(kills.items())})


def payments(folder: Path, seed: int, rounds: int) -> Outcome:
    """Kills the programs of the payment example, and the broker: docs/payments.md."""
    settings = _settings(_flush(seed))
    with ExitStack() as stack:
        url = f"sqlite:///{folder / 'shop.sqlite'}"
        if seed % 4 > 1:
            url = stack.enter_context(Postgres()).url
        cluster = stack.enter_context(
            ProcessCluster(folder, broker_settings=settings, keys=keys_in(folder))
        )
        restart_broker = partial(_restart_broker, cluster)
        scene = PaymentScene(cluster, url, folder, random.Random(seed), restart_broker)
        return Outcome(scene.run(rounds), {"kills": rounds})


class Processes(ProcessCluster):
    """A cluster without a supervisor, so that what is killed stays dead until it is wanted.

    Args:
        folder: For stores and logs.
        namesrvs: Number of name servers.
    """

    def __init__(self, folder: Path, namesrvs: int = 1) -> None:
        super().__init__(
            folder, namesrvs=namesrvs, broker_settings=_settings(), keys=keys_in(folder)
        )

    @property
    def broker_endpoint(self) -> str:
        """``host:port`` of the broker."""
        return self.brokers[BROKER].endpoint


Scenario = Callable[[Path, int, int], Outcome]

SCENARIOS: Final[dict[str, Scenario]] = {
    "kill-broker-async": kill_broker_async,
    "kill-broker-sync": kill_broker_sync,
    "kill-name-servers": kill_name_servers,
    "kill-consumer": kill_consumer,
    "kill-producers": kill_producers,
    "kill-in-transactions": kill_in_transactions,
    "kill-in-delays": kill_in_delays,
    "kill-in-receives": kill_in_receives,
    "kill-in-kv": kill_in_kv,
    "carry": carry,
    "kill-outbox": kill_outbox,
    "kill-outbox-postgres": kill_outbox_postgres,
    "kill-in-processing": kill_in_processing,
    "payments": payments,
    "policies": kill_under_policies,
    "pause-broker": pause_broker,
}


def _flush(seed: int) -> str:
    return "SYNC_FLUSH" if seed % 2 else "ASYNC_FLUSH"


def _settings(flush: str = "ASYNC_FLUSH") -> dict[str, str]:
    return {
        "storage.flush_disk_type": flush,
        "flush_consumer_offset_interval_ms": str(OFFSETS_SAVED_MS),
        # Small, so that segments end under load, too.
        "storage.mapped_file_size_commit_log": str(_SEGMENT_BYTES),
    }


def _restart_broker(cluster: ProcessCluster) -> None:
    cluster.brokers[BROKER].kill()
    cluster.start_broker()


# ---- The long form -------------------------------------------------------------------


def run_one(
    name: str, seed: int, rounds: int, out: Path | None = None, *, secure: bool = False
) -> bool:
    """Runs a scenario once in a folder of its own, which stays if it fails.

    Args:
        name: Name of the scenario.
        seed: Seed of all random choices.
        rounds: Kills, for scenarios that have rounds.
        out: A file that gets a line of JSON about each run.
        secure: Clients without a key are refused.

    Returns:
        True when everything held.
    """
    folder = Path(tempfile.mkdtemp(prefix="mq-"))
    began = time.monotonic()
    if secure:
        os.environ[CREDENTIALS_VARIABLE] = str(secured_folder(folder) / f"{CLIENT}.toml")
    try:
        outcome = SCENARIOS[name](folder, seed, rounds)
        good, text, metrics = outcome.report.good, outcome.report.text(), outcome.metrics
    except (AssertionError, RuntimeError, MQMeshError) as error:
        good, text, metrics = False, f"{type(error).__name__}: {error}", {}
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    took_s = time.monotonic() - began
    measured = "; ".join(f"{key} {value:.3g}" for key, value in metrics.items())
    say(f"{'ok    ' if good else 'FAILED'} {name} --seed {seed}: {measured}, {took_s:.0f} s")
    say("       " + text.replace("\n", "\n       "))
    if out is not None:
        line = {"scenario": name, "seed": seed, "rounds": rounds, "good": good, "text": text}
        with out.open("ab") as file:
            file.write(msgspec.json.encode({**line, **metrics}) + b"\n")
    if good:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        say(f"       kept: {folder}")
        replay = f"--scenario {name} --seed {seed} --rounds {rounds}"
        say(f"       replay: scripts/chaos {replay}{' --secure' if secure else ''}")
    return good


def main(arguments: list[str] | None = None) -> int:
    """Runs the program.

    Returns:
        Exit code: 0 when everything held, 1 when not, 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(
        prog="scripts/chaos", description="Harms clusters under load and judges what clients saw."
    )
    parser.add_argument("--minutes", type=float, default=0, help="how long; 0: each scenario once")
    parser.add_argument("--seed", type=int, help="of the first run; the next ones count on")
    parser.add_argument("--scenario", choices=SCENARIOS, action="append", help="may be repeated")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="kills a run (%(default)s)")
    parser.add_argument("--secure", action="store_true", help="nobody gets in without a key")
    parser.add_argument("--out", type=Path, help="append a line of JSON about each run")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    seed = int.from_bytes(os.urandom(3), "big") if options.seed is None else options.seed
    names = options.scenario or list(SCENARIOS)
    deadline = time.monotonic() + 60 * options.minutes
    before = signal.signal(signal.SIGTERM, _interrupt)
    runs = failures = 0
    try:
        while runs < len(names) or time.monotonic() < deadline:
            name = names[runs % len(names)]
            show(f"run {runs + 1}: {name} --seed {seed + runs} …")
            failures += not run_one(
                name, seed + runs, options.rounds, options.out, secure=options.secure
            )
            runs += 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    say(f"{runs} runs from seed {seed} on, {failures} failed")
    return 1 if failures else 0


def say(text: str) -> None:
    """Prints a line."""
    show("")
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def show(text: str) -> None:
    """Shows on a terminal what is going on, in a line that the next one replaces."""
    if sys.stdout.isatty():
        sys.stdout.write("\r\x1b[K" + text)
        sys.stdout.flush()


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
