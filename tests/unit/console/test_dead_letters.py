"""Dead letters: groups, those of one, resend with honest results, export, purge."""

from __future__ import annotations

import csv
import io
import json

import pytest
from harness.console import ConsoleWorld, open_console
from unit.console.test_messages import HOSTILE, ID, NOW_MS, calls_of, stored

from mqmesh.errors import GroupNotFound, TopicNotFound
from mqmesh.protocol.admin import QueueStats, TopicStats
from mqmesh.protocol.retries import ResendResult, ResendStatus, ResendTarget
from mqmesh.sdk.admin.dead_letters import DeadLetter, GroupDeadLetters
from mqmesh.sdk.admin.searches import SearchResult

REASON = "LookupError: no address"
PATH = "/dead-letters/shipping"


def letter(number, *, reason=REASON, resent_ms=0, body=b"{}"):
    message = stored(
        number=number, at=NOW_MS + number, physical="%DLQ%shipping", body=body, LAST_FAILURE=reason
    )
    return DeadLetter("broker-a", number, message, resent_ms)


@pytest.fixture
def world():
    letters = [letter(1), letter(2, reason="ValueError"), letter(3, resent_ms=NOW_MS)]
    broken = DeadLetter("broker-a", 4, None, undecodable=b"??", count=2, error="a checksum")

    def scan(group, wanted, newest=None):
        return [one for one in [*letters, broken] if wanted.fits(one)]

    def resend(group, chosen, *, dry_run, force, target):
        for one in chosen:
            known = next((of for of in letters if of.queue_offset == one.queue_offset), None)
            if known is None:
                yield one, ResendResult(ResendStatus.GONE)
            elif known.resent_ms and not force:
                yield one, ResendResult(ResendStatus.ALREADY_RESENT, known.resent_ms)
            else:
                yield one, ResendResult(ResendStatus.RESENT)

    return ConsoleWorld(
        {
            "overview": {"shipping": GroupDeadLetters(5, NOW_MS, NOW_MS + 9)},
            "search": SearchResult([letters[0].message], 1, 1),
            "topic_stats": {"broker-a": TopicStats("%DLQ%shipping", [QueueStats(0, 0, 5)])},
            "scan": scan,
            "resend": resend,
            "purge": 5,
        }
    )


def test_groups_have_counts_ages_and_the_last_reason(world):
    answer = open_console(world).get("/api/v1/dead-letters").json()
    assert answer["rows"] == [
        {
            "group": "shipping",
            "count": 5,
            "oldest_ms": NOW_MS,
            "newest_ms": NOW_MS + 9,
            "last_reason": REASON,
        }
    ]
    assert f'href="{PATH}"' in open_console(world).get("/dead-letters").text


def test_letters_are_newest_first_with_their_reasons(world):
    answer = open_console(world).get(f"/api/v1{PATH}").json()
    assert [one["place"] for one in answer["table"]["rows"]] == [
        "broker-a@3",
        "broker-a@2",
        "broker-a@1",
        "broker-a@4",
    ]
    assert answer["count"] == 5
    assert [REASON, 2] in answer["reasons"]
    page = open_console(world).get(PATH).text
    assert "2 messages at broker-a@4" in page
    assert "it cannot be decoded: a checksum" in page


def test_letters_are_chosen_by_filter(world):
    client = open_console(world)
    params = {"reason": "address", "resent": "no", "tag": "new", "key": "order-7"}
    answer = client.get(f"/api/v1{PATH}", params=params).json()
    assert [one["place"] for one in answer["table"]["rows"]] == ["broker-a@1"]
    assert client.get(PATH, params={"topic": "a b"}).status_code == 400
    assert client.get(PATH, params={"since": "soon"}).status_code == 400


def test_a_scan_looks_at_no_more_than_it_may_and_says_so(world):
    answer = open_console(world, max_query_messages=2).get(f"/api/v1{PATH}").json()
    assert calls_of(world, "scan")[0][1] == {"newest": 2}
    assert answer["table"]["cut"].startswith("Looked at 2 of 5")


def test_a_group_without_dead_letters_is_empty_and_an_unknown_one_not_found(world):
    world.answers |= {"topic_stats": TopicNotFound("none"), "scan": []}
    assert "This group has no dead letters" in open_console(world).get(PATH).text
    world.answers["scan"] = GroupNotFound("no consumer group 'shipping'")
    assert open_console(world).get(PATH).status_code == 404


