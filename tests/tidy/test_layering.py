"""Who may import whom: the rooms, the roles, and the few places that touch the world."""

from __future__ import annotations

import ast
import graphlib
from collections import defaultdict
from collections.abc import Iterator

import pytest
from harness.syntax import parsed, walked

# The first rule reads every file, which takes a while on a loaded machine.
pytestmark = pytest.mark.timeout(300)

# From the floor up. A room imports only what stands in its row.
MAY_IMPORT = {
    "base": {"base"},
    "batch": {"base"},
    "protocol": {"base"},
    "filtering": {"base", "batch"},
    "security": {"base", "protocol"},
    "sandbox": {"base", "batch"},
    "storage": {"base", "batch", "filtering"},
    "transport": {"base", "protocol", "security"},
    "coordination": {"base", "protocol", "transport"},
    "sdk": {"base", "batch", "protocol", "filtering", "security", "transport"},
    "aio": {"base", "protocol", "filtering", "security", "transport", "sdk"},
    "faststream": {"base", "sdk"},
    "sql": {"base", "security", "sdk"},
    "roles": {
        "base",
        "batch",
        "protocol",
        "filtering",
        "security",
        "sandbox",
        "storage",
        "transport",
        "coordination",
        "sdk",
    },
    "console": {"base", "protocol", "filtering", "security", "storage", "sdk", "aio", "roles"},
    "testing": {
        "base",
        "batch",
        "protocol",
        "filtering",
        "security",
        "storage",
        "transport",
        "coordination",
        "sdk",
        "aio",
        "roles",
    },
    "bench": {
        "base",
        "batch",
        "protocol",
        "filtering",
        "security",
        "transport",
        "sdk",
        "aio",
        "roles",
    },
    "cli": {
        "base",
        "batch",
        "protocol",
        "filtering",
        "security",
        "sandbox",
        "storage",
        "transport",
        "coordination",
        "sdk",
        "aio",
        "sql",
        "roles",
        "testing",
        "bench",
        "console",
    },
    "spark": {"base", "batch", "storage", "sdk"},
}

# The same for the folders inside two rooms.
INNER_ROOMS = {
    "mqmesh.storage": {
        "files": set(),
        "log": {"files"},
        "queues": {"files"},
        "commitlog": {"files", "log", "queues"},
        "lmdb": {"files", "log", "queues", "commitlog"},
        "index": {"files", "log", "lmdb"},
        "tools": {"files", "log", "queues", "commitlog", "lmdb", "index"},
    },
    "mqmesh.transport": {"zmq": set(), "simulated": set()},
    "mqmesh.sdk": {
        "client": set(),
        "tracing": {"client"},
        "producer": {"client", "tracing"},
        "transactions": {"client", "producer"},
        "consumer.fetching": {"client"},
        "consumer.listening": {"client", "consumer.fetching"},
        "consumer.introspection": {"client", "consumer.fetching", "consumer.listening"},
        "consumer.receiving": {"client", "consumer.fetching", "consumer.listening"},
        # Whoever consumes has a producer for its message trace.
        "consumer": {
            "client",
            "tracing",
            "producer",
            "consumer.fetching",
            "consumer.listening",
            "consumer.introspection",
            "consumer.receiving",
        },
        "admin": {"client", "tracing", "consumer"},
        "admin.views": {"producer", "admin", "tables"},
        "connector": {"client", "admin", "consumer.fetching"},
        "tables": {"client", "admin", "connector"},
        "app": {
            "client",
            "tracing",
            "producer",
            "consumer.fetching",
            "consumer.listening",
            "consumer",
        },
        "aio": {
            "app",
            "client",
            "tracing",
            "producer",
            "transactions",
            "consumer.fetching",
            "consumer.receiving",
            "consumer.listening",
            "consumer",
            "admin",
            "tables",
        },
        "faststream": {
            "aio",
            "app",
            "client",
            "tracing",
            "producer",
            "consumer.fetching",
            "consumer.listening",
            "consumer",
        },
    },
}

PUBLIC = {"mqmesh.__init__", "mqmesh.faststream.__init__", "mqmesh.sql.__init__"}
"""What users import from, and so more than docstrings."""


