"""Draw the pictures of docs/explanation/method.md from numbers that the package computes.

    python -m csda.research.explain docs/explanation/pictures

The example has three classes, from common to rare. Row i of `LABELED` is λ_i^x and row i of `UNLABELED` is λ_i^u.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.ticker import PercentFormatter
from torch import Tensor

from csda.alignment import align, align_agnostic, change_basis, temper, temperatures, transition
from csda.condition_queue import VariableConditionQueue
from csda.report.figures import FULL, PALETTE, STYLE, alone, to_svg

CLASSES = ("naevus", "melanoma", "dermatofibroma")
LABELED = torch.tensor([[0.80, 0.15, 0.05], [0.35, 0.55, 0.10], [0.30, 0.20, 0.50]])
UNLABELED = torch.tensor([[0.90, 0.08, 0.02], [0.38, 0.54, 0.08], [0.25, 0.20, 0.55]])
LABELED_SHARES = torch.tensor([0.70, 0.20, 0.10])
UNLABELED_SHARES = torch.tensor([0.80, 0.15, 0.05])
"""Frequencies of each class among labels and predictions: the weights of the rows in the marginals over all classes."""
GUESS = torch.tensor([0.62, 0.30, 0.08])

TWO_LABELED = torch.tensor([[0.75, 0.25], [0.20, 0.80]])
TWO_UNLABELED = torch.tensor([[0.90, 0.10], [0.45, 0.55]])
TWO_GUESS = torch.tensor([0.30, 0.70])
"""Two classes, so that marginals can be drawn as arrows."""

HAM10000 = {"NV": 6705, "MEL": 1113, "BKL": 1099, "BCC": 514, "AKIEC": 327, "VASC": 142, "DF": 115}
"""Images of each class in HAM10000 (Tschandl et al., 2018)."""
CONFIDENCE = torch.tensor([0.90, 0.60, 0.60, 0.55, 0.50, 0.60, 0.40])
"""c^x of the queue's example, plausible values for HAM10000's classes."""

TEMPERATURES = (1.0, 0.7, 0.5, 0.3, 0.1, 0.0)

_COLOURS = [PALETTE[name] for name in ("blue", "vermilion", "green")]
_styled = matplotlib.rc_context(STYLE)


def agnostic_marginals() -> tuple[Tensor, Tensor]:
    """λ^x and λ^u of the example over all classes, weighted by class frequencies."""
    return LABELED_SHARES @ LABELED, UNLABELED_SHARES @ UNLABELED


def fill_queue(gamma: float, capacity: int = 512) -> list[int]:
    """Number of samples of each class in a queue after every image of HAM10000's classes was offered once.

    The model is assumed to predict the right class, with a confidence that is uniform from 0.2 to 1 over the images of
    a class, so that the threshold of Eq. (16) excludes some.
    """
    sizes, n = list(HAM10000.values()), len(HAM10000)
    classes = torch.repeat_interleave(torch.arange(n), torch.tensor(sizes))
    confidence = torch.cat([torch.linspace(0.2, 1, size) for size in sizes])
    aligned = ((1 - confidence) / (n - 1))[:, None].expand(-1, n).scatter(1, classes[:, None], confidence[:, None])
    queue = VariableConditionQueue(n, capacity, gamma)
    queue.push(torch.arange(len(classes)), aligned, CONFIDENCE, CONFIDENCE)
    counts: list[int] = queue.counts().tolist()
    return counts


@_styled
def draw_change_of_basis() -> Figure:
    """Like the paper's Figure 1: two bases, the full matrix of Eq. (7), and the vector of Eq. (9)."""
    figure = _canvas(420)
    bases, matrix, vector = figure.subplots(1, 3, sharex=True, sharey=True)
    (x1, x2), (u1, u2) = TWO_LABELED.tolist(), TWO_UNLABELED.tolist()

    _plane(bases, "Two bases", "The mean guess for each class, on\nlabeled (x) and on unlabeled (u) images")
    for tip, name in ((x1, "λ₁ˣ"), (x2, "λ₂ˣ")):
        _arrow(bases, tip, "blue", name)
    for tip, name in ((u1, "λ₁ᵘ"), (u2, "λ₂ᵘ")):
        _arrow(bases, tip, "vermilion", name)

    m = TWO_LABELED @ torch.linalg.inv(TWO_UNLABELED)
    reached = change_basis(m, TWO_UNLABELED)[1].tolist()
    halfway = (m[1, 1] * TWO_UNLABELED[1]).tolist()
    first, second = (f"{value:.2f}".replace("-", "− ") for value in m[1].tolist())
    _plane(
        matrix, "All of M, Eq. (7)", f"Both unlabeled rows make one labeled row:\nλ₂ˣ = {second} · λ₂ᵘ {first} · λ₁ᵘ"
    )
    for tip, name in ((u1, "λ₁ᵘ"), (u2, "λ₂ᵘ")):
        _arrow(matrix, tip, "vermilion", name, alpha=0.4)
    _arrow(matrix, halfway, "vermilion", f"{second} · λ₂ᵘ")
    _arrow(matrix, reached, "vermilion", "", start=halfway)
    _arrow(matrix, reached, "blue", "λ₂ˣ")

    across, up = transition(TWO_LABELED, TWO_UNLABELED)[1].tolist()
    stretched = [TWO_GUESS[0].item() * across, TWO_GUESS[1].item() * up]
    aligned = align(TWO_GUESS[None], TWO_LABELED, TWO_UNLABELED)[0].tolist()
    _plane(
        vector,
        "Its diagonal, Eq. (9) and (10)",
        f"Across × {across:.2f}, up × {up:.2f}, back to the line:\nλ₂ᵘ becomes λ₂ˣ, and a guess q becomes q̃",
    )
    _arrow(vector, u2, "vermilion", "λ₂ᵘ")
    _arrow(vector, x2, "blue", "λ₂ˣ")
    for start, end in ((TWO_GUESS.tolist(), stretched), (stretched, aligned)):
        _link(vector, start, end, PALETTE["ink"], shrink=5, linestyle=(0, (2, 2)))
    for place, name, fill in ((TWO_GUESS.tolist(), "q", "paper"), (stretched, "", "paper"), (aligned, "q̃", "ink")):
        vector.plot(*place, "o", color=PALETTE[fill], markeredgecolor=PALETTE["ink"], markersize=7)
        vector.text(place[0] + (0.04 if name == "q" else -0.09), place[1], name, fontsize=14)
    return figure


