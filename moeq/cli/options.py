"""Options that several commands share, spelled once. Deployment options are the same on every command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from moeq.deploy.deployment import Deployment

DEPLOY = "Deployment"

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout instead of text.")]
RevisionOption = Annotated[str | None, typer.Option("--revision", help="Hub revision: branch, tag or commit.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
WorkersOption = Annotated[int | None, typer.Option("--workers", min=1, help="Threads (default: the cores, at most 8).")]
EventsOption = Annotated[
    Path | None, typer.Option("--events", metavar="FILE", help="Append what happens to FILE, as JSON lines.")
]

# What decides a conversion beside the deployment, for `plan` and `convert`.
MaxMemoryOption = Annotated[
    str | None,
    typer.Option(
        "--max-memory", metavar="SIZE", help="Never use more: 8GiB, 500MB. Lowers the workers (default: 1GiB, softly)."
    ),
]
LayoutOption = Annotated[
    str | None, typer.Option("--layout", help="Force a layout by id; it still has to fit (default: the backend's).")
]
SkipUnfitOption = Annotated[
    bool, typer.Option("--skip-unfit", help="Copy layers that cannot be converted instead of refusing.")
]
AllowLossyOption = Annotated[
    bool, typer.Option("--allow-lossy", help="Allow layouts that change stored numbers; they are counted.")
]

GpuOption = Annotated[
    str | None,
    typer.Option(
        "--gpu", help="H100, a100, sm90, gfx942, cpu, ... (default: the GPU found here).", rich_help_panel=DEPLOY
    ),
]
TpOption = Annotated[
    int | None, typer.Option("--tp", help="Tensor-parallel size (default: 1).", rich_help_panel=DEPLOY)
]
EpOption = Annotated[
    int | None, typer.Option("--ep", help="Expert-parallel size (default: 1).", rich_help_panel=DEPLOY)
]
BatchedOption = Annotated[
    bool | None,
    typer.Option("--batched/--standard", help="Activations as \\[E, max_tokens, K].", rich_help_panel=DEPLOY),
]
LoraOption = Annotated[
    bool | None, typer.Option("--lora/--no-lora", help="LoRA adapters on the experts.", rich_help_panel=DEPLOY)
]
DtypeOption = Annotated[
    str | None, typer.Option("--dtype", help="Activation dtype: bf16 or fp16 (default: bf16).", rich_help_panel=DEPLOY)
]
BackendOption = Annotated[
    str | None,
    typer.Option("--backend", help="Force a backend; unsupported is an error (default: auto).", rich_help_panel=DEPLOY),
]
EngineOption = Annotated[
    str | None,
    typer.Option("--engine", help="Whose rules decide: vllm@0.33.0 or moeq.", rich_help_panel=DEPLOY),
]
DeployOption = Annotated[
    Path | None,
    typer.Option("--deploy", help="TOML file with these options; options given win.", rich_help_panel=DEPLOY),
]


def deployment(file: Path | None, **given: Any) -> Deployment:
    """The deployment that the options above (by their long names) and a `--deploy` file describe."""
    from moeq.deploy.options import make_deployment

    return make_deployment(given, file)
