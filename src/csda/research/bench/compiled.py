"""What `torch.compile` would make of the parts of a step that this package writes itself, or leaves in many kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from csda.methods.self_training import SelfTraining
from csda.research.bench.noise import batch_trained_on, open_trainer
from csda.research.bench.timing import Action, Deadline, as_graph, time_in_turn


def measure_compiled(chosen: Mapping[str, Any], rounds: int, deadline: Deadline) -> dict[str, Any]:
    """Forward and backward of the network's blocks, and alignment with queue: as they are, by torch, and compiled.

    With the seconds that compilation took, first calls included.
    """
    trainer = open_trainer("csda", chosen)
    method, config, device = trainer.method, trainer.config, trainer.device
    assert isinstance(method, SelfTraining)
    method.begin(trainer.model, trainer.parts.labeled, trainer.parts.unlabeled)
    refinement = method.refinement
    with trainer.engine.arithmetic():
        images = batch_trained_on(trainer).weak()
    unlabeled = trainer.parts.unlabeled.batch(torch.arange(config.unlabeled_batch_size, device=device))
    probs = torch.rand(len(images), trainer.task.num_classes, device=device).softmax(-1)
    labeled_probs, unlabeled_probs = probs[: config.batch_size], probs[: len(unlabeled)]
    labels = trainer.parts.labeled.targets[: config.batch_size]

    blocks = trainer.model.student[:-1]
    layers = nn.Sequential(*(layer for block in blocks for layer in block))

    def learn(network: Callable[[Tensor], Tensor]) -> None:
        blocks.zero_grad(set_to_none=True)
        with trainer.engine.arithmetic():
            network(images).float().square().mean().backward()

    @torch.no_grad()
    def refine() -> Tensor:
        refinement.observe_labeled(labeled_probs, labels)
        aligned = refinement.refine(unlabeled_probs)
        refinement.push(unlabeled, aligned)
        return aligned

    begun = time.perf_counter()
    compiled_layers, compiled_refine = torch.compile(layers), torch.compile(refine)
    learn(compiled_layers)
    compiled_refine()
    seconds = time.perf_counter() - begun
    actions: dict[str, Action] = {
        "blocks": lambda: learn(blocks),
        "blocks by torch": lambda: learn(layers),
        "blocks compiled": lambda: learn(compiled_layers),
        "alignment and queue": refine,
        "alignment and queue compiled": compiled_refine,
    }
    actions = {name: as_graph(action, device, trainer.parts.labeled.generator) for name, action in actions.items()}
    times = time_in_turn(actions, device, rounds, deadline)
    return {**{f"{name} ms": times.figure(name) for name in actions}, "compilation s": seconds}
