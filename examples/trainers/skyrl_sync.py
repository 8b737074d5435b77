"""SkyRL's weight sync of a vLLM worker that serves converted experts: `python skyrl_sync.py`.

The calls are those that SkyRL's worker extension makes (`NewInferenceWorkerWrap`, commit a9564572); SkyRL itself wants
Python 3.12 and sends its chunks between GPUs only:

    skyrl_start_weight_update    the engine's `initialize_layerwise_reload`
    update_weights_ipc           the model's `load_weights`, once for each chunk of tensors
    skyrl_finish_weight_update   the engine's `finalize_layerwise_reload`

moeq quantises and writes the experts in place within `load_weights`; a chunk may end within a layer. Needs `vllm`.
"""

import tempfile
from pathlib import Path

import torch
from small_model import check, converted_checkpoint, trained_weights
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm_server import ModelRunner

CHUNK_TENSORS = 7


def sync(runner: ModelRunner, weights: list[tuple[str, torch.Tensor]]) -> None:
    """Send weights in chunks between the beginning and the end of one reload."""
    with set_current_vllm_config(runner.vllm_config):
        initialize_layerwise_reload(runner.model)
        for start in range(0, len(weights), CHUNK_TENSORS):
            runner.model.load_weights(weights=weights[start : start + CHUNK_TENSORS])
        finalize_layerwise_reload(runner.model, runner.vllm_config.model_config)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        folder = converted_checkpoint(Path(scratch))
        runner = ModelRunner(folder, Path(scratch))
        sync(runner, list(trained_weights(folder)))
        check(folder, runner.experts)
