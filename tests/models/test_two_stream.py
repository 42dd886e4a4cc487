"""Teacher and student."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from csda.models.alexnet import alexnet
from csda.models.backbones import BACKBONES, build_encoder
from csda.models.two_stream import TwoStream, probabilities


def _model(**options: bool) -> TwoStream:
    torch.manual_seed(0)
    return TwoStream(alexnet(32, 3), 4, **options)


def test_the_teacher_follows_by_moving_average_statistics_included() -> None:
    model = _model()
    with torch.no_grad():
        for value in model.student.state_dict().values():
            if value.is_floating_point():
                value.add_(torch.rand_like(value))
    before = {name: value.clone() for name, value in model.teacher.state_dict().items()}
    model.update_teacher(0.9)
    student = model.student.state_dict()
    for name, value in model.teacher.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, 0.9 * before[name] + 0.1 * student[name])


def test_the_teacher_starts_as_a_copy() -> None:
    model = _model()
    images = torch.rand(3, 3, 32, 32)
    with torch.no_grad():
        for value in model.student.parameters():
            value.add_(0.1)
    model.eval()
    assert not torch.equal(model(images), model.teach(images))
    model.start_teacher()
    assert torch.equal(model(images), model.teach(images))


def test_only_student_and_head_are_trained() -> None:
    model = _model()
    model(torch.rand(4, 3, 32, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in (*model.student.parameters(), *model.head.parameters()))
    assert all(parameter.grad is None for parameter in model.teacher.parameters())


def test_the_teacher_predicts_in_evaluation_mode_unless_told() -> None:
    assert not _model().train().teacher.training
    assert _model(teacher_trains=True).train().teacher.training
    assert not _model(teacher_trains=True).eval().teacher.training


def test_a_guess_is_made_in_evaluation_mode_and_leaves_no_trace() -> None:
    model = _model().train()
    images = torch.rand(4, 3, 32, 32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first, second = model.guess(images), model.guess(images)
    assert torch.equal(first, second)
    assert not first.requires_grad
    assert model.student.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_probabilities_are_a_distribution_or_one_a_label() -> None:
    logits = torch.tensor([[1.0, -1.0, 0.0]])
    torch.testing.assert_close(probabilities(logits, False).sum(), torch.tensor(1.0))
    torch.testing.assert_close(probabilities(logits, True), torch.sigmoid(logits))


@pytest.mark.parametrize("backbone", sorted(BACKBONES))
def test_several_tensors_of_images_pass_as_one(backbone: str) -> None:
    torch.manual_seed(0)
    model = TwoStream(build_encoder(backbone, 32, 3, dropout=0.0), 4)
    twin = deepcopy(model)
    images = torch.rand(7, 3, 32, 32)
    parts = images.split((2, 4, 1))
    for together, apart in (
        (model(images), twin(*parts)),
        (model.teach(images), twin.teach(*parts)),
        (model.guess(images), twin.guess(*parts)),
        (model.teach(images[2:]), twin.teach(images[:0], images[2:])),
    ):
        assert torch.equal(together, apart)
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("backbone", sorted(BACKBONES))
def test_images_that_pass_apart_have_their_own_statistics(backbone: str) -> None:
    torch.manual_seed(0)
    model = TwoStream(build_encoder(backbone, 32, 3, dropout=0.0), 4).double()
    twin = deepcopy(model)
    parts = torch.rand(3, 3, 32, 32, dtype=torch.float64), 0.2 * torch.rand(5, 3, 32, 32, dtype=torch.float64)
    logits = model.forward_apart(*parts)
    expected = torch.cat([twin(part) for part in parts])
    torch.testing.assert_close(logits, expected)
    logits.square().sum().backward()
    expected.square().sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
