"""The asyncio producer with a real cluster."""

from __future__ import annotations

import asyncio

import pytest

from mqmesh.aio import Producer
from mqmesh.errors import EndpointUnreachable, MQMeshError
from mqmesh.message import Message
from mqmesh.protocol.messaging import SendStatus
from mqmesh.testing.processes import ProcessCluster


@pytest.mark.timeout(120)
def test_sends_side_by_side_while_the_broker_dies_and_comes_back(short_tmp_path):
    async def send(producer: Producer, number: int) -> str | None:
        try:
            return (await producer.send(Message("t", str(number).encode()))).message_id
        except MQMeshError:
            return None

    async def main(cluster: ProcessCluster) -> None:
        async with Producer("g", namesrv_addr=cluster.namesrv_addr) as producer:
            ids = await asyncio.gather(*(send(producer, n) for n in range(2_000)))
            assert None not in ids
            cluster.brokers["broker-a"].kill()
            during = [asyncio.ensure_future(send(producer, n)) for n in range(500)]
            await asyncio.sleep(0)
            with pytest.raises(EndpointUnreachable):
                await producer.send(Message("t", b"x"), timeout_ms=200)
            for one in during[::50]:
                one.cancel()
            await asyncio.to_thread(cluster.start_broker)
            ids += [one for one in await asyncio.gather(*during, return_exceptions=True) if one]
            after = await producer.send(Message("t", b"y"), timeout_ms=10_000)
            assert after.status is SendStatus.SEND_OK
            known = [one for one in ids if isinstance(one, str)]
            assert len(known) == len(set(known)) >= 2_000

    with ProcessCluster(short_tmp_path) as cluster:
        asyncio.run(main(cluster))