# A library and the places (a module, or a package and all in it) that may import it.
CONFINED = {
    "zmq": "mqmesh.transport.zmq",
    # Everybody else is given a transport. These take the real one: where processes of roles begin,
    # and what clients have by default.
    "mqmesh.transport.zmq": (
        "mqmesh.transport.zmq mqmesh.sdk.client.options mqmesh.testing.thread_cluster "
        "mqmesh.cli.processes.serve mqmesh.cli.processes.schedule mqmesh.cli.processes.indexer "
        "mqmesh.cli.processes.gateway mqmesh.cli.processes.secure"
    ),
    "mmap": "mqmesh.storage.log.mapped_file",
    "lmdb": "mqmesh.storage.lmdb.env",
    "lark": "mqmesh.filtering.sql92",
    "h2": "mqmesh.protocol.grpc.calls",
    "google.protobuf": "mqmesh.protocol.grpc.messages",
    "click": "mqmesh.cli",
    "faststream": "mqmesh.sdk.faststream mqmesh.faststream",
    "psycopg": "mqmesh.sql",
    "sqlalchemy": "mqmesh.sql",
    "fast_depends": "mqmesh.sdk.faststream",
    "opentelemetry": "mqmesh.sdk.tracing.otel mqmesh.faststream.opentelemetry",
    "prometheus_client": "mqmesh.faststream.prometheus",
    "rich": "mqmesh.cli",
    "starlette": "mqmesh.console",
    "uvicorn": "mqmesh.console",
    "jinja2": "mqmesh.console",
    "markupsafe": "mqmesh.console",
    "pyspark": "mqmesh.spark",
    "pyarrow": "mqmesh.spark",
    "delta": "mqmesh.spark",
    "deltalake": "mqmesh.spark",
}

# In a role's folder only these files may hold sockets, files, threads and clocks.
CARRY_OUT = {
    "access_keeper",
    "server",
    "shell",
    "role",
    "master_role",
    "follower_role",
    "environment",
    "page",
    "monitor",
    "alarm_notes",
    "death_notes",
    "upstream",
}
SUPERVISOR = "supervisor"
"""The folder beside the roles that is none: it looks after processes."""
IMPURE = {
    "asyncio",
    "concurrent",
    "multiprocessing",
    "os",
    "select",
    "selectors",
    "shutil",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "time",
}


MAKES_ITS_OWN = {
    "mqmesh.sdk.client.interrupt": "signals come to the main thread, before there is a transport",
    "mqmesh.sdk.client.lock_order": "the one place where locks are made",
    "mqmesh.sdk.client.options": "asks for the name of this machine",
    "mqmesh.sdk.client.run": "asks whether this is the main thread, for signals",
    "mqmesh.sdk.consumer.listening.worker_threads": "threads of listeners; simulated: workers.py",
    "mqmesh.sdk.consumer.introspection.stacks": "tells where this process's threads stand",
    "mqmesh.sdk.transactions.listener_pool": "threads of listeners; simulated: workers.py",
}
"""Files of the SDK that use threads without the transport, and why."""
WORLDLY = {"multiprocessing", "random", "select", "selectors", "socket", "threading", "time"}
"""What the SDK gets of its transport: threads and what they wait for, clocks, chance, peers."""


def is_in(module: str, place: str) -> bool:
    """Tell whether a module is that module or stands in that package."""
    return module == place or module.startswith(place + ".")


def room(module: str) -> str:
    """Name the room of a module: `mqmesh.sdk.client.run` -> `sdk`, `mqmesh.units` -> `base`."""
    parts = module.split(".")
    if len(parts) > 1 and parts[1] in MAY_IMPORT:
        return parts[1]
    return "base"


def role(module: str) -> str | None:
    """Name the role whose folder a module stands in; None for what roles share."""
    parts = module.split(".")
    is_role = parts[:2] == ["mqmesh", "roles"] and len(parts) > 3 and parts[2] != SUPERVISOR
    return parts[2] if is_role else None


