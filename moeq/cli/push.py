"""`moeq push`: upload a conversion to the Hub, with a model card."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeq.cli import options
from moeq.cli.out import Output

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

    out: Output = ctx.obj
    gather(dst, read_manifest(dst))
    target = open_push(repo, base_model, public=public)
    pushed = push_conversion(out, dst, target, base_model, sign, quiet=quiet or json)
    out.answer(document(pushed), lambda console: render(console, pushed))


def open_push(repo: str, base_model: str | None, *, public: bool) -> PushTarget:
    """Check everything that can refuse a push, before there is anything to push."""
    from moeq.pipeline.push import check_name, open_target

    if base_model is not None:
        check_name(base_model)
    return open_target(repo, private=not public)


def push_conversion(
    out: Output, folder: Path, target: PushTarget, base_model: str | None, sign: Path | None, *, quiet: bool
) -> Pushed:
    """Push `folder` with its card, showing progress; the manifest is adapted and signed anew."""
    from moeq.checkpoint.manifest import MANIFEST_NAME, read_manifest
    from moeq.cli.progress import ProgressReport
    from moeq.pipeline.plan.side_files import CARD, SIGNATURE_NAME, SOURCE_CARD
    from moeq.pipeline.push import base_model_of, gather, published_manifest, push
    from moeq.pipeline.state.signature import Signer
    from moeq.report import model_card

    manifest = read_manifest(folder)
    base = base_model or base_model_of(manifest)
    upload = gather(folder, manifest)
    own = upload.card
    card = model_card.CardOptions(
        repo=target.repo,
        base_model=base,
        size=upload.size,
        source_card=None if own is None else SOURCE_CARD,
        source_fields={} if own is None else model_card.read_front_matter(own),
    )
    replaced = {CARD: model_card.render(manifest, card).encode()}
    if own is not None:
        replaced[SOURCE_CARD] = own
    replaced[MANIFEST_NAME] = published_manifest(manifest, base, replaced)
    if sign is not None:
        replaced[SIGNATURE_NAME] = Signer(sign).sign(replaced[MANIFEST_NAME])
    elif (folder / SIGNATURE_NAME).exists():
        out.warning("the repository gets no signature: its moeq.json is not that of the folder; --sign KEY signs it")
    beside = sorted(name for name in {*upload.contents, *replaced} if not name.endswith(".safetensors"))
    out.note(f"beside the weights, {target.repo} gets {', '.join(beside)}")
    layouts = ", ".join(sorted({layer.layout for layer in manifest.layers}))
    message = f"{layouts} of {base or 'a local checkpoint'}, by moeq {manifest.moeq_version}"
    with ProgressReport(out, "push", quiet=quiet) as progress:
        return push(upload, target, replaced, message=message, progress=progress.update)


def document(pushed: Pushed) -> dict[str, Any]:
    """Return the JSON document."""
    return asdict(pushed)


def render(console: Console, pushed: Pushed) -> None:
    """Print the answer for people."""
    from rich.text import Text

    from moeq.report.text import human_bytes

    console.print(Text.assemble(("pushed", "bold"), f" {pushed.url}: {pushed.files} files, {human_bytes(pushed.size)}"))
    console.print(f"  commit    {pushed.commit}")
    if pushed.removed:
        console.print(f"  removed   {len(pushed.removed)} weight files of an earlier push")
    console.print(f"  read it   moeq inspect {pushed.repo}")
