"""Data sets by name: official benchmarks, any folder or table, pre-computed features, and an embedded one."""

from bier.data.catalog import NAMES, expected, load, load_for, note
from bier.data.part import Dataset, Part
from bier.data.sampler import BalancedBatches
from bier.data.sources import list_images

__all__ = ["NAMES", "BalancedBatches", "Dataset", "Part", "expected", "list_images", "load", "load_for", "note"]
