"""What runs the network of a model fastest on a CPU, and what that costs in recall.

torch in float32 (channels first, and channels last as Model.encode runs it) and bfloat16, ONNX Runtime, OpenVINO, and
int8 by the static quantisation of the last two (the package nncf for OpenVINO), on prepared photographs in memory. All
engines are in one process, have one thread each and take turns batch by batch. Their processor time is compared, which
other work on the machine does not stretch.

Recall is that of the plain features on a sample of the test classes of CUB-200-2011, where an engine computes in less
than float32; the others are only timed, on a few batches. int8 is calibrated on 128 photographs of training classes.
torch.compile is left out because compiling takes minutes; `--skip` alone measures it too.

Run: taskset -c 1 python benchmarks/engines.py [BACKBONE ...]
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from _report import Report
from bier import recall_at_k
from bier.images import ImageDataset
from bier.models.backbone import Backbone, autocast, folded
from bier.models.backbones import build_backbone
from bier.models.backends import compiled, onnx_graph
from bier.models.embed import pixel_batches
from bier.system import reuse_memory

SHARED = Path(__file__).parents[1].parent / "shared" / "data"
BATCH, CALIBRATION, TIMED, CPU = 64, 128, 4, torch.device("cpu")
PACKAGES = ("onnxruntime", "openvino", "nncf")
BASE, USUAL = "torch float32", "torch bfloat16"
Engine = Callable[[Tensor], Tensor]


def network(name: str, shared: Path) -> Backbone:
    """With its pretrained weights where they are on this machine, else with random ones."""
    if name == "googlenet-bvlc":
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


def engines(backbone: Backbone, calibration: Tensor, folder: Path, skip: list[str]) -> Iterator[tuple[str, Engine]]:
    yield "torch float32, channels first", lambda x: backbone.body(backbone.scale(x).contiguous())
    yield BASE, backbone

    def bfloat16(pixels: Tensor) -> Tensor:
        with autocast("bfloat16", CPU):
            return backbone(pixels)

    yield USUAL, bfloat16
    if "compile" not in skip:
        yield "torch.compile float32", torch.compile(backbone)
    yield "ONNX Runtime float32", compiled(backbone, backbone.crop, "onnx", "float32")
    if "int8" not in skip:
        yield "ONNX Runtime int8", onnx_int8(backbone, calibration, folder)
    yield "OpenVINO float32", compiled(backbone, backbone.crop, "openvino", "float32")
    yield "OpenVINO bfloat16", compiled(backbone, backbone.crop, "openvino", "bfloat16")
    if "int8" not in skip and installed("nncf"):
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
    nncf.set_log_level(40)  # errors
    with redirect_stdout(sys.stderr):  # its progress bars
        graph = nncf.quantize(graph, nncf.Dataset(rows), subset_size=len(rows))
    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False}
    ready = openvino.compile_model(graph, "CPU", settings)
    return lambda pixels: torch.from_numpy(ready(pixels.numpy())[0].copy())


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def take_turns(contenders: dict[str, Engine], batches: Iterator[Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(processor seconds for an image, normalised features) of each; float32 only for the first batches."""
    seconds: dict[str, list[float]] = {one: [] for one in contenders}
    found: dict[str, list[Tensor]] = {one: [] for one in contenders}
    for number, pixels in enumerate(batches):
        for one, run in contenders.items():
            if number < TIMED or one == BASE or "float32" not in one:
                start = time.process_time()
                features = run(pixels)
                seconds[one].append((time.process_time() - start) / len(pixels))
                found[one].append(nn.functional.normalize(features.float()))
    medians = {one: float(np.median(some)) for one, some in seconds.items()}
    return medians, {one: torch.cat(some).numpy() for one, some in found.items()}


@torch.inference_mode()
def measure(name: str, images: int, shared: Path, skip: list[str], report: Report) -> None:
    backbone = network(name, shared)
    files, labels, others = photographs(shared, images)
    calibration = torch.cat(list(prepared(others, backbone)))
    with tempfile.TemporaryDirectory() as folder:
        contenders = dict(engines(backbone, calibration, Path(folder), skip))
        for run in contenders.values():
            run(calibration[:BATCH])
        seconds, vectors = take_turns(contenders, prepared(files, backbone))
    numbers = np.unique(labels, return_inverse=True)[1]
    recall = {one: recall_at_k(some, numbers, (1,))[1] for one, some in vectors.items() if len(some) == len(files)}
    rows = []
    for one, taken in seconds.items():
        cosine = float((vectors[one] * vectors[BASE][: len(vectors[one])]).sum(1).mean())
        recalls = (f"{recall[one]:.2f}", f"{recall[one] - recall[BASE]:+.2f}") if one in recall else ("", "")
        ratios = (f"{seconds[BASE] / taken:.2f}", f"{seconds[USUAL] / taken:.2f}")
        rows.append([one, round(1 / taken, 1), *ratios, *recalls, f"{cosine:.4f}"])
    columns = ["", "images/s", "of torch float32", "of torch bfloat16", "R@1", "difference", "mean cosine"]
    report.table(f"{name}: recall of {len(files)} photographs of {len(set(labels))} classes", columns, rows)
    for one, against in (("ONNX Runtime float32", BASE), ("OpenVINO float32", BASE), ("OpenVINO bfloat16", USUAL)):
        report.figure(f"speed of {one}, {name}", against, seconds[against] / seconds[one], at_least=1)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("backbones", nargs="*", default=["efficientnet_lite0", "googlenet-bvlc"])
    arguments.add_argument("--images", type=int, default=1000, help="photographs of test classes")
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--shared", type=Path, default=SHARED, help="the folder with CUB_200_2011")
    arguments.add_argument(
        "--skip", nargs="*", default=["compile"], choices=("compile", "int8"), help="leave these out"
    )
    chosen = arguments.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    reuse_memory()
    report = Report("engines", [one for one in PACKAGES if installed(one)])
    for name in chosen.backbones:
        measure(name, chosen.images, chosen.shared, chosen.skip, report)
    report.save()


if __name__ == "__main__":
    main()
