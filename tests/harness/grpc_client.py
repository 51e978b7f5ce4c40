"""A client of RocketMQ 5 by gRPC on one simulated connection, made of h2's client side."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)

from mqmesh.protocol.grpc.codes import ReplyCode
from mqmesh.protocol.grpc.messages import CLASSES, SERVICE
from mqmesh.transport.simulated.streams import SimulatedStream


class Asked:
    """A call of the client.

    Attributes:
        answers: Messages that came.
        status: gRPC's status, once it is over; -1 if it was reset.
        text: Text of the status.
    """

    def __init__(self, response: str) -> None:
        self._response = CLASSES[response]
        self._data = b""
        self.answers: list[Any] = []
        self.status: int | None = None
        self.text = ""

    def take(self, data: bytes) -> None:
        self._data += data
        while len(self._data) >= 5:
            size = struct.unpack_from(">I", self._data, 1)[0]
            if len(self._data) < 5 + size:
                return
            self.answers.append(self._response.FromString(self._data[5 : 5 + size]))
            self._data = self._data[5 + size :]


class GrpcTestClient:
    """The client.

    Args:
        stream: Its connection.
        run: Lets time pass, in ms.
        client_id: Its id.
    """

    def __init__(self, stream: SimulatedStream, run: Callable[[int], None], client_id: str) -> None:
        self._run = run
        self._h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self._calls: dict[int, Asked] = {}
        self._streams: dict[Asked, int] = {}
        self.client_id = client_id
        self.stream = stream
        self.is_closed = False
        self.gives_room = True
        stream.start(self)
        self._h2.initiate_connection()
        self._write()

    def on_bytes(self, data: bytes) -> None:
        for event in self._h2.receive_data(data):
            if isinstance(event, ConnectionTerminated):
                self.is_closed = True
                continue
            asked = self._calls.get(getattr(event, "stream_id", None) or 0)
            if asked is None:
                continue
            if isinstance(event, DataReceived):
                asked.take(event.data)
                if self.gives_room:
                    self._h2.acknowledge_received_data(
                        event.flow_controlled_length, event.stream_id
                    )
            elif isinstance(event, ResponseReceived | TrailersReceived):
                headers = {str(name): str(value) for name, value in event.headers}
                if "grpc-status" in headers:
                    asked.status = int(headers["grpc-status"])
                    asked.text = headers.get("grpc-message", "")
            elif isinstance(event, StreamReset | StreamEnded) and asked.status is None:
                asked.status = -1
        self._write()

    def on_stuck(self) -> None:
        pass

    def on_drained(self) -> None:
        pass

    def on_closed(self) -> None:
        self.is_closed = True

    def post(self, name: str, *, is_open: bool = False, timeout: str = "", **fields: Any) -> Asked:
        """Begins a call with a request."""
        response = "TelemetryCommand" if name == "Telemetry" else f"{name}Response"
        request = "TelemetryCommand" if name == "Telemetry" else f"{name}Request"
        asked = Asked(response)
        number = self._h2.get_next_available_stream_id()
        self._calls[number], self._streams[asked] = asked, number
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", f"/{SERVICE}/{name}"),
            (":authority", "gateway"),
            ("content-type", "application/grpc"),
            ("x-mq-client-id", self.client_id),
            ("x-mq-language", "TEST"),
        ]
        if timeout:
            headers.append(("grpc-timeout", timeout))
        self._h2.send_headers(number, headers)
        self.say(asked, CLASSES[request](**fields), is_open=is_open)
        return asked

    def say(self, asked: Asked, message: Any, *, is_open: bool = True) -> None:
        """Sends a message of a call."""
        data = message.SerializeToString()
        self._h2.send_data(
            self._streams[asked], struct.pack(">BI", 0, len(data)) + data, end_stream=not is_open
        )
        self._write()

    def cancel(self, asked: Asked) -> None:
        self._h2.reset_stream(self._streams[asked])
        self._write()

    def wait(self, asked: Asked, within_ms: int = 10_000) -> Asked:
        """Waits until a call is over."""
        for _ in range(within_ms // 10):
            if asked.status is not None:
                return asked
            self._run(10)
        raise AssertionError("a call is not over")

    def ask(self, name: str, within_ms: int = 10_000, **fields: Any) -> Any:
        """Calls, and returns the answer of a call that has one."""
        asked = self.wait(self.post(name, **fields), within_ms)
        assert asked.status == 0, asked.text
        return asked.answers[-1]

    def settings(self, **fields: Any) -> Asked:
        """Opens a Telemetry stream, and waits for its settings."""
        asked = self.post("Telemetry", is_open=True, settings=CLASSES["Settings"](**fields))
        for _ in range(500):
            if asked.answers:
                return asked
            self._run(10)
        raise AssertionError("no settings")

    def send(self, body: bytes, topic: str = "t", **system: Any) -> Any:
        """Posts a message; the call."""
        system.setdefault("message_id", body.decode())
        message = CLASSES["Message"](
            topic=resource(topic),
            body=body,
            system_properties=CLASSES["SystemProperties"](**system),
        )
        return self.post("SendMessage", messages=[message])

    def receive(
        self,
        group: str = "g",
        topic: str = "t",
        wait_s: int = 0,
        invisible_s: int = 10,
        **more: Any,
    ) -> Any:
        """Posts a receive; the call."""
        more.setdefault("batch_size", 32)
        if invisible_s:
            more["invisible_duration"] = CLASSES["Duration"](seconds=invisible_s)
        return self.post(
            "ReceiveMessage",
            group=resource(group),
            message_queue=queue(topic),
            long_polling_timeout=CLASSES["Duration"](seconds=wait_s),
            **more,
        )

    def got(self, within_ms: int = 20_000, **more: Any) -> list[Any]:
        """Receives; the messages."""
        asked = self.wait(self.receive(**more), within_ms)
        assert asked.status == 0, asked.text
        code = asked.answers[-1].status.code
        assert code in (ReplyCode.OK, ReplyCode.MESSAGE_NOT_FOUND), asked.answers[-1].status
        return [one.message for one in asked.answers if one.HasField("message")]

    def ack(self, *messages: Any, group: str = "g") -> Any:
        """Acknowledges messages of one topic; the answer."""
        entries = [
            CLASSES["AckMessageEntry"](
                message_id=one.system_properties.message_id,
                receipt_handle=one.system_properties.receipt_handle,
            )
            for one in messages
        ]
        topic = messages[0].topic
        return self.ask("AckMessage", group=resource(group), topic=topic, entries=entries)

    def change(self, message: Any, ms: int, group: str = "g") -> Any:
        """Changes the invisible duration of a message; the answer."""
        return self.ask(
            "ChangeInvisibleDuration",
            group=resource(group),
            topic=message.topic,
            receipt_handle=message.system_properties.receipt_handle,
            invisible_duration=CLASSES["Duration"](
                seconds=ms // 1_000, nanos=ms % 1_000 * 1_000_000
            ),
        )

    def _write(self) -> None:
        if data := self._h2.data_to_send():
            self.stream.write(data)


def resource(name: str) -> Any:
    space, _, own = name.rpartition("%")
    return CLASSES["Resource"](resource_namespace=space, name=own)


def queue(topic: str = "t", broker: str = "broker-a") -> Any:
    return CLASSES["MessageQueue"](
        topic=resource(topic), id=-1, broker=CLASSES["Broker"](name=broker)
    )
