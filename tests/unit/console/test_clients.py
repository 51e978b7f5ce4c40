"""Clients are lent: few for each user, again and again, and closed when nobody needs them."""

from __future__ import annotations

import asyncio

import pytest

from mqmesh.aio import AdminClient, GroupAdmin, TrackClient
from mqmesh.console.clients import IDLE_MS, MAX_PER_USER, Clients
from mqmesh.console.shared_answers import SharedAnswers
from mqmesh.console.users import UsersFile, WatchedUsers, load_users, new_user, save_users
from mqmesh.errors import ConfigError
from mqmesh.testing.clock import ManualClock


class World:
    def __init__(self):
        self.clock = ManualClock()
        self.made = []
        self.closed = []
        self.clients = Clients(["h:1"], self.clock, self.make)

    def make(self, kind, namesrv_addr, **options):
        world = self

        class Made(kind):
            def __init__(self):
                self.options = options

            async def close(self):
                world.closed.append(self)

        self.made.append(Made())
        return self.made[-1]


@pytest.fixture
def world():
    return World()


def test_a_client_is_lent_again(world):
    async def scene():
        async with world.clients.lend("a", GroupAdmin) as first:
            assert first.options == {
                "timeout_ms": 3_000,
                "broker_name": "",
                "credentials": "a",
                "namespace": "",
            }
        async with world.clients.lend("a", AdminClient) as again:
            assert again is first, "who administers groups can do less, too"
        async with world.clients.lend("a", GroupAdmin, "broker-a") as other:
            assert other is not first
        async with world.clients.lend("b", GroupAdmin) as others:
            assert others is not first

    asyncio.run(scene())
    assert len(world.made) == 3


def test_a_user_has_four_at_most(world):
    async def scene():
        open_now = 0
        most = 0

        async def use(kind):
            nonlocal open_now, most
            async with world.clients.lend("a", kind):
                open_now += 1
                most = max(most, open_now)
                await asyncio.sleep(0)
                open_now -= 1

        await asyncio.gather(*(use(GroupAdmin) for _ in range(20)))
        assert most == MAX_PER_USER
        async with world.clients.lend("a", TrackClient):
            pass
        assert len(world.made) - len(world.closed) == MAX_PER_USER

    asyncio.run(scene())


def test_what_nobody_used_for_long_is_closed(world):
    async def scene():
        async with world.clients.lend("a", GroupAdmin):
            await world.clients.close_idle(0)
        assert world.closed == []
        world.clock.advance(IDLE_MS)
        await world.clients.close_idle()
        assert world.closed == world.made

    asyncio.run(scene())


def test_many_tabs_ask_once():
    clock = ManualClock()
    asked = 0

    async def ask():
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        return asked

    async def scene():
        answers = SharedAnswers(clock, 1_500)
        assert await asyncio.gather(*(answers.get("q", ask) for _ in range(50))) == [1] * 50
        clock.advance(1_499)
        assert await answers.get("q", ask) == 1
        assert await answers.get("another", ask) == 2
        clock.advance(1)
        assert await answers.get("q", ask) == 3

    asyncio.run(scene())


def test_an_error_is_shared_and_forgotten():
    clock = ManualClock()

    async def fail():
        raise ConfigError("no")

    async def scene():
        answers = SharedAnswers(clock, 1_000)
        for _ in range(2):
            with pytest.raises(ConfigError):
                await answers.get("q", fail)

    asyncio.run(scene())


def test_users_are_read_again_when_their_file_changes(tmp_path):
    path, clock = tmp_path / "users.toml", ManualClock()
    save_users(path, UsersFile(user=[new_user("a", "correct horse", "a.toml")]))
    users = WatchedUsers(path, clock)
    save_users(path, UsersFile(user=[new_user("b", "correct horse", "b.toml")]))
    assert users.find("b") is None
    clock.advance(1_000)
    assert users.find("b").credentials == "b.toml"
    path.write_text("no toml")
    clock.advance(1_000)
    assert users.find("b") is not None, "what cannot be read changes nothing"


def test_a_file_of_users_that_others_may_read_is_refused(tmp_path):
    path = tmp_path / "users.toml"
    assert load_users(path) == UsersFile()
    with pytest.raises(ConfigError, match="it has no users"):
        WatchedUsers(path, ManualClock())
    save_users(path, UsersFile(user=[new_user("a", "correct horse", "a.toml")]))
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_users(path)
