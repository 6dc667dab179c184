"""The console script, and `python -m pdctl.cli`: quiet under Ctrl-C from the first line, then `main`."""

from __future__ import annotations

import os
import signal
import sys

from pdctl.cli.output import open_missing_streams

INTERRUPTED = 130


def run() -> None:
    """Entry point of the console script."""
    open_missing_streams()
    # While modules load there is nothing to put in order, and a traceback would help nobody.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from pdctl.cli.main import main

    try:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        main()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    run()
