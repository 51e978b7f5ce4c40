"""A replica dies at each single step of an election, of a switch-over and of coming back.

A step is a command that it is about to send: to another replica, the coordinator, a name server or
a client. All that it did before is done, on its disk, too, and nothing behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
from harness.simulation.election import first_difference, leadership_of
from harness.simulation.world import Process
from simulation.test_election import Site

from mqmesh import Message, Producer
from mqmesh.errors import MQMeshError
from mqmesh.sdk.producer.send_result import SendFuture
from mqmesh.transport.simulated.network import Pipe
from mqmesh.transport.simulated.node import NodeKilled

PACE_MS = 20
MOST_MS = 10_000
BACK_MS = 300
EACH = 9
"""Of so many steps one is tried in a run of the tests."""
LEAST = 5
"""Steps that a course has, or it is not the one that is meant."""


class Steps:
    """Counts what a process sends, and kills it before it does so."""

    def __init__(self, last: int) -> None:
        self.victim: Process | None = None
        self.taken = 0
        self._last = last
        self._send = Pipe.send

    def send(self, pipe: Pipe, arrive: Callable[..., None], *frame: bytes) -> None:
        """In the place of the network's."""
        victim = self.victim
        if victim is not None and pipe.source is victim.node and victim.up:
            self.taken += 1
            if self.taken == self._last:
                victim.kill()
                raise NodeKilled(victim.name)
        self._send(pipe, arrive, *frame)


class Course:
    """One course of a group with a producer, and what the producer was told."""

    def __init__(self, folder: Path, last: int) -> None:
        self.site = Site(folder)
        self.steps = Steps(last)
        self.sent: list[SendFuture] = []
        self.site.admin.create_topic("t", queues=1)
        world = self.site.world
        self._transport = world.transport("producer")
        self._producer = Producer("p", client=world.client_options(), transport=self._transport)
        self._producer.start()

    def run(self, is_over: Callable[[], bool]) -> None:
        """Goes on under load until that."""
        for _ in range(MOST_MS // PACE_MS):
            if is_over():
                return
            self.sent.append(self._producer.send_async(Message("t", b"%d" % len(self.sent))))
            with suppress(NodeKilled):  # of the victim, and the event was its own
                self.site.run(PACE_MS)
        raise AssertionError(f"not within {MOST_MS} ms")

    def is_whole(self) -> bool:
        """Somebody leads, and all replicas are in sync."""
        leader = self.site.leader()
        found = leadership_of(self.site.replicas[leader - 1]) if leader else None
        return found is not None and len(found.members) == len(self.site.replicas)

    def leads(self, epoch: int) -> bool:
        """Somebody leads in an epoch, or a later one."""
        leader = self.site.leader()
        found = leadership_of(self.site.replicas[leader - 1]) if leader else None
        return found is not None and found.epoch >= epoch

    def wrong(self) -> list[str]:
        """What was not as it was promised; everything is settled."""
        world, leader = self.site.world, self.site.leader()
        name = self.site.replicas[leader - 1].name
        stored = world.disks[name].messages("t", "broker-a")
        bodies = Counter(bytes(one.body) for one in stored)
        places = {one.queue_offset: bytes(one.body) for one in stored}
        wrong = [f"{body!r} is stored {times} times" for body, times in bodies.items() if times > 1]
        for number, future in enumerate(self.sent):
            if future.exception() is not None:
                wrong.append(f"message {number} failed: {future.exception()}")
            elif places.get(future.result(0).queue_offset) != b"%d" % number:
                wrong.append(f"message {number} is not where its acknowledgement says")
        logs = [world.disks[one.name].store for one in self.site.replicas]
        end = leadership_of(self.site.replicas[leader - 1]).confirmed()
        differ = [first_difference(logs[0], log, end) for log in logs[1:]]
        return wrong + [f"the logs differ from {at} on" for at in differ if at is not None]

    def close(self) -> None:
        self._producer.close()
        self.site.close()


def run_course(folder: Path, victim: str, last: int) -> Course:
    """A course in which the victim dies at a step, and everybody comes back; it is judged.

    Args:
        folder: Of the replicas.
        victim: ``winner`` or ``voter`` of an election, ``giver``, ``taker`` of a lead that is
            handed over, or ``former``: a master that comes back and has a tail to be cut.
        last: The step; 0 for none.
    """
    course = Course(folder, last)
    site, steps = course.site, course.steps
    first = site.leader()
    one, other = (number for number in (1, 2, 3) if number != first)
    epoch = leadership_of(site.replicas[first - 1]).epoch
    with mock.patch.object(Pipe, "send", lambda *arguments: steps.send(*arguments)):
        course.run(lambda: len(course.sent) > 5)
        if victim in ("giver", "taker"):
            steps.victim = site.replicas[(first if victim == "giver" else one) - 1]
            with suppress(MQMeshError):  # of the one that dies
                site.admin.switch_over("broker-a", one)
            course.run(lambda: course.leads(epoch + 1))
        elif victim == "former":
            former = site.replicas[first - 1]
            site.cut(former, site.replicas[one - 1], site.replicas[other - 1])
            course.run(lambda: len(course.sent) > 12)
            former.kill()
            site.world.network.heal()
            course.run(lambda: course.leads(epoch + 1))
            steps.victim = former
            former.start()
            site.run(BACK_MS)
        else:
            site.replicas[first - 1].kill()
            steps.victim = site.replicas[(one if victim == "winner" else other) - 1]
            course.run(lambda: course.leads(epoch + 1) or not steps.victim.up)
        steps.victim = None
        for replica in site.replicas:
            replica.start()
        course.run(course.is_whole)
        course.run(lambda: all(future.done() for future in course.sent[:-50]))
        site.run(2_000)
    return course


@pytest.mark.parametrize("victim", ["winner", "voter", "giver", "taker", "former"])
def test_whoever_dies_at_whichever_step_nothing_is_lost_and_somebody_leads(victim, tmp_path):
    course = run_course(tmp_path / "0", victim, 0)
    most = course.steps.taken
    assert most >= LEAST, most
    assert course.wrong() == []
    course.close()
    for step in range(1, most + 1, EACH):
        course = run_course(tmp_path / str(step), victim, step)
        assert course.steps.taken == step
        assert course.wrong() == [], step
        course.close()
