"""How a step executes: device, precision, and on a GPU the optional tier `csda.fast`.

This is the only module of the core that imports `csda.fast`. Without that tier a step runs eagerly on any device.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from csda.data.augment import Augmentation
from csda.data.loader import OpenPool
from csda.distributed import Ranks
from csda.errors import ConfigError
from csda.models.two_stream import TwoStream

if TYPE_CHECKING:
    from csda.fast import Accelerator

Precision = Literal["float32", "tf32", "bf16"]


class Output(Protocol):
    """The result of a step: a loss to minimise and figures to log, all 0-dim tensors."""

    @property
    def loss(self) -> Tensor: ...
    @property
    def logs(self) -> dict[str, Tensor]: ...


class Engine:
    """Executes the steps of one training.

    Args:
        device: device of all tensors.
        precision: float32, tf32 in matrix products and convolutions, or bf16 by autocast.
        generator: the only source of randomness of a step; None for torch's default.
        capture: whether to capture steps in CUDA graphs on a GPU.
        kernels: whether to use hand-written kernels on a GPU.
        ranks: processes that compute the same loss together.
    """

    def __init__(
        self,
        device: torch.device,
        precision: Precision = "float32",
        *,
        generator: torch.Generator | None = None,
        capture: bool = True,
        kernels: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        self.device = device
        self.precision = precision
        self.ranks = ranks or Ranks()
        self.fast = _open_fast(device, precision, generator, capture, kernels, self.ranks)

    @property
    def remark(self) -> str | None:
        """Why steps run eagerly although CUDA graphs were requested, or None."""
        return self.fast.remark if self.fast is not None else None

    def views(self, augmentation: Augmentation) -> Augmentation:
        """The augmentation, computed by the package's kernels if possible."""
        return self.fast.views(augmentation) if self.fast is not None else augmentation

    def prepare(self, model: TwoStream, method: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Replace parts of a training by versions that are faster on this device."""
        if self.fast is not None:
            self.fast.prepare(model, method, optimizer)

    def run(self, function: Callable[..., None], *arguments: object) -> None:
        """Call `function(*arguments)`. On a GPU it is captured after the first calls and then replayed.

        A replay reads the tensors among the arguments again. All other arguments must be the same in every call.
        """
        if self.fast is None:
            function(*arguments)
        else:
            self.fast.run(function, *arguments)

    def arithmetic(self) -> AbstractContextManager[None]:
        """A context in which networks compute in the precision of the run."""
        return arithmetic(self.device, self.precision)


@contextmanager
def arithmetic(device: torch.device, precision: Precision) -> Iterator[None]:
    """A context in which networks compute in this precision."""
    # Without this, autocast would keep its copies of the weights from one graph replay to the next.
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
        yield


class Figures:
    """Means over the steps of an epoch, summed on the device and copied to the host once."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], Tensor] = {}

    def add(self, output: Output) -> None:
        values = {"loss": output.loss.detach(), **output.logs}
        figures = torch.stack([*values.values(), torch.ones_like(output.loss)]).double()
        self._sums.setdefault(tuple(values), torch.zeros_like(figures)).add_(figures)

    def read(self) -> dict[str, float]:
        """The means since the last call of `read`."""
        means: dict[str, float] = {}
        for names, sums in self._sums.items():
            *totals, count = sums.tolist()
            sums.zero_()
            if count:
                means |= {name: total / count for name, total in zip(names, totals, strict=True)}
        return means


def choose_device(name: str, local_rank: int | None = None) -> torch.device:
    """The device of a name. `auto` is a GPU if there is one; processes of one machine take one GPU each."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device = {name!r} is unknown; give auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"device = {name!r} is not available here; give auto or cpu")
    if device.type == "cuda" and device.index is None and local_rank is not None:
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(f"GPU {local_rank} does not exist here; start one process for each, or give device=cpu")
        device = torch.device("cuda", local_rank)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device = {name!r} does not exist; there are {torch.cuda.device_count()}, counted from 0")
    return device


def name_device(device: torch.device) -> str:
    """The name of the hardware."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def streaming() -> OpenPool | None:
    """The function that opens a streamed pool, with pixels on the host; None without the tier `fast`."""
    if not _has_fast():
        return None
    from csda.fast.streaming import StreamedPool

    return StreamedPool


def make_optimizer(
    name: Literal["sgd", "adam", "adamw"],
    parameters: list[nn.Parameter],
    device: torch.device,
    *,
    weight_decay: float = 0.0,
    head: Sequence[nn.Parameter] = (),
    head_scale: float = 1.0,
) -> torch.optim.Optimizer:
    """Make the optimiser: plain SGD as in the paper, Adam or AdamW. On a GPU the learning rate is a tensor, so that a
    captured graph reads its current value.

    The parameters of the `head`, if given, have a learning rate `head_scale` times as large.
    """
    on_gpu = device.type == "cuda"
    of_head = {id(value) for value in head}
    body = [value for value in parameters if id(value) not in of_head]
    groups: list[dict[str, Any]] = [{"params": body, "scale": 1.0}]
    if head:
        groups.append({"params": list(head), "scale": head_scale})
    for group in groups:
        group["lr"] = torch.zeros((), device=device) if on_gpu else 0.0
    if name == "sgd":
        return torch.optim.SGD(groups, fused=on_gpu)
    if name == "adam":
        return torch.optim.Adam(groups, capturable=on_gpu, fused=on_gpu)
    return torch.optim.AdamW(groups, weight_decay=weight_decay, capturable=on_gpu, fused=on_gpu)


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load saved state, but keep the learning rate tensor, because captured graphs read it."""
    kept: list[dict[str, Any]] = [
        {name: group[name] for name in ("lr", "scale") if name in group} for group in optimizer.param_groups
    ]
    optimizer.load_state_dict(state)
    for group, values in zip(optimizer.param_groups, kept, strict=True):
        group.update(values)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        scaled = rate * group.get("scale", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(scaled)
        else:
            group["lr"] = scaled


class _Backends:
    """torch's switches for TF32 and cuDNN's choice of kernels, which all threads of a process share.

    Trainings with the same switches run side by side. One with others waits until they have ended. The last one
    restores the switches.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._users = 0
        self._wanted = (False, True)
        self._before: tuple[bool, bool, bool] = (False, False, False)

    @contextmanager
    def held(self, tf32: bool, time_kernels: bool) -> Iterator[None]:
        wanted = (tf32, time_kernels)
        with self._changed:
            self._changed.wait_for(lambda: self._users == 0 or self._wanted == wanted)
            if self._users == 0:
                self._before = self._read()
                self._write(tf32, tf32, time_kernels)
            self._users, self._wanted = self._users + 1, wanted
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                if self._users == 0:
                    self._write(*self._before)
                self._changed.notify_all()

    @staticmethod
    def _read() -> tuple[bool, bool, bool]:
        cudnn = torch.backends.cudnn
        return torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark

    @staticmethod
    def _write(matmul: bool, convolution: bool, benchmark: bool) -> None:
        torch.backends.cuda.matmul.allow_tf32 = matmul
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = convolution, benchmark


_backends = _Backends()


def backends(device: torch.device, precision: Precision, time_kernels: bool = True) -> AbstractContextManager[None]:
    """A context with torch's process-wide switches set for this precision on this device."""
    return nullcontext() if device.type != "cuda" else _backends.held(precision != "float32", time_kernels)


@contextmanager
def using(device: torch.device, precision: Precision, time_kernels: bool = True) -> Iterator[None]:
    """A context in which a training uses the device, and pauses while another thread captures a graph."""
    with backends(device, precision, time_kernels), _capture_gate(device):
        yield


def _capture_gate(device: torch.device) -> AbstractContextManager[None]:
    if device.type != "cuda" or not _has_fast():
        return nullcontext()
    from csda.fast.graphs import GATE

    return GATE.training()


def _has_fast() -> bool:
    return find_spec("csda.fast") is not None


def _open_fast(
    device: torch.device,
    precision: Precision,
    generator: torch.Generator | None,
    capture: bool,
    kernels: bool,
    ranks: Ranks,
) -> Accelerator | None:
    """The optional tier; None without a GPU, or if it is not installed."""
    if device.type != "cuda" or not _has_fast():
        return None
    from csda.fast import Accelerator

    return Accelerator(device, precision, generator=generator, capture=capture, kernels=kernels, ranks=ranks)
