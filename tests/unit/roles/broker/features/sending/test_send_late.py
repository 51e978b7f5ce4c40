"""Sends that waited for too long: the oldest are refused, the others stored."""

from __future__ import annotations

from mqmesh.protocol.codes import ResponseCode


def overload(stage, waited_ms):
    """A log that has been too slow for longer than the broker lets pass."""
    admission = stage.features.state.admission
    admission.readable_ms = stage.clock.monotonic_ms()
    admission.count_refused(0, admission.readable_ms)
    stage.clock.advance(waited_ms)
    admission.count_refused(1, stage.clock.monotonic_ms())
    stage.clock.advance(1_001)


def test_the_oldest_are_refused_and_the_others_stored(stage):
    opaques = [stage.begin_send(stage.batch(bodies=(f"{i}".encode(),))) for i in range(10)]
    overload(stage, 1_001 - 202)
    # They may have waited for 1800 ms, and 200 are allowed: 8 of 9.
    stage.end_tick()
    codes = [stage.outcomes(opaque)[0].code for opaque in opaques]
    assert codes == [int(ResponseCode.SYSTEM_BUSY)] * 8 + [int(ResponseCode.SUCCESS)] * 2
    (refused,) = stage.outcomes(opaques[0])
    assert refused.retry_after_ms == 100
    assert "1800 ms (wait_time_mills_in_send_queue = 200)" in refused.remark
    assert stage.pull()[1] == [b"8", b"9"]
    assert stage.features.core.stats.total.busy_refusals == 8


def test_outcomes_of_bad_batches_stay_what_they_are(stage):
    bad = stage.begin_send(stage.batch(queue_id=99), stage.batch(bodies=(b"good",)))
    late = [stage.begin_send(stage.batch(bodies=(b"late",))) for _ in range(8)]
    last = stage.begin_send(stage.batch(bodies=(b"last",)), stage.batch(bodies=(b"too",)))
    overload(stage, 1_001 - 202)
    stage.end_tick()
    first, second = stage.outcomes(bad)
    assert first.code != int(ResponseCode.SYSTEM_BUSY)
    assert second.code == int(ResponseCode.SYSTEM_BUSY)
    assert stage.outcomes(late[0])[0].code == int(ResponseCode.SYSTEM_BUSY)
    assert [one.code for one in stage.outcomes(last)] == [int(ResponseCode.SUCCESS)] * 2
    assert stage.pull()[1] == [b"late", b"last", b"too"]


def test_after_a_hiccup_all_are_stored(stage):
    opaques = [stage.begin_send(stage.batch()) for _ in range(3)]
    stage.features.state.admission.readable_ms = stage.clock.monotonic_ms()
    stage.features.state.admission.count_refused(0, stage.clock.monotonic_ms())
    stage.clock.advance(10_000)
    stage.end_tick()
    assert {stage.outcomes(opaque)[0].code for opaque in opaques} == {int(ResponseCode.SUCCESS)}
