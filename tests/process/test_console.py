"""A console beside a secured cluster: whose rights hold, what the audit log has, what is seen."""

from __future__ import annotations

import base64
import datetime
import http.client
import json
import os
import re
import signal
import urllib.parse

import msgspec
import pytest
from harness.commands import CommandProcess, free_ports, run_command, up_arguments
from harness.patience import until

from mqmesh.cli.processes.layout import key_file
from mqmesh.console.users import UsersFile, load_users, new_user, save_users
from mqmesh.roles.supervisor.run_file import read_record
from mqmesh.sdk.admin.access import AccessClient
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.security.access_list import (
    AccessList,
    User,
    UserRole,
    read_access_list,
    write_access_list,
)
from mqmesh.security.keys import load_credentials, save_credentials
from mqmesh.transport.zmq.handshakes import new_key_pair

PASSWORD = "correct horse battery"


class Site:
    """A secured cluster with a console, and those who ask it.

    Attributes:
        folder: Data folder.
        namesrv: Name servers.
        keys: Credentials of the administrator.
    """

    def __init__(self, folder, ports, console_port, password):
        self.folder = folder
        self.port = console_port
        self.namesrv = ";".join(f"127.0.0.1:{port}" for port in ports[:2])
        self.keys = key_file(folder, "client")
        self.passwords = {"admin": password, "viewer": PASSWORD, "shop": PASSWORD}

    def ask(self, method, path, user="admin", body=None, cookie="", form=None):
        """Asks by HTTP; returns status, headers and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        headers, data = {}, None
        if user and path.startswith("/api"):
            text = f"{user}:{self.passwords[user]}".encode()
            headers["Authorization"] = "Basic " + base64.b64encode(text).decode()
        if body is not None:
            headers["Content-Type"], data = "application/json", json.dumps(body)
        if form is not None:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
            data = urllib.parse.urlencode(form)
        if cookie:
            headers["Cookie"] = cookie
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        try:
            return answer.status, dict(answer.getheaders()), answer.read().decode()
        finally:
            connection.close()

    def get(self, path, user="admin"):
        status, _, text = self.ask("GET", f"/api/v1{path}", user)
        return json.loads(text) | {"status": status}

    def post(self, path, user="admin", **body):
        status, _, text = self.ask("POST", f"/api/v1{path}", user, body)
        return json.loads(text) | {"status": status}

    def log_in(self, user):
        form = {"name": user, "password": self.passwords[user]}
        status, headers, _ = self.ask("POST", "/login", form=form)
        assert status == 303
        return headers["set-cookie"].partition(";")[0]

    def admin(self):
        return AdminClient(self.namesrv, credentials=str(self.keys))

    def pid(self, name):
        return next(one.pid for one in read_record(self.folder).roles if one.name == name)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("console") / "data"
    *ports, console_port = free_ports(4)
    settings = ("--set", f"console.listen_port={console_port}")
    command = (*up_arguments(folder, ports), "--secure", "--console", *settings)
    with CommandProcess(*command) as process:
        password = process.expect(r"log in as admin, password (\S+) ")[1]
        note = process.expect(r"cluster is ready in .*; console: (\S+);")[1]
        assert note == f"http://127.0.0.1:{console_port}/"
        found = Site(folder, ports, console_port, password)
        add_users(found)
        yield found


def add_users(site):
    """Makes ``viewer`` of role ``view``, and ``shop`` without any right; both may log in."""
    own = load_credentials(site.keys)
    made, stored = [], []
    for name, role in (("viewer", UserRole.VIEW), ("shop", UserRole.NONE)):
        public, secret = new_key_pair()
        path = site.folder / "security" / f"{name}.toml"
        keys = msgspec.structs.replace(own, user=name, public_key=public, secret_key=secret)
        save_credentials(path, keys)
        made.append(User(name, [public], role))
        stored.append(new_user(name, PASSWORD, str(path)))
    today = datetime.datetime.now(datetime.UTC).date()
    with AccessClient(site.namesrv, credentials=str(site.keys)) as access:
        info = access.access_list()
        former = read_access_list(info.text, "test", today)
        now = AccessList(info.version + 1, [*former.user, *made])
        assert access.put_access_list(write_access_list(now), info.version) == []
    users = site.folder / "security" / "console-users.toml"
    save_users(users, UsersFile(user=[*load_users(users).user, *stored]))


def test_who_may_do_everything_makes_and_deletes_a_topic(site):
    cookie = site.log_in("admin")
    page = site.ask("GET", "/new/topic", cookie=cookie)[2]
    csrf = re.search(r'name="csrf" value="([^"]+)"', page)[1]
    form = {"csrf": csrf, "topic": "made-here", "queues": "6", "step": "do"}
    status, _, answer = site.ask("POST", "/new/topic", cookie=cookie, form=form)
    assert (status, "Topic made-here is there" in answer) == (200, True)
    with site.admin() as admin:
        (config,) = admin.topic_configs("made-here")["broker-a"]
        assert config.write_queue_nums == 6
    assert site.get("/topics/made-here")["settings"][0]["write_queue_nums"] == 6
    assert site.post("/topics/made-here/delete", confirm="made-here")["ok"]
    assert site.get("/topics/made-here")["status"] == 404
    audit = (site.folder / "security" / "audit.jsonl").read_text()
    assert re.search(r'"user":"client".*DELETE_TOPIC|DELETE_TOPIC.*"user":"client"', audit)


def test_who_may_only_look_is_refused_by_the_brokers(site):
    with site.admin() as admin:
        admin.create_topic("kept", exist_ok=True)
    until(lambda: site.ask("GET", "/api/v1/overview", "viewer")[0] == 200)
    told = site.post("/topics/kept/delete", "viewer", confirm="kept")
    assert (told["status"], told["kind"]) == (403, "NoPermission")
    cookie = site.log_in("viewer")
    page = site.ask("GET", "/topics/kept", cookie=cookie)[2]
    assert re.search(r'aria-disabled="true"[^>]*data-test="delete"', page)
    form = site.ask("GET", "/topics/kept/delete", cookie=cookie)[2]
    csrf = re.search(r'name="csrf" value="([^"]+)"', form)[1]
    forged = {"csrf": csrf, "typed": "kept", "step": "do"}
    status, _, answer = site.ask("POST", "/topics/kept/delete", cookie=cookie, form=forged)
    assert status == 403
    assert "viewer" in answer
    # A role that reads no messages has none shown.
    status, _, answer = site.ask("GET", "/topics/kept/tail", cookie=cookie)
    until(lambda: "SUB" in site.ask("GET", "/topics/kept/tail", cookie=cookie)[2])
    with site.admin() as admin:
        assert "kept" in admin.topics()
    audit = (site.folder / "security" / "audit.jsonl").read_text()
    assert '"viewer"' in audit


def test_a_message_that_is_sent_is_tailed(site):
    with site.admin() as admin:
        admin.create_topic("orders", exist_ok=True)
    until(lambda: site.get("/topics/orders/tail")["state"] == "listening")
    sent = site.post("/topics/orders/send", body="hello", tag="new", keys="a b")
    assert sent["summary"].startswith("SEND_OK")
    (message,) = until(lambda: site.get("/topics/orders/tail")["messages"])
    assert (message["body"], message["tag"], message["keys"]) == ("hello", "new", ["a", "b"])
    assert message["message_id"] in sent["summary"]
    assert site.get("/topics/orders/tail?stop=true")["is_over"]
    assert not [one for one in site.get("/groups")["rows"] if "consume" in one["group"]]


def test_a_broker_that_died_is_seen_and_its_return_as_well(site):
    def of_broker():
        told = site.get("/overview")
        assert told["problem"] == ""
        return next(one for one in told["processes"] if one["name"] == "broker-a")

    until(lambda: of_broker()["is_up"])
    os.kill(site.pid("broker-a"), signal.SIGKILL)
    # It is started again within a second, which a look may miss; that it died stays to be seen.
    until(lambda: of_broker()["restarted_ms"])
    until(lambda: of_broker()["is_up"])


def test_a_console_that_was_restarted_asks_who_somebody_is(site):
    cookie = site.log_in("admin")
    assert site.ask("GET", "/", cookie=cookie)[0] == 200
    done = run_command("restart", "console", "--data-dir", str(site.folder))
    assert done.code == 0
    status, headers, _ = site.ask("GET", "/", cookie=cookie)
    assert (status, headers["location"]) == (303, "/login?next=%2F")
    roles = json.loads(run_command("status", "--data-dir", str(site.folder), "--json").out[0])
    (entry,) = (one for one in roles["roles"] if one["role"] == "console")
    assert entry["state"] == "running"
