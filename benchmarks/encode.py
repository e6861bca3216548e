"""Images per second from JPEG files to vectors: Model.encode, the bare network on ready tensors, and a plain loop.

The plain loop opens each file with PIL and runs timm's model in float32, 64 pictures at a time. Each contender lives
in a process of its own; they take turns and the best round counts. Model.encode is measured with the other backends,
too, where they are installed. Run: python benchmarks/encode.py [FOLDER]
"""

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image

from _report import Report
from _turns import take_turns
from bier import EmbeddingEnsemble, Model
from bier.images import ImageDataset
from bier.models.backbone import autocast, resolve_precision
from bier.models.backbones import build_backbone
from bier.models.backends import Backend
from bier.models.embed import pixel_batches
from bier.system import reuse_memory

SEED, BATCH, GROUPS = 0, 64, (96, 160, 256)
CUB = Path(__file__).parents[1].parent / "shared" / "data" / "CUB_200_2011" / "images"


def jpegs(folder: Path, count: int) -> list[Path]:
    """Real photographs where there are any, else noise drawn smoothly, which decodes at about the same cost."""
    found = sorted(folder.rglob("*.jpg"))
    if len(found) >= count:
        return found[:: len(found) // count][:count]
    made, random = Path(tempfile.mkdtemp()), np.random.default_rng(SEED)
    for number in range(count):
        coarse = Image.fromarray(random.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        coarse.resize((256, 192), Image.Resampling.BICUBIC).save(made / f"{number}.jpg", quality=90)
    return sorted(made.glob("*.jpg"))


def our_model() -> Model:
    torch.manual_seed(SEED)
    return Model(build_backbone("efficientnet_lite0"), EmbeddingEnsemble(1280, GROUPS))


def encode(files: list[Path], backend: Backend = "torch") -> Callable[[], object]:
    model = our_model()
    return lambda: model.encode(files, batch_size=BATCH, backend=backend)


def bare(files: list[Path]) -> Callable[[], object]:
    """Our folded network in our precision on pixels that are in memory already."""
    reuse_memory()
    model = our_model()
    network, size, crop = model.network(), model.backbone.resize, model.backbone.crop
    ready = list(pixel_batches(ImageDataset(files, size), size, crop, BATCH, 0))

    def run() -> None:
        with torch.inference_mode(), autocast("auto", model.device):
            for pixels in ready:
                network(pixels.to(model.device))

    return run


def plain(files: list[Path]) -> Callable[[], object]:
    model = our_model()
    network = timm.create_model("tf_efficientnet_lite0", num_classes=0).eval().to(model.device)

    def picture(path: Path) -> torch.Tensor:
        image = Image.open(path).convert("RGB")
        scale = 256 / max(image.size)
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR)
        square = Image.new("RGB", (256, 256), (255, 255, 255))
        square.paste(image, ((256 - image.width) // 2, (256 - image.height) // 2))
        return (torch.from_numpy(np.array(square)[16:240, 16:240]).permute(2, 0, 1).float() - 127) / 128

    def run() -> None:
        with torch.no_grad():
            for start in range(0, len(files), BATCH):
                batch = torch.stack([picture(path) for path in files[start : start + BATCH]])
                model.ensemble.vector(model.ensemble(network(batch.to(model.device))))

    return run


CONTENDERS = {
    "bare network, ready tensors": bare,
    "Model.encode from files": encode,
    "plain timm + PIL, float32": plain,
}
for package, backend in (("onnxruntime", "onnx"), ("openvino", "openvino")):
    if find_spec(package) is not None:
        CONTENDERS[f"Model.encode from files, {backend}"] = partial(encode, backend=backend)


def prepare(files: list[Path], name: str) -> Callable[[], object]:
    return CONTENDERS[name](files)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("folder", nargs="?", type=Path, default=CUB)
    arguments.add_argument("--images", type=int, default=512)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads())
    chosen = arguments.parse_args()
    report = Report("encode", ["timm", "pillow"], SEED)
    files = jpegs(chosen.folder, chosen.images)
    seconds = take_turns(partial(prepare, files), CONTENDERS, chosen.rounds, chosen.threads)
    device = our_model().device
    precision = str(resolve_precision("auto", device)).removeprefix("torch.")
    best = {name: min(times) for name, times in seconds.items()}
    what = f"EfficientNet-Lite0, {precision} on {device}, {len(files)} files"
    rows = [[name, len(files) / one] for name, one in best.items()]
    report.table(f"encoding: {what}", ["", "images/s"], rows)
    bare_best, ours_best, plain_best, *_ = best.values()
    report.figure("speed of Model.encode from files", f"bare network, {what}", bare_best / ours_best, at_least=0.9)
    report.figure("Model.encode from files, times as fast", f"timm + PIL, {what}", plain_best / ours_best, at_least=3)
    for name in list(best)[3:]:  # engines.py compares the networks alone, and has others
        report.figure(f"{name}, times as fast", f"torch, {what}", ours_best / best[name])
    report.save()


if __name__ == "__main__":
    main()
