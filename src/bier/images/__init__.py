"""From a file to uint8 pixels: decode, prepare, augment, cache; a torch Dataset of them.

The Dataset is imported when it is first used, so that a process which only decodes does not wait for torch.
"""

from typing import TYPE_CHECKING, Any

from bier.images.cache import PixelCache
from bier.images.decode import MAX_PIXELS, Box, Source, open_image
from bier.images.transforms import AUGMENTATIONS, augment, prepare, read_prepared

if TYPE_CHECKING:
    from bier.images.dataset import Broken, ImageDataset, default_workers, find_broken, in_order, load_batches

__all__ = [
    "AUGMENTATIONS",
    "MAX_PIXELS",
    "Box",
    "Broken",
    "ImageDataset",
    "PixelCache",
    "Source",
    "augment",
    "default_workers",
    "find_broken",
    "in_order",
    "load_batches",
    "open_image",
    "prepare",
    "read_prepared",
]


if not TYPE_CHECKING:  # a type checker would take every name for one of ours

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'bier.images' has no attribute {name!r}")
        from bier.images import dataset

        return getattr(dataset, name)
