"""What runs the network of a model fastest on a CPU, and what it costs in recall.

torch in float32 (channels first, and channels last as Model.encode runs it) and bfloat16, ONNX Runtime, OpenVINO, and
int8 by the static quantisation of the last two (the package nncf for OpenVINO), on prepared photographs in memory. All
engines are in one process, have one thread each and take turns batch by batch; their processor time is compared, which
other work on the machine does not stretch. Recall is that of the plain features on test classes of CUB-200-2011, a
sample of --images of them; int8 is calibrated on 128 photographs of training classes.
torch.compile is measured with --compile; compiling takes minutes.

Run: taskset -c 1 python benchmarks/engines.py [BACKBONE ...]
"""

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bier import recall_at_k
from bier.images import ImageDataset
from bier.memory import reuse_memory
from bier.models.backbone import Backbone, autocast, folded
from bier.models.backbones import build_backbone
from bier.models.backends import compiled, onnx_graph
from bier.models.inference import pixel_batches

SHARED = Path(__file__).parents[1].parent / "shared" / "data"
BATCH, CALIBRATION, CPU = 64, 128, torch.device("cpu")
PACKAGES = ("torch", "onnxruntime", "openvino", "nncf")
Engine = Callable[[Tensor], Tensor]


def network(name: str, shared: Path) -> Backbone:
    """With its pretrained weights where they are on this machine, else with random ones."""
    if name == "googlenet":
        return folded(build_backbone(name, weights=shared / "bvlc_googlenet.caffemodel"))
    return folded(build_backbone(name, pretrained=name.startswith("efficientnet_lite")))


