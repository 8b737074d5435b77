"""The `moeq` command; `python -m moeq` runs it where the script is not on the path."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the `moeq` command."""
    # While the command is imported, Ctrl-C ends the process without a traceback; later the command has its own handler.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from moeq.cli.app import main

    main()


if __name__ == "__main__":
    main()
