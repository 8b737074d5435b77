"""`moeq verify`: check every byte of a conversion against its manifest, or against its source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from moeq.cli import options
from moeq.cli.out import Output
from moeq.cli.progress import ProgressReport
from moeq.report.text import counted, human_bytes, print_rest

if TYPE_CHECKING:
    from rich.console import Console

    from moeq.prove.verify import Verification

#: Mismatches printed for people; `--json` has all of them.
_SHOWN = 50


def command(
    ctx: typer.Context,
    dst: Annotated[str, typer.Argument(metavar="DST", help="Output of `moeq convert`.")],
    source: Annotated[
        str | None, typer.Option("--source", help="Also compare with the checkpoint it came from.")
    ] = None,
    revision: options.RevisionOption = None,
    signed_by: Annotated[
        str | None, typer.Option("--signed-by", metavar="KEY", help="minisign public key (file or text) of the signer.")
    ] = None,
    slow: Annotated[bool, typer.Option("--slow", help="Also unpack every expert, and decode the source's.")] = False,
    workers: options.WorkersOption = None,
    quiet: options.QuietOption = False,
    json: options.JsonOption = False,
) -> int:
    """Check every byte against the manifest, or with --source against the source itself. Exit 1: something differs."""
    from moeq.prove.verify import verify

    out: Output = ctx.obj
    with ProgressReport(out, "verify", unit="step", quiet=quiet or json) as progress:
        found = verify(
            dst,
            source,
            revision=revision,
            signed_by=signed_by,
            slow=slow,
            workers=workers,
            progress=progress.update,
        )
    code = out.answer(found.to_json(), lambda console: render(console, found), ok=found.ok)
    if not found.ok:
        lines = [mismatch.text for mismatch in found.mismatches[:_SHOWN]]
        out.annotate("error", counted(len(found.mismatches), "mismatch", "mismatches"), "\n".join(lines))
    return code


def render(console: Console, found: Verification) -> None:
    """Print the answer for people."""
    from rich.text import Text

    claim = "every byte is as moeq.json records it" if found.source is None else "the values that were converted"
    verdict = claim if found.ok else counted(len(found.mismatches), "mismatch", "mismatches")
    console.print(Text.assemble(("verified" if found.ok else "DIFFERENT", "bold"), f": {verdict}"))
    proven = "as moeq.json records them" if found.source is None else "proven from the packed tensors"
    console.print(f"  experts   {found.units} projections {proven}")
    rest = f"{counted(found.tensors, 'tensor')} and {counted(found.files, 'file')}"
    if found.source is not None:
        console.print(f"  source    {found.source_units} projections packed again from {found.source}")
        console.print(f"  the rest  {rest} compared with the source")
    elif found.tensors or found.files:
        console.print(f"  the rest  {rest} as moeq.json records them")
    console.print(f"  hashed    {human_bytes(found.bytes)} of tensors")
    if found.signed:
        console.print("  signed    by the key that was given")
    if found.losses:
        console.print(f"  lossy     {found.losses} stored numbers were changed by the conversion, as was allowed")
    for name in found.unproven:
        console.print(f"  unproven  {name}: there is nothing to compare it with")
    for note in found.notes:
        console.print(f"  note      {note}")
    for mismatch in found.mismatches[:_SHOWN]:
        console.print(f"  {mismatch.text}")
    print_rest(console, len(found.mismatches), _SHOWN)
