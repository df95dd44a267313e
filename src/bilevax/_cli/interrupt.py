"""Ctrl-C that is not lost.

Python raises nothing out of callbacks of the garbage collector and the like; where an
interrupt arrives in one, it would be printed and forgotten. JAX has such a callback.
"""

import contextlib
import os
import signal
import sys
import threading

# Seconds until it is sent again, outside of what swallowed it.
_SOON = 0.01


@contextlib.contextmanager
def interrupts_kept():
    """A context in which an interrupt that could not be raised is sent again."""
    former = sys.unraisablehook

    def again(unraisable):
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            return former(unraisable)
        threading.Timer(_SOON, os.kill, (os.getpid(), signal.SIGINT)).start()

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = former