def imports(module: str, source: str, known: set[str]) -> Iterator[str]:
    """Yield what a module imports, down to the module: `from mqmesh.sdk import retry` included."""
    package = module.split(".")[:-1]
    for node in walked(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package[: len(package) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                is_module = full in known or f"{full}.__init__" in known
                yield full if is_module else base


def edges(modules: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield every import of the project as (importing module, imported name)."""
    known = set(modules)
    for module, source in modules.items():
        if module == "mqmesh.__init__":
            continue  # it re-exports what users import, from all rooms
        yield from ((module, name) for name in imports(module, source, known))


def upward_imports(modules: dict[str, str]) -> list[str]:
    """Find imports of a room above or beside."""
    return [
        f"{module} imports {name}: {room(module)} must not know {room(name)}"
        for module, name in edges(modules)
        if is_in(name, "mqmesh")
        and room(name) != room(module)
        and room(name) not in MAY_IMPORT[room(module)]
    ]


BROKER = "mqmesh.roles.broker"
FEATURES = f"{BROKER}.features"
BUILDERS = (["all_features"], ["environment"], ["write_turn"], ["role"], ["server"])
"""Modules that know every feature: no feature asks them for another one."""


def inner_room(module: str) -> tuple[str, str] | None:
    """Name the room and the folder in it: `mqmesh.sdk.client.run` -> `mqmesh.sdk`, `client`."""
    for parent in INNER_ROOMS:
        folder = module.removeprefix(f"{parent}.").rpartition(".")[0]
        if is_in(module, parent) and folder:
            return parent, folder
    return None


def upward_folders(modules: dict[str, str]) -> list[str]:
    """Find imports of a folder above or beside, in a room whose folders have an order."""
    found = []
    for module, name in edges(modules):
        here, there = inner_room(module), inner_room(name)
        if here is None or there is None or here[0] != there[0] or here == there:
            continue
        if there[1] not in INNER_ROOMS[here[0]][here[1]]:
            found.append(f"{module} imports {name}: {here[1]} must not know {there[1]}")
    return found


def broker_folder(module: str) -> str | None:
    """Name the folder of the broker that a module lies in; a module at its top stands alone."""
    if not is_in(module, BROKER):
        return None
    path = module.removeprefix(f"{BROKER}.").split(".")
    return ".".join(path[:-1]) or path[0]


def knotted_folders(modules: dict[str, str]) -> list[str]:
    """Find folders of the broker that reach one another: features get neighbours from above.

    A feature reads another one's state by what its constructor is given, so the folders have an
    order; whoever reaches back into a folder above makes a knot.
    """
    below: dict[str, set[str]] = defaultdict(set)
    for module, name in edges(modules):
        here, there = broker_folder(module), broker_folder(name)
        if here is not None and there is not None and here != there:
            below[here].add(there)
    reached = {folder: reach(folder, below) for folder in below}
    return sorted(
        f"{folder} and {other} know each other"
        for folder, others in reached.items()
        for other in others
        if folder < other and folder in reached.get(other, ())
    )


def reach(start: str, below: dict[str, set[str]]) -> set[str]:
    """Return all that can be reached from a place."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for one in below.get(waiting.pop(), ()):
            if one not in found:
                found.add(one)
                waiting.append(one)
    return found


def borrowed_features(modules: dict[str, str]) -> list[str]:
    """Find modules of features that know another feature, or look for one among all of them.

    State that several features use is pure, and lies in folders of its own. What else a feature
    needs of a neighbour is a function, or an interface of its own, that its constructor gets.
    """
    return [
        f"{module} imports {name}"
        for module, name in edges(modules)
        if is_in(module, FEATURES)
        and (
            name.split(".")[3:4] in BUILDERS
            or (is_in(name, FEATURES) and module.split(".")[4] != name.split(".")[4])
        )
    ]


def imports_of_the_top(modules: dict[str, str]) -> list[str]:
    """Find imports of `mqmesh` itself, or of cli and spark as they lie in the checkout."""
    return [
        f"{module} imports {name}"
        for module, name in edges(modules)
        if name == "mqmesh" or is_in(name, "cli") or is_in(name, "spark")
    ]


def role_to_role(modules: dict[str, str]) -> list[str]:
    """Find roles that import one another, and shared files that import a role."""
    roles = {role(module) for module in modules} - {None}
    found = []
    for module, name in edges(modules):
        if is_in(module, "mqmesh.roles") and is_in(name, "mqmesh.roles"):
            target = [*name.split("."), ""][2]
            if target in roles and target != role(module):
                found.append(f"{module} imports {name}")
    return found


def transport_in_roles(modules: dict[str, str]) -> list[str]:
    """Find files of a role, other than server.py and ha_link.py, that import transport."""
    return [
        f"{module} imports {name}"
        for module, name in edges(modules)
        if room(module) == "roles"
        and room(name) == "transport"
        and module.rpartition(".")[2] not in CARRY_OUT
    ]


def worldly_sdk_files(modules: dict[str, str]) -> list[str]:
    """Find files of the SDK that make threads, waits or chance, or read clocks, by themselves."""
    found = []
    for module, source in modules.items():
        if room(module) != "sdk" or module in MAKES_ITS_OWN:
            continue
        for node in walked(source):
            if isinstance(node, ast.ImportFrom) and node.module in WORLDLY:
                found.append(f"{module}:{node.lineno} imports from {node.module}")
            # Types may be named, in annotations: nothing is called there.
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name.partition(".")[0] in WORLDLY:
                    found.append(f"{module}:{node.lineno} calls {name}")
    return found


def impure_role_files(modules: dict[str, str]) -> list[str]:
    """Find files of a role that ought to be pure but reach for a socket, file, thread or clock."""
    pure = {m for m in modules if role(m) and m.rpartition(".")[2] not in CARRY_OUT}
    found = [
        f"{module} imports {name}"
        for module, name in edges(modules)
        if module in pure and name.partition(".")[0] in IMPURE
    ]
    for module in pure:
        for node in walked(modules[module]):
            if isinstance(node, ast.Name) and node.id == "open":
                found.append(f"{module}:{node.lineno} opens a file")
    return found


def escaped_libraries(modules: dict[str, str]) -> list[str]:
    """Find imports of a confined library outside its place."""
    return [
        f"{module} imports {name}, which belongs to {places}"
        for module, name in edges(modules)
        for library, places in CONFINED.items()
        if is_in(name, library) and not any(is_in(module, place) for place in places.split())
    ]


def relative_imports(modules: dict[str, str]) -> list[str]:
    """Find relative imports, save inside cli and spark, where absolute ones are banned."""
    found = []
    for module, source in modules.items():
        is_relative = room(module) in {"cli", "spark"}
        most = module.count(".") - 1 if is_relative else 0
        for node in walked(source):
            if isinstance(node, ast.ImportFrom):
                inside = is_in(node.module or "", f"mqmesh.{room(module)}")
                if node.level > most or (is_relative and inside):
                    found.append(f"{module}:{node.lineno}")
    return found


def busy_package_files(modules: dict[str, str]) -> list[str]:
    """Find `__init__.py` files that are more than a docstring."""
    found = []
    for module, source in modules.items():
        if module.endswith(".__init__") and module not in PUBLIC:
            tree = parsed(source)
            if len(tree.body) != 1 or not ast.get_docstring(tree):
                found.append(module)
    return found


def cycles(modules: dict[str, str]) -> list[str]:
    """Find one circle of imports, if there is any."""
    graph: dict[str, set[str]] = {}
    for module, name in edges(modules):
        target = f"{name}.__init__" if f"{name}.__init__" in modules else name
        if target in modules and target != module:
            graph.setdefault(module, set()).add(target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


RULES = [
    upward_imports,
    upward_folders,
    imports_of_the_top,
    knotted_folders,
    borrowed_features,
    role_to_role,
    transport_in_roles,
    impure_role_files,
    worldly_sdk_files,
    escaped_libraries,
    relative_imports,
    busy_package_files,
    cycles,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_project_obeys(rule, modules):
    assert rule(modules) == []


PROJECT = {
    "mqmesh.__init__": "from mqmesh.sdk.producer.producer import Producer",
    "mqmesh.units": "import enum",
    "mqmesh.sdk.__init__": '"""Docstring."""',
    "mqmesh.sdk.producer.producer": "from mqmesh.transport.interface import Transport",
    "mqmesh.storage.commitlog.store": "import mqmesh.units",
    "mqmesh.storage.log.mapped_file": "import mmap",
    "mqmesh.transport.zmq.client": "import zmq\nfrom mqmesh import units",
    "mqmesh.roles.process": "import time",
    "mqmesh.roles.broker.server": "import time\nfrom mqmesh.transport.interface import Transport",
    "mqmesh.roles.broker.features.sending.feature": (
        "import mqmesh.roles.broker.topic_state.topic_table"
    ),
    "mqmesh.roles.broker.features.topics.feature": "",
    "mqmesh.roles.broker.topic_state.topic_table": "from mqmesh.roles.process import x",
    "mqmesh.roles.namesrv.route_table": "import enum",
    "mqmesh.cli.main": "import click\nfrom .admin import topic",
    "mqmesh.cli.admin.topic": "from mqmesh.sdk.producer.producer import Producer",
    "mqmesh.spark.archive": "import pyspark\nfrom mqmesh.storage.commitlog.store import x",
}

FAULTS = [
    (upward_imports, "mqmesh.units", "from mqmesh.protocol.codes import x"),
    (upward_imports, "mqmesh.storage.commitlog.store", "from mqmesh.protocol.codes import x"),
    (
        upward_imports,
        "mqmesh.storage.commitlog.store",
        "def f():\n    import mqmesh.transport.zmq.client",
    ),
    (upward_imports, "mqmesh.sdk.producer.producer", "from mqmesh.storage import store"),
    (upward_imports, "mqmesh.filtering.tags", "from mqmesh.protocol import codes"),
    (upward_imports, "mqmesh.spark.archive", "from mqmesh.transport.interface import Transport"),
    (upward_imports, "mqmesh.testing.cluster", "from mqmesh.cli.main import main"),
    (upward_folders, "mqmesh.storage.log.scan", "from mqmesh.storage.index.part import x"),
    (imports_of_the_top, "mqmesh.sdk.producer.producer", "from mqmesh import Producer"),
    (
        knotted_folders,
        "mqmesh.roles.broker.topic_state.topic_table",
        "from mqmesh.roles.broker.features.sending.feature import SendingFeature",
    ),
    (
        borrowed_features,
        "mqmesh.roles.broker.features.topics.feature",
        "from mqmesh.roles.broker.all_features import BrokerFeatures",
    ),
    (
        borrowed_features,
        "mqmesh.roles.broker.features.sending.feature",
        "from mqmesh.roles.broker.features.topics.feature import TopicsFeature",
    ),
    (imports_of_the_top, "mqmesh.sdk.producer.producer", "import mqmesh"),
    (imports_of_the_top, "mqmesh.testing.cluster", "import cli.main"),
    (
        role_to_role,
        "mqmesh.roles.broker.topic_state.topic_table",
        "from mqmesh.roles.namesrv import route_table",
    ),
    (
        role_to_role,
        "mqmesh.roles.broker.topic_state.topic_table",
        "from mqmesh.roles import namesrv",
    ),
    (
        role_to_role,
        "mqmesh.roles.process",
        "import mqmesh.roles.broker.topic_state.topic_table",
    ),
    (
        transport_in_roles,
        "mqmesh.roles.broker.features.sending.feature",
        "import mqmesh.transport.zmq.client",
    ),
    (transport_in_roles, "mqmesh.roles.process", "from mqmesh.transport.zmq import client"),
    (
        impure_role_files,
        "mqmesh.roles.broker.topic_state.topic_table",
        "from time import monotonic",
    ),
    (impure_role_files, "mqmesh.roles.broker.topic_state.topic_table", "import os.path"),
    (impure_role_files, "mqmesh.roles.broker.features.sending.feature", "x = open('f')"),
    (worldly_sdk_files, "mqmesh.sdk.producer.producer", "import time\nx = time.monotonic()"),
    (worldly_sdk_files, "mqmesh.sdk.producer.producer", "from time import monotonic"),
    (worldly_sdk_files, "mqmesh.sdk.aio.producer", "import threading\nx = threading.Event()"),
    (
        escaped_libraries,
        "mqmesh.sdk.client.client",
        "from mqmesh.transport.zmq.loop import EventLoop",
    ),
    (upward_folders, "mqmesh.transport.simulated.loop", "from mqmesh.transport.zmq.loop import x"),
    (escaped_libraries, "mqmesh.roles.broker.server", "import zmq.utils"),
    (escaped_libraries, "mqmesh.storage.commitlog.store", "from mmap import mmap"),
    (escaped_libraries, "mqmesh.sdk.client.run", "import zmq"),
    (escaped_libraries, "mqmesh.storage.commitlog.store", "import lmdb"),
    (escaped_libraries, "mqmesh.sdk.producer.producer", "import click"),
    (escaped_libraries, "mqmesh.storage.commitlog.store", "import pyspark"),
    (relative_imports, "mqmesh.sdk.producer.producer", "from .retry import x"),
    (relative_imports, "mqmesh.cli.main", "from ..sdk import producer"),
    (relative_imports, "mqmesh.cli.admin.topic", "from ...sdk import producer"),
    (relative_imports, "mqmesh.cli.main", "from mqmesh.cli.admin.topic import x"),
    (busy_package_files, "mqmesh.sdk.__init__", '"""Docstring."""\nimport enum'),
    (busy_package_files, "mqmesh.sdk.__init__", ""),
    (cycles, "mqmesh.cli.admin.topic", "from ..main import main"),
    (
        cycles,
        "mqmesh.roles.broker.topic_state.topic_table",
        "from mqmesh.roles.broker.features.sending import feature",
    ),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_accepts_a_tidy_project(rule):
    assert rule(PROJECT) == []


@pytest.mark.parametrize(("rule", "module", "source"), FAULTS)
def test_a_rule_finds_a_planted_fault(rule, module, source):
    known = dict.fromkeys(["mqmesh.roles.namesrv.__init__", "mqmesh.protocol.codes"], '"""Doc."""')
    assert rule({**PROJECT, **known, module: source})
