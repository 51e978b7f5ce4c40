"""From a request to its handler: decoded, permitted, counted, timed."""

from __future__ import annotations

import pytest
from harness.peers import KeptPeer

from mqmesh.errors import (
    BrokerNotAvailable,
    LocalProtocolError,
    NoPermission,
    RemoteProtocolError,
    SystemBusy,
)
from mqmesh.metrics import MetricBoard, MetricSample
from mqmesh.protocol.admin import GetTopicConfigRequest
from mqmesh.protocol.command import (
    ANYBODY,
    EMPTY_REPLY,
    ONEWAY,
    Principal,
    Reply,
    decode_frame,
    encode_frame,
    encode_header,
)
from mqmesh.protocol.commands import RequestCode, ServedBy, served_by
from mqmesh.protocol.pulling import PullRequest
from mqmesh.protocol.request import Request
from mqmesh.protocol.route import DeleteTopicRequest, TopicConfig
from mqmesh.roles.dispatch import METRICS, Dispatch

PULL = PullRequest("g", "t", 0, 0)


def request_of(code, header=b"", principal=ANYBODY) -> Request:
    data = header if isinstance(header, bytes) else encode_header(header)
    peer = KeptPeer(b"peer", principal=principal)
    return Request(peer, decode_frame(encode_frame(code, 1, header=data)))


