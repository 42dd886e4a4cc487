"""Linear layers that keep their weights rounded: without a GPU torch does the kernels' work, on one they do it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import csda.fast
from csda.data.augment import Augmentation
from csda.distributed import Ranks
from csda.engine import Engine, make_optimizer, set_learning_rate, using
from csda.fast import Accelerator, kernels
from csda.fast.graphs import Graphs, Program
from csda.fast.linear import Linear, in_step
from csda.models.alexnet import alexnet
from csda.models.two_stream import TwoStream
from csda.research.bench.noise import open_trainer
from csda.trainer import Trainer
from csda.training import update

CPU = torch.device("cpu")


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """On the CPU, too, weights are kept rounded; the calls of what stands in for the kernels."""
    calls = []

    # Written to by way of `data`, a weight keeps its version, as it does when kernels write.
    def descend(weight: Tensor, gradient: Tensor, rate: float, copy: Tensor) -> None:
        calls.append("descend")
        weight.data.add_(gradient.float(), alpha=-rate)
        copy.data.copy_(weight.data)

    def average(weight: Tensor, other: Tensor, share: float, copy: Tensor) -> None:
        calls.append("average")
        weight.data.lerp_(other, share)
        copy.data.copy_(weight.data)

    monkeypatch.setitem(sys.modules, "csda.fast.update", SimpleNamespace(descend=descend, average=average))
    monkeypatch.setattr(csda.fast, "update", SimpleNamespace(descend=descend, average=average), raising=False)
    monkeypatch.setattr(kernels, "supported", lambda device: True)
    monkeypatch.setattr("csda.fast.fuse", lambda encoder: encoder)
    monkeypatch.setattr("csda.fast.FusedAugmentation", Augmentation)
    monkeypatch.setattr("csda.engine._open_fast", _open_fast)
    monkeypatch.setattr(
        kernels, "matrix_dtype", lambda: torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32
    )
    return calls


def _open_fast(
    device: torch.device, precision: Any, generator: Any, capture: bool, kernels: bool, ranks: Ranks
) -> Accelerator:
    """On the CPU, too; what has no kernels there is not captured either."""
    capture &= device.type == "cuda"
    return Accelerator(device, precision, generator=generator, capture=capture, kernels=kernels, ranks=ranks)


@pytest.fixture(params=["cpu", "cuda"])
def place(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu":
        request.getfixturevalue("by_torch")
    elif torch.cuda.is_available():
        pytest.importorskip("triton")
    else:
        pytest.skip("needs a GPU")
    return str(request.param)


def _half() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


def _agrees(layer: Linear) -> bool:
    assert layer.rounded is not None
    return torch.equal(layer.rounded, layer.weight.bfloat16())


def _pair(inputs: int = 5, outputs: int = 3) -> tuple[Linear, nn.Linear]:
    """A layer with a copy of its weight, and torch's with the same weights."""
    ours, theirs = Linear(inputs, outputs), nn.Linear(inputs, outputs)
    theirs.load_state_dict(ours.state_dict())
    ours.keep_rounded()
    return ours, theirs


def test_it_is_drawn_and_saved_like_torchs() -> None:
    torch.manual_seed(3)
    theirs, their_next = nn.Linear(5, 3), torch.rand(1)
    torch.manual_seed(3)
    ours, our_next = Linear(5, 3), torch.rand(1)
    ours.keep_rounded()
    assert torch.equal(our_next, their_next)
    assert list(ours.state_dict()) == list(theirs.state_dict()) == ["weight", "bias"]
    assert len(list(ours.parameters())) == 2
    for name, value in ours.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name])


@pytest.mark.usefixtures("by_torch")
def test_outside_of_a_step_and_without_autocast_it_is_torchs() -> None:
    ours, theirs = _pair()
    values = torch.rand(4, 5)
    with _half():
        assert torch.equal(ours(values), theirs(values))
    with in_step([ours]):
        outputs = ours(values)
    assert torch.equal(outputs, theirs(values))
    outputs.sum().backward()
    theirs(values).sum().backward()
    assert torch.equal(ours.weight.grad, theirs.weight.grad)
    assert ours.rounded.grad is None


