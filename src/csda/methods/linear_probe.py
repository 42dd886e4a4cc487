"""Logistic regression on frozen features: the control for what a pretrained network gives without training.

It is exact, so there is nothing to step. Every training on frozen features begins with such a head, and here it is all.
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
        description="how class frequencies are left out: by class weights in the loss, by dividing by them, or not",
    )


class LinearProbe(Baseline):
    """The labels alone, through scikit-learn's logistic regression."""

    def __init__(self, task: Task, settings: LinearProbeSettings) -> None:
        super().__init__(task, settings)
        self.settings = settings

    @property
    def balance(self) -> Balance:
        return self.settings.balance
