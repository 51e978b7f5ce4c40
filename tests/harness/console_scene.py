"""A secured cluster of three replicas with a console and clients: the scene of its tasks."""

import io
import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from harness.browser import Browser, open_browser
from harness.commands import CommandProcess, free_ports, free_ports_of_replicas
from harness.oracle.wire import Connection, Keys
from harness.patience import until
from mqmesh.cli.main import main  # type: ignore[import-not-found]
from mqmesh.console.users import UsersFile, load_users, new_user, save_users
from mqmesh.message import Message, StoredMessage
from mqmesh.roles.gateway.users import parse_users
from mqmesh.roles.supervisor.run_file import read_record
from mqmesh.sdk.admin.ha_admin import HaAdmin
from mqmesh.sdk.client.options import CREDENTIALS_VARIABLE
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.consumer.push_consumer import PushConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.sdk.transactions.transaction_producer import TransactionProducer
from mqmesh.sdk.transactions.transactions import LocalTransactionState, TransactionListener

TOPIC: Final = "orders"
EMPTY: Final = "empty"
READ: Final = "billing"
"""Group with two members, which are done with everything."""
UNREAD: Final = "ledger"
"""Group without members, which has read nothing of ``TOPIC``."""
FAILING: Final = "shipping"
"""Group whose listener fails for each message; it gets those tagged ``BROKEN``."""
BROKEN: Final = "broken"
MESSAGES: Final = 1_000
BATCH: Final = 50
READY_S: Final = 90.0
DIALOG: Final = "#dialog"
SETTINGS: Final = {
    "broker.0.transaction_timeout_ms": "500",
    "broker.0.transaction_check_interval_ms": "200",
    "broker.0.transaction_check_max": "2",
}
"""A half message that nobody decides about is parked within a second."""


def orders() -> list[Message]:
    """Return the messages of ``TOPIC``: ten for each key, ten that ``FAILING`` gets."""
    return [
        Message(
            TOPIC,
            json.dumps({"order": number, "item": f"item {number % 10}"}).encode(),
            BROKEN if number % 100 == 13 else ("new", "paid")[number % 2],
            [f"order-{number % 100}"],
            {"price": str(number % 20)},
        )
        for number in range(MESSAGES)
    ]


class Member:
    """A member of ``READ``, in this process; it keeps what it got.

    Attributes:
        consumer: The member.
        got: All deliveries, in order.
    """

    def __init__(self, **options: Any) -> None:
        self.got: list[StoredMessage] = []
        self.consumer = PushConsumer(READ, msg_trace=1, **options)
        self.consumer.subscribe(TOPIC, listener=self._keep)

    def _keep(self, messages: Sequence[StoredMessage]) -> None:
        self.got.extend(messages)


class Undecided(TransactionListener):
    """Local transactions of which nobody knows how they end."""

    def execute_local_transaction(self, message: StoredMessage, arg: Any) -> LocalTransactionState:
        """Leave the half message undecided."""
        return LocalTransactionState.UNKNOWN

    def check_local_transaction(self, message: StoredMessage) -> LocalTransactionState:
        """Leave it undecided when the broker asks."""
        return LocalTransactionState.UNKNOWN


