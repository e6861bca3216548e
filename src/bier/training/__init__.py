"""Training: methods as sets of settings, the loop, checkpoints, many processes.

The loop is imported when first used, so that settings can be resolved without waiting for torch.
"""

from typing import TYPE_CHECKING, Any

from bier.training.methods import METHODS, resolve

if TYPE_CHECKING:
    from bier.training.loop import Observer, train
    from bier.training.state import TrainingResult

__all__ = ["METHODS", "Observer", "TrainingResult", "resolve", "train"]


if not TYPE_CHECKING:  # a type checker would take every name for one of ours

    def __getattr__(name: str) -> Any:
        if name not in ("Observer", "TrainingResult", "train"):
            raise AttributeError(f"module 'bier.training' has no attribute {name!r}")
        from bier.training import loop

        return getattr(loop, name)
