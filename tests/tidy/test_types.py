"""What type checkers tell users of mqmesh: mypy finds each planted error, and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ERROR = re.compile(r"(\w+\.py):(\d+): error: ")

PROGRAM = """
from mqmesh import (
    AdminClient, App, ConsumeFromWhere, ConsumeResult, Message, Producer, PullConsumer,
    PushConsumer, StoredMessage, TopicConfig, TransactionListener, TransactionProducer, aio,
)
from mqmesh.faststream import MQMeshBroker

def returns_nothing(messages: list[StoredMessage]) -> None: ...
def returns_a_result(messages: list[StoredMessage]) -> ConsumeResult:
    return ConsumeResult.SUCCESS
def returns_a_number(messages: list[StoredMessage]) -> int:
    return 1
async def coroutine(messages: list[StoredMessage]) -> None: ...

def use(listener: TransactionListener) -> None:
    producer = Producer("g", namesrv_addr=["a:1"], send_msg_timeout_ms=5, busy_poll_us=0)
    Producer("g", send_msg_timeout=5)  # planted
    Producer("g", send_msg_timeout_ms="5")  # planted
    Producer("g", execute_thread_count=5)  # planted
    Producer("g", namesrv_addr=5)  # planted
    TransactionProducer("g", listener, execute_thread_count=5, send_msg_timeout_ms=5)
    TransactionProducer("g", listener, execute_threads=5)  # planted
    producer.send(Message("t", bytearray(b"x")))
    producer.send(Message("t", memoryview(b"x"), tag="a", properties={"a": "b"}))
    producer.send(Message("t", "text"))  # planted
    producer.send_oneway(Message("t", b"x"), qeue=None)  # planted
    producer.request(Message("t", b"x"), timeout_ms=5, selector=5)  # planted

    consumer = PushConsumer("g", consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    PushConsumer("g", consume_from_where="FIRST_OFFSET", message_model="BROADCASTING")
    aio.PullConsumer("g", consume_from_where="TIMESTAMP", consume_timestamp_ms=5)
    PushConsumer("g", consume_from_where="first")  # planted
    PushConsumer("g", message_model="broadcasting")  # planted
    PushConsumer("g", auto_commit=True)  # planted
    consumer.subscribe("t", listener=returns_nothing)
    consumer.subscribe("t", listener=returns_a_result)
    consumer.subscribe("t", listener=returns_a_number)  # planted
    consumer.subscribe("t", listener=coroutine)  # planted
    PullConsumer("g", auto_commit=False, pull_batch_size=5)
    PullConsumer("g", consume_orderly=True)  # planted
    aio.PushConsumer("g", consume_orderly=True)
    aio.PushConsumer("g", consume_ordered=True)  # planted
    aio.Producer("g", batch_messages="5")  # planted

    broker = MQMeshBroker()
    broker.subscriber("t", group="g", consume_from_where="FIRST_OFFSET")
    broker.subscriber("t", group="g", consume_from_where="first")  # planted
    app = App("g")
    app.subscriber("t", group="g", consume_from_where="FIRST_OFFSET")

    with AdminClient("a:1,b:2") as admin:
        admin.create_topic("orders", queues=8, exist_ok=True)
        admin.create_topic(TopicConfig("orders"))
        admin.create_topic("orders", queue_count=8)  # planted
"""


EXAMPLES = "orders_service", "test_orders_service", "faststream_app", "test_faststream_app"
"""Programs of one page; nothing is planted there."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mypy_finds_wrong_names_and_types_and_nothing_else(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    programs = [str(program), *(f"examples/{name}.py" for name in EXAMPLES)]
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", *programs],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1, found.stdout + found.stderr
    planted = {
        ("program.py", str(number))
        for number, line in enumerate(PROGRAM.splitlines(), 1)
        if "# planted" in line
    }
    assert set(ERROR.findall(found.stdout)) == planted, found.stdout
