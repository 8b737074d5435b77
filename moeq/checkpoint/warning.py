"""A warning about a checkpoint: worth knowing, but no reason to stop."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointWarning:
    """A warning about a checkpoint."""

    code: str  #: stable dotted name, such as `index.total-size`
    message: str  #: one sentence with names and numbers


#: Code -> what it means and what to do about it, for `moeq explain`.
EXPLAINED: dict[str, str] = {
    "gguf.computed": "The file has a tensor that llama.cpp computed from the model's rope_scaling. Engines compute it "
    "from config.json: copy that entry from the original model's config.",
    "gguf.no-tokenizer": "Install transformers to get the tokenizer's files, or copy those of the original model.",
    "config.copies-differ": "The quantisation config stands in several files or places that differ. The one that is "
    "named counts; engines may read another.",
    "config.excludes-quantized": "The config says that these modules are not quantised, their tensors are. moeq "
    "follows the tensors; engines that follow the config load them wrongly.",
    "config.quantizes-plain": "The config says that these modules are quantised, their tensors are plain.",
    "config.sizes-differ": "The config's expert size is not that of the tensors. moeq follows the tensors.",
    "experts.several-sets": "Layers have several sets of experts of different sizes (ERNIE-4.5-VL: text and vision), "
    "numbered on in one list. vLLM's class of that model builds a layer for each set. One stack cannot hold both, so "
    "convert refuses; transcode keeps both.",
    "files.no-index": "Several weight files and no index: all of them were taken.",
    "files.not-in-index": "Weight files beside those of the index; nothing reads them.",
    "files.not-loaded": "Weight files beside model.safetensors; nothing reads them.",
    "files.several-indices": "More than one index file; the named one was read.",
    "header.unknown-field": "A header has fields that the format does not know; they were ignored.",
    "hub.cached": "The Hub could not be reached, and the whole checkpoint is in the local cache: that copy was read. "
    "The repository may have moved on since.",
    "index.duplicates": "A tensor lies in several files; the index says which counts. Engines read every tensor of "
    "every listed file, so that the last file wins there. A converted or transcoded folder has one copy.",
    "index.total-size": "The index's total_size is not the sum of the tensors: the index is of another version.",
    "index.unlisted": "Tensors that the index does not list. moeq ignores them; engines read every tensor of every "
    "listed file and load them, or stop. A converted or transcoded folder is without them.",
    "module.router-quantized": "The router is quantised. Engines expect it plain and may refuse or misread it.",
    "mtp.absent": "Multi-token prediction is declared, and there are no experts of it.",
    "mtp.not-converted": "Experts of multi-token prediction stay as the source has them.",
    "mtp.undeclared": "Layers beyond the declared number; they were taken for multi-token prediction.",
    "name.says-awq": "The name says AWQ, the config another method. The config counts.",
    "scales.activation-missing": "Some experts lack the static activation scale that others of their layer have: they "
    "saw no token while the model was calibrated. Engines fill the gap, or read memory that was never written. "
    "Calibrate all experts and quantise again, or serve with weight-only kernels such as Marlin.",
    "scheme.act-order": "Columns are reordered by activation order (desc_act). Kernels have to gather activations; "
    "vLLM 0.33 refuses it for experts, moeq's kernels and vLLM 0.26.0's Marlin read it. inspect --scan tells whether "
    "the order changes anything.",
    "scheme.bias": "Expert projections have biases. Backends without a bias input would drop them; moeq does not "
    "write for those.",
    "scheme.f32-scales": "Scales are float32, and kernels take 16-bit ones.",
    "scheme.gptq-v1-zeros": "GPTQ v1 stores zero points minus one. moeq undoes that; some engines do not.",
    "scheme.mixed-layer": "One layer holds experts of several schemes, which cannot be stacked: "
    "`moeq convert --skip-unfit` copies such layers.",
    "shape.partial-group": "The number of input features is no multiple of the group size, so the last group is "
    "smaller. Tensor parallelism that cuts it is refused.",
    "stack.other": "Experts outside the decoder's layers (an encoder, a talker); they are copied unchanged.",
}
