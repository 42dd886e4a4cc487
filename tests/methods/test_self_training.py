"""Self-training: Algorithm 1's order, when teacher, marginals and queue are renewed, and η."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from csda.errors import ConfigError
from csda.methods.self_training import SelfTraining
from csda.models.dropout import Dropout
from csda.models.two_stream import TwoStream
from csda.presets import configure
from reference.trainings import Training, make_training


def _training(name: str = "csda", **settings: Any) -> tuple[Training, SelfTraining]:
    training = make_training(name, **settings)
    assert isinstance(training.method, SelfTraining)
    return training, training.method


def _events(training: Training, method: SelfTraining, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens from here on, in its order."""
    events: list[str] = []

    def watch(owner: object, name: str, event: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def wrapped(*arguments: Any) -> Any:
            events.append(event)
            return function(*arguments)

        monkeypatch.setattr(owner, name, wrapped)

    watch(training.model, "average_weights", "teacher")
    watch(method.refinement, "observe_labeled", "λ^x")
    watch(method.refinement, "refine", "λ^u")
    watch(method.refinement, "push", "queue")
    watch(method, "learn", "train")
    return events


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"order": "train_first"}, ["teacher", "train", "λ^x", "λ^u", "queue"]),
        ({"order": "update_first"}, ["teacher", "λ^x", "λ^u", "queue", "train"]),
        ({"refresh": "epoch", "teacher_update": "epoch"}, ["train"]),
        ({"queue": "none", "order": "train_first"}, ["teacher", "λ^x", "λ^u", "train"]),
        ({"teacher": "none"}, ["λ^x", "λ^u", "queue", "train"]),
        ({"labeled_from": "student", "order": "train_first"}, ["teacher", "train", "λ^x", "λ^u", "queue"]),
        ({"labeled_from": "start", "order": "train_first"}, ["teacher", "train", "λ^u", "queue"]),
    ],
)
def test_a_step_keeps_the_order_of_its_settings(
    settings: dict[str, str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    training, method = _training(**settings)
    training.begin()
    events = _events(training, method, monkeypatch)
    training.step()
    assert events == expected


def test_by_epoch_teacher_marginals_and_queue_are_renewed_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    training, method = _training(refresh="epoch", teacher_update="epoch", refresh_batch_size=5)
    training.begin()
    events = _events(training, method, monkeypatch)
    training.step()
    training.step()
    method.end_epoch(training.model, training.labeled_set, training.pool)
    # Twelve unlabeled images are three batches of five at most.
    assert events == ["train", "train", "teacher", *["λ^x", "λ^u", "queue"] * 3]


@pytest.mark.parametrize("condition", ["label", "prediction"])
@pytest.mark.parametrize("repeats", ["refresh", "keep"])
def test_what_a_pass_repeats_depends_on_its_tensors_alone(condition: str, repeats: str) -> None:
    """So that a graph of one call can stand for all with the same shapes: here the first one's arguments do."""
    kept: dict[object, list[object]] = {}
    calls = 0

    def again(function: Callable[..., None], *arguments: object) -> None:
        nonlocal calls
        calls += 1
        place = function, tuple(value.shape if isinstance(value, Tensor) else value for value in arguments)
        if place not in kept:
            kept[place] = [value.clone() if isinstance(value, Tensor) else value for value in arguments]
        for ours, given in zip(kept[place], arguments, strict=True):
            if isinstance(ours, Tensor) and isinstance(given, Tensor):
                ours.copy_(given)
        function(*kept[place])

    states = []
    for by in (None, again):
        training, method = _training(refresh="epoch", refresh_batch_size=5, condition=condition, repeats=repeats)
        training.seed(1)
        if by is not None:
            method.queue_at = partial(by, method.queue_at)  # type: ignore[method-assign]
        training.begin()
        for _ in range(3):
            training.step().loss.backward()
            method.end_epoch(training.model, training.labeled_set, training.pool)
        states.append(method.state_dict())
    # Twelve unlabeled images are batches of 5, 5 and 2, beside eight labeled ones in batches of 5 and 3 in turn.
    assert (calls, len(kept)) == (12, 3)
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def test_by_step_the_epoch_has_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    training, method = _training()
    training.begin()
    events = _events(training, method, monkeypatch)
    method.end_epoch(training.model, training.labeled_set, training.pool)
    assert events == []


def _move_student(model: TwoStream) -> None:
    with torch.no_grad():
        for parameter in model.student.parameters():
            parameter.add_(1.0)


@pytest.mark.parametrize(("update", "after_step", "after_epoch"), [("step", 0.25, 0.25), ("epoch", 0.0, 0.25)])
def test_the_teacher_follows_by_step_or_by_epoch(update: str, after_step: float, after_epoch: float) -> None:
    training, method = _training(teacher_update=update, teacher_momentum=0.75)
    training.begin()
    weight = training.model.teacher[0][0].weight
    before = weight.clone()
    _move_student(training.model)
    training.step()
    torch.testing.assert_close(weight - before, torch.full_like(before, after_step))
    method.end_epoch(training.model, training.labeled_set, training.pool)
    torch.testing.assert_close(weight - before, torch.full_like(before, after_epoch))


@pytest.mark.parametrize(("start", "equal"), [("copy", True), ("initial", False)])
def test_the_teacher_starts_as_a_copy_or_stays_as_it_began(start: str, equal: bool) -> None:
    training, _ = _training(teacher_start=start)
    _move_student(training.model)
    training.begin()
    assert torch.equal(training.model.teacher[0][0].weight, training.model.student[0][0].weight) == equal


def test_the_beginning_takes_the_marginals_from_one_exact_pass() -> None:
    training, method = _training(queue="none")
    training.begin()
    images = training.labeled_set(torch.arange(8), "plain")
    probs, labels = training.model.teach(images).softmax(-1), training.labeled_set.targets
    expected = torch.stack([probs[labels == label].mean(0) for label in range(4)])
    torch.testing.assert_close(method.refinement.marginals.labeled, expected)
    torch.testing.assert_close(method.refinement.marginals.unlabeled, expected)


@pytest.mark.parametrize("progress", [0.25, 1.0])
def test_the_weight_of_unlabeled_samples_grows_with_the_training(progress: float) -> None:
    training, _ = _training("da", weight=3.0)
    training.begin()
    output = training.step(progress=progress)
    expected = output.logs["labeled_loss"] + 3.0 * progress * output.logs["unlabeled_loss"]
    torch.testing.assert_close(output.loss.detach(), expected)


def test_without_a_queue_the_batch_itself_is_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    training, method = _training("self-train")
    training.begin()
    seen: dict[str, Tensor] = {}
    compute = method.learn

    def watch(
        model: TwoStream, images: Tensor, labels: Tensor, samples: Any, targets: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        seen.update(indices=samples.indices, targets=targets, mask=mask)
        return compute(model, images, labels, samples, targets, mask)

    monkeypatch.setattr(method, "learn", watch)
    training.seed(3)
    training.step(unlabeled=torch.tensor([9, 2, 4]))
    assert seen["indices"].tolist() == [9, 2, 4]
    assert seen["mask"].all()
    training.seed(3)
    training.labeled_set.batch(torch.arange(6)).weak()
    guessed = training.model.guess(training.pool(torch.tensor([9, 2, 4]), "weak")).softmax(-1)
    torch.testing.assert_close(seen["targets"], guessed, atol=1e-4, rtol=1e-3)


def test_with_a_queue_its_samples_are_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    training, method = _training("vcq")
    training.begin()
    queue = method.refinement.queue
    assert queue is not None
    seen = []
    compute = method.unlabeled_loss

    def watch(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        seen.append((targets, mask))
        return compute(logits, targets, mask)

    monkeypatch.setattr(method, "unlabeled_loss", watch)
    training.step()
    _, aligned, mask = queue.contents()
    assert mask.any()
    assert torch.equal(seen[0][0], aligned)
    assert torch.equal(seen[0][1], mask)


def test_hard_labels_are_made_of_what_is_queued() -> None:
    training, method = _training(soft=False)
    training.begin()
    queue = method.refinement.queue
    assert queue is not None
    targets = queue.targets[queue.mask]
    assert (targets.amax(-1) < 1).any()
    assert set(method.refinement.targets(targets).flatten().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("rebuild", [True, False])
def test_rebuilding_empties_the_queue_before_it_is_renewed(rebuild: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    training, method = _training(refresh="epoch", rebuild=rebuild)
    training.begin()
    queue = method.refinement.queue
    assert queue is not None
    assert queue.mask.any()
    held: list[bool] = []
    monkeypatch.setattr(method, "queue_all", lambda *_: held.append(bool(queue.mask.any())))
    method.end_epoch(training.model, training.labeled_set, training.pool)
    assert held == [not rebuild]


def test_mixed_labels_are_learned_in_a_pass_of_their_own() -> None:
    """L_s is that of labeled images mixed with each other, and L_u what a pass without them gives."""
    training, method = _training(mix_labels=True, labeled_from="teacher")
    model = training.model
    for module in model.modules():
        if isinstance(module, Dropout):
            module.eval()
    images, labels = training.labeled_set(torch.arange(6), "weak"), training.labeled_set.targets[:6]
    samples, targets = training.pool.batch(torch.arange(5)), torch.rand(5, 4).softmax(-1)
    mask = torch.tensor([True, True, False, True, True])
    training.seed(3)
    supervised, unsupervised = method.learn(model, images, labels, samples, targets, mask)

    training.seed(3)
    assert method.mixing is not None
    drawn = method.mixing.draw(torch.ones(6, dtype=torch.bool), None)
    mixed = method.mixing.logits(model, images, drawn)
    one_hot = torch.eye(4)[labels]
    cross_entropy = torch.zeros(())
    for row in range(6):
        share, partner = drawn.shares[row], drawn.partners[row]
        target = share * one_hot[row] + (1 - share) * one_hot[partner]
        cross_entropy -= (target * mixed[row].log_softmax(-1)).sum() / 6
    torch.testing.assert_close(supervised, cross_entropy)
    logits = model(samples.weak())
    by_hand = [-(targets[row] * logits[row].log_softmax(-1)).sum() for row in (0, 1, 3, 4)]
    torch.testing.assert_close(unsupervised, torch.stack(by_hand).mean())


def test_mixed_labels_need_somebody_who_looks_at_whole_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"no unmixed labeled image to compute λ\^x from; choose labeled_from = 'teacher'"
    ):
        configure({"method": "csda", "preset": "default", "mix_labels": True})
    make_training("self-train", mix_labels=True, labeled_from="student")