@pytest.mark.usefixtures("by_torch")
def test_in_a_step_outputs_and_gradients_are_those_of_autocast() -> None:
    ours, theirs = _pair(70, 30)
    values = torch.rand(4, 70)
    our_values, their_values = values.clone().requires_grad_(), values.clone().requires_grad_()
    with _half(), in_step([ours]):
        our_outputs = ours(our_values)
    with _half():
        their_outputs = theirs(their_values)
    our_outputs.float().square().sum().backward()
    their_outputs.float().square().sum().backward()
    assert our_outputs.dtype == torch.bfloat16
    assert torch.equal(our_outputs, their_outputs)
    assert torch.equal(our_values.grad, their_values.grad)
    assert torch.equal(ours.bias.grad, theirs.bias.grad)
    assert ours.weight.grad is None
    assert ours.rounded.grad.dtype == torch.bfloat16
    assert torch.equal(ours.rounded.grad.float(), theirs.weight.grad)


@pytest.mark.usefixtures("by_torch")
def test_gradients_of_two_passes_add_up_and_those_of_two_steps_do_not() -> None:
    layer, _ = _pair()
    single = []
    for values in torch.rand(2, 4, 5):
        with _half(), in_step([layer]):
            layer(values).float().sum().backward()
        single.append((values, layer.rounded.grad))
    with _half(), in_step([layer]):
        sum(layer(values).float().sum() for values, _ in single).backward()
    assert torch.equal(layer.rounded.grad, single[0][1] + single[1][1])


def _step(optimizer: type[torch.optim.Optimizer]) -> Callable[[Linear], None]:
    def update(layer: Linear) -> None:
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer([layer.weight], lr=0.1).step()

    return update


def _lerp(layer: Linear) -> None:
    with torch.no_grad():
        torch._foreach_lerp_([layer.weight], [torch.ones_like(layer.weight)], 0.3)


@pytest.mark.parametrize(
    "write",
    [
        lambda layer: layer.load_state_dict(Linear(5, 3).state_dict()),
        lambda layer: layer.load_state_dict(Linear(5, 3).state_dict(), assign=True),
        lambda layer: layer.state_dict()["weight"].add_(1.0),
        lambda layer: nn.init.normal_(layer.weight),
        lambda layer: setattr(layer, "weight", nn.Parameter(torch.rand(3, 5))),
        lambda layer: layer.to(torch.float64),
        _step(torch.optim.SGD),
        _step(torch.optim.Adam),
        _lerp,
    ],
)
def test_whatever_writes_to_the_weight_is_noticed(write: Callable[[Linear], Any]) -> None:
    layer, _ = _pair()
    layer.renew()
    assert _agrees(layer)
    layer.rounded.data.zero_()
    layer.renew()
    assert not layer.rounded.any(), "rounded again, though nobody wrote to the weight"
    write(layer)
    layer.renew()
    assert layer.rounded.any()
    assert _agrees(layer)


@pytest.mark.usefixtures("by_torch")
def test_a_weight_that_is_written_to_within_a_step_is_rounded_before_it_is_used() -> None:
    layer, _ = _pair()
    layer.requires_grad_(False)
    values = torch.rand(4, 5)
    with _half(), in_step([layer]):
        layer(values)
        layer.weight.add_(1.0)
        assert torch.equal(layer(values), nn.Linear.forward(layer, values))


def test_a_copy_of_the_layer_has_its_own() -> None:
    layer, _ = _pair()
    layer.renew()
    twin = deepcopy(layer)
    nn.init.ones_(twin.weight)
    twin.renew()
    assert _agrees(twin)
    assert _agrees(layer)
    assert not torch.equal(twin.rounded, layer.rounded)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgd", {"precision": "float32"}),
        ("sgd", {"kernels": False}),
        ("sgd", {"ranks": Ranks(0, 1, 0)}),
        ("adam", {}),
    ],
)
@pytest.mark.usefixtures("by_torch")
def test_an_engine_that_cannot_descend_keeps_nothing_rounded(name: Any, options: dict[str, Any]) -> None:
    model = TwoStream(alexnet(32, 3), 4)
    engine = Engine(CPU, **{"precision": "bf16", **options})
    engine.prepare(model, nn.Identity(), make_optimizer(name, list(model.parameters()), CPU))
    assert engine.fast is not None
    assert engine.fast.layers == []
    assert not any(isinstance(module, Linear) for module in model.modules())


