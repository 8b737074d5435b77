"""The `moeq` command: a table of commands, imported one at a time, and the only place that catches exceptions."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

import typer

from moeq.cli.out import Output
from moeq.errors import ExitCode, MoeqError, as_moeq_error


class Command(NamedTuple):
    """One command: where its function lives and the line `moeq --help` shows for it."""

    module: str
    help: str


# Order is the order of use. The module is imported only when its command runs, so `moeq --help` stays instant.
COMMANDS: dict[str, Command] = {
    "inspect": Command("moeq.cli.inspect", "Say what a checkpoint holds and which backend would run it."),
    "oracle": Command("moeq.cli.oracle", "Decide the kernel backend for a deployment, with every reason."),
    "plan": Command("moeq.cli.plan", "Say what a conversion would read, write and need, unit by unit."),
    "convert": Command("moeq.cli.convert", "Repack expert weights into a backend's kernel layout, offline."),
    "transcode": Command("moeq.cli.transcode", "Write the same values in another format that engines load as it is."),
    "finalize": Command("moeq.cli.finalize", "Publish a conversion that was done in shares, after checking all of it."),
    "push": Command("moeq.cli.push", "Upload a conversion to the Hub, with a model card."),
    "verify": Command("moeq.cli.verify", "Prove that a conversion still means what was converted."),
    "restore": Command("moeq.cli.restore", "Take a conversion back to its source, byte for byte."),
    "diff": Command("moeq.cli.diff", "Compare two checkpoints by dequantised values, whatever their packing."),
    "parity": Command("moeq.cli.parity", "Compare packed bytes with the engine's own packing code."),
    "run-check": Command("moeq.cli.run_check", "Run fused kernels on converted weights against a reference."),
    "selftest": Command("moeq.cli.selftest", "Check the checker: damage experts in memory, see each damage named."),
    "backends": Command("moeq.cli.backends", "List backend families, backends and their limits."),
    "explain": Command("moeq.cli.explain", "Explain a rule, advisory or error code."),
}


def build(argv: Sequence[str]) -> typer.Typer:
    """The app with the one command that `argv` asks for, or with every command's help line where it asks for none."""
    app = typer.Typer(
        name="moeq",
        help="Quantised Mixture-of-Experts checkpoints: inspect, choose a backend, repack offline, prove.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    # A callback keeps Typer from collapsing an app of one command into the command itself.
    @app.callback(invoke_without_command=True)
    def root(
        ctx: typer.Context,
        version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    ) -> None:
        if version:
            from moeq.version import __version__

            sys.stdout.write(f"moeq {__version__}\n")
            raise typer.Exit(0)

    asked = asked_command(argv)
    for name, row in COMMANDS.items():
        if name == asked:
            app.command(name, help=row.help)(import_module(row.module).command)
        else:
            app.command(name, help=row.help)(_not_asked)
    return app


def _not_asked() -> None:
    """Stands for a command in the help of others; never runs, since the asked one is always imported."""


def asked_command(argv: Sequence[str]) -> str | None:
    """The command that a command line names, or None."""
    return next((word for word in argv if not word.startswith("-")), None)


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code. Never raises for an expected failure."""
    name = asked_command(argv)
    out = Output(f"moeq.{name or 'moeq'}/1", json_mode="--json" in argv)
    try:
        code = build(argv)(args=list(argv), standalone_mode=False, obj=out)
    except MoeqError as error:
        out.failure(error)
        return int(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        out.failure(as_moeq_error(KeyboardInterrupt()))
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader went away (`moeq inspect ... | head`). Python's own message at exit would be noise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.OK)
    except Exception as error:  # noqa: BLE001 - the last line of defence: a bug must be reported as one, exit code 70
        return _unexpected(error, out)
    if code == ExitCode.INTERRUPTED:  # the parser caught Ctrl-C itself
        out.failure(as_moeq_error(KeyboardInterrupt()))
    return int(code or 0)


def _unexpected(error: Exception, out: Output) -> int:
    """Usage errors of the command-line parser (exit 2); everything else is a bug in moeq (exit 70)."""
    # Typer vendors its parser and moves its classes between releases; these two attributes are the stable part.
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        out.failure(MoeqError("usage.command-line", error.format_message(), "see `moeq COMMAND --help`"))
        return int(ExitCode.USAGE)
    if os.environ.get("MOEQ_DEBUG"):
        raise error
    out.failure(as_moeq_error(error))
    return int(ExitCode.BUG)


def main() -> None:
    """Entry point of the `moeq` script."""
    # Schedulers end jobs with SIGTERM: finished work is kept as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    code = run(sys.argv[1:])
    gc.freeze()  # what is left goes with the process: a last collection of all headers takes up to half a second
    sys.exit(code)
