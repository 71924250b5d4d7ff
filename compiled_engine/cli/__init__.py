"""Entry point of the command line.

`main` imports the commands. Ctrl-C during these imports ends the process without a traceback.
"""

from __future__ import annotations

import signal

from compiled_engine.process.ending import end_process


def main() -> None:
    """Run the command given on the command line, and end the process."""
    interrupted = signal.getsignal(signal.SIGINT)
    if interrupted is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from compiled_engine.cli.app import main as run

    if interrupted is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupted)
    try:
        run()
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        status = end.code
    else:
        status = 0
    end_process(status)
