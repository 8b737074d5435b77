"""`moeq gpus`: the devices that `--gpu` knows by name, and the device that a name means."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from moeq.cli import completion, options
from moeq.cli.out import Output
from moeq.deploy.detect import detect_gpu
from moeq.deploy.gpus import known_gpus, parse_gpu
from moeq.report.text import line

if TYPE_CHECKING:
    from rich.console import Console


def command(
    ctx: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="A name as drivers print it, or an architecture.",
            autocompletion=completion.gpus,
        ),
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """List the GPUs that `--gpu` knows, or say which one a name means."""
    out: Output = ctx.obj
    gpus = [parse_gpu(name)] if name else list(known_gpus().values())
    here = detect_gpu()
    document = {"gpus": [asdict(gpu) for gpu in gpus], "found_here": None if here is None else asdict(here)}

    def render(console: Console) -> None:
        rows: dict[tuple[str, str], list[str]] = {}
        for gpu in gpus:
            memory = f" ({gpu.memory_gib} GiB)" if gpu.memory_gib else ""
            rows.setdefault((gpu.platform, gpu.arch), []).append(gpu.name + memory)
        for (platform, arch), names in rows.items():
            line(console, f"{platform} {arch}" if platform != arch else arch, ", ".join(names), width=16)
        line(console, "found here", here.name if here else "none", width=16)

    out.answer(document, render)
