"""The command `mqmesh`: finds the command, and turns errors into a line and an exit code.

Exit codes: 0 ok, 1 the operation failed, 2 wrong usage or configuration, 130 Ctrl-C.
"""

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, Final

import click

from mqmesh.errors import ConfigError, MQMeshError
from mqmesh.logs import one_line, traceback_lines
from mqmesh.roles.process import ExitCode
from mqmesh.version import VERSION

from .lazy_group import LazyGroup
from .names import check_texts
from .notes import Options, print_error
from .streams import drop_output, escape_what_no_encoding_holds, refuse_closed_output

INTERRUPTED: Final = 130

# Command -> module under this folder, and the name of the command in it. A module is loaded when
# its command is called: a broker should not load modules that draw tables.
COMMANDS: Final = {
    "up": ("processes.cluster", "up"),
    "status": ("processes.cluster", "status"),
    "down": ("processes.cluster", "down"),
    "restart": ("processes.cluster", "restart"),
    "cluster": ("admin.clusters", "cluster"),
    "context": ("context", "context"),
    "topic": ("admin.topic", "topic"),
    "send": ("messages.send", "send"),
    "consume": ("messages.consume", "consume"),
    "receive": ("messages.receive", "receive"),
    "query": ("messages.query", "query"),
    "replay": ("messages.replay", "replay"),
    "trace": ("messages.trace", "trace"),
    "table": ("messages.table", "table"),
    "group": ("admin.group", "group"),
    "ha": ("admin.ha", "ha"),
    "user": ("admin.access", "user"),
    "acl": ("admin.access", "acl"),
    "key": ("admin.access", "key"),
    "kv": ("admin.kv", "kv"),
    "dlq": ("messages.dlq", "dlq"),
    "store": ("stores.store", "store"),
    "snapshot": ("stores.snapshot", "snapshot"),
    "archive": ("stores.archive", "archive"),
    "tx": ("messages.tx", "tx"),
    "sql": ("messages.sql", "sql"),
    "namesrv": ("processes.serve", "namesrv"),
    "broker": ("processes.serve", "broker"),
    "filtersrv": ("processes.serve", "filtersrv"),
    "schedule": ("processes.schedule", "schedule"),
    "coordinator": ("processes.serve", "coordinator"),
    "gateway": ("processes.gateway", "gateway"),
    "exporter": ("processes.serve", "exporter"),
    "monitor": ("processes.monitor", "monitor"),
    "console": ("processes.console", "console"),
    "bench": ("bench.commands", "bench"),
    "completion": ("completion", "completion"),
}

# Commands that processes of mqmesh call, and people need not know.
HIDDEN_COMMANDS: Final = {
    "indexer": ("processes.indexer", "indexer"),
}

EXAMPLES: Final = """
\b
Five minutes:
  mqmesh up                                   a cluster on this machine
  mqmesh topic create orders --queues 8       (in another terminal)
  mqmesh send orders 'hello' --tag new --key 4711
  mqmesh consume orders --from first
  mqmesh status
  mqmesh down

Times are UTC, those that commands print and those that they take: 2026-03-01T12:00, or with a zone
2026-03-01T12:00+01:00.
"""


@click.group(
    cls=LazyGroup,
    places=COMMANDS,
    hidden=HIDDEN_COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXAMPLES,
)
@click.version_option(VERSION, "-V", "--version", prog_name="mqmesh")
@click.option(
    "--namesrv",
    metavar="HOST:PORT,…",
    help="Name servers. [default: MQMESH_NAMESRV, else the context in use, else "
    "127.0.0.1:9876;127.0.0.1:9877]",
)
@click.option("--context", "context_name", metavar="NAME", help="Cluster; see `mqmesh context`.")
@click.option(
    "--namespace",
    metavar="NAME",
    help="Namespace of topics and groups; see docs/namespaces.md. [default: MQMESH_NAMESPACE, "
    "else that of the context]",
)
@click.option("--json", "as_json", is_flag=True, help="Answer in JSON, for programs.")
@click.option("--debug", is_flag=True, help="Say more; show the traceback of a bug.")
@click.pass_context
def root(
    context: click.Context,
    namesrv: str | None,
    context_name: str | None,
    namespace: str | None,
    as_json: bool,
    debug: bool,
) -> None:
    """A message queue for Python teams, on ZeroMQ."""
    options = context.ensure_object(Options)
    options.namesrv = namesrv
    options.context = context_name
    options.namespace = namespace
    options.as_json = as_json
    options.debug = debug
    # Roles set up a log of their own; clients warn in words.
    handler = logging.StreamHandler()
    handler.setFormatter(_LineFormatter("%(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.INFO if debug else logging.WARNING, handlers=[handler])


class _LineFormatter(logging.Formatter):
    """Writes records in words: a line, and the lines of a traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Formats a record as a line."""
        return one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """Formats the lines of an exception."""
        return "\n".join(traceback_lines(super().formatException(ei)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: Without the program's name; None for those of the process.

    Returns:
        Exit code.
    """
    options = Options()
    refuse_closed_output()
    escape_what_no_encoding_holds()

    def report(text: str) -> None:
        print_error(text, as_json=_wants_json(options, arguments))

    try:
        result: Any = root.main(
            None if arguments is None else list(arguments),
            prog_name="mqmesh",
            standalone_mode=False,
            obj=options,
        )
        # The rest of the buffer may meet a closed pipe, too.
        sys.stdout.flush()
    except (KeyboardInterrupt, click.Abort):
        if _wants_json(options, arguments):
            report("interrupted")
        else:
            sys.stderr.write("interrupted\n")
        return INTERRUPTED
    except click.ClickException as error:
        report(_usage(error))
        return ExitCode.USAGE
    except ConfigError as error:
        report(str(error))
        return ExitCode.USAGE
    except (BrokenPipeError, SystemExit):
        # The reader of our output has seen enough (click turns that into SystemExit).
        drop_output()
        return ExitCode.OK
    except MQMeshError as error:
        report(str(error))
        return ExitCode.FAILED
    except OSError as error:
        _forget_what_is_left()
        report(_without_number(error))
        return ExitCode.FAILED
    except Exception as error:
        if options.debug:
            sys.stderr.write("\n".join(traceback_lines(traceback.format_exc())) + "\n")
        report(f"internal error: {type(error).__name__}: {error} (--debug shows where)")
        return ExitCode.FAILED
    return result if isinstance(result, int) else ExitCode.OK


def _forget_what_is_left() -> None:
    """Flushes standard output, or drops it on a full disk: the interpreter would end with 120."""
    try:
        sys.stdout.flush()
    except OSError:
        drop_output()


def _wants_json(options: Options, arguments: Sequence[str] | None) -> bool:
    # An error may come before the option is read, or be about what stands before it.
    words = list(sys.argv[1:] if arguments is None else arguments)
    return options.as_json or "--json" in (words[: words.index("--")] if "--" in words else words)


def _without_number(error: OSError) -> str:
    """Returns the operating system's text and file name for an error, without the error number."""
    what = error.strerror or str(error)
    return what if error.filename is None else f"{os.fsdecode(error.filename)}: {what}"


def _usage(error: click.ClickException) -> str:
    command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else ""
    advice = f" (`{command} --help` says more)" if command else ""
    return f"{error.format_message()}{advice}"


check_texts(root)
