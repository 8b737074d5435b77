"""Push a conversion to the Hub with a model card: front matter that the Hub reads, and what a person has to know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeq.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from moeq.foreign import in_code, in_data, in_markdown
from moeq.pipeline.plan.side_files import CARD, SIGNATURE_NAME, SOURCE_CARD
from moeq.pipeline.push import (
    Pushed,
    PushTarget,
    base_model_of,
    check_name,
    gather,
    open_target,
    published_manifest,
    push,
)
from moeq.pipeline.state.signature import Signer
from moeq.report.conversion_facts import conversion_facts, proof, table
from moeq.report.text import human_bytes

if TYPE_CHECKING:
    from jinja2 import Template


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
        base_model: repository of the source; None: what the manifest tells.
        progress: called with bytes done, all bytes and a label.
        tell: called with the names of the files beside the weights, before anything is sent.

    Raises:
        MoeqError: what `gather` and `push` raise.
    """
    manifest = read_manifest(folder)
    base = base_model or base_model_of(manifest)
    upload = gather(folder, manifest)
    source_card = upload.card
    card = CardOptions(
        repo=target.repo,
        base_model=base,
        size=upload.size,
        source_card=None if source_card is None else SOURCE_CARD,
        source_fields={} if source_card is None else read_front_matter(source_card),
    )
    replaced = {CARD: render_card(manifest, card).encode()}
    if source_card is not None:
        replaced[SOURCE_CARD] = source_card
    replaced[MANIFEST_NAME] = published_manifest(manifest, base, replaced)
    if sign is not None:
        replaced[SIGNATURE_NAME] = Signer(sign).sign(replaced[MANIFEST_NAME])
    if tell is not None:
        tell(sorted(name for name in {*upload.contents, *replaced} if not name.endswith(".safetensors")))
    layouts = ", ".join(sorted({layer.layout for layer in manifest.layers}))
    message = f"{layouts} of {base or 'a local checkpoint'}, by moeq {manifest.moeq_version}"
    return push(upload, target, replaced, message=message, progress=progress)


#: Fields of the source's card that stay true of its conversion.
KEPT_FIELDS = ("license", "license_name", "license_link", "language", "pipeline_tag")

#: Longest front matter that is read; real ones have a few kilobytes.
_FRONT_MATTER_BYTES = 64 << 10


@dataclass(frozen=True)
class CardOptions:
    """Facts that the manifest does not hold."""

    repo: str
    base_model: str | None  #: repository of the source, or None where it has none
    size: int  #: bytes of all files
    source_card: str | None  #: name that the source's own card has in the repository, or None where it had none
    source_fields: Mapping[str, Any]  #: front matter of the source's card


def read_front_matter(card: bytes) -> dict[str, Any]:
    """Read the YAML block at the top of a card; empty where there is none, or none that can be read."""
    import yaml  # type: ignore[import-untyped]  # a dependency of huggingface_hub

    lines = card[:_FRONT_MATTER_BYTES].decode("utf-8", "replace").removeprefix("\ufeff").splitlines()
    if not lines or lines[0].rstrip() != "---":
        return {}
    end = next((number for number, line in enumerate(lines[1:], 1) if line.rstrip() == "---"), None)
    try:
        found = yaml.safe_load("\n".join(lines[1:end])) if end else None
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def render_card(manifest: Manifest, options: CardOptions) -> str:
    """Write the whole README."""
    import yaml

    fields = in_data(_front_matter(manifest, options))
    front = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True, width=float("inf"))
    return f"---\n{front}---\n\n{_text(manifest, options)}"


def _front_matter(manifest: Manifest, options: CardOptions) -> dict[str, Any]:
    kept = {name: options.source_fields[name] for name in KEPT_FIELDS if _plain(options.source_fields.get(name))}
    based = {"base_model": options.base_model, "base_model_relation": "quantized"} if options.base_model else {}
    method = manifest.model.get("quant_method")
    tags = ["moeq", "mixture-of-experts", *([str(method)] if method else []), *conversion_facts(manifest).layouts]
    return {**kept, **based, "library_name": "moeq", "tags": tags}


def _plain(value: Any) -> bool:
    """Return whether a value is a string or a list of them, the only valid values of these fields."""
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, str) for one in value))


def _text(manifest: Manifest, options: CardOptions) -> str:
    facts = conversion_facts(manifest)
    named = (
        f"[{options.base_model}](https://huggingface.co/{options.base_model})" if options.base_model else "its source"
    )
    revision = f" at revision {in_code(manifest.source.revision)}" if manifest.source.revision else ""
    rows = [
        ("source", f"{options.base_model or 'not on the Hub'}{revision}"),
        ("quantisation", f"{in_markdown(facts.scheme)}, unchanged"),
        ("layout", f"{', '.join(map(in_code, facts.layouts))} for {in_markdown(manifest.backend)}"),
        ("converted for", in_markdown(facts.deployment)),
        ("loads in", in_markdown(", ".join(manifest.loads_in) or "nothing yet")),
        ("layers", f"{facts.layers}, {facts.experts} experts each; copied unchanged: {facts.copied}"),
        ("size", human_bytes(options.size)),
        ("written by", f"moeq {in_markdown(manifest.moeq_version)}"),
    ]
    proofs = [
        ("packed matrices", proof(facts.packed, facts.losses)),
        ("digests", f"{facts.digests} in `moeq.json`, one per expert and projection ({in_markdown(manifest.digest)})"),
        ("all digests", f"`{facts.digest}`"),
        ("source identity", in_code(manifest.source.identity)),
    ]
    loaders = ", ".join(manifest.loads_in)
    return _template().render(
        title=options.repo.rpartition("/")[2],
        named=named,
        revision=revision,
        layout=in_code(facts.layouts[0]),
        facts=facts,
        options=options,
        rows="\n".join(table(rows)),
        proofs="\n".join(table(proofs)),
        loaders=[name for name in ("vLLM", "SGLang", "transformers", "load_experts") if name in loaders],
    )


def _template() -> Template:
    """Return the template of the card, whose values are Markdown already."""
    from jinja2 import Environment, PackageLoader

    loader = PackageLoader("moeq.report")
    environment = Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    return environment.get_template("card.md")
