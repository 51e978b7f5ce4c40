"""A payment that cannot be booked: dead letter, repair, another chance. Needs ``mqmesh up``.

Books some payments, one of which has no account. It is given up at once here, to show what
comes then; with the default of 16 retries that would take almost five hours. The account is
opened, and the dead letter is resent and booked::

    python examples/dead_letters.py
"""

import argparse
import sys
import threading
import time

from mqmesh import (
    ConsumeFromWhere,
    DeadLetterClient,
    Message,
    Producer,
    PushConsumer,
    StoredMessage,
)

TOPIC = "payments"
PATIENCE_S = 30.0


class Bank:
    """Accounts, and a listener that books payments to them."""

    def __init__(self, accounts: list[str]) -> None:
        self._balances = dict.fromkeys(accounts, 0)
        self._changed = threading.Condition()
        self.booked: list[str] = []

    def open_account(self, name: str) -> None:
        """Lets payments to a name succeed."""
        with self._changed:
            self._balances[name] = 0

    def book(self, messages: list[StoredMessage]) -> None:
        """Listener of the payments; an account that is missing makes it fail."""
        for message in messages:
            name = message.keys[0]
            with self._changed:
                self._balances[name] += int(message.body)  # raises KeyError
                self.booked.append(name)
                self._changed.notify_all()

    def wait_for(self, name: str) -> None:
        """Waits until a payment to a name was booked."""
        with self._changed:
            if not self._changed.wait_for(lambda: name in self.booked, PATIENCE_S):
                sys.exit(f"no payment to {name} came")


def main() -> None:
    """Runs both sides."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--namesrv", default="127.0.0.1:9876;127.0.0.1:9877")
    namesrv = parser.parse_args().namesrv
    group = f"bank-{time.time_ns()}"  # a fresh one, so that its dead letters are ours
    bank = Bank(["ada", "bob"])
    consumer = PushConsumer(
        group,
        namesrv_addr=namesrv,
        consume_from_where=ConsumeFromWhere.LAST_OFFSET,
        max_reconsume_times=0,
    )
    consumer.subscribe(TOPIC, listener=bank.book)
    with (
        Producer("shop", namesrv_addr=namesrv) as producer,
        consumer,
        DeadLetterClient(namesrv) as client,
    ):
        for name in ("ada", "eve", "bob"):
            producer.send(Message(TOPIC, b"10", keys=[name]))
        bank.wait_for("ada")
        bank.wait_for("bob")  # eve's failure is in nobody's way

        deadline = time.monotonic() + PATIENCE_S
        while not (found := list(client.scan(group))):
            if time.monotonic() > deadline:
                sys.exit("no dead letter came")
        for dead_letter in found:
            assert dead_letter.message is not None
            print(f"dead: payment to {dead_letter.message.keys[0]}: {dead_letter.reason}")

        bank.open_account("eve")
        for turn in ("first", "second"):
            for _, result in client.resend(group, found):
                print(f"{turn} resend: status {result.status}")  # 0 resent, 1 was resent before
        bank.wait_for("eve")
    print(f"booked: {', '.join(sorted(bank.booked))}")


if __name__ == "__main__":
    main()
