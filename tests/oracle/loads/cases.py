"""Random small checkpoints: everything follows from the seed and a case's number.

A case is a plain dict: `config` (config.json), `side` (other JSON files), `tensors` (name to dtype, shape, values) and
`deployment`. About half of them contradict themselves in one way, which `twist` names.
"""

from __future__ import annotations

from random import Random
from typing import Any

from oracle.loads.draft import Draft, Place, add_exclusions
from oracle.loads.formats import FAMILIES, Encoding, Part, Row
from oracle.loads.models import COMMON, DEEPSEEK_V4, DENSE, DENSE_INTER, EXPERTS, GPT_OSS, LAYERS, MODELS, Model
from oracle.loads.twists import TWISTS, applies, twist_gpt_oss


def case(seed: int | str, number: int) -> Row:
    """A checkpoint and a deployment."""
    rng = Random(f"{seed}/{number}")
    family = rng.choices(list(FAMILIES), [weight for _, weight in FAMILIES.values()])[0]
    encoding = FAMILIES[family][0](rng)
    model = _model(rng, family)
    inters = _GPT_OSS_INTER if encoding.stacked else _INTER
    hidden, inter, second = (_size(rng, encoding, sizes) for sizes in (_HIDDEN, inters, _INTER))
    config = None if encoding.config is None else _copy(encoding.config)
    count = EXPERTS if encoding.stacked else rng.choice((EXPERTS, EXPERTS, EXPERTS, 5, 6, 8))
    draft = Draft(
        rng, model, encoding, config, hidden, inter, second if model.sets > 1 else None, stem=model.stem,
        total=count * model.sets, count=count, declared=dict(encoding.extra.get("declared", {})),
    )  # fmt: skip
    _place_linears(draft)
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


#: Sizes that are drawn; odd ones, which tensor parallelism or a kernel's tile may not divide, are rarer.
_HIDDEN, _INTER = (256, 256, 256, 384, 320), (128, 128, 128, 256, 256, 384, 96, 160, 192, 320)
#: gpt-oss deals out blocks of 32 features, and ranks may get none.
_GPT_OSS_INTER = (32, 64, 96, 128, 160, 256, 384)


def _size(rng: Random, encoding: Encoding, sizes: tuple[int, ...]) -> int:
    return rng.choice([size for size in sizes if size % encoding.unit == 0])


def _model(rng: Random, family: str) -> Model:
    own = {"gpt-oss": GPT_OSS, "deepseek-v4": DEEPSEEK_V4}
    return own.get(family) or MODELS[rng.choice(("qwen3_moe", *MODELS))]


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(one) for key, one in value.items()}
    return [_copy(one) for one in value] if isinstance(value, list) else value


def _place_linears(draft: Draft) -> None:
    """Decide which linear modules other than experts are encoded as experts are: all, none, or some kinds."""
    rng, encoding, model = draft.rng, draft.encoding, draft.model
    if model.linears and model.count_key == "n_routed_experts" and "table" not in encoding.extra:
        draft.dense = rng.choice((0, 0, 1))
    draft.declared |= {"first_k_dense_replace": draft.dense} if draft.dense else {}
    draft.shared = _size(rng, encoding, _INTER)
    if model.shared_key == "n_shared_experts":
        count = rng.choice((1, 1, 2))
        draft.shared = draft.inter * count
        draft.declared |= {"n_shared_experts": count} if any("shared" in path for path in model.linears) else {}
    else:
        draft.declared[model.shared_key] = draft.shared
    covered = {kind: rng.random() < 0.5 for kind in ("self_attn", "shared", "dense")}
    if encoding.skip is None or draft.config is None:
        covered = dict.fromkeys(covered, False)
    for layer in range(LAYERS):
        shared = [path for path in model.linears if layer >= draft.dense or "shared" not in path]
        for path in (*shared, *(DENSE if layer < draft.dense else ())):
            kind = "self_attn" if "self_attn" in path else "shared" if "shared" in path else "dense"
            fits = draft.linear_size(layer, path)[1] % encoding.unit == 0 and draft.linear_size(layer, path)[0] % 8 == 0
            draft.linears[layer, path] = encoding if covered[kind] and fits else None
    draft.linears[-1, model.head.removesuffix(".weight")] = None


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
    for layer in range(draft.dense, LAYERS):
        for expert in range(draft.total):
            for projection in ("gate", "up", "down"):
                draft.encode(encoding, layer, expert, projection)
    if draft.config is None or encoding.skip is None:
        return
    if encoding.skip[0] != "dynamic":
        add_exclusions(draft.config, encoding, draft.plain_modules(), rng)
    if "table" in encoding.extra:
        modules = [draft.module(*at) for at in draft.every()]
        whole = [f"{model.above}layers.{layer}.{model.experts}" for layer in range(LAYERS)]
        others = [draft.linear(*at) for at, encoded in draft.linears.items() if encoded]
        draft.config["quantized_layers"] = dict.fromkeys((modules if encoding.extra["each"] else whole) + others)
        for name in draft.config["quantized_layers"]:
            draft.config["quantized_layers"][name] = dict(encoding.extra["table"])


def _document(draft: Draft) -> Row:
    model, second = draft.model, draft.inter_of_second_set
    inter = draft.inter if second is None else [draft.inter, second]
    found = {**COMMON, **model.config, "hidden_size": draft.hidden}
    found[model.inter_key] = inter
    found.setdefault("intermediate_size", DENSE_INTER if draft.dense else draft.inter)
    found |= {model.count_key: draft.count if model.sets == 1 else [draft.count] * model.sets, **draft.declared}
    found = {**model.outer, "text_config": found} if model.outer else found
    return {**found, "quantization_config": draft.config} if draft.config is not None else found


def _frame(draft: Draft) -> dict[str, Part]:
    """Tensors that are no experts'."""
    stem = f"{draft.stem}." if draft.stem else ""
    hidden, model, count = draft.hidden, draft.model, draft.count
    found: dict[str, Part] = {
        f"{stem}{model.embedding}.weight": ("BF16", (64, hidden), "scale"),
        f"{stem}norm.weight": ("BF16", (hidden,), "scale"),
    }
    plain = FAMILIES["plain"][0](Random(1))
    for at, encoding in draft.linears.items():
        parts = (encoding or plain).parts(*draft.linear_size(*at))
        found |= {f"{draft.linear_name(*at)}.{part}": row for part, row in parts.items()}
    for layer in range(LAYERS):
        above = f"{stem}layers.{layer}."
        for norm in model.norms:
            found[f"{above}{norm}.weight"] = ("BF16", (hidden,), "scale")
        for norm, size in model.inner_norms.items():
            found[f"{above}{norm}.weight"] = ("BF16", (hidden if size == "hidden" else int(size),), "scale")
        if layer < draft.dense:
            continue
        if model.bias:
            dtype = "F32" if model.bias.endswith("correction_bias") or model is DEEPSEEK_V4 else "BF16"
            found[f"{above}{model.bias}"] = (dtype, (count,) if model.sets == 1 else (model.sets, count), "scale")
        if model.router == "router.proj":  # Gemma-4 scales the router's input as well
            found[f"{above}router.scale"] = ("BF16", (hidden,), "scale")
        if model.sets > 1:  # a router for each set, transposed
            for name in ("weight", "weight_1"):
                found[f"{above}{model.router}.{name}"] = ("F32", (hidden, count), "scale")
            continue
        parts = (draft.encoding if draft.router else plain).parts(count, hidden)
        found |= {f"{above}{model.router}.{part}": row for part, row in parts.items()}
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
