"""What a worker of vLLM holds, in this process and on a CPU: the model, filled from a converted checkpoint."""

from pathlib import Path
from typing import Any

import torch
from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.model_loader import reload
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

from moeq_kernels import interpreter

interpreter.enable()  # the experts are set up for moeq's kernels, which run without a GPU then


class ModelRunner:
    """Model of a worker, by the names that vLLM's own runner gives to its parts.

    Attributes:
        model: the model.
        vllm_config: the engine's configuration.
        experts: modules that hold the experts, one for each layer.

    Args:
        folder: the converted checkpoint.
        scratch: folder for a file of torch's process group.
        kernels: kernels that run the experts: `moeq`, `engine` or `auto`.
    """

    def __init__(self, folder: Path, scratch: Path, kernels: str = "moeq") -> None:
        from safetensors.torch import load_file

        config = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True)
        self.vllm_config = VllmConfig(
            model_config=config,
            device_config=DeviceConfig(device="cpu"),
            additional_config={"moeq": {"kernels": kernels}},
        )
        with set_current_vllm_config(self.vllm_config):
            init_distributed_environment(1, 0, f"file://{scratch}/rendezvous", 0, "gloo")
            initialize_model_parallel()
            self.model: Any = initialize_model(self.vllm_config)
            reload.record_metadata_for_reloading(self.model)
            tensors = {name: one for path in folder.glob("*.safetensors") for name, one in load_file(path).items()}
            self.model.load_weights(tensors.items())
            process_weights_after_loading(self.model, config, torch.device("cpu"))
        self.experts = [layer.mlp.experts.routed_experts for layer in self.model.model.layers]
