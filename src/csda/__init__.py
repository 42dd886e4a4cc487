"""Train medical image classifiers from few labeled and many unlabeled images, where some classes are rare.

The names below are imported when first used, so `import csda` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from csda.classifier import CSDAClassifier
    from csda.condition_queue import VariableConditionQueue
    from csda.marginals import ClassMarginals
    from csda.predict import load
    from csda.training import train

__version__ = "0.1.0"
__all__ = ["CSDAClassifier", "ClassMarginals", "VariableConditionQueue", "load", "train"]

_HOMES = {
    "CSDAClassifier": "csda.classifier",
    "ClassMarginals": "csda.marginals",
    "VariableConditionQueue": "csda.condition_queue",
    "load": "csda.predict",
    "train": "csda.training",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'csda' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
