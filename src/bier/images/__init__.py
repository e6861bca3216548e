"""From a file to uint8 pixels: decode, prepare, augment, cache; a torch Dataset of them."""

from bier.images.cache import PixelCache
from bier.images.dataset import Broken, ImageDataset, default_workers, in_order, load_batches
from bier.images.decode import MAX_PIXELS, Box, Source, open_image
from bier.images.transforms import AUGMENTATIONS, augment, prepare, read_prepared

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
    "in_order",
    "load_batches",
    "open_image",
    "prepare",
    "read_prepared",
]