@pytest.mark.usefixtures("by_torch")
def test_large_layers_of_both_encoders_are_replaced_and_keep_their_weights() -> None:
    model = TwoStream(alexnet(32, 3), 4)
    weights, names = [id(value) for value in model.parameters()], list(model.state_dict())
    engine = Engine(CPU, "bf16")
    engine.prepare(model, nn.Identity(), make_optimizer("sgd", list(model.student.parameters()), CPU))
    assert engine.fast is not None
    assert [layer.weight.shape for layer in engine.fast.layers] == [(4096, 128), (256, 4096)] * 2
    assert type(model.head[1]) is nn.Linear
    assert [id(value) for value in model.parameters()] == weights
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.usefixtures("by_torch")
def test_a_pass_without_autocast_is_learned_from_too(fused: bool) -> None:
    """Alone, and beside one with autocast; the optimiser that is fused raises no version."""
    ours, theirs = _pair()
    values = torch.rand(4, 5)
    for both in (False, True, False):
        for layer, layers in ((ours, [ours]), (theirs, [])):
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=fused)
            optimizer.zero_grad()
            with in_step(layers):
                loss = layer(values).square().sum()
                with _half():
                    loss = loss + layer(values).float().sum() if both else loss
                loss.backward()
                optimizer.step()
                for kept in layers:
                    kept.descend(0.1)  # type: ignore[arg-type]
        assert _agrees(ours)
        torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("by_torch")
def test_a_weight_that_is_written_to_is_rounded_before_a_replay(made_up_stream: Any) -> None:
    """As an engine on a GPU has it, with streams and graph made up."""
    (layer, _), replays = _pair(), []
    graphs = Graphs(CPU, None, [layer], enabled=False)
    graphs.enabled, graphs._stream = True, made_up_stream
    graph: Any = SimpleNamespace(replay=lambda: replays.append(_agrees(layer)))
    graphs.programs[(layer.forward, ())] = Program(graph=graph)
    for _ in range(2):
        nn.init.normal_(layer.weight)
        graphs.run(layer.forward, eager=3)
        graphs.run(layer.forward, eager=3)
    assert replays == [True] * 4


@pytest.mark.usefixtures("by_torch")
def test_a_teacher_with_rounded_weights_follows_as_one_without() -> None:
    torch.manual_seed(0)
    model = TwoStream(alexnet(32, 3), 4)
    nn.init.normal_(model.student[0][2].running_mean)
    for module in model.student.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)
    twin = deepcopy(model)
    engine = Engine(CPU, "bf16")
    engine.prepare(model, nn.Identity(), make_optimizer("sgd", list(model.student.parameters()), CPU))
    for momentum in (0.9, 0.3):
        model.update_teacher(momentum)
        twin.update_teacher(momentum)
    for name, value in model.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name]), name
    layers = [module for module in model.teacher.modules() if isinstance(module, Linear)]
    assert len(layers) == 2
    assert all(map(_agrees, layers))


SMALL = {
    "preset": "default",
    "precision": "bf16",
    "image_size": 32,
    "batch_size": 8,
    "unlabeled_batch_size": 8,
    "capacity": 16,
    "refresh_batch_size": 64,
    "steps_per_epoch": 8,
    "lr": 0.05,
    "threads": 1,
}


@pytest.fixture
def make_session(place: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trainer]:
    """A small training on noise, that keeps weights rounded or does not."""

    def make(method: str, *, rounds: bool, **changes: Any) -> Trainer:
        with monkeypatch.context() as patch:
            if not rounds:
                patch.setattr("csda.fast.keep_rounded", lambda model, optimizer: [])
                patch.setattr("csda.fast.average_weights", TwoStream.average_weights)
            session = open_trainer(method, {**SMALL, "device": place, **changes})
        assert len(_layers(session)) == (4 if rounds else 0)
        return session

    return make


def _layers(session: Trainer) -> list[Linear]:
    assert session.engine.fast is not None
    return session.engine.fast.layers


def _losses(session: Trainer, *, warm_up: bool = False, count: int = 5) -> Iterator[float]:
    """Of steps, each of which leaves weights and copies in agreement, and no gradient to the optimiser."""
    compute = session.warm_up if warm_up else session.step
    for inputs in islice(session.sample(1, labels_only=warm_up), count):
        session.engine.run(update, session, compute, *inputs)
        assert all(_agrees(layer) and layer.weight.grad is None for layer in _layers(session))
        yield session.figures.read()["loss"]
    assert session.engine.remark is None
    if session.device.type == "cuda" and count > 3:
        assert session.engine.fast is not None
        programs = session.engine.fast.graphs.programs
        assert all(program.graph is not None for key, program in programs.items() if compute in key[1])  # type: ignore[index]


def _train(session: Trainer) -> list[Any]:
    """Two kinds of steps, with what comes between them and after them: losses and predictions."""
    parts, method = session.parts, session.method
    losses = list(_losses(session, warm_up=True))
    with session.engine.arithmetic():
        method.begin(session.model, parts.labeled, parts.unlabeled)
    for _ in range(2):
        losses += _losses(session)
        with session.engine.arithmetic():
            method.end_epoch(session.model, parts.labeled, parts.unlabeled)
            probs = session.evaluator.predict(session.model, parts.val)
    return [losses, probs.tolist()]


