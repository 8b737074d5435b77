"""Which names of expert tensors vLLM's model classes load, taken out of vLLM by executing `load_weights`.

Run by `python tools/extract.py names 0.33.0 --site SITE`. Every model class is built on
the meta device. The loaders of its experts' parameters are replaced by one that writes down what reaches it, and
parameters of every quantised format are added. Then `load_weights` gets one tensor at a time, under every spelling of
experts that is known, with rows that are numbered: what arrives says whether the name is known, and where its rows go.
The result is one version's part of `expert_names.json`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeq.errors import MoeqError
from moeq.oracle.engines.vllm.expert_names import EXPERT, OWN_SUFFIXES, SUFFIXES, WHOLE_SUFFIXES
from moeq.oracle.versions import release
from vllm_tables import sandbox
from vllm_tables.model_classes import DOCUMENTS, LEFT_OUT, MODELS, SMALL

#: Paths of experts below a layer: those of all families.
CONTAINERS = (
    "mlp.experts",
    "block_sparse_moe.experts",
    "feed_forward.experts",
    "ffn.experts",
    "ffn.experts.mlp",
    "mixer.experts",
    "moe.experts",
    "experts",
    "moe",
    "block_sparse_moe",
)
#: Spellings of one expert's modules, and of tensors that hold all experts, with what they hold.
_PER_EXPERT = (
    {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"},
    {"w1": "gate", "w3": "up", "w2": "down"},
    {"v1": "up", "linear": "gate", "linear_v": "up", "linear_1": "down"},
    {"gate_up_proj": "gate_up", "w13": "gate_up"},
)
_STACKED = (
    {"gate_up_proj": "gate_up", "down_proj": "down"},
    {"w13": "gate_up", "w2": "down", "input_linear": "gate_up", "output_linear": "down"},
    {"gate_proj": "gate", "up_proj": "up", "w1": "gate", "w3": "up", "v1": "up", "fc1": "gate_up", "fc2": "down"},
)
#: Parts of modules in every quantised format.
_WEIGHTS = ("weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "qweight", "qzeros")
_PARTS = (*_WEIGHTS, "scales", "g_idx", "weight_zero_point", "weight_shape", "weight_global_scale", "input_scale")
#: Numbers of a row that one stored value stands for, in an int4 format with groups of 32.
_NUMBERS = {"_packed": 8, ".qweight": 8, "_scale": 32, "_scale_inv": 32}

#: Paths of the layers in checkpoints.
_STACKS = (
    *("model.layers", "backbone.layers", "model.language_model.layers", "language_model.model.layers", "layers"),
    *("model.model.layers", "language_model.layers", "thinker.model.layers", "model.language_model.model.layers"),
)


@dataclass(frozen=True)
class Call:
    """One call of a parameter's loader: the parameter, and the tensor that was cut out for it."""

    parameter: str
    expert: int | None
    shard: str | None
    tensor: Any