@_styled
def draw_one_prediction() -> Figure:
    """Alignment of one prediction, with the marginals of all classes and with the rows of its class."""
    figure = _canvas(440)
    agnostic = agnostic_marginals()
    lines: list[tuple[str, str, Tensor, Tensor, Tensor]] = [
        ("all classes together:\nDA", "", *agnostic, align_agnostic(GUESS, *agnostic)),
        ("rows of its class:\nCSDA", "₁", LABELED[0], UNLABELED[0], align(GUESS[None], LABELED, UNLABELED)[0]),
    ]
    for (name, i, labeled, unlabeled, aligned), axes in zip(lines, figure.subplots(2, 5), strict=True):
        columns = {
            "guess q": GUESS,
            f"λ{i}ˣ": labeled,
            f"λ{i}ᵘ": unlabeled,
            f"λ{i}ˣ ⊘ λ{i}ᵘ": labeled / unlabeled,
            "aligned q̃": aligned,
        }
        for each, (title, values) in zip(axes, columns.items(), strict=True):
            limit = 3.2 if "⊘" in title else 1.2
            each.barh(range(3), values.tolist(), color=_COLOURS, height=0.62)
            for place, value in enumerate(values.tolist()):
                each.text(value + limit * 0.025, place, f"{value:.2f}", va="center", fontsize=11)
            each.set(xlim=(0, limit), ylim=(2.5, -0.5), title=title)
            each.set_yticks(range(3), CLASSES if title == "guess q" else [""] * 3)
            _bare(each)
        axes[0].set_ylabel(name, color=PALETTE["ink"], labelpad=14)
    return figure


@_styled
def draw_temperature() -> Figure:
    """The paper's Figure 4a, then the effect of T on a marginal, and on a prediction aligned with it."""
    figure = _canvas(360)
    power, marginal, guess = figure.subplots(1, 3)
    probability = torch.linspace(0, 1, 61)[1:]
    for T in TEMPERATURES:
        power.plot(probability, probability**T, color=PALETTE["blue"], alpha=1 - 0.7 * T)
        label = power.text(0.3, 0.3**T, f"T={T:g}", fontsize=10, va="center", ha="center")
        label.set_bbox({"facecolor": PALETTE["paper"], "edgecolor": "none", "pad": 1.5})
    power.set(xlim=(0, 1), ylim=(0, 1.08), xlabel="probability", title="Probability to the power T")

    scale = torch.linspace(0, 1, 61)
    tempered = [temper(LABELED, T.expand(3)) for T in scale]
    adaptive = temperatures(LABELED.diagonal())[0].item()
    for axes, rows, title in (
        (marginal, [labeled[0] for labeled in tempered], "The row λ₁ˣ of naevus"),
        (guess, [align(GUESS[None], labeled, UNLABELED)[0] for labeled in tempered], "A guess, aligned with it"),
    ):
        lines = torch.stack(rows)
        for k, name in enumerate(CLASSES):
            axes.plot(scale, lines[:, k], color=_COLOURS[k])
            end = lines[-1, k].item()
            # If two lines end at the same height, their names are placed one above the other.
            lift = 0.025 * sum(
                0 < abs(end - other) < 0.05 and (1 if end > other else -1) for other in lines[-1].tolist()
            )
            axes.text(1.02, end + lift, name, color=_COLOURS[k], va="center", fontsize=11)
        axes.axvline(adaptive, color=PALETTE["muted"], linewidth=1, linestyle=(0, (2, 3)))
        axes.text(
            adaptive + 0.02, 0.97, f"T₁ = 1 − c₁ˣ = {adaptive:.1f}", fontsize=10, color=PALETTE["muted"], va="top"
        )
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="T", title=title)
    for axes in (power, marginal, guess):
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    return figure


