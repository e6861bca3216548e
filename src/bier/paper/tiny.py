"""Drawn data in the layouts of CUB-200-2011 and CIFAR-10, so that a smoke test needs no download."""

from pathlib import Path

import numpy as np
from PIL import Image

SIDE, CLASSES, IMAGES = 48, 8, 6
FIRST_TEST_CLASS = 101
DONE = "complete"


def draw_tiny_data(folder: Path) -> Path:
    """Write both data sets into `folder`, unless they are there: a few classes, each with a pattern of its own."""
    if not (folder / DONE).is_file():
        _cub(folder / "CUB_200_2011", np.random.default_rng(0))
        _cifar10(folder / "cifar-10-batches-bin", np.random.default_rng(1))
        (folder / DONE).touch()
    return folder


def _cub(home: Path, random: np.random.Generator) -> None:
    lists: dict[str, list[str]] = {"images": [], "image_class_labels": [], "classes": [], "bounding_boxes": []}
    count = 0
    for number in (*range(1, CLASSES + 1), *range(FIRST_TEST_CLASS, FIRST_TEST_CLASS + CLASSES)):
        name = f"{number:03d}.Tiny_{number}"
        lists["classes"].append(f"{number} {name}")
        (home / "images" / name).mkdir(parents=True, exist_ok=True)
        pattern = random.integers(0, 256, (6, 6, 3)).repeat(SIDE // 6, axis=0).repeat(SIDE // 6, axis=1)
        for image in range(IMAGES):
            count += 1
            noisy = np.clip(pattern + random.normal(scale=160, size=pattern.shape), 0, 255).astype(np.uint8)
            Image.fromarray(noisy).save(home / "images" / name / f"{image}.png")
            lists["images"].append(f"{count} {name}/{image}.png")
            lists["image_class_labels"].append(f"{count} {number}")
            lists["bounding_boxes"].append(f"{count} 4.0 4.0 40.0 40.0")
    for name, lines in lists.items():
        (home / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _cifar10(home: Path, random: np.random.Generator) -> None:
    home.mkdir(parents=True, exist_ok=True)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        labels = np.tile(np.arange(10, dtype=np.uint8), 4)  # 40 records: a label, then 3,072 pixels
        pixels = (labels[:, None] * 20 + random.integers(0, 60, (40, 3072))).astype(np.uint8)
        (home / f"{name}.bin").write_bytes(np.concatenate([labels[:, None], pixels], axis=1).tobytes())
