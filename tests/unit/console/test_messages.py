"""Messages: searches, one message with track and trace, its body, a hand-over."""

from __future__ import annotations

import pytest
from harness.console import ConsoleWorld, access_list_of, open_console, users_of

from mqmesh.errors import NoPermission, OffsetIllegal, TopicNotFound
from mqmesh.message import BatchInfo, StoredMessage
from mqmesh.protocol.client_rpc import HandedOver
from mqmesh.protocol.groups import ConsumerConnection
from mqmesh.protocol.membership import ConsumerData
from mqmesh.sdk.admin.queries import QueryResult
from mqmesh.sdk.admin.searches import SearchResult
from mqmesh.sdk.admin.traces import MessageSpans, SpanKind, TraceSpan
from mqmesh.sdk.admin.tracks import MessageTrack, Track, TrackState

NOW_MS = 1_700_000_000_000
ID = "0000000000000001" + "0000000000000007"
HOSTILE = "<b>hi</b><script>alert(1)</script>\x1b[31m\u202egpj.exe\u202c\u2066"


def stored(topic="orders", body=b'{"a": 1}', *, number=7, at=NOW_MS, physical="", **properties):
    info = BatchInfo(
        physical or topic, 3, "broker-a", number, 800, 90, at, at, "h:1", "b:9", 1, number, 0
    )
    return StoredMessage(
        topic, body, "new", ("order-7",), properties or None, queue_offset=number, batch=info
    )


@pytest.fixture
def world():
    spans = [
        TraceSpan(SpanKind.SEND, NOW_MS, 10, "shop", "h:1", "SUCCESS", "orders"),
        TraceSpan(SpanKind.CONSUME, NOW_MS + 500, 500, "billing", "h:2", "FAILED", retry_times=1),
        TraceSpan(SpanKind.END_TRANSACTION, NOW_MS + 900, None, "shop", "h:1", "COMMIT"),
    ]
    tracks = [
        Track("billing", TrackState.CONSUMED, 1),
        Track("shipping", TrackState.RETRYING, 1, 1, "ValueError: <i>no</i>", NOW_MS + 9_000),
    ]
    member = ConsumerConnection(
        "client-1", "PYTHON", "1", True, 9, ConsumerData("billing", "CLUSTERING", "", [])
    )
    world = ConsoleWorld(
        {
            "search": SearchResult([stored(price="12")], 1_000, 1_500),
            "by_key": QueryResult([stored()]),
            "by_id": QueryResult([stored(physical="%RETRY%shipping", body=b"copy"), stored()]),
            "by_offset_id": stored(physical="%DLQ%shipping"),
            "by_offset": stored(),
            "track": MessageTrack([stored()], 0, tracks, {"broker-b": "is not indexed yet"}),
            "trace": MessageSpans(ID, spans),
            "topic_consumers": ["billing"],
            "connections": [member],
            "hand_to": HandedOver("SUCCESS", "", 41),
        }
    )
    world.clock.jump_wall(NOW_MS - world.clock.wall_ms())
    return world


def calls_of(world, method):
    return [call[2:] for call in world.calls if call[1] == method]


def test_nothing_is_searched_before_somebody_asks(world):
    page = open_console(world).get("/messages").text
    assert "A topic alone shows its newest messages" in page
    assert world.calls == []


def test_a_topic_is_searched_by_time_sql_and_text(world):
    asked = {
        "topic": "orders",
        "since": "1h",
        "until": "2023-11-14T22:13:20",
        "sql": "price > 10",
        "text": "a",
        "queue_id": "3",
    }
    answer = open_console(world).get("/api/v1/messages", params=asked).json()
    ((topic, wanted), options) = calls_of(world, "search")[0]
    assert (topic, wanted.sql, wanted.text, wanted.queue_id) == ("orders", "price > 10", "a", 3)
    assert (wanted.from_ms, wanted.to_ms) == (NOW_MS - 3_600_000, NOW_MS)
    assert options == {"max_looked": 1_000}
    assert answer["table"]["cut"].startswith("Looked at 1,000 of 1,500, the newest of each queue")
    (row,) = answer["table"]["rows"]
    assert (row["message_id"], row["preview"], row["keys"]) == (ID, '{"a": 1}', ["order-7"])


@pytest.mark.parametrize(
    ("asked", "method", "given"),
    [
        ({"by": "key", "topic": "orders", "key": "k"}, "by_key", ("orders", "k")),
        ({"by": "id", "message_id": ID}, "by_id", (ID,)),
        ({"by": "id", "message_id": "b:9#320#0"}, "by_offset_id", ("b:9#320#0",)),
        ({"by": "queue", "topic": "orders", "queue_id": "3", "offset": "7"}, "by_offset",
         ("orders", 3, 7)),
    ],
)  # fmt: skip
def test_each_way_asks_the_sdk(world, asked, method, given):
    page = open_console(world).get("/messages", params=asked).text
    assert calls_of(world, method)[0][0] == given
    assert f'data-test="message-{ID}"' in page


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"topic": "orders", "since": "never"}, "From &#39;never&#39;: must be"),
        ({"topic": "orders", "since": "1h", "until": "2h"}, "From 1h is behind To 2h"),
        ({"topic": "orders", "tag": "a", "sql": "b = 1"}, "exclude each other"),
        ({"by": "key", "key": "k"}, "name it"),
    ],
)
def test_a_search_that_cannot_be_made_says_why_and_keeps_the_form(world, asked, sentence):
    answer = open_console(world).get("/messages", params=asked)
    assert answer.status_code == 200
    assert sentence in answer.text
    assert 'data-test="search-form"' in answer.text