class Ticks:
    """A clock that goes on by a millisecond whenever it is looked at."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 1_000_000
        return self.now_ns


class OnlyShop:
    """Lets one principal read one topic."""

    def check(self, principal, spec, header) -> None:
        if principal.name != "shop" or spec.topic_names(header) != ["t"]:
            raise NoPermission(f"{principal.name} may not {spec.right}")


def test_a_handler_gets_the_decoded_header():
    dispatch, seen = Dispatch(ServedBy.BROKER, Ticks()), []
    dispatch.open({RequestCode.PULL_MESSAGE: lambda *call: seen.append(call)})
    request = request_of(RequestCode.PULL_MESSAGE, PULL)
    assert dispatch.handlers[RequestCode.PULL_MESSAGE](request) is None
    assert seen == [(request, PULL)]


def test_bytes_that_are_no_such_header_never_reach_the_handler():
    dispatch = Dispatch(ServedBy.BROKER, Ticks())
    dispatch.open({RequestCode.PULL_MESSAGE: lambda request, header: pytest.fail("called")})
    with pytest.raises(RemoteProtocolError):
        dispatch.handlers[RequestCode.PULL_MESSAGE](request_of(RequestCode.PULL_MESSAGE, b"?"))
    assert dispatch.counts[RequestCode.PULL_MESSAGE].failures == 1


def test_the_right_is_looked_up_for_the_principal_before_the_handler_is_called():
    dispatch = Dispatch(ServedBy.BROKER, Ticks(), OnlyShop())
    dispatch.open({RequestCode.PULL_MESSAGE: lambda request, header: EMPTY_REPLY})
    serve = dispatch.handlers[RequestCode.PULL_MESSAGE]
    shop = Principal("shop")
    assert serve(request_of(RequestCode.PULL_MESSAGE, PULL, shop)) is EMPTY_REPLY
    with pytest.raises(NoPermission, match="anybody may not SUB"):
        serve(request_of(RequestCode.PULL_MESSAGE, PULL))
    with pytest.raises(NoPermission, match="shop may not SUB"):
        other = PullRequest("g", "other", 0, 0)
        serve(request_of(RequestCode.PULL_MESSAGE, other, shop))


def test_commands_are_counted_and_timed_also_those_that_fail():
    ticks, takes_ms = Ticks(), [1, 3, 9]
    dispatch = Dispatch(ServedBy.BROKER, ticks)

    def handler(request, header):
        ticks.now_ns += takes_ms.pop(0) * 1_000_000
        if not takes_ms:
            raise BrokerNotAvailable("planned")
        return EMPTY_REPLY

    dispatch.open({RequestCode.PULL_MESSAGE: handler})
    serve = dispatch.handlers[RequestCode.PULL_MESSAGE]
    serve(request_of(RequestCode.PULL_MESSAGE, PULL))
    serve(request_of(RequestCode.PULL_MESSAGE, PULL))
    with pytest.raises(BrokerNotAvailable):
        serve(request_of(RequestCode.PULL_MESSAGE, PULL))
    board = MetricBoard()
    board.add(METRICS, lambda: dispatch.counts)
    samples = {one.metric.name: one.samples for one in board.read()}
    labels = ("pull_message",)
    assert samples["command_requests_total"] == [MetricSample(labels, 3)]
    assert samples["command_failures_total"] == [MetricSample(labels, 1)]
    assert samples["command_spent_ms_total"] == [MetricSample(labels, 16)]
    assert samples["command_longest_ms"] == [MetricSample(labels, 10)]


def latencies(dispatch) -> dict[tuple[str, ...], tuple[int, ...]]:
    board = MetricBoard()
    board.add(METRICS, lambda: dispatch.counts)
    (told,) = (one for one in board.read() if one.metric.name == "command_latency_ms")
    return {one.labels: one.value.counts for one in told.samples}


@pytest.mark.parametrize(
    ("code", "header", "held"),
    [
        (RequestCode.PULL_MESSAGE, PULL, "true"),
        (RequestCode.GET_TOPIC_CONFIG, GetTopicConfigRequest("t"), "false"),
    ],
)
def test_the_latency_of_what_is_answered_later_ends_with_its_answer(code, header, held):
    ticks = Ticks()
    dispatch = Dispatch(ServedBy.BROKER, ticks)
    dispatch.open({code: lambda request, header: None})
    request = request_of(code, header)
    assert dispatch.handlers[code](request) is None
    assert latencies(dispatch) == {}
    pending = request.later()
    ticks.now_ns += 8_000_000
    pending.fail(SystemBusy("planned"))
    # Ticks: the beginning, the handler's end, and the answer; 10 ms are the sixth bound.
    assert latencies(dispatch) == {
        (code.name.lower(), held, "system_busy"): (0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0)
    }


def test_the_latency_of_what_is_answered_or_refused_at_once_ends_there():
    dispatch = Dispatch(ServedBy.BROKER, Ticks())
    dispatch.open({RequestCode.PULL_MESSAGE: lambda request, header: EMPTY_REPLY})
    dispatch.handlers[RequestCode.PULL_MESSAGE](request_of(RequestCode.PULL_MESSAGE, PULL))
    with pytest.raises(RemoteProtocolError):
        dispatch.handlers[RequestCode.PULL_MESSAGE](request_of(RequestCode.PULL_MESSAGE, b"x"))
    once = (0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    assert latencies(dispatch) == {
        ("pull_message", "false", "success"): once,
        ("pull_message", "false", "message_illegal"): once,
    }


def test_a_role_that_cannot_serve_refuses_all_but_what_is_kept_with_its_reason():
    dispatch = Dispatch(ServedBy.BROKER, Ticks())
    dispatch.keep({RequestCode.PING: lambda request, header: EMPTY_REPLY})
    dispatch.refuse("broker-a is starting")
    assert set(dispatch.handlers) == set(served_by(ServedBy.BROKER))
    for code, serve in dispatch.handlers.items():
        if code != RequestCode.PING:
            with pytest.raises(BrokerNotAvailable, match="broker-a is starting"):
                serve(request_of(code, b"no header"))
    assert dispatch.handlers[RequestCode.PING](request_of(RequestCode.PING)) is EMPTY_REPLY


def test_a_late_answer_goes_to_the_peer_that_asked_or_nowhere_if_nobody_waits():
    peer, code = KeptPeer(b"peer"), RequestCode.GET_TOPIC_CONFIG
    for opaque, flags in ((1, 0), (2, ONEWAY)):
        frame = encode_frame(code, opaque, header=b"header", flags=flags)
        pending = Request(peer, decode_frame(frame)).later(deadline_ms=70)
        assert (pending.code, pending.deadline_ms, pending.is_oneway) == (code, 70, opaque == 2)
        pending.done(TopicConfig("t", 1, 1))
    assert peer.kept.answers == {1: Reply(encode_header(TopicConfig("t", 1, 1)))}


def test_an_answer_that_cannot_be_encoded_becomes_an_error():
    peer = KeptPeer(b"peer")
    request = Request(peer, decode_frame(encode_frame(RequestCode.GET_TOPIC_CONFIG, 1)))
    request.later().done(TopicConfig("\ud800", 1, 1))
    assert isinstance(peer.kept.answers[1], LocalProtocolError)


class Told:
    """What an audit was told."""

    def __init__(self, dispatch):
        self.lines = []
        dispatch.audit = lambda peer, code, topics, groups, error, what: self.lines.append(
            (
                peer.principal.name,
                code.name,
                topics,
                groups,
                type(error).__name__,
                *filter(None, [what]),
            )
        )


def test_refusals_are_told_to_the_audit_once_and_reads_that_are_served_are_not():
    dispatch = Dispatch(ServedBy.BROKER, Ticks(), OnlyShop())
    told = Told(dispatch)
    dispatch.open({RequestCode.PULL_MESSAGE: lambda request, header: EMPTY_REPLY})
    serve = dispatch.handlers[RequestCode.PULL_MESSAGE]
    serve(request_of(RequestCode.PULL_MESSAGE, PULL, Principal("shop")))
    with pytest.raises(NoPermission):
        serve(request_of(RequestCode.PULL_MESSAGE, PULL, Principal("thief")))
    assert told.lines == [("thief", "PULL_MESSAGE", ["t"], ["g"], "NoPermission")]


class NoTopic(OnlyShop):
    """Lets everybody ask, and gives nobody a topic."""

    def check(self, principal, spec, header) -> None:
        pass

    def check_topic(self, principal, spec, topic) -> None:
        raise NoPermission("not yours")

    check_creation = check_topic


def test_a_right_that_a_handler_asks_for_is_told_once_though_its_error_goes_on():
    dispatch = Dispatch(ServedBy.BROKER, Ticks(), NoTopic())
    told = Told(dispatch)
    code = RequestCode.PULL_MESSAGE
    dispatch.open({code: lambda request, header: dispatch.permit(request.peer, code, "u")})
    for _ in range(2):
        with pytest.raises(NoPermission):
            dispatch.handlers[RequestCode.PULL_MESSAGE](request_of(RequestCode.PULL_MESSAGE, PULL))
    assert told.lines == [("anybody", "PULL_MESSAGE", ["u"], [], "NoPermission")] * 2


def test_what_administrators_do_is_told_whatever_comes_of_it():
    dispatch = Dispatch(ServedBy.BROKER, Ticks())
    told = Told(dispatch)
    answers = iter([EMPTY_REPLY, None, BrokerNotAvailable("stopping")])

    def handler(request, header):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    dispatch.open({RequestCode.DELETE_TOPIC_IN_BROKER: handler})
    asked = request_of(RequestCode.DELETE_TOPIC_IN_BROKER, DeleteTopicRequest("orders"))
    for _ in range(2):
        dispatch.handlers[RequestCode.DELETE_TOPIC_IN_BROKER](asked)
    with pytest.raises(BrokerNotAvailable):
        dispatch.handlers[RequestCode.DELETE_TOPIC_IN_BROKER](asked)
    assert [line[-1] for line in told.lines] == ["NoneType", "NoneType", "BrokerNotAvailable"]
    assert told.lines[0][:4] == ("anybody", "DELETE_TOPIC_IN_BROKER", ["orders"], [])
