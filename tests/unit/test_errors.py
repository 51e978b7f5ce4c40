import inspect
import re

import pytest

from mqmesh import errors
from mqmesh.errors import BrokerError, InvalidArgument, MQMeshError, SystemBusy

CLASSES = {
    name: class_
    for name, class_ in vars(errors).items()
    if inspect.isclass(class_) and issubclass(class_, MQMeshError)
}


def drawn_tree() -> dict[str, str]:
    """Each error's parent, as the drawing at the head of the module has it."""
    parents: dict[str, str] = {}
    above: list[str] = []
    assert errors.__doc__ is not None
    for line in errors.__doc__.splitlines():
        found = re.match(r"    ([│├└─ ]*)([A-Z]\w+(?:, *[A-Z]\w+)*)", line)
        if found is None:
            continue
        depth = len(found[1]) // 4
        names = re.findall(r"\w+", found[2])
        above[depth:] = [names[0]]
        for name in names if depth else ():
            parents[name] = above[depth - 1]
    return parents


def test_tree_in_the_docstring_is_the_tree_of_the_code() -> None:
    actual = {
        name: class_.__bases__[0].__name__
        for name, class_ in CLASSES.items()
        if class_ is not MQMeshError
    }
    assert drawn_tree() == actual


def test_every_error_says_when_it_is_raised() -> None:
    for name, class_ in CLASSES.items():
        assert class_.__doc__, name
        assert re.match(r"Raised when|Base of", class_.__doc__), name


def test_retriable_is_decided_by_class() -> None:
    retriable = {name for name, class_ in CLASSES.items() if class_.retriable}
    assert retriable == {
        "TooManyOpenFiles",
        "TransportError",
        "RequestTimeout",
        "EndpointUnreachable",
        "QueueFull",
        "DiskFull",
        "SystemBusy",
        "BrokerNotAvailable",
        "NotMaster",
        "ClientNotOnline",
        "FilterFailed",
        "FilterUnknown",
        "NoRoute",
    }


def test_invalid_argument_is_also_pythons_value_error() -> None:
    with pytest.raises(ValueError, match="out of bounds"):
        raise InvalidArgument("out of bounds")


def test_broker_error_carries_what_the_broker_said() -> None:
    error = SystemBusy("too much to do", code=2, retry_after_ms=50)
    assert str(error) == error.remark == "too much to do"
    assert (error.code, error.retry_after_ms) == (2, 50)
    assert (BrokerError("no").code, BrokerError("no").retry_after_ms) == (1, 0)
    assert SystemBusy.code == 1  # an instance's code is its own