class ConsoleScene:
    """The cluster, its clients, and a browser in which ``admin`` is logged in.

    Args:
        folder: For everything on disk; a short path.

    Attributes:
        data: Data folder of the cluster.
        address: Of the console, without a slash at the end.
        namesrv_addr: Name server.
        gateway_addr: Where clients of RocketMQ find the broker group.
        admin_keys, viewer_keys, shop_keys: Files of keys; ``shop`` may send to ``others`` only.
        passwords: Of the console's users, by name.
        producer: Producer with keys of the administrator, whose messages are traced.
        members: Those of ``READ``.
        half_id: Id of a half message that is parked.
    """

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        self.passwords: dict[str, str] = {}
        self._closing = ExitStack()
        try:
            self._start()
            self._fill()
        except BaseException:
            self.close()
            raise

    # ---- Parts -------------------------------------------------------------------------

    def _start(self) -> None:
        namesrv, coordinator, broker = free_ports_of_replicas()
        console, exporter, gateway, of_brokers = free_ports(4)
        self.address = f"http://127.0.0.1:{console}"
        self.namesrv_addr = f"127.0.0.1:{namesrv}"
        self.gateway_addr = f"127.0.0.1:{of_brokers}"
        settings = SETTINGS | {
            "namesrv": f"[{{listen_port={namesrv}}}]",
            "coordinator.listen_port": str(coordinator),
            "broker.0.listen_port": str(broker),
            "console.listen_port": str(console),
            "exporter.listen_port": str(exporter),
            "gateway.namesrv_port": str(gateway),
            "gateway.broker_port_base": str(of_brokers),
            "gateway.vip_ports": "false",
            "gateway.grpc_port": "0",
        }
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        flags = ("--replicas", "3", "--secure", "--console", "--metrics", "--gateway")
        self.up = CommandProcess("up", "--data-dir", str(self.data), *flags, *words)
        self._closing.callback(self.up.close)
        self.passwords["admin"] = self.up.expect("as admin, password ([^ ]+)", READY_S)[1]
        self.up.expect("cluster is ready", READY_S)
        security = self.data / "security"
        self.admin_keys = security / "client.toml"
        self.viewer_keys = security / "viewer.toml"
        self.shop_keys = security / "shop.toml"
        self.cli("user", "add", "viewer", "--role", "view", "-o", str(self.viewer_keys))
        self.cli("user", "add", "shop", "--pub", "others", "-o", str(self.shop_keys))
        self.let_in("viewer", self.viewer_keys)

    def _fill(self) -> None:
        keys: dict[str, Any] = {
            "namesrv_addr": self.namesrv_addr,
            "credentials": str(self.admin_keys),
        }
        self.keys: Mapping[str, Any] = keys
        first: dict[str, Any] = {**keys, "consume_from_where": "FIRST_OFFSET"}
        self.cli("topic", "create", TOPIC, "--queues", "8")
        self.cli("topic", "create", EMPTY)
        enter = self._closing.enter_context
        self.producer = enter(Producer("shop", msg_trace=1, send_msg_timeout_ms=30_000, **keys))
        self.members = [Member(**first) for _ in range(2)]
        failing = PushConsumer(FAILING, msg_trace=1, **first)
        failing.subscribe(TOPIC, BROKEN, listener=_fail)
        for consumer in (*(one.consumer for one in self.members), failing):
            enter(consumer)
        with PullConsumer(UNREAD, auto_commit=False, **first) as reader:
            reader.assign(reader.queues(TOPIC))
            reader.commit(dict.fromkeys(reader.queues(TOPIC), 0))
        sent = orders()
        for begin in range(0, MESSAGES, BATCH):
            self.producer.send_batch(sent[begin : begin + BATCH])
        with TransactionProducer("payments", listener=Undecided(), **keys) as payments:
            half = payments.send_message_in_transaction(Message(TOPIC, b"half"))
        self.half_id = half.send_result.message_id
        until(lambda: len({one.message_id for one in self.delivered()}) >= MESSAGES)

    # ---- For tasks ---------------------------------------------------------------------

    def let_in(self, name: str, keys: Path) -> None:
        """Let somebody log in at the console, who acts by a file of keys."""
        path = self.data / "security" / "console-users.toml"
        self.passwords[name] = f"password of {name}"
        user = new_user(name, self.passwords[name], str(keys))
        save_users(path, UsersFile(user=[*load_users(path).user, user]))

    def rocketmq(self, client_id: str) -> Connection:
        """Return a connection of a client of RocketMQ, which is signed by ``admin``."""
        path = self.data / "security" / "gateway-users.toml"
        secret = parse_users(path.read_text(), str(path))["admin"].secret_key
        return Connection(self.gateway_addr, client_id, Keys("admin", secret))

    def delivered(self) -> list[StoredMessage]:
        """Return what the members of ``READ`` got so far."""
        return [message for one in self.members for message in list(one.got)]

    def cli(self, *words: str) -> Any:
        """Run `mqmesh … --json` as administrator, and return its answer.

        Raises:
            AssertionError: It failed.
        """
        out, keys = io.StringIO(), {CREDENTIALS_VARIABLE: str(self.admin_keys)}
        with patch.dict(os.environ, keys), redirect_stdout(out):
            code = main(["--namesrv", self.namesrv_addr, "--json", *words])
        assert code == 0, f"mqmesh {' '.join(words)} ended with {code}"
        return json.loads(out.getvalue() or "null")

    def pid(self, name: str) -> int:
        """Return the id of a process of the cluster, such as ``broker-a-r1`` or ``console``."""
        record = read_record(self.data)
        assert record is not None
        return next(one.pid for one in record.roles if one.name == name)

    @contextmanager
    def killed(self, *names: str) -> Iterator[None]:
        """End processes of the cluster as a crash would; they start again behind the block."""
        os.kill(self.up.pid, signal.SIGSTOP)
        try:
            for name in names:
                os.kill(self.pid(name), signal.SIGKILL)
            yield
        finally:
            os.kill(self.up.pid, signal.SIGCONT)

    def master(self) -> str:
        """Return the name of the leading replica's process."""
        with HaAdmin(**self.keys) as admin:
            return until(lambda: _master(admin))

    def follower(self) -> str:
        """Return the name of a process of a replica that does not lead."""
        group, _, number = self.master().rpartition("-r")
        return f"{group}-r{int(number) % 3 + 1}"

    def browser(self, user: str = "admin", *, dark: bool = False) -> Browser:
        """Open a browser in which a user is logged in; it ends with the scene."""
        browser = self._closing.enter_context(open_browser(self.address, dark=dark))
        log_in(browser, user, self.passwords[user])
        return browser

    def stranger(self) -> AbstractContextManager[Browser]:
        """Return a browser in which nobody is logged in."""
        return open_browser(self.address)

    def close(self) -> None:
        """End everything."""
        self._closing.close()


