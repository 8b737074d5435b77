"""`moeq push`: upload a conversion to the Hub, with a model card."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeq.cli import options
from moeq.cli.out import Output
from moeq.cli.progress import ProgressReport
from moeq.report.text import counted, human_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from moeq.pipeline.push import Pushed, PushTarget

PublicOption = Annotated[
    bool,
    typer.Option(
        "--public/--private", help="Visibility of a repository that is created (default: private).", show_default=False
    ),
]
BaseModelOption = Annotated[
    str | None, typer.Option("--base-model", metavar="ORG/NAME", help="The source's repository, for the model card.")
]


def command(
    ctx: typer.Context,
    dst: Annotated[Path, typer.Argument(metavar="DST", help="Output of `moeq convert`.")],
    repo: Annotated[str, typer.Argument(metavar="ORG/NAME", help="Repository; created where it does not exist.")],
    public: PublicOption = False,
    base_model: BaseModelOption = None,
    sign: options.SignOption = None,
    quiet: options.QuietOption = False,
    json: options.JsonOption = False,
) -> None:
    """Upload a conversion to the Hub, with a model card. One commit; run a failed push again and it continues."""
    from moeq.checkpoint.manifest import read_manifest
    from moeq.pipeline.push import gather
    from moeq.report.publishing import open_push

    out: Output = ctx.obj
    gather(dst, read_manifest(dst))
    target = open_push(repo, base_model, public=public)
    pushed = push_conversion(out, dst, target, base_model, sign, quiet=quiet or json)
    out.answer(document(pushed), lambda console: render(console, pushed))


def push_conversion(
    out: Output, folder: Path, target: PushTarget, base_model: str | None, sign: Path | None, *, quiet: bool
) -> Pushed:
    """Push `folder` with its card, showing progress; the manifest is adapted and signed anew."""
    from moeq.pipeline.plan.side_files import SIGNATURE_NAME
    from moeq.report.publishing import push_with_card

    if sign is None and (folder / SIGNATURE_NAME).exists():
        out.warning("the repository gets no signature: its moeq.json is not that of the folder; --sign KEY signs it")

    def tell(beside: list[str]) -> None:
        out.note(f"beside the weights, {target.repo} gets {', '.join(beside)}")

    with ProgressReport(out, "push", quiet=quiet) as progress:
        return push_with_card(folder, target, base_model, sign, progress=progress.update, tell=tell)


def document(pushed: Pushed) -> dict[str, Any]:
    """Return the JSON document."""
    return asdict(pushed)


def render(console: Console, pushed: Pushed) -> None:
    """Print the answer for people."""
    from rich.text import Text

    console.print(
        Text.assemble(("pushed", "bold"), f" {pushed.url}: {counted(pushed.files, 'file')}, {human_bytes(pushed.size)}")
    )
    console.print(f"  commit    {pushed.commit}")
    if pushed.removed:
        console.print(f"  removed   {counted(len(pushed.removed), 'weight file')} of an earlier push")
    console.print(f"  read it   moeq inspect {pushed.repo}")
