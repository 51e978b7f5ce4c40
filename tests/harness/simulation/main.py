"""``scripts/simulate``: runs seeds of simulated clusters, and says how to replay one that fails."""

import argparse
import gc
import logging
import os
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from harness.chaos import say, show
from harness.simulation.run import Outcome, run_seed

QUIET: Final = logging.CRITICAL + 1
BAR: Final = 30
"""Characters of the progress bar."""
MOST_VIOLATIONS: Final = 12
"""So many are printed of a seed."""


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
    level = QUIET if options.log is None else options.log.upper()
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    # A seed's world is garbage as a whole, and only when the seed is over.
    gc.collect()
    gc.freeze()
    gc.disable()
    failed: list[int] = []
    counts: Counter[str] = Counter()
    begun = time.monotonic()
    runs = 0
    try:
        for seed in _seeds(options):
            show(_progress(options, time.monotonic() - begun, runs, len(failed)) + f", seed {seed}")
            outcome = run_seed(seed)
            gc.collect()
            runs += 1
            counts.update(outcome.counts)
            counts["events"] += outcome.events
            if outcome.violations:
                failed.append(seed)
                tell(outcome)
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    usage = resource.getrusage(resource.RUSAGE_SELF)
    spent_s = usage.ru_utime + usage.ru_stime
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
    parser.add_argument("--log", help="the roles' log, from this level on")
    options = parser.parse_args(arguments)
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1 << 31)
    return options


if __name__ == "__main__":
    sys.exit(main())
