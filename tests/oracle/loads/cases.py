"""Random small checkpoints: everything follows from the seed and a case's number.

A case is a plain dict: `config` (config.json), `side` (other JSON files), `tensors` (name to dtype, shape, values) and
`deployment`. About half of them contradict themselves in one way, which `twist` names.
"""

from __future__ import annotations

from random import Random
from typing import Any

from oracle.loads.draft import Draft, Place, add_exclusions
from oracle.loads.formats import FAMILIES, Encoding, Part, Row
from oracle.loads.models import COMMON, EXPERTS, GPT_OSS, LAYERS, MODELS
from oracle.loads.twists import TWISTS, applies, twist_gpt_oss


def case(seed: int | str, number: int) -> Row:
    """A checkpoint and a deployment."""
    rng = Random(f"{seed}/{number}")
    family = rng.choices(list(FAMILIES), [weight for _, weight in FAMILIES.values()])[0]
    encoding = FAMILIES[family][0](rng)
    model = GPT_OSS if encoding.stacked else MODELS[rng.choice(("qwen3_moe", *MODELS))]
    hidden, inter = rng.choice((256, 256, 384)), rng.choice((128, 128, 256, 384))
    config = None if encoding.config is None else _copy(encoding.config)
    total = EXPERTS if encoding.stacked else rng.choice((EXPERTS, EXPERTS, EXPERTS, 5, 6, 8))
    draft = Draft(rng, model, encoding, config, hidden, inter, stem=model.stem, total=total, count=total)
    _fill(draft)
    twist = "none"
    if rng.random() < 0.6:
        if encoding.stacked:
            twist = f"gpt-oss-{twist_gpt_oss(draft)}"
        else:
            fitting = [name for name in TWISTS if applies(name, draft)]
            twist = rng.choices(fitting, [TWISTS[name][1] for name in fitting])[0]
            TWISTS[twist][0](draft)
    return {
        "id": number, "family": family, "twist": twist, "config": _document(draft), "side": draft.side,
        "tensors": {**_frame(draft), **_tensors(draft, draft.experts)}, "stale": _tensors(draft, draft.stale),
        "deployment": _deployment(rng, encoding),
    }  # fmt: skip


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(one) for key, one in value.items()}
    return [_copy(one) for one in value] if isinstance(value, list) else value


def _fill(draft: Draft) -> None:
    """Encode every expert, and complete the config as its exporter would."""
    rng, encoding, model = draft.rng, draft.encoding, draft.model
    if encoding.stacked:
        for layer in range(LAYERS):
            for leaf, projection in (("gate_up_proj", "gate"), ("down_proj", "down")):
                n, k = draft.sizes(projection)
                for part, (dtype, shape, values) in encoding.parts(n * (2 if leaf != "down_proj" else 1), k).items():
                    draft.stacked[layer, leaf, part] = (dtype, (EXPERTS, *shape), values)
        return
    for layer in range(LAYERS):
        for expert in range(draft.total):
            for projection in ("gate", "up", "down"):
                draft.encode(encoding, layer, expert, projection)
    if draft.config is None or encoding.skip is None:
        return
    if encoding.skip[0] != "dynamic":
        add_exclusions(draft.config, encoding, draft.routers(), rng)
    if "table" in encoding.extra:
        modules = [draft.module(*at) for at in draft.every()]
        whole = [f"{model.stem}.layers.{layer}.{model.experts}" for layer in range(LAYERS)]
        draft.config["quantized_layers"] = dict.fromkeys(modules if encoding.extra["each"] else whole)
        for name in draft.config["quantized_layers"]:
            draft.config["quantized_layers"][name] = dict(encoding.extra["table"])


def _document(draft: Draft) -> Row:
    model = draft.model
    found = {**COMMON, **model.config, "hidden_size": draft.hidden, model.inter_key: draft.inter}
    found.setdefault("intermediate_size", draft.inter)
    found |= {model.count_key: draft.count, **draft.declared}
    found = {**model.outer, "text_config": found} if model.outer else found
    return {**found, "quantization_config": draft.config} if draft.config is not None else found


