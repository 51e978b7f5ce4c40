"""The program `mqmesh`: Ctrl-C ends it in order from its first moment on."""

import os
import signal
import sys


def main() -> int:
    """Loads the command line and runs it.

    Returns:
        Exit code.
    """
    _keep_descriptors()
    # While modules are loaded, there is nothing to be ended in order, and no code that would catch
    # the interrupt: the signal ends the process. A process that ignores it goes on to do so.
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .main import main as run

    if is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


def _keep_descriptors() -> None:
    """Opens ``/dev/null`` in place of closed standard streams.

    Else the first file or socket would get the descriptor, and with it what is printed. Python's
    ``sys.stdout`` remains None until ``refuse_closed_output``; the other two are replaced.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(opened, True)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
