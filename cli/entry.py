"""The program `mqmesh`: Ctrl-C ends it in order from its first moment on."""

import signal


def main() -> int:
    """Loads the command line and runs it.

    Returns:
        Exit code.
    """
    # While modules are loaded, there is nothing to be ended in order, and nobody who would catch
    # the interrupt: the signal ends the process. Whoever ignores it goes on to do so.
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .main import main as run

    if is_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()
