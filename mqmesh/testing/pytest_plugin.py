"""The pytest plugin of mqmesh: ``mqmesh_cluster`` gives tests a real cluster.

pytest loads this module at every start wherever mqmesh is installed, so it imports what is needed
for a cluster only when a test requests one.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mqmesh.testing.cluster_for_tests import ClusterForTests, SharedCluster


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option and the settings."""
    parser.getgroup("mqmesh").addoption(
        "--mqmesh-cluster",
        choices=("threads", "processes"),
        help="what the fixture mqmesh_cluster is made of; the ini setting is mqmesh_cluster",
    )
    parser.addini("mqmesh_cluster", "threads (default) or processes", default="threads")
    parser.addini("mqmesh_broker_settings", "key=value of the broker, one a line", type="linelist")


@pytest.fixture(scope="session")
def mqmesh_shared_cluster(pytestconfig: pytest.Config) -> "Iterator[SharedCluster]":
    """The session's cluster, started when the first test requests one."""
    from mqmesh.testing.cluster_for_tests import KINDS, SharedCluster

    kind = pytestconfig.getoption("--mqmesh-cluster") or pytestconfig.getini("mqmesh_cluster")
    if kind not in KINDS:
        raise pytest.UsageError(f"mqmesh_cluster = {kind!r} is none of {', '.join(KINDS)}")
    lines = [line.partition("=") for line in pytestconfig.getini("mqmesh_broker_settings")]
    cluster = SharedCluster(kind, {key.strip(): value.strip() for key, _, value in lines})
    yield cluster
    cluster.close()


@pytest.fixture
def mqmesh_cluster(
    mqmesh_shared_cluster: "SharedCluster", request: pytest.FixtureRequest
) -> "Iterator[ClusterForTests]":
    """A real cluster, with topics, groups and clients of the test's own."""
    from mqmesh.testing.cluster_for_tests import ClusterForTests

    cluster = ClusterForTests(mqmesh_shared_cluster, request.node.name)
    yield cluster
    cluster.close()