class Probe:
    """One model class, ready to be asked.

    Args:
        model: built on the meta device.
        config: vLLM's config of it.
    """

    def __init__(self, model: Any, config: Any) -> None:
        self._model, self._config = model, config
        self._calls: list[Call] = []
        name, experts = next((n, m) for n, m in model.named_modules() if "w13_weight" in m._parameters)
        self._layer = name.partition("layers.")[2].partition(".")[0] or "0"
        self.experts, rows, self.hidden = experts._parameters["w13_weight"].shape
        self.inner = experts._parameters["w2_weight"].shape[2]
        self.gated = rows == 2 * self.inner
        for name in ("w13", "w2"):
            self._record(experts, name)

    def _record(self, experts: Any, name: str) -> None:
        """Give a projection parameters of every format, and loaders that write down what they get."""
        import torch

        shape = experts._parameters[f"{name}_weight"].shape
        for suffix in (*_PARTS, *(f"weight{suffix}" for suffix in OWN_SUFFIXES)):
            full = f"{name}_{suffix}"
            if full not in experts._parameters:
                empty = torch.nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
                experts.register_parameter(full, empty)
            parameter = experts._parameters[full]
            field = "_weight_loader" if hasattr(type(parameter), "weight_loader") else "weight_loader"
            setattr(parameter, field, self._loader(full))

    def _loader(self, parameter: str) -> Any:
        def load(param: Any, loaded_weight: Any, *values: Any, **named: Any) -> bool:
            given = {**dict(zip(("weight_name", "shard_id", "expert_id"), values, strict=False)), **named}
            self._calls.append(Call(parameter, given.get("expert_id"), given.get("shard_id"), loaded_weight))
            return True

        return load

    def load(self, name: str, tensor: Any) -> tuple[list[Call], bool] | None:
        """What reaches the experts' parameters from one tensor, and whether any was filled without its loader.

        None where the class stops at it.
        """
        from vllm.config import set_current_vllm_config

        self._calls.clear()
        try:
            with set_current_vllm_config(self._config):
                loaded = self._model.load_weights(iter([(name, tensor)])) or ()
        except Exception:  # noqa: BLE001 - whatever a class raises at a name that it does not know
            return None
        return list(self._calls), any(".w13_" in f".{one}" or ".w2_" in f".{one}" for one in loaded)

    def per_expert(self, stack: str, head: str, role: str) -> str | None:
        """How a class takes a module of one expert: `any`, whatever it holds, or the order of gate and up."""
        first = None
        for part in _WEIGHTS:
            order = self._order(stack, f"{head.replace(EXPERT, '1')}.{part}", role, stacked=False)
            if order is None or order != (first or order):
                return None
            first = order
        return first

    def stacked(self, stack: str, name: str, role: str) -> str | None:
        """How a class takes a tensor of all experts, as of `ClassNames.tensors`."""
        if name.endswith(WHOLE_SUFFIXES):
            return self._whole(stack, name)
        if name.endswith(OWN_SUFFIXES):
            return self._own(stack, name, role)
        return self._order(stack, name, role, stacked=True)

    def _whole(self, stack: str, name: str) -> str | None:
        """How a class takes numbers that are the same for all experts: `as-is` where it leaves them out.

        Parameters have a place for each expert, so that numbers which reach one of them do not fit there.
        """
        import torch

        found = self.load(f"{stack}.{self._layer}.{name}", torch.tensor([self.experts, self.inner, self.hidden]))
        return "as-is" if found is not None and not found[0] else None

    def _own(self, stack: str, name: str, role: str) -> str | None:
        """gpt-oss' blocks of 16 bytes, or their scales: `as-is` where a parameter takes all experts at once."""
        import torch

        n, k = self._sizes(role)
        shape = (self.experts, n, k // 32, *((16,) if name.endswith("_blocks") else ()))
        found = self.load(f"{stack}.{self._layer}.{name}", torch.zeros(shape, dtype=torch.uint8))
        return "as-is" if found is not None and any(found) else None

    def _sizes(self, role: str) -> tuple[int, int]:
        """Rows and columns."""
        n = {"gate": self.inner, "up": self.inner, "gate_up": 2 * self.inner, "down": self.hidden}[role]
        return n, self.inner if role == "down" else self.hidden

    def _order(self, stack: str, name: str, role: str, *, stacked: bool) -> str | None:
        import torch

        n, k = self._sizes(role)
        # Classes look at shapes, and codes and scales of a row are fewer than its numbers.
        k //= next((count for end, count in _NUMBERS.items() if stacked and name.endswith(end)), 1)
        plain = torch.arange(n, dtype=torch.float32).view(-1, 1).expand(n, k)
        forms = {"halves": plain, "transposed": plain.T} if stacked else {"halves": plain}
        orders = []
        for form, tensor in forms.items():
            whole = tensor.unsqueeze(0).expand(self.experts, *tensor.shape) if stacked else tensor
            found = self.load(f"{stack}.{self._layer}.{name}", whole)
            if found is None:
                continue
            calls, direct = found
            if not calls and direct:
                return "as-is"
            order = _order_of([call for call in calls if call.expert in (None, 0 if stacked else 1)], role, n, k)
            if order is not None:
                orders.append(form if order == "halves" else order)
        return "either" if orders == ["halves", "transposed"] else orders[0] if orders else None


def _order_of(calls: list[Call], role: str, n: int, k: int) -> str | None:
    """The order of rows that a class reads out of numbered rows; None where they do not get where they belong."""
    expected = {"gate": ("w1",), "up": ("w3", "w1"), "down": ("w2",)}
    starts = {}
    for call in calls:
        tensor = call.tensor
        if not call.parameter.startswith("w2_" if role == "down" else "w13_") or tensor.dim() < 2:
            return None
        first, second = map(float, tensor[..., :2, 0].flatten()[:2])
        starts[(call.shard or "").rpartition("_")[2]] = tuple(tensor.shape[-2:]), first, second
    if role == "gate_up":
        half = (n // 2, k)
        if starts.keys() == {"w1", "w3"}:
            orders = {
                "halves": {"w1": (half, 0.0, 1.0), "w3": (half, n / 2, n / 2 + 1)},
                "interleaved": {"w1": (half, 0.0, 2.0), "w3": (half, 1.0, 3.0)},
            }
            return next((order for order, found in orders.items() if found == starts), None)
        return "as-is" if list(starts.values()) == [((n, k), 0.0, 1.0)] else None
    right = len(starts) == 1 and next(iter(starts)) in expected[role] and starts.popitem()[1] == ((n, k), 0.0, 1.0)
    return "halves" if right else None


def names_of(probe: Probe) -> dict[str, Any]:
    """Paths of layers that a class finds, and spellings that it loads below the first of them.

    Those are modules of single experts, and stacked tensors with the order of their rows.
    """
    names = next((names for names in (_names_below(probe, stack) for stack in _STACKS) if names["stacks"]), None)
    if names is None:
        return {"stacks": [], "modules": {}, "tensors": {}}
    known = {"modules": list(names["modules"])[:1], "tensors": list(names["tensors"])[:1]}
    more = [one for one in _STACKS if one not in names["stacks"] and _loads(probe, one, known)]
    return {**names, "stacks": [*names["stacks"], *more]}


def _names_below(probe: Probe, stack: str) -> dict[str, Any]:
    modules: dict[str, str] = {}
    tensors: dict[str, str] = {}
    for container in CONTAINERS:
        for head, role in _heads(_PER_EXPERT, f"{container}.{EXPERT}"):
            order = probe.per_expert(stack, head, role)
            if order is not None:
                modules[head] = order if role == "gate_up" else "any"
        # Parts are asked about where the container is known: there are many.
        heads = list(_heads(_STACKED, container))
        plain = any(probe.stacked(stack, head + end, role) for head, role in heads for end in ("", "_blocks"))
        for head, role in heads if plain or any(name.startswith(f"{container}.{EXPERT}") for name in modules) else ():
            for suffix in (*SUFFIXES, *WHOLE_SUFFIXES, *OWN_SUFFIXES):
                order = probe.stacked(stack, head + suffix, role)
                if order is not None:
                    tensors[head + suffix] = order
    # Of tensors that a class does not know it leaves out whatever it does not look at.
    known = {_head(name) for name in tensors if not name.endswith(WHOLE_SUFFIXES)}
    tensors = {name: order for name, order in tensors.items() if _head(name) in known}
    return {"stacks": [stack] if modules or tensors else [], "modules": modules, "tensors": tensors}


def _loads(probe: Probe, stack: str, names: Mapping[str, list[str]]) -> bool:
    """Tell whether a class loads a name below another path of layers as well."""
    roles = {leaf: role for spelling in (*_PER_EXPERT, *_STACKED) for leaf, role in spelling.items()}
    for name in names["modules"]:
        return probe.per_expert(stack, name, roles[name.rpartition(".")[2]]) is not None
    return any(probe.stacked(stack, name, roles[_head(name).rpartition(".")[2]]) for name in names["tensors"])


def _head(name: str) -> str:
    """A tensor's name without what says which part it is."""
    ends = (end for end in (*SUFFIXES, *WHOLE_SUFFIXES, *OWN_SUFFIXES) if end and name.endswith(end))
    return name.removesuffix(max(ends, key=len, default=""))


def _heads(spellings: tuple[dict[str, str], ...], container: str) -> Iterator[tuple[str, str]]:
    for spelling in spellings:
        for name, role in spelling.items():
            yield f"{container}.{name}", role


# ------------------------------------------------------------------------------------------------ building classes


def build(model_type: str, architecture: str, more: Mapping[str, Any] | None, method: str | None) -> Probe:
    """A model class of the imported vLLM on the meta device. `method`: `quant_method` that the config declares."""
    model, whole = make(model_type, architecture, more)
    if method is not None:  # classes that load in several ways look at the config then
        whole.model_config.hf_config.quantization_config = {"quant_method": method}
    return Probe(model, whole)


def make(
    model_type: str, architecture: str, more: Mapping[str, Any] | None, quantization: Any = None
) -> tuple[Any, Any]:  # fmt: skip
    """A small model on the meta device, and vLLM's config of it; `quantization` is its quantisation config."""
    import torch
    from transformers import AutoConfig
    from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.transformers_utils import config as known

    registry = known._CONFIG_REGISTRY
    document = DOCUMENTS.get(model_type)
    if document is None:
        config: Any = registry[model_type]() if model_type in registry else AutoConfig.for_model(model_type)
        if more is not None:
            _shrink(config.get_text_config(), more)
        document = config.to_dict()
    with tempfile.TemporaryDirectory() as folder:
        document = {**document, "architectures": [architecture], "model_type": model_type}
        Path(folder, "config.json").write_text(json.dumps(document, default=str), encoding="utf-8")
        made = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True)
        whole = VllmConfig(model_config=made, device_config=DeviceConfig(device="cpu"))
        whole.quant_config = quantization
        with set_current_vllm_config(whole):
            _one_rank(folder)
            with torch.device("meta"):
                model = initialize_model(whole)
    return model, whole


def _shrink(config: Any, more: Mapping[str, Any]) -> None:
    """Make a language model small."""
    for key, value in {**SMALL, **more}.items():
        if key in more or hasattr(config, key):
            setattr(config, key, value)
    if len(getattr(config, "layer_types", None) or ()) > SMALL["num_hidden_layers"]:
        config.layer_types = config.layer_types[: SMALL["num_hidden_layers"]]


def _one_rank(folder: str) -> None:
    import torch
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    if not torch.distributed.is_initialized():
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel()


#: Compiled operators that layers look up when they are made, and that no name depends on.
_OPERATORS = (
    "silu_and_mul",
    "mul_and_silu",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "gelu_new",
    "gelu_fast",
    "gelu_quick",
)
_libraries: list[Any] = []  # operator definitions live as long as these


def install(site: str) -> None:
    """Import vLLM from `site` as on a CPU, and make its classes buildable. Once a process."""
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # is remembered: what follows is only there to be imported
    sys.meta_path.insert(0, sandbox._Finder({"xgrammar", "torchvision"}))
    sandbox.preload()
    sandbox.install(site, {"kind": "cpu", "arch": "x86", "amx": True, "flags": {}, "env": {}})
    prepare()


def prepare() -> None:
    """Make every model class buildable here: without attention, which has no weights and wants a device.

    Classes are looked at in this process: vLLM would start one for each.
    """
    import torch
    from vllm.model_executor.layers import attention
    from vllm.model_executor.models import registry

    lazy: Any = registry._LazyRegisteredModel
    lazy.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(self.load_model_cls())
    for name in ("Attention", "MLAAttention"):
        getattr(attention, name).__init__ = lambda self, *values, **named: torch.nn.Module.__init__(self)
    for module, classes in LEFT_OUT.items():
        found: Any = importlib.import_module(f"vllm.model_executor.models.{module}")
        for name in classes:
            setattr(found, name, without_weights(name))
    _register_published_configs()
    make: Any = torch.library.Library
    _libraries.append(make("_C", "FRAGMENT"))
    for name in _OPERATORS:
        with contextlib.suppress(RuntimeError):  # the engine's own are here
            _libraries[-1].define(f"{name}(Tensor(a!) out, Tensor input) -> ()")


def without_weights(name: str) -> Any:
    """A module class of that name, which takes what it is given and has no parameters."""
    import torch

    made: Any = type(
        name, (torch.nn.Module,), {"__init__": lambda self, *values, **named: torch.nn.Module.__init__(self)}
    )
    made.from_config = classmethod(lambda cls, *values, **named: cls())  # in place of transformers' AutoModel
    return made


def _register_published_configs() -> None:
    """Make configs known whose classes come with checkpoints, as code that `trust_remote_code` runs."""
    from transformers import AutoConfig, PreTrainedConfig

    kind = type("Ernie4_5_VLMoePublishedConfig", (PreTrainedConfig,), {"model_type": "ernie4_5_moe_vl"})
    AutoConfig.register("ernie4_5_moe_vl", kind, exist_ok=True)


def probe_models(only: tuple[str, ...] = ()) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Names by architecture, and why the others could not be built."""
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for model_type, (architecture, more) in MODELS.items():
        if only and architecture not in only:
            continue
        try:
            names = names_of(build(model_type, architecture, more, None))
            own = names_of(build(model_type, architecture, more, "mxfp4")) if "gpt_oss" in model_type else names
        except Exception as error:  # noqa: BLE001 - a class that wants what is not here is left out
            failed[architecture] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            continue
        tensors = {name: order for name, order in names["tensors"].items() if not name.endswith(OWN_SUFFIXES)}
        tensors |= {name: order for name, order in own["tensors"].items() if name.endswith(("_blocks", "_scales"))}
        if model_type != "gpt_oss":
            tensors = {name: order for name, order in tensors.items() if not name.endswith(("_blocks", "_scales"))}
        found[architecture] = {"stacks": names["stacks"], "modules": names["modules"], "tensors": tensors}
    return found, failed


def extract(version: str, site: str, only: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """Names that the classes of the version in `site` load, by architecture; reports classes that cannot be built.

    Raises:
        MoeqError: `environment.engine` when no class can be built.
    """
    install(site)
    found, failed = probe_models(only)
    for name, why in failed.items():
        print(f"{name}: {why}", file=sys.stderr)
    if not found:
        raise MoeqError("environment.engine", f"no class of vllm {version} could be built")
    return found


def merged(known: Mapping[str, Any], version: str, found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The data file with some classes of a version in it, in place of what it had of those."""
    classes: dict[str, dict[str, dict[str, Any]]] = {}
    for architecture, rows in known.get("classes", {}).items():
        for row in rows:
            for one in row["versions"]:
                if one != version or architecture not in found:
                    kept = {key: row[key] for key in ("stacks", "modules", "tensors")}
                    classes.setdefault(architecture, {})[one] = kept
    for architecture, row in found.items():
        classes.setdefault(architecture, {})[version] = dict(row)
    document: dict[str, list[dict[str, Any]]] = {}
    for architecture, by_version in sorted(classes.items()):
        rows = document.setdefault(architecture, [])
        for one in sorted(by_version, key=release):
            same = next((row for row in rows if row == {**by_version[one], "versions": row["versions"]}), None)
            if same is None:
                rows.append({"versions": [one], **by_version[one]})
            else:
                same["versions"].append(one)
    return {"versions": sorted({*known.get("versions", ()), version}, key=release), "classes": document}
