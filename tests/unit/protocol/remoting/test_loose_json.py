import json

import pytest

from mqmesh.errors import RemoteProtocolError
from mqmesh.protocol.remoting.bodies import QueueName
from mqmesh.protocol.remoting.loose_json import MAX_DEPTH, encode_table, strict_json


def test_a_table_has_objects_as_keys():
    pairs = [(QueueName("t", "a", number), number) for number in range(2)]
    assert bytes(encode_table(pairs)) == (
        b'{{"topic":"t","brokerName":"a","queueId":0}:0,'
        b'{"topic":"t","brokerName":"a","queueId":1}:1}'
    )
    assert bytes(encode_table([])) == b"{}"


@pytest.mark.parametrize(
    ("loose", "strict"),
    [
        ('{"a": {{"q":1}: {"b":[1,{2:3}]}, {"q":2}:null}}', None),
        ("{0:1, -1 : 2}", {"0": 1, "-1": 2}),
        (r'{"a:{}\"[":"}\\"}', {'a:{}"[': "}\\"}),
        ("[{},[],1.5e3]", [{}, [], 1500.0]),
        ('{"a":"x","b":{}}', {"a": "x", "b": {}}),
    ],
)
def test_keys_become_texts(loose, strict):
    if strict is None:
        strict = {"a": {'{"q":1}': {"b": [1, {"2": 3}]}, '{"q":2}': None}}
    assert json.loads(strict_json(loose.encode())) == strict


@pytest.mark.parametrize(
    "data",
    [b"}", b"[1]]", b"[" * (MAX_DEPTH + 1), b'{{"a":"' + b"x" * 5_000 + b'"}:1}'],
)
def test_what_would_cost_too_much_is_refused(data):
    with pytest.raises(RemoteProtocolError):
        strict_json(data)