def photographs(shared: Path, images: int) -> tuple[list[Path], list[str], list[Path]]:
    """(test photographs, their classes, photographs for calibration)."""
    classes = sorted(path for path in (shared / "CUB_200_2011" / "images").iterdir() if path.is_dir())
    halves = classes[:100], classes[100:]
    train, test = ([file for one in some for file in sorted(one.glob("*.jpg"))] for some in halves)
    chosen = test[:: max(1, len(test) // images)]
    return chosen, [file.parent.name for file in chosen], train[:: len(train) // CALIBRATION][:CALIBRATION]


def prepared(files: list[Path], backbone: Backbone) -> Iterator[Tensor]:
    size, crop = backbone.resize, backbone.crop
    return (pixels.contiguous() for pixels in pixel_batches(ImageDataset(files, size), size, crop, BATCH, 0))


def engines(backbone: Backbone, calibration: Tensor, folder: Path, with_compile: bool) -> Iterator[tuple[str, Engine]]:
    yield "torch float32, channels first", lambda x: backbone.body(backbone.scale(x).contiguous())
    yield "torch float32", backbone

    def bfloat16(pixels: Tensor) -> Tensor:
        with autocast("bfloat16", CPU):
            return backbone(pixels)

    yield "torch bfloat16", bfloat16
    if with_compile:
        yield "torch.compile float32", torch.compile(backbone)
    yield "ONNX Runtime float32", compiled(backbone, backbone.crop, "onnx", "float32")
    yield "ONNX Runtime int8", onnx_int8(backbone, calibration, folder)
    yield "OpenVINO float32", compiled(backbone, backbone.crop, "openvino", "float32")
    yield "OpenVINO bfloat16", compiled(backbone, backbone.crop, "openvino", "bfloat16")
    if installed("nncf"):
        yield "OpenVINO int8", openvino_int8(backbone, calibration)


def onnx_int8(backbone: nn.Module, calibration: Tensor, folder: Path) -> Engine:
    import onnx
    import onnxruntime
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        rows = iter(calibration.split(8))

        def get_next(self) -> dict[str, Any] | None:
            batch = next(self.rows, None)
            return None if batch is None else {"pixels": batch.numpy()}

    plain, prepared, quantised = (folder / f"{name}.onnx" for name in ("plain", "prepared", "int8"))
    onnx.save(onnx_graph(backbone, calibration[:2], "pixels", "features"), plain)
    quant_pre_process(plain, prepared, skip_symbolic_shape=True)
    quantize_static(
        prepared,
        quantised,
        Reader(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(quantised, options, providers=["CPUExecutionProvider"])
    return lambda pixels: torch.from_numpy(session.run(None, {"pixels": pixels.numpy()})[0])


def openvino_int8(backbone: nn.Module, calibration: Tensor) -> Engine:
    import nncf
    import openvino

    graph = openvino.convert_model(backbone, example_input=calibration[:2], input=[-1, *calibration.shape[1:]])
    rows = [batch.numpy() for batch in calibration.split(1)]
    graph = nncf.quantize(graph, nncf.Dataset(rows), subset_size=len(rows))
    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False}
    ready = openvino.compile_model(graph, "CPU", settings)
    return lambda pixels: torch.from_numpy(ready(pixels.numpy())[0].copy())


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@torch.inference_mode()
def measure(name: str, images: int, shared: Path, with_compile: bool) -> None:
    backbone = network(name, shared)
    files, labels, others = photographs(shared, images)
    calibration = torch.cat(list(prepared(others, backbone)))
    with tempfile.TemporaryDirectory() as folder:
        contenders = dict(engines(backbone, calibration, Path(folder), with_compile))
        for run in contenders.values():
            run(calibration[:BATCH])
        seconds: dict[str, list[float]] = {one: [] for one in contenders}
        found: dict[str, list[Tensor]] = {one: [] for one in contenders}
        for pixels in prepared(files, backbone):
            for one, run in contenders.items():
                start = time.process_time()
                features = run(pixels)
                seconds[one].append((time.process_time() - start) / len(pixels))
                found[one].append(nn.functional.normalize(features.float()))
    show(name, len(files), labels, seconds, {one: torch.cat(some).numpy() for one, some in found.items()})


def show(name: str, count: int, labels: list[str], seconds: dict[str, list[float]], vectors: dict[str, Any]) -> None:
    numbers = np.unique(labels, return_inverse=True)[1]
    print(f"\n{name}, {count} photographs of {len(set(labels))} classes")
    print(f"{'':32}{'images/s':>10}{'of torch f32':>14}{'of torch bf16':>14}{'R@1':>8}{'difference':>12}{'cosine':>9}")
    times = {one: float(np.median(some)) for one, some in seconds.items()}
    base, half, exact = times["torch float32"], times["torch bfloat16"], vectors["torch float32"]
    known = recall_at_k(exact, numbers, (1,))[1]
    for one, time_of_image in times.items():
        recall = recall_at_k(vectors[one], numbers, (1,))[1]
        cosine = float((vectors[one] * exact).sum(1).mean())
        ratios = f"{base / time_of_image:13.2f}x{half / time_of_image:13.2f}x"
        print(f"{one:32}{1 / time_of_image:10.1f}{ratios}{recall:8.2f}{recall - known:+12.2f}{cosine:9.4f}", flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("backbones", nargs="*", default=["efficientnet_lite0", "googlenet"])
    arguments.add_argument("--images", type=int, default=1000, help="photographs of test classes")
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--shared", type=Path, default=SHARED, help="the folder with CUB_200_2011")
    arguments.add_argument("--compile", action="store_true", help="torch.compile too")
    chosen = arguments.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    reuse_memory()
    versions = ", ".join(f"{one} {installed(one)}" for one in PACKAGES if installed(one))
    print(f"{platform.machine()}, {chosen.threads} thread(s), load {os.getloadavg()[0]:.1f}, {date.today()}, seed 0")
    print(f"{versions}; processor time, median over batches of {BATCH}", flush=True)
    for name in chosen.backbones:
        measure(name, chosen.images, chosen.shared, chosen.compile)


if __name__ == "__main__":
    main()