def test_a_topic_that_is_not_there_is_a_sentence(world):
    world.answers["search"] = TopicNotFound("no topic 'nope'")
    page = open_console(world).get("/messages", params={"topic": "nope"}).text
    assert "no topic &#39;nope&#39;" in page


def test_a_user_who_may_read_no_message_sees_which_right_is_missing():
    world = ConsoleWorld(access_list=access_list_of())
    client = open_console(world, users_of("viewer", "admin"))
    client.log_in("viewer")
    page = client.get("/messages").text
    assert "needs the right SUB of their topic" in page
    world.failure = NoPermission("viewer lacks SUB on topic 'orders'")
    answer = client.get("/messages", params={"topic": "orders"})
    assert answer.status_code == 403
    assert "viewer lacks SUB on topic" in answer.text
    client.log_in("admin")
    assert "needs the right SUB" not in client.get("/messages").text


def test_a_message_has_fields_body_track_and_trace(world):
    client = open_console(world)
    answer = client.get(f"/api/v1/messages/{ID}").json()
    assert answer["message"]["physical_topic"] == "orders", "the copy in its own topic is shown"
    assert answer["body"]["kind"] == "json"
    assert answer["message"]["body"] is None
    assert [(one["left"], one["width"]) for one in answer["spans"]] == [
        (0, 10),
        (500, 500),
        (900, 8),
    ]
    assert answer["lasted_ms"] == 1_000
    assert answer["notes"] == ["broker-b: is not indexed yet"]
    page = client.get(f"/messages/{ID}").text
    assert "done" in page
    assert "retry 1" in page
    assert "ValueError: &lt;i&gt;no&lt;/i&gt;" in page
    for kind in ("send", "consume", "end_transaction"):
        assert f'data-test="span-{kind}"' in page


def test_a_message_is_shown_without_its_track_if_that_is_refused(world):
    world.answers["track"] = NoPermission("it needs role view")
    page = open_console(world).get(f"/messages/{ID}")
    assert page.status_code == 200
    assert "it needs role view" in page.text


@pytest.mark.parametrize(
    "error", [QueryResult([], notes={"broker-a": "not indexed"}), OffsetIllegal("not there")]
)
def test_a_message_that_is_not_there_is_not_found(world, error):
    world.answers["by_id"] = error
    answer = open_console(world).get(f"/messages/{ID}")
    assert answer.status_code == 404
    assert "not" in answer.text


def test_a_body_is_viewed_in_another_way_and_downloaded(world):
    client = open_console(world)
    page = client.get(f"/messages/{ID}", params={"kind": "bytes"}).text
    assert "00000000  7b 22 61 22" in page
    file = client.get(f"/messages/{ID}/body")
    assert file.content == b'{"a": 1}'
    assert file.headers["content-type"] == "application/octet-stream"
    assert file.headers["content-disposition"] == 'attachment; filename="body.bin"'


def test_a_console_that_shows_no_bodies_shows_sizes_and_properties(world):
    secret = stored(body=b"a secret", price="12")
    world.answers |= {"by_id": QueryResult([secret]), "search": SearchResult([secret], 1, 1)}
    client = open_console(world, allow_body_view=False)
    page = client.get(f"/messages/{ID}").text
    assert "allow_body_view = false" in page
    assert "price" in page
    assert "8 B" in page
    assert "Download" not in page
    texts = [page, client.get(f"/api/v1/messages/{ID}").text]
    texts += [client.get(way, params={"topic": "orders"}).text for way in ("/messages",)]
    assert not [text for text in texts if "a secret" in text]
    assert client.get(f"/messages/{ID}/body").status_code == 403


def test_hostile_texts_are_shown_and_do_nothing(world):
    evil = stored(body=HOSTILE.encode(), **{"p<r>": HOSTILE})
    evil.keys, evil.tag = (HOSTILE,), HOSTILE
    world.answers |= {"by_id": QueryResult([evil]), "search": SearchResult([evil], 1, 1)}
    client = open_console(world)
    for path, asked in ((f"/messages/{ID}", {}), ("/messages", {"topic": "orders"})):
        page = client.get(path, params=asked).text
        assert "<script>alert" not in page
        assert "&lt;script&gt;alert(1)" in page
        assert not set(page) & set("\x1b\u202e\u202c\u2066")
        assert "⟨U+202E⟩" in page


def test_a_text_of_1_mib_is_cut(world):
    large = stored(body=b"word " * 210_000)
    world.answers |= {"by_id": QueryResult([large]), "search": SearchResult([large], 1, 1)}
    client = open_console(world)
    page = client.get(f"/messages/{ID}").text
    assert len(page) < 100_000
    assert "Only the beginning of 1.0 MiB is shown" in page
    assert len(client.get("/messages", params={"topic": "orders"}).text) < 20_000
    assert len(client.get(f"/messages/{ID}/body").content) == 1_050_000


def test_a_message_is_handed_to_the_member_that_was_chosen(world):
    client = open_console(world)
    path = f"/messages/{ID}/hand-to"
    assert "<option selected>billing client-1</option>" in client.get(path).text
    csrf = client.csrf(path)
    plan = client.act(path, csrf, "plan", member="billing client-1")
    assert "handed to one member of group billing: client-1" in plan.text
    assert calls_of(world, "hand_to") == []
    done = client.act(path, csrf, member="billing client-1")
    assert "SUCCESS after 41 ms" in done.text
    assert calls_of(world, "hand_to")[0][0] == (ID, "billing", "client-1")
    assert client.act(path, csrf, member="billing").status_code == 400