@_styled
def draw_queue() -> Figure:
    """The effect of the queue on the class balance."""
    figure = _canvas(360)
    columns = {"all images": (list(HAM10000.values()), "grey")}
    columns |= {f"queue, γ = {gamma:g}": (fill_queue(gamma), "blue") for gamma in (1.0, 0.5, 0.0)}
    for axes, (title, (counts, colour)) in zip(figure.subplots(1, 4), columns.items(), strict=True):
        shares = [count / sum(counts) for count in counts]
        axes.barh(range(len(counts)), shares, color=PALETTE[colour], height=0.66)
        for place, (share, count) in enumerate(zip(shares, counts, strict=True)):
            axes.text(share + 0.02, place, f"{share:.0%} · {count:,}", va="center", fontsize=11)
        axes.set(xlim=(0, 1.02), ylim=(len(counts) - 0.5, -0.5), title=title)
        axes.set_yticks(range(len(counts)), list(HAM10000) if colour == "grey" else [""] * len(counts))
        _bare(axes)
    return figure


@_styled
def draw_two_streams() -> Figure:
    """Like the paper's Figure 2: teacher, student, losses, alignment and queue."""
    figure = Figure(figsize=(FULL / 72, 460 / 72))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, FULL), ylim=(460, 0))
    axes.axis("off")
    _lane(axes, (178, 20, 300, 180), "student", "vermilion")
    _lane(axes, (178, 238, 300, 180), "teacher", "blue")

    labeled = _box(axes, (34, 56), "labeled batch\nx, y")
    queued = _box(axes, (34, 134), "queued samples\nu, q̃", "green")
    batches = _box(axes, (34, 316), "unlabeled u\n(and x, for λˣ)")
    student = _box(axes, (200, 95), "encoder\nθₑ²", "vermilion")
    student_head = _box(axes, (348, 95), "head\nθ_fc", "vermilion")
    teacher = _box(axes, (200, 316), "encoder\nθₑ¹", "blue")
    teacher_head = _box(axes, (348, 316), "head\nθ_fc, shared", "vermilion")
    supervised = _box(axes, (540, 56), "Lₛ: cross-entropy\nwith y", width=150)
    unsupervised = _box(axes, (540, 134), "Lᵤ: cross-entropy\nwith q̃", width=150)
    total = _box(axes, (770, 95), "L = Lₛ + η · Lᵤ\nEq. (18), (19)", width=170)
    marginals = _box(axes, (540, 240), "λˣ, λᵘ, cˣ, cᵘ, T\nEq. (11)–(14)", "green", width=150)
    alignment = _box(axes, (540, 316), "alignment\nq → q̃, Eq. (10)", "green", width=150)
    queue = _box(axes, (770, 316), "Variable Condition\nQueue, Eq. (15)–(17)", "green", width=170)

    for start, end in (
        (labeled, student),
        (queued, student),
        (student, student_head),
        (student_head, supervised),
        (student_head, unsupervised),
        (supervised, total),
        (unsupervised, total),
        (batches, teacher),
        (teacher, teacher_head),
        (teacher_head, marginals),
        (teacher_head, alignment),
        (alignment, queue),
    ):
        _link(axes, (start[0] + start[2], start[1] + start[3] / 2), (end[0], end[1] + end[3] / 2))
    _link(axes, (615, 292), (615, 316))
    _link(axes, (690, 266), (820, 316))
    _link(axes, (257, 147), (257, 316), linestyle=(0, (4, 3)))
    axes.text(266, 219, "follows by moving average ω; no gradient", fontsize=11, va="center", color=PALETTE["muted"])
    axes.plot([855, 855, 14, 14], [368, 438, 438, 160], color=PALETTE["green"], linewidth=1.6)
    _link(axes, (14, 160), (34, 160), PALETTE["green"])
    axes.text(520, 429, "the queue's samples, augmented anew each time", fontsize=11, color=PALETTE["green"])
    return figure