def log_in(browser: Browser, user: str, password: str) -> None:
    """Log in by the form."""
    browser.open("/login")
    browser.fill("User", user)
    browser.fill("Password", password)
    browser.press("Log in")
    browser.test("nav-overview")


def plan(browser: Browser, button: str, fields: Mapping[str, str] | None = None) -> str:
    """Open an action by its button and fill its form in.

    Args:
        browser: At a page that has the action.
        button: ``data-test`` of the button.
        fields: Values by label; None for an action without a form.

    Returns:
        Text of the plan; the dialog stays open.
    """
    browser.click(button)
    if fields is not None:
        for label, value in fields.items():
            browser.fill(label, value, DIALOG)
        browser.press("Continue", DIALOG)
    browser.test("plan")
    return browser.text(DIALOG)


def confirm(browser: Browser, verb: str, typed: str = "") -> str:
    """Do what was planned, and close the dialog.

    Args:
        browser: With the plan in its dialog.
        verb: Label of the button that does it.
        typed: Name to type first; until then the button must be dead.

    Returns:
        The outcome.
    """
    if typed:
        assert not browser.test("do").is_enabled()
        field = browser.find("#typed")
        field.send_keys(typed[:-1])
        assert not browser.test("do").is_enabled()
        field.send_keys(typed[-1])
    browser.press(verb, DIALOG)
    browser.test("outcome")
    outcome = browser.text('[data-test="outcome"]')
    closing = browser.find(f"{DIALOG} .primary")
    closing.click()
    browser.wait(lambda: not browser.driver.find_elements("css selector", f"{DIALOG}[open]"))
    return outcome


def rows(browser: Browser, css: str) -> list[list[str]]:
    """Return the cells of the body of a table, as they are shown."""
    script = """return [...document.querySelectorAll(arguments[0] + " tbody tr")]
        .map(row => [...row.cells].map(cell => cell.innerText.trim()))"""
    found: list[list[str]] = browser.driver.execute_script(script, css)
    return found


def _master(admin: HaAdmin) -> str:
    for one in admin.ha_status():
        if one.status is not None and one.status.role == "MASTER":
            return f"{one.broker_name}-r{one.status.broker_id}"
    return ""


def _fail(messages: Sequence[StoredMessage]) -> None:
    raise LookupError(f"no address for {messages[0].keys[0]}")
