"""Logistic regression on frozen features: the control for a pretrained network that is not trained further.

It is fitted directly, without steps. Every training on frozen features starts with this head.
"""

from __future__ import annotations

from pydantic import Field

from csda.config import Settings
from csda.methods.base import Task
from csda.methods.baseline import Baseline
from csda.probe import Balance


class LinearProbeSettings(Settings):
    balance: Balance = Field(
        "weights",
        description="how class frequencies are removed: class weights in the loss, division by the prior, or not",
    )


class LinearProbe(Baseline):
    """scikit-learn's logistic regression on the labels alone."""

    def __init__(self, task: Task, settings: LinearProbeSettings) -> None:
        super().__init__(task, settings)
        self.settings = settings

    @property
    def balance(self) -> Balance:
        return self.settings.balance