PICTURES: dict[str, tuple[Callable[[], Figure], str]] = {
    "change-of-basis": (
        draw_change_of_basis,
        "Three planes with two classes as axes: the marginals as two sets of arrows, one arrow as a combination of two "
        "others, and a guess stretched along the axes and brought back to the line of distributions.",
    ),
    "one-prediction": (
        draw_one_prediction,
        "Bars: one guess, the labeled and unlabeled marginals, their ratio and the aligned guess, for DA and for CSDA.",
    ),
    "temperature": (
        draw_temperature,
        "Powers of a probability, a marginal that becomes uniform as T falls to 0, and the guess aligned with it.",
    ),
    "queue": (draw_queue, "Shares of seven classes among all images and in the queue for three values of γ."),
    "two-streams": (
        draw_two_streams,
        "Student and teacher with their common head, losses, alignment and queue, and the arrows between them.",
    ),
}


def render(name: str) -> str:
    """Draw a picture as an SVG that adapts to light or dark mode."""
    draw, description = PICTURES[name]
    return alone(to_svg(draw(), description))


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in PICTURES:
        (folder / f"{name}.svg").write_text(render(name), encoding="utf-8")


# --- parts of the drawings ------------------------------------------------------------------------------------------


def _canvas(height: int) -> Figure:
    layout = ConstrainedLayoutEngine(w_pad=14 / 72, h_pad=14 / 72)
    return Figure(figsize=(FULL / 72, height / 72), layout=layout)


def _plane(axes: Axes, title: str, note: str) -> None:
    """The plane of two classes, with the line of distributions."""
    axes.plot([0, 1], [1, 0], color=PALETTE["muted"], linewidth=1, linestyle=(0, (4, 3)))
    axes.set(xlim=(0, 1.15), ylim=(0, 1.15), aspect="equal", title=title)
    axes.set(xlabel=f"class 1\n\n{note}", ylabel="class 2")
    axes.grid(visible=False)


def _arrow(
    axes: Axes, tip: Sequence[float], colour: str, name: str, start: Sequence[float] = (0, 0), alpha: float = 1
) -> None:
    """An arrow with a name at its tip."""
    _link(axes, start, tip, PALETTE[colour], shrink=0, linewidth=1.8, alpha=alpha)
    axes.text(tip[0] + 0.03, tip[1] + 0.03, name, color=PALETTE[colour], alpha=alpha, fontsize=13)


def _link(
    axes: Axes,
    start: Sequence[float],
    end: Sequence[float],
    colour: str = PALETTE["muted"],
    *,
    shrink: float = 2,
    linewidth: float = 1.4,
    linestyle: Any = "-",
    alpha: float = 1,
) -> None:
    arrow = FancyArrowPatch((start[0], start[1]), (end[0], end[1]), arrowstyle="-|>", mutation_scale=12)
    arrow.set(color=colour, linewidth=linewidth, linestyle=linestyle, alpha=alpha)
    arrow.shrinkA = arrow.shrinkB = shrink
    axes.add_patch(arrow)


def _bare(axes: Axes) -> None:
    """Remove the scale of bars that have their numbers beside them."""
    axes.tick_params(length=0, labelbottom=False)
    axes.tick_params(axis="y", labelcolor=PALETTE["ink"])
    axes.grid(visible=False)
    axes.spines[["bottom", "left"]].set_visible(False)


_Place = tuple[float, float, float, float]


def _box(axes: Axes, corner: tuple[float, float], text: str, colour: str = "grey", width: float = 114) -> _Place:
    place = (*corner, width, 52.0)
    _round(axes, place, 9).set(facecolor=PALETTE["paper"], edgecolor=PALETTE[colour], linewidth=1.5)
    axes.text(corner[0] + width / 2, corner[1] + 26, text, ha="center", va="center")
    return place


def _lane(axes: Axes, place: _Place, name: str, colour: str) -> None:
    _round(axes, place, 14).set(facecolor=PALETTE[colour], linewidth=0, alpha=0.1)
    axes.text(place[0] + 14, place[1] + 18, name, color=PALETTE[colour], fontweight="bold", va="center")


def _round(axes: Axes, place: _Place, radius: int) -> FancyBboxPatch:
    """A rectangle with round corners."""
    x, y, width, height = place
    patch = FancyBboxPatch((x, y), width, height, boxstyle=f"round,pad=0,rounding_size={radius}")
    axes.add_patch(patch)
    return patch


if __name__ == "__main__":
    main(Path(sys.argv[1]))
