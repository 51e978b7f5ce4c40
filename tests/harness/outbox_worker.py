"""Program that forks a relay for each line it reads. A relay lives until it is killed."""

import sys

from harness.forks import fork_for_lines
from mqmesh.sql.relay import OutboxRelay
from mqmesh.sql.statements import connect


def main() -> None:
    """Fork until standard input ends; arguments: database, name servers, lease in ms."""
    url, namesrv_addr, lease_ms = sys.argv[1:]
    connect(url).close()  # loads the library

    def relay(_: str) -> None:
        OutboxRelay(lambda: connect(url), namesrv_addr, lease_ms=int(lease_ms)).run()

    fork_for_lines(relay)


if __name__ == "__main__":
    main()