def _same(ours: Trainer, theirs: Trainer, before: dict[str, Tensor]) -> None:
    """All weights are the same; on a GPU they have moved the same way from where they were, but for rounding."""
    expected = theirs.model.state_dict()
    for name, value in ours.model.state_dict().items():
        if ours.device.type == "cpu":
            assert torch.equal(value, expected[name]), name
        elif value.is_floating_point():
            moved, last_digit = (expected[name] - before[name]).norm(), 2**-23 * expected[name].norm()
            assert (value - expected[name]).norm() <= 0.02 * moved + last_digit, name


def _state(session: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in session.model.state_dict().items()}


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("baseline", {}),
        ("nm", {}),
        ("csda", {}),
        ("csda", {"teacher_update": "epoch", "teacher_momentum": 0.6}),
        ("csda", {"teacher": "none", "passes": "one"}),
        ("glm", {}),
    ],
    ids=str,
)
def test_a_training_is_what_it_is_without_copies(
    make_session: Callable[..., Trainer], method: str, changes: dict[str, Any]
) -> None:
    ours, theirs = (make_session(method, rounds=rounds, **changes) for rounds in (True, False))
    before = _state(theirs)
    results, expected = _train(ours), _train(theirs)
    if ours.device.type == "cpu":
        assert results == expected
    else:
        torch.testing.assert_close(torch.tensor(results[0]), torch.tensor(expected[0]), rtol=0.01, atol=0.0)
        torch.testing.assert_close(torch.tensor(results[1]), torch.tensor(expected[1]), rtol=0.0, atol=0.02)
    _same(ours, theirs, before)
    assert not torch.equal(before["student.5.2.weight"], ours.model.state_dict()["student.5.2.weight"])


@pytest.mark.parametrize(
    ("method", "changes"),
    [("baseline", {}), ("nm", {}), ("csda", {"teacher_update": "epoch"})],
    ids=str,
)
def test_weights_that_are_loaded_between_steps_are_used_by_the_next(
    make_session: Callable[..., Trainer], method: str, changes: dict[str, Any]
) -> None:
    ours, theirs = (make_session(method, rounds=rounds, **changes) for rounds in (True, False))
    others = {
        name: value * 3.0 if name.endswith(("5.2.weight", "5.5.weight")) else value
        for name, value in _state(make_session(method, rounds=False, seed=7, **changes)).items()
    }
    for session in (ours, theirs):
        session.method.begin(session.model, session.parts.labeled, session.parts.unlabeled)
        list(_losses(session))
    assert list(_losses(ours, count=1)) == pytest.approx(list(_losses(theirs, count=1)), rel=0.01)
    kept = _state(theirs)
    for state in (others, kept):
        for session in (ours, theirs):
            session.model.load_state_dict(state)
        (loss,), (expected,) = list(_losses(ours, count=1)), list(_losses(theirs, count=1))
        assert loss == pytest.approx(expected, rel=0.01)
        _same(ours, theirs, state)


def test_a_learning_rate_is_read_by_the_next_step(make_session: Callable[..., Trainer]) -> None:
    session = make_session("baseline", rounds=True)
    list(_losses(session, count=5))
    layer = _layers(session)[0]
    before = layer.weight.detach().clone()
    set_learning_rate(session.optimizer, 0.0)
    list(_losses(session, count=2))
    assert torch.equal(layer.weight, before)
    set_learning_rate(session.optimizer, 0.1)
    list(_losses(session, count=1))
    assert not torch.equal(layer.weight, before)


def test_trainings_side_by_side_have_weights_of_their_own(make_session: Callable[..., Trainer]) -> None:
    alone = make_session("nm", rounds=True)
    with using(alone.device, "bf16"):
        expected = _train(alone)
    sessions = [make_session("nm", rounds=True) for _ in range(2)]
    results: list[Any] = []
    if sessions[0].device.type == "cuda":
        torch.cuda.synchronize()  # the threads' streams do not wait for the one that the sessions were made on

    def train(session: Trainer) -> None:
        with using(session.device, "bf16"):
            if session.device.type == "cpu":
                results.append(_train(session))
                return
            with torch.cuda.stream(torch.cuda.Stream()):
                results.append(_train(session))

    threads = [threading.Thread(target=train, args=(session,)) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    for losses, _ in results:
        assert losses == pytest.approx(expected[0], rel=0.01)
