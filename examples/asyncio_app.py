"""A producer and a consumer in one asyncio program. Needs a running ``mqmesh up``."""

import asyncio

from mqmesh import ConsumeFromWhere, Message
from mqmesh.aio import Producer, PullConsumer

TOPIC = "ticks"
COUNT = 1_000


async def send() -> None:
    """Sends all ticks side by side; they share batches by themselves."""
    async with Producer("ticks-producer") as producer:
        results = await asyncio.gather(
            *(producer.send(Message(TOPIC, f"tick {number}".encode())) for number in range(COUNT))
        )
    print(f"sent {len(results):,} ticks")


async def receive() -> None:
    """Receive as many ticks; a message counts as consumed when the next one is requested.

    To gather messages before the work is stored, use ``auto_commit=False`` and ``commit()``.
    """
    count = 0
    async with PullConsumer(
        "ticks-group", consume_from_where=ConsumeFromWhere.FIRST_OFFSET
    ) as consumer:
        await consumer.subscribe(TOPIC)
        async for _message in consumer:
            count += 1
            if count == COUNT:
                break
    print(f"received {count:,} ticks")


async def main() -> None:
    """Sends and receives at the same time."""
    await asyncio.wait_for(asyncio.gather(send(), receive()), 30)


if __name__ == "__main__":
    asyncio.run(main())
