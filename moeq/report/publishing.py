"""Push a conversion to the Hub with the model card that describes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from moeq.checkpoint.manifest import MANIFEST_NAME, read_manifest
from moeq.pipeline.plan.side_files import CARD, SIGNATURE_NAME, SOURCE_CARD
from moeq.pipeline.push import base_model_of, check_name, gather, open_target, published_manifest, push
from moeq.pipeline.state.signature import Signer
from moeq.report import model_card

if TYPE_CHECKING:
    from moeq.pipeline.push import Pushed, PushTarget


def open_push(repo: str, base_model: str | None, *, public: bool) -> PushTarget:
    """Check everything that can refuse a push, before there is anything to push. Raises as `open_target`."""
    if base_model is not None:
        check_name(base_model)
    return open_target(repo, private=not public)


def push_with_card(
    folder: Path,
    target: PushTarget,
    base_model: str | None,
    sign: Path | None,
    *,
    progress: Callable[[int, int, str], None] | None = None,
    tell: Callable[[list[str]], None] | None = None,
) -> Pushed:
    """Push a folder with its card; the manifest is adapted and signed anew.

    Args:
        folder: output of `convert`.
        target: the repository, opened.
        base_model: repository of the source; None: what the manifest tells.
        sign: minisign secret key.
        progress: called with bytes done, all bytes and a label.
        tell: called with the names of the files beside the weights, before anything is sent.

    Raises:
        MoeqError: what `gather` and `push` raise.
    """
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
    if tell is not None:
        tell(sorted(name for name in {*upload.contents, *replaced} if not name.endswith(".safetensors")))
    layouts = ", ".join(sorted({layer.layout for layer in manifest.layers}))
    message = f"{layouts} of {base or 'a local checkpoint'}, by moeq {manifest.moeq_version}"
    return push(upload, target, replaced, message=message, progress=progress)
