"""Training: methods as sets of settings, the loop, checkpoints, many processes."""

from bier.training.loop import Observer, Run, train
from bier.training.methods import METHODS, resolve

__all__ = ["METHODS", "Observer", "Run", "resolve", "train"]
