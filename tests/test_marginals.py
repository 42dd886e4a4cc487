"""The moving averages against one loop over the classes, through whole sequences of updates."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st

from csda import marginals
from csda.errors import DataError
from csda.marginals import AgnosticMarginals, ClassMarginals
from reference import marginals as reference
from reference.cases import Case, OnDevice, cases, thoroughly

STATE = (
    "labeled",
    "unlabeled",
    "labeled_confidence",
    "unlabeled_confidence",
    "labeled_predicted",
    "labeled_numbers",
)


def assert_same(case: Case, actual: ClassMarginals, expected: reference.ClassMarginals) -> None:
    for name in STATE:
        values = getattr(actual, name)
        assert values.dtype == case.dtype
        wanted = torch.tensor(getattr(expected, name), dtype=torch.float64)
        # An estimate of Eq. (13) may be a ratio by the least divisor, so its error is relative to the largest.
        error = case.tolerance["rtol"] * max(1.0, wanted.abs().max().item())
        torch.testing.assert_close(values.double(), wanted, rtol=case.tolerance["rtol"], atol=error)
    for rows in (actual.labeled, actual.unlabeled):
        torch.testing.assert_close(rows.sum(-1), torch.ones_like(rows.sum(-1)))


def complete_labels(case: Case, size: int) -> torch.Tensor:
    return torch.tensor([*range(case.n), *case.random.integers(case.n, size=size)])


def test_examples_in_docstrings():
    result = doctest.testmod(marginals)
    assert result.attempted > 5
    assert result.failed == 0


@thoroughly
@given(
    cases(),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 0.95]),
    st.sampled_from(["label", "prediction", "truth"]),
    st.sampled_from(["replace", "ema"]),
    st.sampled_from(["class", "batch"]),
    st.sampled_from(["adaptive", "unlabeled", 1.0, 0.5]),
    st.sampled_from(["unlabeled", "labeled"]),
    st.sampled_from([0.0, 0.0, 2.0]),
)
def test_sequence_of_updates(
    case: Case,
    started: bool,
    momentum: float,
    condition: Any,
    absent: Any,
    share: Any,
    temperature: Any,
    against: Any,
    shrinkage: float,
):
    options: dict[str, Any] = {"condition": condition, "absent": absent, "share": share}
    options |= {"against": against, "shrinkage": shrinkage}
    with case.default_dtype():
        actual = ClassMarginals(case.n, momentum, temperature, 0.1, **options)
    expected = reference.ClassMarginals(case.n, momentum, **options)
    if started:
        labels = complete_labels(case, 5)
        probs = case.probs(len(labels))
        actual.start(probs, labels)
        expected.start(probs.tolist(), labels.tolist())
        assert_same(case, actual, expected)
    for _ in range(5):
        probs, labels = case.probs(8), case.labels(8)
        actual.update_labeled(probs, labels)
        expected.update_labeled(probs.tolist(), labels.tolist())
        assert_same(case, actual, expected)
        unlabeled_probs = case.probs(6)
        actual.update_unlabeled(unlabeled_probs)
        expected.update_unlabeled(unlabeled_probs.tolist())
        assert_same(case, actual, expected)

    aligned = actual.align(probs)
    torch.testing.assert_close(aligned.sum(-1), torch.ones(8, dtype=case.dtype))
    for name in STATE:  # align from the very same numbers, since a division by the least divisor magnifies rounding
        setattr(expected, name, getattr(actual, name).tolist())
    wanted = torch.tensor([expected.align(q, temperature, 0.1) for q in probs.tolist()], dtype=torch.float64)
    torch.testing.assert_close(aligned.double(), wanted, **case.tolerance)


@settings(thoroughly, max_examples=40)
@given(cases(st.integers(2, 6)), st.sampled_from([0.01, 1.0]), st.sampled_from(["unlabeled", "labeled"]))
def test_a_general_basis_after_exact_passes(case: Case, basis: float, against: Any):
    options: dict[str, Any] = {"condition": "truth", "against": against, "shrinkage": 1.0, "basis": basis}
    with case.default_dtype():
        actual = ClassMarginals(case.n, temperature=1.0, **options)
    expected = reference.ClassMarginals(case.n, 0.95, **options)
    labels = complete_labels(case, 9)
    probs, unlabeled_probs = case.probs(len(labels)), case.probs(12)
    actual.start(probs, labels)
    actual.start_unlabeled(unlabeled_probs)
    expected.start(probs.tolist(), labels.tolist())
    expected.start_unlabeled(unlabeled_probs.tolist())
    assert_same(case, actual, expected)
    wanted = torch.tensor([expected.align(q, 1.0) for q in unlabeled_probs.tolist()], dtype=torch.float64)
    torch.testing.assert_close(actual.align(unlabeled_probs).double(), wanted, **case.tolerance)


def test_honest_predictions_that_are_calibrated_are_left_alone():
    """Of the images predicted as a class as many are of each class as was said: alignment by what was observed over
    what was expected changes nothing, whatever the unlabeled images are like."""
    actual = ClassMarginals(2, temperature=1.0, condition="truth", against="labeled")
    probs = torch.tensor([[0.75, 0.25]] * 4 + [[0.2, 0.8]] * 5)
    actual.start(probs, torch.tensor([0, 0, 0, 1, 0, 1, 1, 1, 1]))
    actual.update_unlabeled(torch.tensor([[1.0, 0.0], [0.9, 0.1]]))
    torch.testing.assert_close(actual.align(probs), probs)


def test_classes_that_are_mistaken_for_others_get_their_share_back():
    """Three in four images predicted as the first class are of it, and more was promised."""
    actual = ClassMarginals(2, temperature=1.0, condition="truth", against="labeled")
    actual.start(torch.tensor([[0.9, 0.1]] * 4 + [[0.1, 0.9]]), torch.tensor([0, 0, 0, 1, 1]))
    torch.testing.assert_close(actual.align(torch.tensor([[0.9, 0.1]])), torch.tensor([[0.75, 0.25]]))
    torch.testing.assert_close(actual.labeled_confidence, torch.tensor([0.75, 1.0]))


def test_n_100_in_a_long_run():
    case = Case(100, torch.float32, np.random.default_rng(0))
    actual, expected = ClassMarginals(100), reference.ClassMarginals(100, 0.95)
    for _ in range(3):
        probs, labels = case.probs(64), case.labels(64)
        actual.update_labeled(probs, labels)
        expected.update_labeled(probs.tolist(), labels.tolist())
        actual.update_unlabeled(probs)
        expected.update_unlabeled(probs.tolist())
    assert_same(case, actual, expected)


def test_a_class_absent_for_ever_stays_a_distribution():
    actual = ClassMarginals(3)
    actual.start(torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]]), torch.tensor([0, 1, 2]))
    for _ in range(2000):
        actual.update_labeled(torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), torch.tensor([0, 1]))
        actual.update_unlabeled(torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]))
    for values in actual.buffers():
        assert values.isfinite().all()
    torch.testing.assert_close(actual.unlabeled.sum(-1), torch.ones(3))
    torch.testing.assert_close(actual.labeled[2], torch.tensor([0.3, 0.3, 0.4]))


def test_confidence_of_an_absent_class_is_not_the_diagonal():
    actual = ClassMarginals(2)
    actual.start(torch.tensor([[0.8, 0.2], [0.4, 0.6]]), torch.tensor([0, 1]))
    actual.update_unlabeled(torch.tensor([[0.6, 0.4]]))
    before = (0.8 * 0.95 + 0.6 * 0.05, 0.6)
    actual.update_unlabeled(torch.tensor([[0.6, 0.4]]))
    estimate = 0.6 * (before[0] / 0.8 + before[1] / 0.6) / 2
    assert actual.unlabeled_confidence[1].item() == pytest.approx(estimate, abs=1e-6)
    assert abs(actual.unlabeled[1, 1].item() - estimate) > 1e-3


def test_the_first_observation_replaces_and_the_second_is_averaged():
    actual = ClassMarginals(2, momentum=0.5)
    assert actual.labeled.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    actual.update_labeled(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    assert actual.labeled.tolist() == [[1.0, 0.0], [0.5, 0.5]]
    actual.update_labeled(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
    assert actual.labeled.tolist() == [[0.75, 0.25], [0.5, 0.5]]


def test_a_share_of_the_batch_follows_the_number_of_labels():
    actual = ClassMarginals(2, share="batch")
    probs = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.9, 0.1], [0.2, 0.8]])
    labels = torch.tensor([0, 0, 0, 1])
    actual.start(probs, labels)
    torch.testing.assert_close(actual.labeled_confidence, torch.tensor([0.675, 0.2]))
    torch.testing.assert_close(actual.temperatures(), torch.tensor([0.325, 0.8]))
    actual.update_labeled(probs[:3], labels[:3])
    torch.testing.assert_close(actual.labeled_confidence, torch.tensor([0.675 * 0.95 + 0.9 * 0.05, 0.2 * 0.95]))
    torch.testing.assert_close(actual.labeled, torch.tensor([[0.9, 0.1], [0.2, 0.8]]))


def test_tempering_is_not_written_back():
    actual = ClassMarginals(2)
    actual.start(torch.tensor([[0.8, 0.2], [0.4, 0.6]]), torch.tensor([0, 1]))
    state = {name: values.clone() for name, values in actual.state_dict().items()}
    first = actual.align(torch.tensor([[0.7, 0.3]]))
    assert torch.equal(first, actual.align(torch.tensor([[0.7, 0.3]])))
    torch.testing.assert_close(dict(actual.state_dict()), state)
    torch.testing.assert_close(actual.temperatures(), torch.tensor([0.2, 0.4]))


def test_a_class_without_labeled_images_is_named():
    with pytest.raises(DataError, match="class 1, 3"):
        ClassMarginals(4).start(torch.full((2, 4), 0.25), torch.tensor([0, 2]))
    with pytest.raises(DataError, match="label 1 = 1"):
        ClassMarginals(2, num_labels=2).start(torch.full((2, 2, 2), 0.5), torch.tensor([[0, 0], [1, 0]]))


@pytest.mark.parametrize("share", ["class", "batch"])
def test_labels_are_kept_apart(share: Any):
    case = Case(2, torch.float64, np.random.default_rng(3))
    K = 4
    together = ClassMarginals(2, num_labels=K, share=share).double()
    alone = [ClassMarginals(2, share=share).double() for _ in range(K)]
    labels = torch.tensor([[0] * K, [1] * K, [0, 1] * (K // 2)])
    for step in range(6):
        probs = case.probs(3, K)
        for name, arguments in (
            ("start" if step == 0 else "update_labeled", (probs, labels)),
            ("update_unlabeled", (probs.flip(0),)),
        ):
            getattr(together, name)(*arguments)
            for k in range(K):
                getattr(alone[k], name)(*(values[:, k] for values in arguments))
    for name in STATE:
        torch.testing.assert_close(getattr(together, name), torch.stack([getattr(one, name) for one in alone]))
    aligned = torch.stack([alone[k].align(probs[:, k]) for k in range(K)], 1)
    torch.testing.assert_close(together.align(probs), aligned)


@thoroughly
@given(cases(), st.sampled_from(["prediction", "label"]))
def test_agnostic_averages(case: Case, source: Any):
    actual = AgnosticMarginals(case.n, 0.5, source=source).to(case.dtype)
    labeled = unlabeled = None
    for _ in range(3):
        probs, labels, others = case.probs(6), case.labels(6), case.probs(4)
        actual.update_labeled(probs, labels)
        actual.update_unlabeled(others)
        rows = probs.tolist() if source == "prediction" else [[float(y == j) for j in range(case.n)] for y in labels]
        mean = [sum(column) / 6 for column in zip(*rows, strict=True)]
        other = [sum(column) / 4 for column in zip(*others.tolist(), strict=True)]
        labeled = [0.5 * a + 0.5 * b for a, b in zip(labeled, mean, strict=True)] if labeled else mean
        unlabeled = [0.5 * a + 0.5 * b for a, b in zip(unlabeled, other, strict=True)] if unlabeled else other
    torch.testing.assert_close(actual.labeled.double(), torch.tensor(labeled, dtype=torch.float64), **case.tolerance)
    torch.testing.assert_close(
        actual.unlabeled.double(), torch.tensor(unlabeled, dtype=torch.float64), **case.tolerance
    )
    aligned = actual.align(probs)
    torch.testing.assert_close(aligned.sum(-1), torch.ones(6, dtype=case.dtype))


def test_agnostic_start_and_empty_batch():
    actual = AgnosticMarginals(2, num_labels=3)
    probs, labels = torch.rand(5, 3, 2).softmax(-1), torch.zeros(5, 3, dtype=torch.int64)
    actual.update_unlabeled(torch.rand(4, 3, 2))
    actual.start(probs, labels)
    torch.testing.assert_close(actual.labeled, probs.mean(0))
    torch.testing.assert_close(actual.unlabeled, probs.mean(0))
    actual.update_unlabeled(torch.empty(0, 3, 2))
    torch.testing.assert_close(actual.unlabeled, probs.mean(0))
    actual.update_unlabeled(torch.zeros(1, 3, 2))
    torch.testing.assert_close(actual.unlabeled, probs.mean(0) * 0.95)


@pytest.mark.parametrize("kind", [ClassMarginals, AgnosticMarginals])
def test_saved_state_is_complete(kind: Any):
    case = Case(5, torch.float32, np.random.default_rng(1))
    one, other = kind(5), kind(5)
    one.update_labeled(case.probs(3), torch.tensor([0, 1, 1]))
    one.update_unlabeled(case.probs(3))
    other.load_state_dict(one.state_dict())
    batches = [(case.probs(7), case.labels(7)) for _ in range(3)]
    for marginals_ in (one, other):
        for probs, labels in batches:
            marginals_.update_labeled(probs, labels)
            marginals_.update_unlabeled(probs)
    for name, values in one.state_dict().items():
        assert torch.equal(values, other.state_dict()[name])
    assert torch.equal(one.align(batches[0][0]), other.align(batches[0][0]))


def test_half_precision_predictions_are_averaged_in_the_dtype_of_the_buffers():
    actual = ClassMarginals(2)
    actual.update_unlabeled(torch.tensor([[0.75, 0.25]] * 1000 + [[0.25, 0.75]], dtype=torch.bfloat16))
    torch.testing.assert_close(actual.unlabeled, torch.tensor([[0.75, 0.25], [0.25, 0.75]]), rtol=0, atol=1e-6)
    assert actual.align(torch.tensor([[0.75, 0.25]], dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("kind", [ClassMarginals, AgnosticMarginals])
def test_nothing_is_copied_to_the_host(kind: Any):
    case = Case(5, torch.float32, np.random.default_rng(2))
    actual, probs, labels = kind(5), case.probs(8), case.labels(8)
    addresses = [values.data_ptr() for values in actual.buffers()]
    with OnDevice():
        actual.update_labeled(probs, labels)
        actual.update_unlabeled(probs)
        actual.align(probs)
    assert [values.data_ptr() for values in actual.buffers()] == addresses


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_is_captured_in_a_cuda_graph():
    case = Case(5, torch.float32, np.random.default_rng(2))
    replayed, eager = ClassMarginals(5).cuda(), ClassMarginals(5).cuda()
    probs, labels = case.probs(8).cuda(), case.labels(8).cuda()

    def step(model: ClassMarginals) -> torch.Tensor:
        model.update_labeled(probs, labels)
        model.update_unlabeled(probs)
        return model.align(probs)

    replayed.load_state_dict(eager.state_dict())
    with torch.cuda.stream(torch.cuda.Stream()):
        step(ClassMarginals(5).cuda())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        aligned = step(replayed)
    for _ in range(4):
        probs.copy_(case.probs(8))
        labels.copy_(case.labels(8))
        graph.replay()
        torch.testing.assert_close(aligned, step(eager))
        torch.testing.assert_close(dict(replayed.state_dict()), dict(eager.state_dict()))


def _kinds(group: dist.ProcessGroup | None = None) -> dict[str, ClassMarginals | AgnosticMarginals]:
    return {
        "class": ClassMarginals(4, process_group=group),
        "share": ClassMarginals(4, share="batch", process_group=group),
        "agnostic": AgnosticMarginals(4, process_group=group),
    }


def _update_on_rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group = dist.group.WORLD
    modules = _kinds(group)
    for probs, labels in torch.load(f"{folder}/batches.pt"):
        half = slice(0, 3) if rank == 0 else slice(3, None)
        for module in modules.values():
            module.update_labeled(probs[half], labels[half])
            module.update_unlabeled(probs[half])
    torch.save({name: module.state_dict() for name, module in modules.items()}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_hold_what_one_would(tmp_path: Path):
    case = Case(4, torch.float32, np.random.default_rng(4))
    batches = [(case.probs(8), case.labels(8)) for _ in range(5)]
    torch.save(batches, tmp_path / "batches.pt")
    torch.multiprocessing.spawn(_update_on_rank, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for name, alone in _kinds().items():
        for probs, labels in batches:
            alone.update_labeled(probs, labels)
            alone.update_unlabeled(probs)
        torch.testing.assert_close(first[name], dict(alone.state_dict()))
        for key, values in first[name].items():
            assert torch.equal(values, second[name][key])


@pytest.mark.parametrize(
    ("kind", "wrong", "named"),
    [
        (ClassMarginals, {"num_classes": 0}, "`num_classes` to be a whole number of at least 1, but got 0"),
        (ClassMarginals, {"num_classes": 2.0}, "`num_classes`"),
        (ClassMarginals, {"momentum": 2}, "`momentum` to be a number from 0 to 1, which is excluded, but got 2"),
        (ClassMarginals, {"momentum": 1.0}, "`momentum`"),
        (ClassMarginals, {"momentum": True}, "`momentum`"),
        (ClassMarginals, {"momentum": float("nan")}, "`momentum`"),
        (ClassMarginals, {"temperature": -5}, "`temperature` to be a number of at least 0, but got -5"),
        (ClassMarginals, {"temperature": "adaptiv"}, "`temperature` to be one of 'adaptive', 'unlabeled'"),
        (ClassMarginals, {"temperature_floor": 1.5}, "`temperature_floor` to be a number from 0 to 1, but got 1.5"),
        (ClassMarginals, {"condition": "x"}, "`condition` to be one of 'label', 'prediction', 'truth', but got 'x'"),
        (ClassMarginals, {"absent": "keep"}, "`absent` to be one of 'replace', 'ema'"),
        (ClassMarginals, {"share": "all"}, "`share` to be one of 'class', 'batch'"),
        (ClassMarginals, {"num_labels": 0}, "`num_labels` to be a whole number of at least 1, but got 0"),
        (AgnosticMarginals, {"num_classes": -1}, "`num_classes`"),
        (AgnosticMarginals, {"momentum": -0.1}, "`momentum`"),
        (AgnosticMarginals, {"source": "both"}, "`source` to be one of 'prediction', 'label', but got 'both'"),
        (AgnosticMarginals, {"num_labels": 1.5}, "`num_labels`"),
    ],
)
def test_a_wrong_argument_is_named(kind: type[Any], wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        kind(**{"num_classes": 3} | wrong)


@pytest.mark.parametrize("kind", [ClassMarginals, AgnosticMarginals])
@pytest.mark.parametrize("update", ["start", "update_labeled"])
@pytest.mark.parametrize(
    ("shape", "labels", "named"),
    [
        ((2, 3), [0, 3], "`labels` to be whole numbers from 0 to 2, but got 3"),
        ((2, 3), [-1, 0], "`labels` to be whole numbers from 0 to 2, but got -1"),
        ((2, 3), [0.5, 0.0], "`labels` to be whole numbers from 0 to 2, but got 0.5"),
        ((2, 3), [0], r"`labels` to have the shape \[2\], but got \[1\]"),
        ((2, 4), [0, 1], r"`probs` to have the shape \[2, 3\], but got \[2, 4\]"),
        ((3,), [0, 1, 2], r"`probs` to have the shape \[3, 3\], but got \[3\]"),
    ],
)
def test_labels_and_predictions_that_do_not_fit_are_refused(
    kind: type[Any], update: str, shape: tuple[int, ...], labels: list[float], named: str
) -> None:
    marginals = kind(3)
    before = {name: values.clone() for name, values in marginals.state_dict().items()}
    with pytest.raises(ValueError, match=named):
        getattr(marginals, update)(torch.full(shape, 1 / 3), torch.tensor(labels))
    assert all(torch.equal(values, before[name]) for name, values in marginals.state_dict().items())


@pytest.mark.parametrize("kind", [ClassMarginals, AgnosticMarginals])
@pytest.mark.parametrize("update", ["start", "update_labeled"])
@pytest.mark.parametrize(
    ("probs", "labels", "named"),
    [
        (np.eye(2), torch.arange(2), "`probs` to be a tensor, but got a ndarray"),
        (torch.eye(2), [0, 1], "`labels` to be a tensor, but got a list"),
        (torch.eye(2), None, "`labels` to be a tensor, but got a NoneType"),
    ],
)
def test_what_is_no_tensor_is_refused(kind: type[Any], update: str, probs: Any, labels: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        getattr(kind(2), update)(probs, labels)


@pytest.mark.parametrize("kind", [ClassMarginals, AgnosticMarginals])
@pytest.mark.parametrize("update", ["update_unlabeled", "align"])
def test_predictions_for_other_classes_are_refused(kind: type[Any], update: str) -> None:
    with pytest.raises(ValueError, match=r"`probs` to have the shape \[5, 3\], but got \[5, 2\]"):
        getattr(kind(3), update)(torch.full((5, 2), 0.5))
    with pytest.raises(ValueError, match=r"`probs` to have the shape \[5, 4, 2\], but got \[5, 2\]"):
        getattr(kind(2, num_labels=4), update)(torch.full((5, 2), 0.5))


@pytest.mark.parametrize("kind", [ClassMarginals, AgnosticMarginals])
def test_reset_goes_back_to_the_beginning_in_place(kind: type[Any]) -> None:
    marginals, fresh = kind(3), kind(3)
    places = {name: values.data_ptr() for name, values in marginals.named_buffers()}
    marginals.start(torch.eye(3), torch.arange(3))
    marginals.update_unlabeled(torch.eye(3))
    assert not torch.equal(marginals.labeled_observed, fresh.labeled_observed)
    marginals.reset()
    for name, values in marginals.named_buffers():
        assert values.data_ptr() == places[name]
        assert torch.equal(values, fresh.get_buffer(name)), name


def test_the_settings_are_shown() -> None:
    shown = repr(ClassMarginals(3, 0.9, 0.5, condition="prediction", num_labels=2))
    assert shown == (
        "ClassMarginals(num_classes=3, momentum=0.9, temperature=0.5, temperature_floor=0.0, condition='prediction', "
        "against='unlabeled', shrinkage=0.0, basis='diagonal', absent='replace', share='class', num_labels=2)"
    )
    assert repr(AgnosticMarginals(3)) == (
        "AgnosticMarginals(num_classes=3, momentum=0.95, source='prediction', num_labels=None)"
    )
