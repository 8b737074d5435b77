"""The `moeq` command: a table of commands, imported one at a time, and the only place that catches exceptions."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.main import get_command

from moeq.cli import interrupts
from moeq.cli.out import Output, flush_streams, open_missing_streams
from moeq.errors import ExitCode, MoeqError, as_moeq_error
from moeq.spelling import spelled


class Command(NamedTuple):
    """One command."""

    module: str
    help: str  #: line of the command in `moeq --help`
    examples: tuple[str, ...]  #: arguments of the examples at the end of its help; tests run them


#: Variable that the shell's completion script sets.
_COMPLETE = "_MOEQ_COMPLETE"

# Order is the order of use. The module is imported only when its command runs, so `moeq --help` stays instant.
COMMANDS: dict[str, Command] = {
    "inspect": Command(
        "moeq.cli.inspect",
        "Say what a checkpoint holds and which backend would run it.",
        ("org/name", "./checkpoint --gpu H100 --tp 4", "./checkpoint --gpu H100 --json"),
    ),
    "oracle": Command(
        "moeq.cli.oracle",
        "Decide the kernel backend for a deployment, with every reason.",
        (
            "./checkpoint --gpu H100 --tp 8",
            "./checkpoint --gpu a100,h100,mi300x --tp 1,2,4,8",
            "./checkpoint --gpu a100,h100 --tp 1,2 --require H100/tp2",
        ),
    ),
    "plan": Command(
        "moeq.cli.plan",
        "Say what a conversion would read, write and need, unit by unit.",
        ("./checkpoint --gpu H100 --tp 2", "./checkpoint --gpu H100 -o plan.json"),
    ),
    "convert": Command(
        "moeq.cli.convert",
        "Repack expert weights into a backend's kernel layout, offline.",
        (
            "./checkpoint ./converted --gpu H100 --tp 2",
            "./checkpoint ./converted --gpu A100 --dry-run",
            "./checkpoint ./converted --plan plan.json",
        ),
    ),
    "transcode": Command(
        "moeq.cli.transcode",
        "Write the same values in another checkpoint format, which engines load directly.",
        ("./checkpoint ./transcoded --to compressed-tensors",),
    ),
    "finalize": Command(
        "moeq.cli.finalize", "Publish a conversion that was done in shards, after checking all of it.", ("./converted",)
    ),
    "push": Command("moeq.cli.push", "Upload a conversion to the Hub, with a model card.", ("./converted org/name",)),
    "verify": Command(
        "moeq.cli.verify",
        "Prove that a conversion still holds the values of its source.",
        ("./converted", "./converted --source ./checkpoint"),
    ),
    "restore": Command(
        "moeq.cli.restore", "Take a conversion back to its source, byte for byte.", ("./converted ./restored",)
    ),
    "diff": Command(
        "moeq.cli.diff",
        "Compare two checkpoints by dequantised values, whatever their packing.",
        ("./checkpoint ./converted",),
    ),
    "parity": Command(
        "moeq.cli.parity",
        "Compare packed bytes with the engine's own packing code.",
        ("./checkpoint --layout marlin-wna16/1",),
    ),
    "run-check": Command(
        "moeq.cli.run_check",
        "Run fused kernels on converted weights against a reference.",
        ("./converted", "./converted --layers 0 --tokens 1,7 --html report.html"),
    ),
    "selftest": Command(
        "moeq.cli.selftest",
        "Test run-check itself: damage experts in memory and see each damage found.",
        ("./converted",),
    ),
    "warmup": Command(
        "moeq.cli.warmup",
        "Compile the kernels that serving a conversion needs, ahead of time.",
        ("./converted", "./converted --gpu H100 --tp 2"),
    ),
    "backends": Command("moeq.cli.backends", "List backend families, backends and their limits.", ("", "wna16")),
    "gpus": Command("moeq.cli.gpus", "List the GPUs that are known by name.", ("", "'NVIDIA H100 80GB HBM3'")),
    "doctor": Command(
        "moeq.cli.doctor",
        "Summary to paste into an issue: environment, verdict, flags, memory, what to do.",
        ("", "./checkpoint --gpu H100 --tp 2"),
    ),
    "schema": Command("moeq.cli.schema", "Print the JSON Schema of a command's --json document.", ("", "inspect")),
    "explain": Command("moeq.cli.explain", "Explain a rule, advisory or error code.", ("", "P04_SCHEME", "usage.tp")),
}


@cache
def parser(asked: str | None) -> Callable[..., Any]:
    """Return the parser of command lines, built once in a process for each command that is asked for."""
    return get_command(build(asked))


def build(asked: str | None) -> typer.Typer:
    """Build the app with the one command that is asked for, and every other command's help line."""
    app = typer.Typer(
        name="moeq",
        help="Quantised Mixture-of-Experts checkpoints: inspect, choose a backend, repack offline, prove.",
        epilog="`moeq COMMAND --help` has examples. Exit codes: 0 yes, 1 no, 2 usage, 3 environment, "
        "4 source broken or missing, 5 disk or memory, 70 a bug in moeq, 130 interrupted.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    # A callback keeps Typer from collapsing an app of one command into the command itself.
    @app.callback(invoke_without_command=True)
    def root(
        ctx: typer.Context,
        version: bool = typer.Option(False, "--version", "-V", help="Print the version and exit."),
    ) -> None:
        if version:
            from moeq.version import __version__

            sys.stdout.write(f"moeq {__version__}\n")
            raise typer.Exit(0)

    for name, row in COMMANDS.items():
        if name == asked:
            app.command(name, epilog=_examples(name))(import_module(row.module).command)
        else:
            app.command(name, help=row.help)(_not_asked)
    return app


def _not_asked() -> None:
    """Stand for a command in the help of others. It never runs: the command that is asked for is imported."""


def _examples(command: str) -> str:
    """Return the examples at the end of a command's help, a line each."""
    rows = COMMANDS[command].examples
    return "\n\n".join(("Examples:", *(f"  moeq {command} {row}".rstrip() for row in rows)))


def asked_command(argv: Sequence[str]) -> str | None:
    """Return the command that a command line names, or None."""
    return next((word for word in argv if not word.startswith("-")), None)


@spelled(for_shell=True)
def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code. Never raises for an expected failure."""
    # A shell that completes a command line says so, and gives the line, in its environment.
    words = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") if _COMPLETE in os.environ else None
    argv = [*argv[1:], "--help"] if argv and argv[0] == "help" else argv
    name = asked_command(words.split()[1:] if words else argv)
    out = Output(f"moeq.{name or 'moeq'}/1", json_mode="--json" in argv)
    try:
        parse = parser(name if name in COMMANDS else None)
        code = parse(args=list(argv) or ["--help"], standalone_mode=False, obj=out, prog_name="moeq")
    except BaseException as error:  # noqa: BLE001 - the last line of defence: a bug must be reported as one, exit code 70
        interrupted = interrupts.received() or isinstance(error, (KeyboardInterrupt, typer.Abort))
        interrupts.release()
        return _interrupted(out) if interrupted else _failed(error, argv, out)
    if code == ExitCode.INTERRUPTED:  # the parser caught Ctrl-C itself
        return _interrupted(out)
    return int(code or 0)


def _interrupted(out: Output) -> int:
    error = as_moeq_error(KeyboardInterrupt())
    if out.kept is not None:
        hint = "run the same command again: it continues where it stopped"
        error = MoeqError(error.code, f"{error.message}; {out.kept} keeps what was finished", hint)
    out.failure(error, styled=False)
    return int(ExitCode.INTERRUPTED)


def _failed(error: BaseException, argv: Sequence[str], out: Output) -> int:
    """Report what a command raised; returns its exit code."""
    if isinstance(error, MoeqError):
        out.failure(error)
        return int(error.exit_code)
    only_prints = not argv or not {"--help", "-h", "--version", "-V", "--show-completion"}.isdisjoint(argv)
    if isinstance(error, (SystemExit, OSError)) and only_prints:
        return int(ExitCode.OK)  # the parser ends so if its reader went away (`moeq --help | head -1`)
    if isinstance(error, SystemExit):
        return int(error.code or ExitCode.OK)
    return _unexpected(error, out)


def _unexpected(error: BaseException, out: Output) -> int:
    """Report usage errors of the parser, what the machine lacks, and bugs in moeq (exit 70)."""
    # Typer vendors its parser and moves its classes between releases; these two attributes are the stable part.
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        out.failure(MoeqError("usage.command-line", error.format_message(), _usage(error)))
        return int(ExitCode.USAGE)
    failure = as_moeq_error(error)
    if os.environ.get("MOEQ_DEBUG") and failure.exit_code == ExitCode.BUG:
        raise error
    out.failure(failure)
    return int(failure.exit_code)


def _usage(error: Any) -> str:
    """Return the usage line of the command that the parser refused, and where its options are."""
    context = getattr(error, "ctx", None)
    if context is None:
        return "see `moeq COMMAND --help`"
    usage = " ".join(context.get_usage().removeprefix("Usage: ").replace("{", "").replace("}", "").split())
    return f"usage: {usage}; `{context.command_path} --help` lists what it takes"


def main() -> None:
    """Run the `moeq` script."""
    # Modules are made of many objects that stay: collecting after every 700 is a twentieth of a start.
    gc.set_threshold(50_000)
    open_missing_streams()
    try:
        interrupts.catch()
        code = run(sys.argv[1:])
        interrupts.release()
    except KeyboardInterrupt:  # before the command began, after it ended, or a second one
        interrupts.release()
        code = _interrupted(Output("moeq.moeq/1"))
    flush_streams()
    if "triton" not in sys.modules:  # triton 3.9 counts its objects at the end and prints those that are left
        gc.freeze()  # skip the final garbage collection, which takes up to half a second with many headers in memory
    sys.exit(code)