def test_a_resend_says_honestly_what_it_did(world):
    client = open_console(world)
    path = PATH + "/resend"
    csrf = client.csrf(PATH)
    form = {"csrf": csrf, "chosen": [f"broker-a@{n}" for n in (1, 2, 3, 9)]}
    plan = client.post(path, data=form | {"step": "plan"}).text
    assert "2 dead letters of group shipping are resent to the group alone" in plan
    assert "1 were resent before, and stay" in plan
    assert 'name="chosen" value="broker-a@1,broker-a@2,broker-a@3,broker-a@9"' in plan
    assert all(options["dry_run"] for _, options in calls_of(world, "resend"))
    done = client.post(path, data=form | {"step": "do"}).text
    assert "2 resent, 1 were before, 1 gone meanwhile" in done
    assert "2023-11-14 22:13:20 UTC" in done
    assert f'href="{PATH}"' in done


def test_all_that_were_found_are_resent_and_forced(world):
    client = open_console(world)
    answer = client.post(
        f"/api/v1{PATH}/resend",
        json={
            "found": True,
            "reason": "address",
            "force": True,
            "target": "all groups of the topic",
        },
    ).json()
    assert answer["summary"] == "2 resent"
    (_, chosen), options = calls_of(world, "resend")[-1]
    assert [one.queue_offset for one in chosen] == [3, 1]
    assert (options["target"], options["force"]) == (ResendTarget.TOPIC, True)


@pytest.mark.parametrize("chosen", ["", "broker-a", "broker-a@x", "@1", "broker-a@" + "9" * 19])
def test_what_names_no_dead_letter_is_refused(world, chosen):
    client = open_console(world)
    answer = client.act(PATH + "/resend", client.csrf(PATH), "plan", chosen=chosen)
    assert answer.status_code == 400
    assert calls_of(world, "resend") == []


def test_nothing_to_resend_cannot_be_confirmed(world):
    client = open_console(world)
    plan = client.act(PATH + "/resend", client.csrf(PATH), "plan", chosen="broker-a@3")
    assert "None of them can be resent" in plan.text
    assert 'value="do"' not in plan.text


def test_an_export_has_all_that_fit_and_exact_bodies(world):
    bodies = [HOSTILE.encode(), b"\xff\x00", b'=1+1,"a"\r\n']
    letters = [letter(number, body=body) for number, body in enumerate(bodies)]
    world.answers["scan"] = letters
    client = open_console(world)
    lines = client.get(PATH + "/export.jsonl").content.splitlines()
    assert [json.loads(line)["body"] for line in lines] == [HOSTILE, None, '=1+1,"a"\r\n']
    assert json.loads(lines[1])["body_base64"] == "/wA="
    file = client.get(PATH + "/export.csv")
    rows = list(csv.DictReader(io.StringIO(file.content.decode(), newline="")))
    assert [row["body"] for row in rows] == [HOSTILE, "", '=1+1,"a"\r\n']
    assert rows[1]["body_base64"] == "/wA="
    assert rows[0]["message_id"] == ID[:-1] + "0"
    assert 'filename="dead-letters.csv"' in file.headers["content-disposition"]


def test_an_export_of_none_has_a_heading_and_one_without_bodies_none(world):
    client = open_console(world, allow_body_view=False)
    assert '"body":null' in client.get(PATH + "/export.jsonl").text
    assert "??" not in client.get(PATH + "/export.jsonl").text
    world.answers["scan"] = []
    assert client.get(PATH + "/export.csv").text.startswith("message_id,topic,")


def test_a_purge_wants_the_name(world):
    client = open_console(world)
    path = PATH + "/purge"
    assert "5 messages are lost" in client.get(path).text
    csrf = client.csrf(path)
    assert client.act(path, csrf, typed="ship").status_code == 400
    assert calls_of(world, "purge") == []
    assert (
        "5 dead letters of group shipping are deleted"
        in client.act(path, csrf, typed="shipping").text
    )
    world.answers["overview"] = {}
    assert "Group shipping has no dead letters" in client.get(path).text
