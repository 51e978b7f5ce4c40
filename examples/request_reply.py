"""Asks a consumer and waits for its reply. Needs a running ``mqmesh up``."""

from mqmesh import (
    ConsumeFromWhere,
    Message,
    Producer,
    PushConsumer,
    StoredMessage,
    is_request,
)

TOPIC = "prices"
PRICES = {b"apple": b"3", b"pear": b"4", b"plum": b"2"}


def main() -> None:
    """Asks for three prices, each a round trip of milliseconds."""
    with Producer("price-requester") as requester, Producer("price-replier") as replier:

        def listen(messages: list[StoredMessage]) -> None:
            for message in messages:
                if is_request(message):
                    # False: the requester waits no more. No retry.
                    replier.reply(message, PRICES.get(message.body, b"unknown"))

        service = PushConsumer("price-service", consume_from_where=ConsumeFromWhere.LAST_OFFSET)
        service.subscribe(TOPIC, listener=listen)
        requester.send(Message(TOPIC, b"this creates the topic"))
        with service:
            for fruit in PRICES:
                reply = requester.request(Message(TOPIC, fruit), timeout_ms=10_000)
                print(f"{fruit.decode()} costs {reply.body.decode()}")


if __name__ == "__main__":
    main()
