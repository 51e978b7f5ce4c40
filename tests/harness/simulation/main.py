"""``scripts/simulate``: runs seeds of simulated clusters, and says how to replay one that fails."""

import argparse
import gc
import logging
import os
import random
import resource
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Final

from harness.chaos import say, show
from harness.ha_model import explore_all
from harness.simulation.election import ElectionRun
from harness.simulation.failover import FailoverRun
from harness.simulation.owners import OwnersRun
from harness.simulation.processing import ProcessingRun
from harness.simulation.receiving import ReceiveElectionRun, ReceiveFailoverRun, ReceiveRun
from harness.simulation.run import Outcome, Run, run_seed
from harness.simulation.tables import TableRun

QUIET: Final = logging.CRITICAL + 1
BAR: Final = 30
"""Characters of the progress bar."""
MOST_VIOLATIONS: Final = 12
"""Violations that are printed of a seed."""

SEEDS_WAITING: Final = 4
"""Seeds given out to each process, so that none waits for one whose seed takes long."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line says.

    Returns:
        0 when all is well, 1 when a seed failed, 130 after Ctrl-C.
    """
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(
            sys.executable, [sys.executable, "-P", "-m", "harness.simulation.main", *sys.argv[1:]]
        )
    options = _parse(arguments)
    if options.model:
        return 0 if explore_all() else 1
    level = QUIET if options.log is None else options.log.upper()
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    failed: list[int] = []
    counts: Counter[str] = Counter()
    begun = time.monotonic()
    runs = 0
    try:
        for outcome in _outcomes(options):
            runs += 1
            spent_s = time.monotonic() - begun
            show(_progress(options, spent_s, runs, len(failed)) + f", seed {outcome.seed}")
            counts.update(outcome.counts)
            counts["events"] += outcome.events
            if outcome.violations:
                failed.append(outcome.seed)
                tell(outcome)
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    spent_s = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    say(", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    say(
        f"{runs} seeds, {len(failed)} failed, {spent_s / max(runs, 1):.2f} s of processor time each"
    )
    return 1 if failed else 0


def tell(outcome: Outcome) -> None:
    """Prints what a seed broke, and the line that replays it."""
    say(f"seed {outcome.seed} failed; replay it by: {outcome.replay}")
    for violation in outcome.violations[:MOST_VIOLATIONS]:
        say(f"  {violation}")
    if len(outcome.violations) > MOST_VIOLATIONS:
        say(f"  and {len(outcome.violations) - MOST_VIOLATIONS} more")


def _progress(options: argparse.Namespace, spent_s: float, runs: int, failed: int) -> str:
    share = runs / options.count
    if options.minutes is not None:
        share = min(spent_s / (60 * options.minutes), 1)
    full = int(share * BAR)
    return f"[{'#' * full}{'-' * (BAR - full)}] {spent_s:.0f} s, {runs} done, {failed} failed"


def _outcomes(options: argparse.Namespace) -> Iterator[Outcome]:
    # A seed's world is garbage as a whole, and only when the seed is over.
    gc.collect()
    gc.freeze()
    gc.disable()
    kinds: tuple[type[Run], ...] = (Run, FailoverRun, ElectionRun)
    if options.receive:
        kinds = (ReceiveRun, ReceiveFailoverRun, ReceiveElectionRun)
    kind = kinds[2 if options.election else 1 if options.failover else 0]
    if options.owners:
        kind = OwnersRun
    elif options.processing:
        kind = ProcessingRun
    elif options.tables:
        kind = TableRun
    if options.jobs == 1:
        yield from map(partial(_run, kind=kind, secure=options.secure), _seeds(options))
        return
    waiting: deque[Future[Outcome]] = deque()
    with ProcessPoolExecutor(options.jobs, get_context("fork"), _ignore_interrupts) as pool:
        for seed in _seeds(options):
            waiting.append(pool.submit(_run, seed, kind, options.secure))
            if len(waiting) > SEEDS_WAITING * options.jobs:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _run(seed: int, kind: type[Run] = Run, secure: bool = False) -> Outcome:
    outcome = run_seed(seed, kind=kind, secure=secure)
    gc.collect()
    return outcome


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that waits for outcomes ends this


def _seeds(options: argparse.Namespace) -> Iterator[int]:
    if options.minutes is None:
        yield from range(options.seed, options.seed + options.count)
        return
    end = time.monotonic() + 60 * options.minutes
    seed = options.seed
    while time.monotonic() < end:
        yield seed
        seed += 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/simulate", description=__doc__)
    parser.add_argument("--seed", type=int, help="the first seed; a new one by default")
    parser.add_argument("--count", type=int, default=1, help="so many seeds (default: 1)")
    parser.add_argument("--minutes", type=float, help="as many seeds as go into so many minutes")
    parser.add_argument(
        "--jobs", type=int, help="processes that share the seeds (default: one for each processor)"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--failover", action="store_true", help="a machine is lost, its follower takes over"
    )
    kind.add_argument(
        "--election", action="store_true", help="replicas elect their master, whatever goes wrong"
    )
    parser.add_argument("--receive", action="store_true", help="members acknowledge each message")
    parser.add_argument(
        "--secure", action="store_true", help="nobody gets in without a key, and strangers try"
    )
    kind.add_argument(
        "--owners", action="store_true", help="ordered members come and go while masters are lost"
    )
    kind.add_argument(
        "--processing", action="store_true", help="members make messages of messages, exactly once"
    )
    kind.add_argument(
        "--tables", action="store_true", help="registers of a table while masters are lost"
    )
    parser.add_argument(
        "--model", action="store_true", help="all courses of elections within bounds, no seeds"
    )
    parser.add_argument("--log", help="the roles' log, from this level on")
    options = parser.parse_args(arguments)
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1 << 31)
    if options.jobs is None:
        several = options.minutes is not None or options.count > 1
        options.jobs = (os.cpu_count() or 1) if several else 1
    return options


if __name__ == "__main__":
    sys.exit(main())
