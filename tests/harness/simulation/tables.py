"""Seeds with registers of a table that clients compare and write, while its masters are lost.

Broken when:

* T1: a write is in the log that did not expect the newest revision of its key;
* T2: a write that was acknowledged is not in the log under its revision, one is there twice, or one
  that was refused is there;
* T3: a read saw what is not in the log;
* T4: the table has other values in the end than the log;
* T5: of what the table keeps something stands only where retention may remove the log, or an older
  revision of a key stands behind its newest one.
"""

import hashlib
import struct
from collections import defaultdict
from collections.abc import Callable
from typing import Final

import msgspec

from harness.simulation.election import GROUP, MODES, ElectionRun, start_group
from harness.simulation.load import Client
from harness.simulation.world import World
from mqmesh.batch.delayed_batch import ExpectingMeta
from mqmesh.batch.payload import encode_payload
from mqmesh.batch.record_batch import Attributes, batch_parts
from mqmesh.coordination.interface import AckReplicas
from mqmesh.errors import MQMeshError
from mqmesh.message import CARRIED_TOPIC, Message, StoredMessage
from mqmesh.producer_key import producer_id_of
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import decode_outcomes, encode_send
from mqmesh.protocol.route import TopicConfig
from mqmesh.protocol.tables import (
    OPERATIONS,
    PROPERTY_KV_OPERATION,
    KvOperation,
    ReadTableRequest,
    TableEntries,
)
from mqmesh.roles.broker.features.tables.changes import PROPERTY_CARRIED
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.units import CommitLogOffset

TABLE: Final = "registers"
KEYS: Final = 4
WRITERS: Final = 5
EVERY_MS: Final = 300
AGAIN_MS: Final = 200
ASK_MS: Final = 2_000
CARRY_EVERY_MS: Final = 4_000
HISTORY: Final = 2
_OK: Final = int(ResponseCode.SUCCESS)
_CONFLICT: Final = int(ResponseCode.REVISION_CONFLICT)


class Write(msgspec.Struct):
    """One write of a client.

    Attributes:
        name: Of it; its value.
        key: Key.
        expected: The revision that it was to have.
        revision: That it got; 0 while it has none.
        is_refused: It was answered that its key has another revision.
    """

    name: str
    key: str
    expected: int
    revision: int = 0
    is_refused: bool = False


