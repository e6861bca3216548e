"""From a file to uint8 pixels: decode, prepare, augment, cache, batch."""

from bier.images.augment import AUGMENTATIONS, augment
from bier.images.cache import PixelCache
from bier.images.decode import MAX_PIXELS, Box, Source, open_image, printable
from bier.images.loader import Batches, Broken, PreparedImages, in_order
from bier.images.prepare import prepare, read_prepared
from bier.images.workers import default_workers

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