def _frame(draft: Draft) -> dict[str, Part]:
    """Tensors that are no experts'. Attention is left out."""
    stem = f"{draft.stem}." if draft.stem else ""
    hidden, router = draft.hidden, draft.model.router
    found: dict[str, Part] = {
        f"{stem}embed_tokens.weight": ("BF16", (64, hidden), "scale"),
        f"{stem}norm.weight": ("BF16", (hidden,), "scale"),
        "lm_head.weight": ("BF16", (64, hidden), "scale"),
    }
    for layer in range(LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{stem}layers.{layer}.{norm}.weight"] = ("BF16", (hidden,), "scale")
        parts = (
            draft.encoding.parts(draft.count, hidden)
            if draft.router
            else {"weight": ("BF16", (draft.count, hidden), "scale")}
        )
        found |= {f"{stem}layers.{layer}.{router}.{part}": row for part, row in parts.items()}
        if draft.model is GPT_OSS:
            found[f"{stem}layers.{layer}.{router}.bias"] = ("BF16", (draft.count,), "scale")
        if draft.model.count_key == "n_routed_experts":
            found[f"{stem}layers.{layer}.{router}.e_score_correction_bias"] = ("F32", (draft.count,), "scale")
    return found


def _tensors(draft: Draft, experts: dict[Place, Part]) -> dict[str, Part]:
    """Expert tensors under their names."""
    stem = f"{draft.stem}." if draft.stem else ""
    if draft.stacked and experts is draft.experts:
        return {f"{stem}layers.{at[0]}.mlp.experts.{at[1]}{at[2]}": row for at, row in draft.stacked.items()}
    path, leaves = draft.model.experts, draft.model.leaves
    if "|" in draft.form:
        path, _, listed = draft.form.partition("|")
        leaves = tuple(listed.split(","))  # type: ignore[assignment]
    if draft.form == "stacked":
        return _in_stacks(draft, experts, stem, path)
    found = {}
    for (layer, expert, projection, part), row in experts.items():
        leaf = leaves[("gate", "up", "down").index(projection)]
        name = f"{leaf}.{expert}" if draft.form == "listed" else f"{expert}.{leaf}"
        found[f"{stem}layers.{layer}.{path}.{name}.{part}"] = row
    return found


def _in_stacks(draft: Draft, experts: dict[Place, Part], stem: str, path: str) -> dict[str, Part]:
    """One tensor for all experts, gate above up: `gate_up_proj`, with parts as suffixes."""
    transposed = draft.rng.random() < 0.5
    found: dict[str, Part] = {}
    for (layer, _, projection, part), (dtype, shape, values) in experts.items():
        leaf = "down_proj" if projection == "down" else "gate_up_proj"
        if leaf == "gate_up_proj" and len(shape) == 2:
            rows, columns = shape
            turned = part in ("qweight", "qzeros", "scales")
            shape = (rows, 2 * columns) if turned else (2 * rows, columns)
        if part == "weight" and transposed and len(shape) == 2:
            shape = shape[::-1]
        suffix = "" if part in ("weight", "weight_packed") else f"_{part}"
        found[f"{stem}layers.{layer}.{path}.{leaf}{suffix}"] = (dtype, (draft.total, *shape), values)
    return found


_GPUS = ("A100", "H100", "H100", "B200")


def _deployment(rng: Random, encoding: Encoding) -> Row:
    gpu, ranks = rng.choice(_GPUS), rng.choice((1, 1, 1, 2, 4))
    backend = rng.choice(("marlin", "triton", "cutlass")) if rng.random() < 0.1 else "auto"
    quantization = rng.choice(encoding.quantization) if rng.random() < 0.5 else None
    data = rng.choice((1, 1, 1, 1, 1, 1, 1, 2))
    return {
        "gpu": gpu, "tp": ranks, "rank": rng.randrange(ranks), "ep": ranks * data > 1 and rng.random() < 0.4,
        "dp": data, "dp_rank": rng.randrange(data), "backend": backend, "quantization": quantization,
    }  # fmt: skip
