"""What shape objects have: how much they offer, how much they want, and whom they know."""

from __future__ import annotations

import ast
from collections import defaultdict

from harness.syntax import parsed, walked

METHODS_MAX = 12
ARGUMENTS_MAX = 8
SCRAP_LINES = 60

# What is above a limit has its own, which only ever becomes lower.
MANY_METHODS = {
    "mqmesh.storage.commitlog.store.CommitLogStore": 28,
    "mqmesh.storage.log.commitlog.CommitLog": 19,
    "mqmesh.roles.broker.features.topics.topics.TopicTable": 18,
    "mqmesh.storage.queues.consume_queues.ConsumeQueues": 18,
    "mqmesh.storage.interface.MessageStore": 18,
    "mqmesh.transport.zmq.loop.EventLoop": 16,
    "mqmesh.roles.broker.features.groups.consumer_groups.ConsumerGroups": 16,
    "mqmesh.roles.schedule.timetable.Timetable": 14,
    "mqmesh.transport.simulated.loop.SimulatedLoop": 14,
    "mqmesh.filtering.sql92._Builder": 13,
    # RocketMQ's DefaultLitePullConsumer is one class to its users: sixteen of these are its. What
    # they do is PolledQueues' and the engine's.
    "mqmesh.sdk.consumer.pull_consumer.PullConsumer": 21,
    "mqmesh.sdk.aio.consumer.PullConsumer": 20,
    # So is DefaultMQProducer, which has a dozen overloads of send and request alone; replies are
    # its users', too, and every way to send has a form that waits and one that does not.
    "mqmesh.sdk.producer.producer.Producer": 15,
    # So is DefaultMQAdminExt, with over a hundred; what is of one subject has a client of its own.
    "mqmesh.sdk.admin.admin.AdminClient": 14,
}
MANY_ARGUMENTS = {
    "mqmesh.storage.commitlog.checkpointer.Checkpointer": 13,
    "mqmesh.storage.commitlog.recovery.LogRecovery": 13,
    "mqmesh.storage.commitlog.cleaner.Cleaner": 11,
    "mqmesh.storage.log.commitlog.CommitLog": 10,
}
HANDLES = {
    "mqmesh.storage.log.commitlog.CommitLog": "Append",
    "mqmesh.sdk.transactions.transaction_producer.TransactionProducer": "Transaction",
}
"""What these hand out to callers acts on them: a handle, and no part."""
SCRAPS = {
    "mqmesh.roles.broker.features.pulls.filter_server",
    "mqmesh.roles.broker.features.queries.query",
    "mqmesh.roles.schedule.broker_clock",
}
"""Those that were there; it only ever becomes shorter."""

PRIVATE_IN_TESTS = 335
"""So often tests reach into what is private, at most; it only ever becomes lower."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def classes(modules):
    """Every class of a module's first level, by its whole name."""
    for path, source in modules.items():
        for node in parsed(source).body:
            if isinstance(node, ast.ClassDef):
                yield f"{path}.{node.name}", node


def public_methods(modules):
    """How many methods a class offers; properties and other ways to make one do not count."""
    return {
        name: sum(
            isinstance(one, Function)
            and not one.name.startswith(("_", "test_"))
            and not any(
                ast.unparse(d).rpartition(".")[2]
                in {"property", "classmethod", "staticmethod", "setter", "overload"}
                for d in one.decorator_list
            )
            for one in node.body
        )
        for name, node in classes(modules)
    }


def constructor_arguments(modules):
    """How many arguments a class wants that have to be given."""
    found = {}
    for name, node in classes(modules):
        for one in node.body:
            if isinstance(one, Function) and one.name == "__init__":
                wanted = one.args.args[1:]
                given = len(one.args.defaults)
                keywords = [default for default in one.args.kw_defaults if default is None]
                found[name] = len(wanted) - given + len(keywords)
    return found


def handed_down(modules):
    """Classes that hand themselves to what they make: the maker, and what it makes."""
    for name, node in classes(modules):
        for call in ast.walk(node):
            if not isinstance(call, ast.Call):
                continue
            made = ast.unparse(call.func).rpartition(".")[2]
            arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
            if made[:1].isupper() and any(
                isinstance(one, ast.Name) and one.id == "self" for one in arguments
            ):
                yield name, made


def scraps(modules):
    """Short modules that only their neighbour imports."""
    importers = defaultdict(set)
    for path, source in modules.items():
        for node in walked(source):
            if isinstance(node, ast.ImportFrom) and node.module:
                importers[node.module].add(path)
                for alias in node.names:
                    importers[f"{node.module}.{alias.name}"].add(path)
    for path, source in modules.items():
        room, _, name = path.rpartition(".")
        (only, *others) = importers[path] or {""}
        if (
            not others
            and only.startswith(f"{room}.")
            and name not in {"__init__", "feature", "main"}
            and len(source.splitlines()) < SCRAP_LINES
        ):
            yield path


def above(counts, limit, allowed):
    """What is above its limit, or could have a lower one by now."""
    return {
        name: count
        for name, count in counts.items()
        if count > limit and allowed.get(name) != count
    } | {name: counts.get(name, 0) for name in allowed if counts.get(name, 0) <= limit}


def test_no_class_offers_too_much(modules):
    assert above(public_methods(modules), METHODS_MAX, MANY_METHODS) == {}


def test_no_class_wants_too_much(modules):
    assert above(constructor_arguments(modules), ARGUMENTS_MAX, MANY_ARGUMENTS) == {}


def test_nobody_hands_itself_to_its_parts(modules):
    assert dict(handed_down(modules)) == HANDLES


def test_no_module_is_a_scrap_of_its_neighbour(modules):
    assert set(scraps(modules)) == SCRAPS


def private_accesses(source):
    """Attributes that belong to somebody else, by their lines."""
    return [
        node.lineno
        for node in walked(source)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        and not (isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super")
    ]


def test_tests_reach_into_objects_ever_less(python_files):
    tests = [text for path, text in python_files.items() if path.startswith("tests/")]
    found = sum(len(private_accesses(text)) for text in tests)
    assert found <= PRIVATE_IN_TESTS


def test_a_private_access_is_found():
    assert private_accesses("a.b\nself._b\nsuper()._b()\na._b\nself.a._b()\na.__name__\n") == [4, 5]


def test_planted_shapes_are_found():
    methods = "".join(f"    def m{number}(self): ...\n" for number in range(METHODS_MAX + 1))
    wanted = ", ".join(f"a{number}" for number in range(ARGUMENTS_MAX + 1))
    source = f"class A:\n{methods}    def __init__(self, {wanted}, b=1, *, c=2):\n"
    planted = {"m.a": source + "        self.part = Part(self)\n        self.name = str(self)\n"}
    assert above(public_methods(planted), METHODS_MAX, {}) == {"m.a.A": METHODS_MAX + 1}
    assert above(constructor_arguments(planted), ARGUMENTS_MAX, {}) == {"m.a.A": ARGUMENTS_MAX + 1}
    assert dict(handed_down(planted)) == {"m.a.A": "Part"}
    assert list(scraps(planted | {"m.b": "from m.a import A\n", "n.c": ""})) == ["m.a"]
    assert list(scraps(planted | {"m.b": "import x\n", "n.c": "from m.a import A\n"})) == []
    assert above({"m.a.A": 12}, 12, {"m.a.A": 13}) == {"m.a.A": 12}
    assert above({"m.a.A": 13}, 12, {"m.a.A": 13}) == {}
