"""The `moeq` command, also as `python -m moeq`, where the script is not on the path."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the `moeq` command."""
    # Until the command can say it in one line, Ctrl-C ends the process without a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from moeq.cli.app import main

    main()


if __name__ == "__main__":
    main()
