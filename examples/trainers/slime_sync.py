"""slime's weight sync of an SGLang that serves converted experts: `python slime_sync.py`.

slime (commit 624b824a) packs buckets of tensors with SGLang's `FlattenedTensorBucket` and has the engine call
`update_weights_from_tensor(..., load_format="flattened_bucket")`. These are SGLang's published calls, and the example
makes them on the updater that SGLang's scheduler has; slime itself needs Megatron and GPUs. moeq quantises and writes
the experts in place; a bucket may end within a layer. Needs `sglang` and the packages that it imports.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from sglang.srt import runtime_context
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.server_args import ServerArgs
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
from small_model import check, converted_checkpoint, trained_weights

BUCKET_TENSORS = 7
GROUPS = ("tp", "attn_tp", "moe_tp", "moe_ep", "pp", "attn_dp", "attn_cp", "moe_dp", "attn_dcp")


class Server:
    """SGLang's model and the updater of its scheduler, one rank on a CPU.

    Attributes:
        model: the model.
        updater: what answers `update_weights_from_tensor`.
    """

    def __init__(self, folder: Path, scratch: Path, **options: Any) -> None:
        started = {"device": "cpu", "disable_cuda_graph": True, "skip_tokenizer_init": True, **options}
        runtime_context.publish(ServerArgs(model_path=str(folder), **started), role="scheduler")
        if not torch.distributed.is_initialized():
            init_distributed_environment(
                world_size=1,
                rank=0,
                local_rank=0,
                backend="gloo",
                distributed_init_method=f"file://{scratch}/rendezvous",
            )
            initialize_model_parallel()
        config = ModelConfig.from_server_args(runtime_context.get_server_args())
        config.dtype = torch.bfloat16
        self.model = DefaultModelLoader(LoadConfig()).load_model(model_config=config, device_config=DeviceConfig("cpu"))
        self.updater = WeightUpdater(
            tp_rank=0,
            device="cpu",
            gpu_id=0,
            model_config=config,
            custom_weight_loaders={},
            get_model=lambda: self.model,
            update_model_fields=lambda model, **fields: None,
            recapture_cuda_graph=lambda: None,
            get_model_runner=lambda: None,
        )


def sync(server: Server, weights: list[tuple[str, torch.Tensor]]) -> None:
    """Send weights in buckets."""
    for start in range(0, len(weights), BUCKET_TENSORS):
        bucket = FlattenedTensorBucket(named_tensors=weights[start : start + BUCKET_TENSORS])
        tensors = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        done, message = server.updater.update_weights_from_tensor(tensors, load_format="flattened_bucket")
        assert done, message


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        folder = converted_checkpoint(Path(scratch))
        with runtime_context.get_parallel().override(**{f"{group}_rank": 0 for group in GROUPS}):
            server = Server(folder, Path(scratch))
        sync(server, list(trained_weights(folder)))
        check(folder, [layer.mlp.experts for layer in server.model.model.layers])
