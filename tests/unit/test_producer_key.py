"""Instance keys of producers, and the ids that everybody sees."""

from random import SystemRandom

from mqmesh.producer_key import KEY_SIZE, new_key, producer_id_of


def test_an_id_is_made_of_its_key_in_the_way_that_the_protocol_says() -> None:
    assert f"{producer_id_of(bytes(16)):016X}" == "450893FF12309A73"
    assert producer_id_of(b"the key of tests").to_bytes(8, "little") != b"the key of tests"[:8]


def test_keys_are_new_each_time() -> None:
    keys = {new_key(SystemRandom()) for _ in range(100)}
    assert {len(key) for key in keys} == {KEY_SIZE}
    assert len({producer_id_of(key) for key in keys}) == 100
