"""The network of a model in another engine than torch: ONNX Runtime or OpenVINO, on a CPU."""

import logging
import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from bier.errors import ConfigError, needs
from bier.models.backbone import resolve_precision

Backend: TypeAlias = Literal["torch", "onnx", "openvino"]


def check_backend(backend: str, device: torch.device) -> None:
    """ConfigError if there is no such backend, or none for this device; MissingExtraError without its package."""
    if backend not in get_args(Backend):
        raise ConfigError(f"The 'backend' parameter must be one of {', '.join(get_args(Backend))}. Got {backend!r}.")
    if backend == "torch":
        return
    if device.type != "cpu":
        raise ConfigError(
            f"The backend {backend!r} computes on the CPU, and the model is on {device}. Move it with model.to('cpu')."
        )
    for package in ("openvino",) if backend == "openvino" else ("onnx", "onnxruntime", "onnxscript"):
        needs(package, backend)


def compiled(backbone: nn.Module, crop: int, backend: Backend, precision: str) -> Callable[[Tensor], Tensor]:
    """A folded backbone as the engine runs it: pixels (B, 3, crop, crop), uint8, any B, to features (B, h), float32.

    OpenVINO computes in the precision of the model. ONNX Runtime has no bfloat16 kernels for convolutions on a CPU and
    always computes in float32. Both use as many threads as torch does.
    """
    pixels = torch.zeros(2, 3, crop, crop, dtype=torch.uint8)
    return _openvino(backbone, pixels, precision) if backend == "openvino" else _onnx(backbone, pixels)


def _onnx(backbone: nn.Module, pixels: Tensor) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors
    graph = onnx_graph(backbone, pixels, "pixels", "features").SerializeToString()
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    return lambda batch: torch.from_numpy(session.run(None, {"pixels": batch.numpy()})[0])


def onnx_graph(module: nn.Module, example: Tensor, name: str, result: str, *, fixed: bool = False) -> Any:
    """The `onnx.ModelProto` of a module with one input and one output; the first dimension is free unless `fixed`."""
    chatter = logging.getLogger("torch.onnx")
    level = chatter.level
    chatter.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # What torch's exporter and onnxscript say of their own insides is not for the user.
            for kind in (DeprecationWarning, FutureWarning, UserWarning):
                warnings.simplefilter("ignore", kind)
            program = torch.onnx.export(
                module,
                (example,),
                input_names=[name],
                output_names=[result],
                dynamic_shapes=None if fixed else ({0: torch.export.Dim("images")},),
                dynamo=True,
                verbose=False,
            )
    finally:
        chatter.setLevel(level)
    assert program is not None  # as always with dynamo=True
    return program.model_proto


def _openvino(backbone: nn.Module, pixels: Tensor, precision: str) -> Callable[[Tensor], Tensor]:
    import openvino

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter(
            "ignore"
        )  # of torch.jit, which OpenVINO uses, and of values that are constants in a trace
        graph = openvino.convert_model(backbone, example_input=pixels, input=[-1, *pixels.shape[1:]])
    bfloat16 = resolve_precision(precision, pixels.device) is torch.bfloat16
    settings: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": "bf16" if bfloat16 else "f32",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "NUM_STREAMS": 1,  # batches come one after the other
        "ENABLE_CPU_PINNING": False,  # threads that decode images run beside it
    }
    network = openvino.compile_model(graph, "CPU", settings)
    return lambda batch: torch.from_numpy(network(batch.numpy())[0].copy())  # it writes the next batch to its buffer
