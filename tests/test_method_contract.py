"""What every method promises, over all of METHODS and the paper's parts on top of each method that takes them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from csda.config import RunConfig
from csda.data.loader import Batch, ImagePool
from csda.errors import ConfigError
from csda.methods import METHODS
from csda.methods.self_training import SelfTraining
from csda.models.backbones import BACKBONES
from reference.cases import OnDevice
from reference.trainings import CLASSES, Training, make_training

PARTS = [{"align": align, "queue": queue} for align in ("none", "da", "csda") for queue in ("none", "vcq")]
SETTINGS_OF_OTHERS = ("upper-bound", "self-train", "da", "vcq", "csda-folds")
"""Names of the same code as `baseline` and `csda`."""
WITH_PARTS = ("self-train", "fixmatch", "glm", "nm", "bis")
READINGS: list[dict[str, Any]] = [
    {"temperature": "adaptive"},
    {"temperature": "unlabeled"},
    {"temperature": 0.5, "gamma": 2.0, "delta": 1.0},
    {"refresh": "epoch", "order": "train_first", "teacher_update": "epoch"},
    {"order": "train_first"},
    {"labeled_from": "student"},
    {"labeled_from": "start", "share": "batch"},
    {"labeled_from": "folds", "condition": "truth", "against": "labeled", "shrinkage": 3.0},
    {"guesses_from": "both", "basis": 0.1, "shift": 0.01, "guess_temperature": 0.8},
    {"passes": "two", "teacher_mode": "train", "soft": False},
    {"mix_labels": True, "labeled_from": "teacher"},
]
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in METHODS),
    *((name, part) for name in WITH_PARTS for part in PARTS[1:]),
    *(("csda", reading) for reading in READINGS),
    ("self-train", {"teacher": "ema"}),
    ("csda-folds", {"align": "none"}),
]
MULTI_LABEL_CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in METHODS if METHODS[name].multi_label),
    *((name, PARTS[-1]) for name in WITH_PARTS if METHODS[name].multi_label),
]


def _identity(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(map(str, value.values())) or "plain"
    return {True: "multi-label", False: "one-class"}[value] if isinstance(value, bool) else str(value)


every_method = pytest.mark.parametrize(
    ("name", "settings", "multi_label"),
    [*((*case, False) for case in CASES), *((*case, True) for case in MULTI_LABEL_CASES)],
    ids=_identity,
)
every_name = pytest.mark.parametrize(
    ("name", "multi_label"),
    [*((name, False) for name in METHODS), *((name, True) for name in METHODS if METHODS[name].multi_label)],
    ids=_identity,
)


def _begun(name: str, settings: dict[str, Any], multi_label: bool, **options: Any) -> Training:
    training = make_training(name, multi_label=multi_label, **options, **settings)
    training.begin()
    return training


def _gradients(training: Training) -> dict[str, Tensor]:
    owners = (("model", training.model), ("method", training.method))
    return {
        f"{owner}.{name}": parameter.grad
        for owner, module in owners
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and parameter.grad is not None
    }


def _assert_finite(training: Training, **inputs: Any) -> None:
    training.model.zero_grad()
    training.method.zero_grad()
    output = training.step(**inputs)
    assert output.loss.isfinite()
    assert output.loss.shape == ()
    assert all(value.shape == () and value.isfinite() and not value.requires_grad for value in output.logs.values())
    output.loss.backward()
    gradients = _gradients(training)
    assert gradients
    for gradient in gradients.values():
        assert gradient.isfinite().all()


@every_method
def test_all_draws_come_from_the_runs_generator(name: str, settings: dict[str, Any], multi_label: bool) -> None:
    """So that several runs can train side by side in one process."""
    training = make_training(name, multi_label=multi_label, **settings)
    training.model.draw_from(training.pool.generator)
    training.method.generator = training.pool.generator
    before = torch.get_rng_state()
    training.begin()
    training.step()
    assert torch.equal(torch.get_rng_state(), before)


@every_method
def test_loss_and_gradients_are_finite_and_reach_all_that_is_trained(
    name: str, settings: dict[str, Any], multi_label: bool
) -> None:
    training = _begun(name, settings, multi_label)
    _assert_finite(training)
    _assert_finite(training)
    for owner, module in (("model", training.model), ("method", training.method)):
        for parameter_name, parameter in module.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None, f"nothing trains {owner}.{parameter_name}"
    training.method.end_epoch(training.model, training.labeled_set, training.pool)
    assert all(value.isfinite().all() for value in training.method.history().values())


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("name", [name for name in METHODS if name not in SETTINGS_OF_OTHERS])
def test_every_method_trains_every_backbone(name: str, backbone: str) -> None:
    training = _begun(name, {}, False, backbone=backbone)
    before = {key: value.clone() for key, value in training.model.state_dict().items()}
    _update(training, 1)
    _assert_finite(training)
    for key, value in training.model.named_parameters():
        assert key.startswith("teacher.") or not torch.equal(value, before[key]), f"nothing trains {key}"
    training.method.end_epoch(training.model, training.labeled_set, training.pool)


@every_method
def test_no_gradient_goes_through_a_pseudo_label(
    name: str, settings: dict[str, Any], multi_label: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = _begun(name, settings, multi_label)
    # What a first step remembers may be a target of the second.
    training.step()
    seen = []
    compute = training.method.unlabeled_loss

    def watch(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        seen.append(targets)
        assert logits.requires_grad
        return compute(logits, targets, mask)

    monkeypatch.setattr(training.method, "unlabeled_loss", watch)
    training.step().loss.backward()
    assert len(seen) == METHODS[name].uses_unlabeled
    assert not any(targets.requires_grad for targets in seen)
    assert all(parameter.grad is None for parameter in training.model.teacher.parameters())


def test_unlabeled_images_have_no_labels() -> None:
    training = make_training("csda")
    batch = training.pool.batch(torch.arange(3))
    assert type(training.pool) is ImagePool
    assert type(batch) is Batch
    for holder in (training.pool, batch):
        assert not any(word in field for field in vars(holder) for word in ("target", "label", "truth", "class"))


@every_method
def test_nothing_is_copied_to_the_host_within_a_step(name: str, settings: dict[str, Any], multi_label: bool) -> None:
    _step_on_device(_begun(name, settings, multi_label))


@pytest.mark.parametrize("backbone", BACKBONES)
def test_nothing_is_copied_to_the_host_by_a_backbone(backbone: str) -> None:
    _step_on_device(_begun("csda", {}, False, backbone=backbone))


def _step_on_device(training: Training) -> None:
    labeled, unlabeled, progress = torch.arange(6), torch.arange(5), torch.tensor(0.5)
    with OnDevice():
        output = training.method.step(
            training.model,
            training.labeled_set.batch(labeled),
            training.pool.batch(unlabeled),
            training.pool,
            progress,
        )
        output.loss.backward()


@every_method
def test_nothing_is_copied_to_the_host_by_what_a_pass_repeats(
    name: str, settings: dict[str, Any], multi_label: bool
) -> None:
    training = _begun(name, settings, multi_label)

    def guarded(function: Callable[..., None], *arguments: object) -> None:
        with OnDevice():
            function(*arguments)

    if isinstance(training.method, SelfTraining):
        training.method.queue_at = partial(guarded, training.method.queue_at)  # type: ignore[method-assign]
    training.begin()
    training.method.end_epoch(training.model, training.labeled_set, training.pool)


@every_method
def test_saved_and_loaded_the_next_step_is_bitwise_the_same(
    name: str, settings: dict[str, Any], multi_label: bool
) -> None:
    training = _begun(name, settings, multi_label)
    _update(training, 1)
    saved = deepcopy((training.model.state_dict(), training.method.state_dict()))
    other = make_training(name, multi_label=multi_label, **settings)
    other.model.load_state_dict(saved[0])
    other.method.load_state_dict(saved[1])
    assert torch.equal(_update(training, 2), _update(other, 2))
    for ours, theirs in ((training.model, other.model), (training.method, other.method)):
        state = theirs.state_dict()
        for key, value in ours.state_dict().items():
            assert torch.equal(value, state[key]), key


def _update(training: Training, seed: int) -> Tensor:
    """One step with plain gradient descent; its loss."""
    training.seed(seed)
    training.model.zero_grad()
    training.method.zero_grad()
    loss = training.step(unlabeled=torch.arange(12).roll(seed)[:5]).loss
    loss.backward()
    with torch.no_grad():
        for module in (training.model, training.method):
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad
    return loss.detach()


@every_name
def test_a_class_absent_from_the_labeled_batch_survives(name: str, multi_label: bool) -> None:
    training = _begun(name, {}, multi_label)
    _assert_finite(training, labeled=torch.tensor([0, 4, 7]))


@every_name
def test_a_batch_of_one_survives(name: str, multi_label: bool) -> None:
    training = _begun(name, {}, multi_label, image_size=64)
    _assert_finite(training, labeled=torch.tensor([0]), unlabeled=torch.tensor([0]))


@every_name
def test_a_step_before_any_beginning_survives(name: str, multi_label: bool) -> None:
    """The queue, the memory and the ensemble are empty then."""
    _assert_finite(make_training(name, multi_label=multi_label))


@pytest.mark.parametrize("name", ["vcq", "csda", *WITH_PARTS])
def test_an_empty_queue_trains_on_labels_alone(name: str) -> None:
    training = make_training(name, queue="vcq", refresh="epoch")
    _assert_finite(training)
    assert training.step().logs["unlabeled_loss"] == 0
    assert training.step().logs["filled"] == 0


@pytest.mark.parametrize(("name", "multi_label"), [("fixmatch", False), ("bis", False), ("bis", True)])
def test_an_all_false_mask_trains_on_labels_alone(name: str, multi_label: bool) -> None:
    training = _begun(name, {"threshold": 1.0}, multi_label)
    _assert_finite(training)
    output = training.step()
    assert output.logs["unlabeled_loss"] == output.logs["filled"] == 0
    assert torch.equal(output.loss.detach(), output.logs["labeled_loss"])


@every_name
def test_pseudo_labels_are_probabilities(name: str, multi_label: bool) -> None:
    training = _begun(name, {}, multi_label)
    training.step()
    training.model.eval()
    with torch.no_grad():
        for probs in training.method.pseudo_labels(training.model, training.pool(torch.arange(5), "plain")):
            assert probs.shape == (5, CLASSES)
            assert ((probs >= 0) & (probs <= 1.0 + 1e-6)).all()
            if not multi_label:
                torch.testing.assert_close(probs.sum(-1), torch.ones(5))


def test_a_method_that_cannot_take_several_labels_says_so() -> None:
    with pytest.raises(ConfigError, match=r"'fixmatch' needs one class per image.*choose self-train, glm, nm, bis"):
        make_training("fixmatch", multi_label=True)


def test_entries_are_complete_and_their_settings_described() -> None:
    for name, entry in METHODS.items():
        assert entry.summary, name
        assert entry.paper, name
        assert set(entry.defaults) <= {*RunConfig.model_fields, *entry.settings.model_fields}
        for key, field in entry.settings.model_fields.items():
            assert field.description, f"{name}: the setting {key} is not described"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="capture in a CUDA graph needs a GPU")
@every_method
def test_a_step_can_be_captured(name: str, settings: dict[str, Any], multi_label: bool) -> None:
    training = _begun(name, settings, multi_label, device="cuda")
    labeled, unlabeled = torch.arange(6, device="cuda"), torch.arange(5, device="cuda")
    progress = torch.tensor(0.5, device="cuda")

    def step() -> Tensor:
        training.model.zero_grad()
        training.method.zero_grad()
        labeled_batch, unlabeled_batch = training.labeled_set.batch(labeled), training.pool.batch(unlabeled)
        loss = training.method.step(training.model, labeled_batch, unlabeled_batch, training.pool, progress).loss
        loss.backward()
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(training.pool.generator)
    with torch.cuda.graph(graph, stream=stream):
        loss = step()
    graph.replay()
    assert loss.isfinite()
