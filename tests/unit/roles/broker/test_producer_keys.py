"""Whom a broker believes that it is a producer."""

from random import Random

import pytest

from mqmesh.errors import SystemBusy
from mqmesh.producer_key import producer_id_of
from mqmesh.protocol.transactions import End
from mqmesh.roles.broker.producer_keys import EndProofs, ProducerKeys


def key(number: int) -> bytes:
    return bytes([number]) * 16


def test_a_key_gives_the_id_that_it_stands_for() -> None:
    keys = ProducerKeys(2)
    assert keys.show(b"peer", key(1)) == producer_id_of(key(1))
    assert keys.show(b"peer", key(1)) == producer_id_of(key(1)), "also from memory"


def test_a_connection_that_breaks_is_forgotten() -> None:
    keys = ProducerKeys(1)
    keys.show(b"peer", key(1))
    with pytest.raises(SystemBusy, match="1 producers sent by this connection"):
        keys.show(b"peer", key(2))
    keys.on_disconnect(b"peer")
    keys.on_disconnect(b"nobody")
    assert len(keys) == 0
    assert keys.show(b"peer", key(2)) == producer_id_of(key(2))


def end(producer_id: int, proof: bytes, base: int = 5, first_sequence: int = 9) -> End:
    return End(base, producer_id, first_sequence, 0, 1, 1, proof)


def test_a_producer_and_who_was_asked_may_decide() -> None:
    proofs = EndProofs(Random(1))
    own = producer_id_of(key(1))
    assert proofs.holds(end(own, key(1)))
    assert proofs.holds(end(own, proofs.token(5, own, 9)))


@pytest.mark.parametrize(("base", "first_sequence", "number"), [(6, 9, 1), (5, 10, 1), (5, 9, 2)])
def test_a_token_is_for_one_half_batch(base: int, first_sequence: int, number: int) -> None:
    proofs = EndProofs(Random(1))
    token = proofs.token(5, producer_id_of(key(1)), 9)
    assert not proofs.holds(end(producer_id_of(key(number)), token, base, first_sequence))


def test_nothing_else_proves_anything() -> None:
    proofs = EndProofs(Random(1))
    own = producer_id_of(key(1))
    other = EndProofs(Random(2)).token(5, own, 9)
    for proof in (b"", key(2), bytes(16), own.to_bytes(8, "little"), other):
        assert not proofs.holds(end(own, proof))