class _Nothing:
    """A client without a life of its own."""

    def start(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class RegisterClient(Client):
    """Client that reads a register and writes it by the revision that it read, or by an older one.

    A request without an answer is sent again, the very same, to the leader of that moment.
    """

    def __init__(self, world: World, run: "TableRun", name: str) -> None:
        super().__init__(world, run.books, name)
        self._run = run

    def make(self) -> _Nothing:
        """Makes the client."""
        self._key = hashlib.sha256(self.life.encode()).digest()[:16]
        self._sequence = 0
        return _Nothing()

    def begin(self) -> None:
        """Writes now and then."""
        self.later(EVERY_MS, self._step)

    def _step(self) -> None:
        if not self.sending:
            return
        key = f"k{self.transport.node.random.randrange(KEYS)}"
        request = ReadTableRequest(TABLE, [key], deleted=True)
        self._ask(
            RequestCode.READ_TABLE, encode_header(request), b"", lambda got: self._read(key, got)
        )

    def _read(self, key: str, answer: Command) -> None:
        found = decode_header(TableEntries, answer.header).entries
        revision = found[0].revision if found else 0
        self._run.reads.append((key, revision))
        chance = self.transport.node.random
        expected = revision if chance.randrange(5) else max(revision - 1, 0)
        if found and OPERATIONS[found[0].operation] is not KvOperation.PUT:
            expected = chance.choice((expected, 0))
        write = Write(f"{self.life}:{self._sequence}", key, expected)
        self._run.writes.append(write)
        data = self._batch(write, is_deletion=not chance.randrange(6))
        header = encode_send(ASK_MS, 1, self._key)
        self._ask(RequestCode.SEND_MESSAGE, header, data, lambda got: self._written(write, got))

    def _batch(self, write: Write, *, is_deletion: bool) -> bytes:
        properties = {"name": write.name, "expected": str(write.expected)}
        if is_deletion:
            properties[PROPERTY_KV_OPERATION] = KvOperation.DEL
        message = Message(TABLE, write.name.encode(), keys=(write.key,), properties=properties)
        self._sequence += 1
        parts = batch_parts(
            encode_payload([message]),
            topic=TABLE,
            queue_id=0,
            producer_id=producer_id_of(self._key),
            first_sequence=self._sequence,
            born_timestamp=1,
            attributes=int(Attributes.HAS_EXPECTED),
            meta=ExpectingMeta(TABLE, expected=struct.pack("<q", write.expected)),
        )
        return b"".join(parts)

    def _written(self, write: Write, answer: Command) -> None:
        (outcome,) = decode_outcomes(answer.header, answer.body)
        if outcome.code == _CONFLICT:
            write.is_refused = True
            self._run.reads.append((write.key, outcome.base_queue_offset + 1))
        else:
            write.revision = outcome.base_queue_offset + 1
        self.later(EVERY_MS, self._step)

    def _ask(
        self, code: int, header: bytes, body: bytes, on_done: Callable[[Command], None]
    ) -> None:
        """Asks the leader of the moment, until one answers for good."""
        name = self._run.leader
        connection = self.world.connect_to_broker(self.transport, name)

        def done(answer: Command | MQMeshError) -> None:
            self.transport.loop.call_later(0, connection.close)
            is_final = not isinstance(answer, MQMeshError) and answer.code == _OK
            if is_final and code == RequestCode.SEND_MESSAGE:
                assert isinstance(answer, Command)
                (outcome,) = decode_outcomes(answer.header, answer.body)
                is_final = outcome.code in (_OK, _CONFLICT)
            if is_final:
                assert isinstance(answer, Command)
                on_done(answer)
            else:
                self.later(AGAIN_MS, lambda: self._ask(code, header, body, on_done))

        parts = (body,) if body else ()
        connection.request(code, done, *parts, header=header, timeout_ms=ASK_MS)


class TableRun(ElectionRun):
    """Such a seed's world while it runs; arguments as for ``Run``."""

    option = " --tables"

    def _start(self) -> None:
        world = self.world
        modes = tuple(mode for mode in MODES if mode is not AckReplicas.NONE)
        mode = self._mode = modes[self.seed % len(modes)]
        self.books.statuses_hold = True
        self.writes: list[Write] = []
        self.reads: list[tuple[str, int]] = []
        self.replicas = start_group(world, mode, zones=False)
        with AdminClient(world.namesrv_addr, transport=world.transport("admin")) as admin:
            admin.create_topic(TopicConfig(TABLE, 1, 1, history=HISTORY))
        self.clients = [RegisterClient(world, self, f"writer-{one}") for one in range(WRITERS)]
        for client in self.clients:
            world.simulation.after(world.simulation.random.randrange(1_000), client.start)
        self._watch()
        self._want_room()

    @property
    def leader(self) -> str:
        """Name of the replica that leads, or of any."""
        master = self._master()
        chance = self.world.simulation.random
        return (master or chance.choice(self.replicas)).name

    def _want_room(self) -> None:
        """Has retention want all of the master's log that there is, now and then."""
        master = self._master()
        if master is not None and master.up:
            store = self._store(master)
            end = CommitLogOffset(store.stats().max_commitlog_offset)
            store.retention_wish = lambda: end  # type: ignore[method-assign]
        self.world.simulation.after(CARRY_EVERY_MS, self._want_room)

    def _judged(self) -> list[str]:
        found = super()._judged()
        master = self._master()
        features = self._leading()
        if master is None or features is None:
            return found
        disk = self.world.disks[master.name]
        messages = disk.messages(TABLE, GROUP)
        carried = disk.messages(CARRIED_TOPIC, GROUP)
        found += self._chains(messages) + self._outcomes(messages)
        tables = features.state.tables
        tables.settle()
        (table,) = tables
        newest = {one.keys[0]: one for one in messages}
        for key, message in newest.items():
            (row,) = tables.rows_of(table, [key.encode()])
            if row is None or row.newest.revision != message.queue_offset + 1:
                found.append(f"T4: {key} has not revision {message.queue_offset + 1}")
            elif _is_put(message) and row.value != message.body:
                found.append(f"T4: {key} has another value than its newest message")
        return found + _kept(messages, carried, tables.released)

    def _chains(self, messages: list[StoredMessage]) -> list[str]:
        found = []
        newest: dict[str, tuple[int, bool]] = {}
        for one in messages:
            key, expected = one.keys[0], int(one.property("expected") or -1)
            revision, is_put = newest.get(key, (0, False))
            if expected != revision and not (expected == 0 and not is_put):
                found.append(f"T1: {one.property('name')} expects {expected} of {key}: {revision}")
            newest[key] = one.queue_offset + 1, _is_put(one)
        return found

    def _outcomes(self, messages: list[StoredMessage]) -> list[str]:
        found = []
        stored: defaultdict[str, list[int]] = defaultdict(list)
        for one in messages:
            stored[one.property("name") or ""].append(one.queue_offset + 1)
        for write in self.writes:
            got = stored[write.name]
            if len(got) > 1:
                found.append(f"T2: {write.name} is in the log {len(got)} times")
            if write.revision and got != [write.revision]:
                found.append(f"T2: {write.name} was acknowledged as {write.revision}, it is {got}")
            if write.is_refused and got:
                found.append(f"T2: {write.name} was refused, and is in the log")
        there = {(one.keys[0], one.queue_offset + 1) for one in messages}
        found += [
            f"T3: revision {revision} of {key} was seen, and is not in the log"
            for key, revision in self.reads
            if revision and (key, revision) not in there
        ]
        if not any(write.revision for write in self.writes):
            found.append("T2: nothing was ever acknowledged")
        return found


def _is_put(message: StoredMessage) -> bool:
    return (message.property(PROPERTY_KV_OPERATION) or KvOperation.PUT) == KvOperation.PUT


def _kept(messages: list[StoredMessage], carried: list[StoredMessage], released: int) -> list[str]:
    """Look at what is left of the table in the log from an offset on."""
    copies: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for one in messages:
        copies[one.keys[0]].append((one.commitlog_offset, one.ordinal, one.queue_offset + 1))
    for one in carried:
        revision = int((one.property(PROPERTY_CARRIED) or "").split()[1])
        copies[one.keys[0]].append((one.commitlog_offset, one.ordinal, revision))
    found = []
    for key, places in copies.items():
        newest = max(revision for _, _, revision in places)
        left = [revision for place, _, revision in sorted(places) if place >= released]
        if newest not in left:
            found.append(f"T5: revision {newest} of {key} stands before {released} only")
        elif left[-1] != newest:
            found.append(f"T5: revision {left[-1]} of {key} stands behind {newest}")
    return found
