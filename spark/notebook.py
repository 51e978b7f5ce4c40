"""Errors in notebooks: below the lines of the user stands the cause, in one sentence."""

import sys
from types import TracebackType
from typing import Any, Final

from .failures import as_mqmesh_error

_LIBRARIES: Final = frozenset({"pyspark", "py4j", "deltalake", "mqmesh"})


def shorten_tracebacks() -> None:
    """Has IPython, if this runs in it, show errors of Spark and Delta Lake as one sentence.

    A handler that the user has set stays.
    """
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    if shell is None or shell.custom_exceptions:
        return
    from deltalake.exceptions import DeltaError
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    shell.set_custom_exc((PySparkException, Py4JError, DeltaError), _show)


def _show(
    shell: Any,
    kind: type[BaseException],
    error: Exception,
    trace: TracebackType | None,
    tb_offset: int | None = None,
) -> None:
    """Shows an error as IPython asks for it; IPython has the arguments' names."""
    cause = as_mqmesh_error(error)
    shell.showtraceback((type(cause), cause, _own_frames(trace)), tb_offset=tb_offset)


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback without the frames of libraries below the user's last line."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    names = [one.tb_frame.f_globals.get("__name__", "").partition(".")[0] for one in frames]
    last = next((at for at, name in enumerate(names) if name in _LIBRARIES), len(frames))
    found = None
    for one in reversed(frames[: max(last, 1)]):
        found = TracebackType(found, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return found
