"""Images per second from files to uint8 batches: ours with and without the cache beside torchvision.

    python benchmarks/loading.py             48 photographs of about 3072 x 2048, and pictures of 256 pixels
    python benchmarks/loading.py --workers 4

Everyone makes the same tensors from the same files in batches of 16: longest side to 256, white padding to
256 x 256, a random 224 x 224 crop, a random mirror, uint8 (B, 3, 224, 224). torchvision is ImageFolder +
DataLoader with its own transforms. A round is one pass over the files (twenty with the cache), the start of the
workers included; rounds of all contenders take turns and the best of each counts. The cache is read with its
default of no workers at all; on a single core nobody has workers.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from _report import Report, clock, cores
from bier.images import ImageDataset, load_batches

SIZE, CROP, BATCH, SEED = 256, 224, 16, 0
REAL = Path(__file__).parents[2] / "shared" / "data" / "CUB_200_2011" / "images"


def motives(count: int) -> list[Image.Image]:
    """Real photographs where there are some, else smooth random colours."""
    files = sorted(REAL.glob("*/*.jpg"))
    if len(files) >= count:
        return [Image.open(file).convert("RGB") for file in files[:: len(files) // count][:count]]
    rng = np.random.default_rng(SEED)
    tiny = [Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)) for _ in range(count)]
    return [image.resize((SIZE, SIZE * 3 // 4), Image.Resampling.BICUBIC) for image in tiny]


def write_pictures(folder: Path, count: int, longest: int) -> None:
    """JPEGs of quality 90 with the fine grain of a sensor, which makes files as large as a camera's."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(SEED)
    grain = rng.normal(0, 6, (longest * 2, longest * 2, 1)).astype(np.int16)
    for number, image in enumerate(motives(count)):
        scale = longest / max(image.size)
        large = image.resize([round(side * scale) for side in image.size], Image.Resampling.BICUBIC)
        pixels = np.asarray(large).astype(np.int16)
        y, x = rng.integers(0, longest, 2)
        pixels += grain[y : y + pixels.shape[0], x : x + pixels.shape[1]]
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(folder / f"{number:03}.jpg", quality=90)


def pad_to_square(image: Image.Image) -> Image.Image:
    left, top = (SIZE - image.width) // 2, (SIZE - image.height) // 2
    return F.pad(image, [left, top, SIZE - image.width - left, SIZE - image.height - top], fill=255)


def torchvision_batches(root: Path, workers: int, crop: v2.Transform, mirror: float) -> DataLoader:
    steps = [v2.Resize(None, max_size=SIZE), v2.Lambda(pad_to_square), crop, v2.RandomHorizontalFlip(mirror)]
    transform = v2.Compose([*steps, v2.PILToTensor()])
    return DataLoader(ImageFolder(root, transform), BATCH, shuffle=mirror > 0, num_workers=workers)


def our_plan(count: int, seed: int) -> list[list[tuple[int, int]]]:
    rng = np.random.default_rng(seed)
    order, seeds = rng.permutation(count).tolist(), rng.integers(0, 2**62, count).tolist()
    pairs = list(zip(order, seeds, strict=True))
    return [pairs[start : start + BATCH] for start in range(0, count, BATCH)]


def images_per_second(make: Callable[[int], object], passes: int) -> float:
    seen, start = 0, clock()
    for number in range(passes):
        for pixels, _ in make(number):  # type: ignore[attr-defined]
            assert pixels.shape[1:] == (3, CROP, CROP)
            assert pixels.dtype == torch.uint8
            seen += len(pixels)
    return seen / (clock() - start)


def difference(root: Path, files: list[Path]) -> float:
    """Mean absolute difference between our centre crops and torchvision's, of 255."""
    theirs = torch.cat([pixels for pixels, _ in torchvision_batches(root, 0, v2.CenterCrop(CROP), 0.0)])
    plan = [[(index, 0) for index in range(len(files))]]
    (ours,) = load_batches(ImageDataset(files, SIZE, crop=CROP), plan, workers=0)
    return float((theirs.float() - ours.float()).abs().mean())


def compare(title: str, root: Path, options: argparse.Namespace, goals: dict[str, float], report: Report) -> None:
    files, workers = sorted(root.glob("*/*.jpg")), options.workers
    count = len(files)
    settings = {"crop": CROP, "augment": "paper"}
    plain = ImageDataset(files, SIZE, **settings)
    start = clock()
    cached = ImageDataset(files, SIZE, **settings).cached(root.with_name(root.name + "-cache"))
    build = clock() - start
    contenders: dict[str, tuple[Callable[[int], object], int]] = {
        "torchvision": (lambda _: torchvision_batches(root, workers, v2.RandomCrop(CROP), 0.5), 1),
        "bier": (lambda n: plain.batches(our_plan(count, n), workers), 1),
        "bier, cached": (lambda n: cached.batches(our_plan(count, n)), 20),
    }
    best = dict.fromkeys(contenders, 0.0)
    for _ in range(options.rounds):
        for name, (make, passes) in contenders.items():
            best[name] = max(best[name], images_per_second(make, passes))
    megabytes = sum(file.stat().st_size for file in files) / count / 1e6
    kind = f"{title} of {megabytes:.2f} MB, {workers} workers"
    rows = [[name, speed, speed / best["torchvision"]] for name, speed in best.items()]
    rows += [["bier, building the cache", count / build, count / build / best["torchvision"]]]
    report.table(f"loading: {title}", ["", "images/s", "x torchvision"], rows)
    for name in ("bier", "bier, cached"):
        faster = best[name] / best["torchvision"]
        report.figure(f"loading with {name}, times as fast", f"torchvision, {kind}", faster, at_least=goals.get(name))
    print(f"centre crops differ from torchvision's by {difference(root, files):.2f} of 255 on average")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=0 if cores() == 1 else 2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(SEED)
    report = Report("loading", ["torchvision", "pillow"], SEED)
    with tempfile.TemporaryDirectory() as folder:
        large, small = Path(folder) / "large", Path(folder) / "small"
        # Twelve times 256: no side has to be rounded, which torchvision does downwards.
        write_pictures(large / "one", 48, 3072)
        write_pictures(small / "one", 480, 256)
        compare("photographs", large, options, {"bier": 1.5, "bier, cached": 10.0}, report)
        compare("small pictures", small, options, {}, report)
    report.save()


if __name__ == "__main__":
    main()
