"""From a file to uint8 pixels: decode, prepare, augment, cache, batch."""

from bier.images.cache import PixelCache
from bier.images.dataset import Batches, Broken, PreparedImages, default_workers, in_order
from bier.images.decode import MAX_PIXELS, Box, Source, open_image, printable
from bier.images.transforms import AUGMENTATIONS, augment, prepare, read_prepared

__all__ = [
    "AUGMENTATIONS",
    "MAX_PIXELS",
    "Batches",
    "Box",
    "Broken",
    "PixelCache",
    "PreparedImages",
    "Source",
    "augment",
    "default_workers",
    "in_order",
    "open_image",
    "prepare",
    "printable",
    "read_prepared",
]
