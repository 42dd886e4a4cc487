"""The queue against a list that samples join and leave one at a time; then every misreading by name."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from hypothesis import given
from hypothesis import strategies as st

from csda import condition_queue
from csda.condition_queue import VariableConditionQueue
from reference import condition_queue as reference
from reference.cases import Case, OnDevice, cases, thoroughly

EVEN = torch.tensor([0.5, 0.5])


def assert_same(actual: VariableConditionQueue, expected: reference.VariableConditionQueue) -> None:
    """Filled slots from the newest to the oldest, then the same again with the mask off."""
    entries = expected.entries[::-1]
    indices, targets, mask = actual.contents()
    assert mask.tolist() == [slot < len(entries) for slot in range(actual.capacity)]
    if not entries:
        assert indices.tolist() == [0] * actual.capacity
        assert targets.count_nonzero() == 0
    else:
        slots = [entries[slot % len(entries)] for slot in range(actual.capacity)]
        assert indices.tolist() == [entry.index for entry in slots]
        assert targets.tolist() == [entry.target for entry in slots]
    assert actual.counts().tolist() == [sum(e.class_ == i for e in entries) for i in range(actual.num_classes)]


def held(queue: VariableConditionQueue) -> list[int]:
    indices, _, mask = queue.contents()
    return indices[mask].tolist()


def sure(*classes: int) -> torch.Tensor:
    """Aligned predictions of two classes that are admitted to the classes named."""
    return torch.tensor([[0.9, 0.1] if class_ == 0 else [0.1, 0.9] for class_ in classes])


def test_examples_in_docstrings():
    result = doctest.testmod(condition_queue)
    assert result.attempted > 4
    assert result.failed == 0


@thoroughly
@given(
    cases(),
    st.integers(1, 40),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([0.0, 0.25, 0.5]),
    st.integers(0, 1),
    st.sampled_from(["refresh", "keep"]),
    st.sampled_from(["oldest", "least_confident"]),
    st.booleans(),
)
def test_sequence_of_pushes(
    case: Case, capacity: int, gamma: float, delta: float, least: int, repeats: Any, evict: Any, own_targets: bool
):
    """Confidences drawn anew each time make lengths shrink and grow; pushes are empty, small, and above capacity."""
    least *= capacity >= case.n
    width = 3 if own_targets else case.n
    actual = VariableConditionQueue(
        case.n, capacity, gamma, delta, minimum_length=least, repeats=repeats, evict=evict, target_size=width
    ).to(case.dtype)
    expected = reference.VariableConditionQueue(capacity, gamma, delta, least, repeats, evict)
    for _ in range(6):
        size = int(case.random.choice([0, 1, 5, capacity + 7]))
        indices = torch.tensor(case.random.integers(30, size=size), dtype=torch.int64)
        aligned = case.probs(size)
        targets = case.probs(size, n=3) if own_targets else aligned
        labeled, unlabeled = case.confidences(), case.confidences()
        actual.push(indices, aligned, labeled, unlabeled, targets if own_targets else None)
        expected.push(indices.tolist(), aligned.tolist(), labeled.tolist(), unlabeled.tolist(), targets.tolist())
        assert_same(actual, expected)


@pytest.mark.parametrize("capacity", [512, 60])
def test_n_100(capacity: int):
    case = Case(100, torch.float32, np.random.default_rng(0))
    actual, expected = VariableConditionQueue(100, capacity), reference.VariableConditionQueue(capacity, 1.0, 0.25)
    for _ in range(4):
        indices, aligned = torch.tensor(case.random.integers(500, size=300)), case.probs(300)
        confidence, other = case.confidences(), case.confidences() / 8
        actual.push(indices, aligned, confidence, other)
        expected.push(indices.tolist(), aligned.tolist(), confidence.tolist(), other.tolist(), aligned.tolist())
        assert_same(actual, expected)


def test_a_new_queue_is_empty():
    indices, targets, mask = VariableConditionQueue(3, 5).contents()
    assert indices.tolist() == [0] * 5
    assert targets.shape == (5, 3)
    assert not mask.any()


def test_a_sample_admitted_again_moves_with_its_new_target():
    queue = VariableConditionQueue(2, 6)
    queue.push(torch.tensor([3, 4]), sure(0, 0), EVEN, EVEN)
    queue.push(torch.tensor([3]), sure(1), EVEN, EVEN)
    indices, targets, mask = queue.contents()
    assert indices[mask].tolist() == [3, 4]
    torch.testing.assert_close(targets[0], torch.tensor([0.1, 0.9]))
    assert queue.counts().tolist() == [1, 1]


def test_a_sample_pushed_again_and_not_admitted_stays_as_it_was():
    queue = VariableConditionQueue(2, 6, delta=0.75)
    queue.push(torch.tensor([3]), sure(0), torch.ones(2), torch.ones(2))
    queue.push(torch.tensor([3]), torch.tensor([[0.4, 0.6]]), torch.ones(2), torch.ones(2))
    assert held(queue) == [3]
    assert queue.counts().tolist() == [1, 0]


def test_twice_in_one_push_the_later_counts():
    queue = VariableConditionQueue(2, 6)
    queue.push(torch.tensor([3, 3]), sure(0, 1), EVEN, EVEN)
    assert held(queue) == [3]
    assert queue.counts().tolist() == [0, 1]


def test_kept_repeats_are_held_twice():
    queue = VariableConditionQueue(2, 6, repeats="keep")
    queue.push(torch.tensor([3, 3]), sure(0, 1), EVEN, EVEN)
    assert held(queue) == [3, 3]
    assert queue.counts().tolist() == [1, 1]


def test_moved_to_a_class_where_it_does_not_fit_it_is_gone():
    queue = VariableConditionQueue(2, 4)
    queue.push(torch.tensor([3]), sure(0), torch.tensor([1.0, 0.0]), EVEN)
    queue.push(torch.tensor([3]), sure(1), torch.tensor([1.0, 0.0]), EVEN)
    assert held(queue) == []


def test_what_a_shrinking_length_pushed_out_does_not_come_back():
    queue = VariableConditionQueue(2, 4)
    none = torch.empty(0, dtype=torch.int64), torch.empty(0, 2)
    queue.push(torch.tensor([1, 2, 3, 4]), sure(0, 0, 0, 0), torch.tensor([1.0, 0.0]), EVEN)
    assert held(queue) == [4, 3, 2, 1]
    queue.push(*none, torch.tensor([0.5, 0.5]), EVEN)
    assert held(queue) == [4, 3]
    queue.push(*none, torch.tensor([1.0, 0.0]), EVEN)
    assert held(queue) == [4, 3]


def test_a_push_larger_than_the_capacity_keeps_the_newest_of_each_class():
    queue = VariableConditionQueue(2, 4)
    queue.push(torch.arange(10), sure(*[0, 1] * 5), EVEN, EVEN)
    assert held(queue) == [9, 8, 7, 6]


def test_the_least_confident_leave_and_among_equals_the_oldest():
    queue = VariableConditionQueue(2, 4, evict="least_confident")
    aligned = torch.tensor([[0.75, 0.25], [0.875, 0.125], [0.75, 0.25], [0.625, 0.375]])
    queue.push(torch.tensor([1, 2, 3, 4]), aligned, EVEN, EVEN)
    assert held(queue) == [3, 2]


def test_ties_join_the_first_class():
    queue = VariableConditionQueue(2, 4)
    queue.push(torch.tensor([5]), torch.tensor([[0.5, 0.5]]), EVEN, EVEN)
    assert queue.counts().tolist() == [1, 0]


def test_a_minimum_length_gives_every_class_a_place():
    queue = VariableConditionQueue(2, 4, minimum_length=1)
    queue.push(torch.tensor([1, 2, 3, 4, 5]), sure(1, 0, 0, 0, 0), torch.tensor([1.0, 0.0]), EVEN)
    assert queue.counts().tolist() == [3, 1]


def test_an_undefined_prediction_never_enters():
    queue = VariableConditionQueue(2, 3)
    queue.push(torch.tensor([1]), torch.full((1, 2), torch.nan), EVEN, EVEN)
    _, targets, mask = queue.contents()
    assert not mask.any()
    assert targets.isfinite().all()


def test_contents_do_not_change_under_the_caller():
    queue = VariableConditionQueue(2, 3)
    queue.push(torch.tensor([1]), sure(0), EVEN, EVEN)
    contents = queue.contents()
    copies = [values.clone() for values in contents]
    queue.push(torch.tensor([2]), sure(1), EVEN, EVEN)
    queue.reset()
    assert all(torch.equal(values, copy) for values, copy in zip(contents, copies, strict=True))
    assert held(queue) == []


@pytest.mark.parametrize("evict", ["oldest", "least_confident"])
def test_saved_state_is_complete(evict: Any):
    case = Case(4, torch.float32, np.random.default_rng(1))
    one, other = (VariableConditionQueue(4, 10, evict=evict) for _ in range(2))
    pushes = [(case.labels(8), case.probs(8), case.confidences(), case.confidences()) for _ in range(6)]
    for push in pushes[:3]:
        one.push(*push)
    other.load_state_dict(one.state_dict())
    for queue in (one, other):
        for push in pushes[3:]:
            queue.push(*push)
    for name, values in one.state_dict().items():
        assert torch.equal(values, other.state_dict()[name])


@pytest.mark.parametrize("settings", [{}, {"repeats": "keep"}, {"evict": "least_confident", "minimum_length": 1}])
def test_nothing_is_copied_to_the_host(settings: dict[str, Any]):
    case = Case(5, torch.float32, np.random.default_rng(2))
    queue = VariableConditionQueue(5, 16, **settings)
    addresses = [values.data_ptr() for values in queue.buffers()]
    with OnDevice():
        queue.push(torch.arange(8), case.probs(8), case.confidences(), case.confidences())
        queue.contents()
        queue.counts()
    assert [values.data_ptr() for values in queue.buffers()] == addresses


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("settings", [{}, {"repeats": "keep"}, {"evict": "least_confident", "minimum_length": 1}])
def test_a_push_is_captured_in_a_cuda_graph(settings: dict[str, Any]):
    case = Case(5, torch.float32, np.random.default_rng(2))
    replayed, on_host = VariableConditionQueue(5, 16, **settings).cuda(), VariableConditionQueue(5, 16, **settings)

    def draw() -> list[torch.Tensor]:
        indices = torch.tensor(case.random.integers(30, size=8))
        return [indices, case.probs(8), case.confidences(), case.confidences()]

    inputs = [values.cuda() for values in draw()]
    with torch.cuda.stream(torch.cuda.Stream()):
        VariableConditionQueue(5, 16, **settings).cuda().push(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed.push(*inputs)
        contents = replayed.contents()
    for _ in range(6):
        batch = draw()
        for values, new in zip(inputs, batch, strict=True):
            values.copy_(new)
        graph.replay()
        on_host.push(*batch)
        for actual, expected in zip(contents, on_host.contents(), strict=True):
            assert torch.equal(actual.cpu(), expected)


def _push_on_rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    queue = VariableConditionQueue(4, 12, target_size=2, process_group=dist.group.WORLD)
    for indices, aligned, labeled, unlabeled, targets in torch.load(f"{folder}/pushes.pt"):
        half = slice(4 * rank, 4 * rank + 4)
        queue.push(indices[half], aligned[half], labeled, unlabeled, targets[half])
    torch.save(queue.state_dict(), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_hold_what_one_would(tmp_path: Path):
    case = Case(4, torch.float32, np.random.default_rng(4))
    pushes = [
        (torch.arange(8) + 5 * i, case.probs(8), case.confidences(), case.confidences(), case.probs(8, n=2))
        for i in range(5)
    ]
    torch.save(pushes, tmp_path / "pushes.pt")
    torch.multiprocessing.spawn(_push_on_rank, (str(tmp_path),), nprocs=2)
    alone = VariableConditionQueue(4, 12, target_size=2)
    for push in pushes:
        alone.push(*push)
    for rank in (0, 1):
        for name, values in torch.load(tmp_path / f"{rank}.pt").items():
            assert torch.equal(values, alone.state_dict()[name])


@pytest.mark.parametrize("repeats", ["refresh", "keep"])
@pytest.mark.parametrize("evict", ["oldest", "least_confident"])
def test_images_stay_beside_their_samples(repeats: Any, evict: Any) -> None:
    store = torch.arange(40, dtype=torch.uint8)[:, None, None, None].expand(-1, 2, 3, 1).contiguous()
    queue = VariableConditionQueue(3, 12, delta=0.4, repeats=repeats, evict=evict, image_shape=(2, 3, 1))
    random = torch.Generator().manual_seed(0)
    counts = set()
    for _ in range(60):
        indices = torch.randint(0, 40, (7,), generator=random)
        aligned = (2 * torch.randn(7, 3, generator=random)).softmax(-1)
        labeled_confidence, unlabeled_confidence = torch.rand(2, 3, generator=random)
        queue.push(indices, aligned, labeled_confidence, unlabeled_confidence, images=store[indices])
        assert queue.images is not None
        if queue.mask.any():
            assert torch.equal(queue.images, store[queue.indices])
        counts.add(int(queue.mask.sum()))
    assert len(counts) > 3
    assert "images" not in queue.state_dict()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"num_classes": 0}, "`num_classes` to be a whole number of at least 1, but got 0"),
        ({"capacity": 0}, "`capacity` to be a whole number from 1 to 100000, but got 0"),
        ({"capacity": 10**12}, "`capacity` to be a whole number from 1 to 100000"),
        ({"capacity": 2.5}, "`capacity`"),
        ({"gamma": -1.0}, "`gamma` to be a number of at least 0, but got -1.0"),
        ({"gamma": float("inf")}, "`gamma`"),
        ({"delta": 1.1}, "`delta` to be a number from 0 to 1, but got 1.1"),
        ({"minimum_length": -1}, "`minimum_length` to be a whole number from 0 to 2, but got -1"),
        ({"minimum_length": 3}, "`minimum_length` to be a whole number from 0 to 2, but got 3"),
        ({"capacity": 2, "minimum_length": 1}, "`minimum_length` to be a whole number from 0 to 0, but got 1"),
        ({"repeats": "twice"}, "`repeats` to be one of 'refresh', 'keep', but got 'twice'"),
        ({"evict": "newest"}, "`evict` to be one of 'oldest', 'least_confident', but got 'newest'"),
        ({"target_size": 0}, "`target_size` to be a whole number of at least 1, but got 0"),
        ({"image_shape": (8, 8)}, r"`image_shape` to be \(height, width, channels\), but got \(8, 8\)"),
        ({"image_shape": (8, 0, 3)}, "`image_shape` to be a whole number of at least 1, but got 0"),
    ],
)
def test_a_wrong_argument_is_named(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        VariableConditionQueue(**{"num_classes": 3, "capacity": 6} | wrong)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"indices": [0, 1]}, "`indices` to be a tensor, but got a list"),
        ({"aligned": np.eye(2)}, "`aligned` to be a tensor, but got a ndarray"),
        ({"indices": torch.zeros(2)}, "`indices` to be of the dtype int64, but got torch.float32"),
        ({"indices": torch.zeros(2, 1, dtype=torch.int64)}, r"`indices` to have the shape \[2\]"),
        ({"indices": torch.tensor([3, -1])}, "`indices` to be whole numbers of at least 0, but got -1"),
        ({"aligned": torch.full((3, 2), 0.5)}, r"`aligned` to have the shape \[2, 2\], but got \[3, 2\]"),
        ({"aligned": torch.full((2, 3), 0.3)}, r"`aligned` to have the shape \[2, 2\], but got \[2, 3\]"),
        ({"labeled_confidence": torch.ones(3)}, r"`labeled_confidence` to have the shape \[2\]"),
        ({"unlabeled_confidence": torch.ones(1, 2)}, r"`unlabeled_confidence` to have the shape \[2\]"),
        ({"targets": torch.ones(2, 2)}, r"`targets` to have the shape \[2, 5\]"),
        ({"targets": None}, r"`targets` of the shape \[2, 5\], but got none"),
        ({"images": None}, r"`images` of the shape \[2, 4, 4, 3\], but got none"),
        ({"images": torch.zeros(2, 4, 4, 1, dtype=torch.uint8)}, r"`images` to have the shape \[2, 4, 4, 3\]"),
    ],
)
def test_a_push_that_does_not_fit_is_refused(wrong: dict[str, Any], named: str) -> None:
    queue = VariableConditionQueue(2, 6, target_size=5, image_shape=(4, 4, 3))
    fitting = {
        "indices": torch.arange(2),
        "aligned": torch.eye(2),
        "labeled_confidence": torch.ones(2),
        "unlabeled_confidence": torch.ones(2),
        "targets": torch.ones(2, 5),
        "images": torch.zeros(2, 4, 4, 3, dtype=torch.uint8),
    }
    queue.push(**fitting)
    assert queue.counts().tolist() == [1, 1]
    with pytest.raises(ValueError, match=named):
        queue.push(**fitting | wrong)
    assert queue.counts().tolist() == [1, 1]


def test_reset_goes_back_to_the_beginning_in_place() -> None:
    queue, fresh = VariableConditionQueue(2, 6), VariableConditionQueue(2, 6)
    places = {name: values.data_ptr() for name, values in queue.named_buffers()}
    queue.push(torch.tensor([3, 4]), torch.eye(2), EVEN, EVEN)
    assert queue.mask.any()
    queue.reset()
    for name, values in queue.named_buffers():
        assert values.data_ptr() == places[name]
        assert torch.equal(values, fresh.get_buffer(name)), name


def test_the_settings_are_shown() -> None:
    assert repr(VariableConditionQueue(2, 6, evict="least_confident", target_size=5)) == (
        "VariableConditionQueue(num_classes=2, capacity=6, gamma=1.0, delta=0.25, minimum_length=0, "
        "repeats='refresh', evict='least_confident', target_size=5)"
    )
