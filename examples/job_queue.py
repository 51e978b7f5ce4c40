"""A job queue: jobs of unlike length, many workers, retries by a schedule. Needs ``mqmesh up``.

Each job goes to any worker that is free, however few queues the topic has, and a long one holds up
nobody. A job that fails comes again after a moment; one that will never succeed is a dead letter::

    python examples/job_queue.py --jobs 1000 --longest-ms 60000
"""

import argparse
import random
import sys
import threading
import time
from collections import Counter

import msgspec

from mqmesh import App, DeadLetterClient, GroupAdmin, GroupConfig, Reject, StoredMessage

TOPIC = "jobs"
GROUP = "job-workers"
PATIENCE_S = 600.0


class Job(msgspec.Struct):
    """A picture to be made smaller, say."""

    number: int
    takes_ms: int


class Shop:
    """The work, and what was done."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.done: Counter[int] = Counter()
        self.rejected = 0

    def work(self, job: Job, message: StoredMessage) -> None:
        """Handler: returns when the job is done, and raises what went wrong."""
        time.sleep(job.takes_ms / 1_000)
        if job.number % 50 == 7 and message.delivery_attempt == 1:
            raise ConnectionError("the disk is away for a moment")  # comes again
        with self.changed:
            self.changed.notify_all()
            if job.number % 50 == 13:
                self.rejected += 1
                raise Reject("this is no picture")  # a dead letter, now
            self.done[job.number] += 1

    def wait_for(self, count: int) -> None:
        """Waits until so many jobs have an outcome."""
        with self.changed:
            is_done = self.changed.wait_for(
                lambda: len(self.done) + self.rejected >= count, PATIENCE_S
            )
            if not is_done:
                sys.exit(f"only {len(self.done)} of {count} jobs were done")


def main() -> None:
    """Sends jobs, and works on them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--namesrv", default="127.0.0.1:9876;127.0.0.1:9877")
    parser.add_argument("--jobs", type=int, default=400)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--longest-ms", type=int, default=1_000)
    options = parser.parse_args()

    with GroupAdmin(options.namesrv) as admin:
        admin.put_group(
            GroupConfig(
                GROUP,
                delivery="message",  # each job to any worker
                retry_delays="200ms 1s 5s 30s",  # after the first failure, the second, …
                retry_max_times=4,
            )
        )

    shop = Shop()
    app = App("job-shop", namesrv_addr=options.namesrv)
    jobs = app.publisher(TOPIC, Job)
    app.subscriber(
        TOPIC,
        group=GROUP,
        delivery="message",
        consume_from_where="FIRST_OFFSET",
        consume_thread_count=options.workers,
        close_timeout_ms=10_000,
    )(shop.work)

    chance = random.Random(1)
    with app:
        began = time.monotonic()
        for number in range(options.jobs):
            longest = number % 20 == 0
            takes_ms = options.longest_ms if longest else 10 + chance.randrange(90)
            jobs.send_async(Job(number, takes_ms))
        shop.wait_for(options.jobs)
        seconds = time.monotonic() - began

    one_by_one_s = options.jobs * (options.longest_ms + 19 * 55) / 20 / 1_000
    print(f"{len(shop.done)} jobs done in {seconds:.1f} s, of {one_by_one_s:.0f} s of work")
    print(f"done more than once: {sum(count > 1 for count in shop.done.values())}")
    print(f"rejected: {shop.rejected}")
    with DeadLetterClient(options.namesrv) as client:
        for dead_letter in client.scan(GROUP, newest=1):
            print(f"dead: {dead_letter.reason}")


if __name__ == "__main__":
    main()
