"""Export a model for programs without csda: ONNX, a torch.export program, or a MONAI bundle.

The exported model takes decoded images, uint8 [B, H, W, C], and returns calibrated probabilities. Resizing, scaling,
mirror images, prior correction and temperature are part of its graph. Before anything is written, its output is
compared with `csda.load(run).predict`.
"""

from __future__ import annotations

import io
import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from csda.data.decode import IMAGE_SUFFIXES, REDUCED, Aspect, read_image, read_picture
from csda.data.tree import walk_images
from csda.errors import ConfigError, RunError, explained
from csda.evaluate import predict_images
from csda.files import write_whole
from csda.predict import Predictor
from csda.report.card import model_card
from csda.runs import Run

Form = Literal["onnx", "torch", "monai"]
Answer = Callable[[npt.NDArray[np.uint8]], npt.NDArray[Any]]

COMPARED = 16
"""Number of images that are compared before a model is written."""

FROM_SQUARE, FROM_DECODED = 1e-4, 1e-2
"""Largest accepted difference of a probability from csda's: for images of the network's size, and of any size."""

LARGEST = 16_384
"""Largest side of an image in pixels."""

OPSET = 20
SMALLEST = 1e-12
PRECISION = 22
"""Largest number of bits of a weight."""

RUN_BUNDLE = "python -m monai.bundle run --config_file configs/inference.json --bundle_root . --dataset_dir FOLDER"

SCHEMA = "https://project-monai.github.io/schema/meta_schema_20240725.json"


class Classifier(nn.Module):
    """The network with its calibration: images [B, C, S, S] in [0, 1] to calibrated probabilities."""

    frequencies: Tensor

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self.student, self.head = predictor.model.student, predictor.model.head
        self.multi_label, self.views = predictor.multi_label, predictor.views
        fitted = predictor.calibration
        self.temperature = 1.0 if fitted is None else fitted.temperature
        self.corrects = predictor.frequencies is not None
        frequencies = torch.tensor(predictor.frequencies or [1.0], dtype=torch.float32)
        if self.corrects and self.multi_label:
            frequencies = torch.where((frequencies > 0) & (frequencies < 1), frequencies, torch.tensor(0.5))
        self.register_buffer("frequencies", frequencies)

    def forward(self, images: Tensor) -> Tensor:
        probs = predict_images(nn.Sequential(self.student, self.head), images, self.multi_label, self.views)
        if self.multi_label:
            logits = probs.clamp_min(SMALLEST).log() - (1 - probs).clamp_min(SMALLEST).log()
            if self.corrects:
                logits = logits - (self.frequencies / (1 - self.frequencies)).log()
            return torch.sigmoid(logits / self.temperature)
        logits = probs.clamp_min(SMALLEST).log()
        if self.corrects:
            logits = logits - self.frequencies.log()
        return torch.softmax(logits / self.temperature, dim=-1)


class Squares(nn.Module):
    """Resize decoded images [B, C, H, W] of 0 to 255 and of any size to squares of 0 to 1, like the decoder.

    Pixels are the same as the decoder's, because weights and rounding are the same: first the width, then the height,
    each rounded to a grey level. Images that the decoder first shrinks by a whole factor are shrunk first here, too. A
    few pixels of these may differ by one level, and more in grey images much taller than wide, because Pillow resizes
    their height first.
    """

    place: Tensor
    units: Tensor

    def __init__(self, size: int, channels: int, aspect: Aspect) -> None:
        super().__init__()
        self.size, self.channels, self.aspect = size, channels, aspect
        self.register_buffer("place", torch.arange(size, dtype=torch.float64)[:, None], persistent=False)
        self.register_buffer("units", 2.0 ** torch.arange(PRECISION + 1, dtype=torch.float64), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        # Sizes are sums of ones, because a graph for images of any size has no numbers for them.
        row, column = (torch.ones_like(line, dtype=torch.float64) for line in (values[0, 0, 0], values[0, 0, :, 0]))
        across, across_unit, columns = self._weights(row, column.sum())
        down, down_unit, rows = self._weights(column, row.sum())
        values = _block_means(values, columns, rows)
        values = values.double() if self.channels == 1 else values.float()  # sums have 30 bits, and 24
        values = ((values @ across.T) / across_unit + 0.5).floor().clamp(0.0, 255.0)
        values = ((down @ values) / down_unit + 0.5).floor().clamp(0.0, 255.0)
        return values.float() / 255.0

    def _weights(self, ones: Tensor, other: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Weights [size, length] of the triangle filter along an axis, their sum, and where blocks begin and end.

        With `pad` the whole axis is in the middle of the square, between zeros; with `crop` the middle of the axis
        fills the square. Where an axis is first shrunk by a whole factor, a block is that many pixels, and only its
        first pixel has a weight.
        """
        own = ones.sum()
        longest, shortest = torch.maximum(own, other), torch.minimum(own, other)
        inner = (own * (self.size / longest)).round().clamp_min(1.0) if self.aspect == "pad" else own * 0 + self.size
        span = shortest if self.aspect == "crop" else own
        first, start = ((self.size - inner) / 2).floor(), ((own - span) / 2).floor()
        scale = span / inner
        block = (scale / REDUCED * 2).floor().clamp_min(1.0)
        place = self.place - first + 0.5
        pixel = ones.cumsum(0) - 1 - start
        begin = (pixel / block).floor() * block
        weights = (1.0 - (begin + block / 2 - place * scale).abs() / scale.clamp_min(1.0)).clamp_min(0.0)
        weights = weights * ((pixel == begin) & (pixel >= 0) & (pixel < span))
        weights = weights / weights.sum(dim=1, keepdim=True).clamp_min(SMALLEST) * ((place > 0) & (place < inner))
        # torch resizes colours and keeps weights in 16 bits, as precise as the largest allows; Pillow has all others.
        grey = self.channels == 1
        fits = (self.units < (2.0**15 - 0.5) / weights.max()) | (block > 1)
        unit = self.units.max() if grey else (self.units * fits).max()
        whole = (weights * unit + 0.5).floor()
        begins = (begin + start).clamp_min(0.0)
        ends = torch.maximum(torch.minimum(begin + block, span) + start, begins + 1)
        places = begins.long(), torch.minimum(ends, own).long()
        return (whole, unit, places) if grey else (whole.float(), unit.float(), places)


def _block_means(values: Tensor, columns: tuple[Tensor, Tensor], rows: tuple[Tensor, Tensor]) -> Tensor:
    """The mean of the block of each pixel, computed as in Pillow: times a factor of 24 bits, without the fraction."""
    for axis, edge, (begins, ends) in ((3, (1, 0), columns), (2, (0, 0, 1, 0), rows)):
        sums = F.pad(values.cumsum(axis, dtype=torch.int32), edge)
        values = sums.index_select(axis, ends) - sums.index_select(axis, begins)
    counts = (rows[1] - rows[0])[:, None] * (columns[1] - columns[0])
    factors = (2.0**24 / counts.float()).long()
    return (values + counts // 2) * factors // 2**24


class ImageClassifier(nn.Module):
    """The same for decoded images, uint8 [B, H, W, C] of any size."""

    def __init__(self, classifier: Classifier, size: int, channels: int, aspect: Aspect) -> None:
        super().__init__()
        self.classifier, self.squares = classifier, Squares(size, channels, aspect)

    def forward(self, images: Tensor) -> Tensor:
        probs: Tensor = self.classifier(self.squares(images.permute(0, 3, 1, 2)))
        return probs


class Samples(NamedTuple):
    """Images to compare on: decoded, as squares of the network's size, and csda's probabilities."""

    decoded: list[npt.NDArray[np.uint8]]
    squares: npt.NDArray[np.uint8]
    from_decoded: npt.NDArray[np.float32]
    from_squares: npt.NDArray[np.float32]
    from_files: npt.NDArray[np.float32] | None
    remark: str


def export(run: Run, to: Form, out: Path | None = None, images: Sequence[Path] = ()) -> Path:
    """Write the model of a finished run and its card into a new folder, and return the folder.

    The model is compared on `images`, or on test images of the run if their files are found, or on noise.
    """
    if not run.finished:
        raise RunError(f"{run.folder}: has not finished; finish it with `csda train --resume`, then export it")
    folder = out or Path(f"{run.folder.name}-{to}")
    with explained(folder):
        if folder.exists() and any(folder.iterdir()):
            raise RunError(f"{folder}: not empty; give another --out")
    predictor = Predictor(run, "cpu")
    predictor.require_images()
    samples = _samples(run, predictor, images)
    with explained(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
            made = Path(temporary) / "made"
            made.mkdir()
            largest = {"onnx": _write_onnx, "torch": _write_torch, "monai": _write_monai}[to](
                run, predictor, samples, made
            )
            remark = f"{largest} {samples.remark}"
            if to == "monai":
                use = f"In the bundle's folder, `{RUN_BUNDLE}` writes a row for each image to `eval/predictions.csv`."
                write_whole(made / "docs/README.md", model_card(run, f"{use} {remark}", "image files"))
            else:
                write_whole(made / "MODEL_CARD.md", model_card(run, remark))
            if folder.exists():
                folder.rmdir()
            shutil.move(made, folder)
    return folder


def _write_onnx(run: Run, predictor: Predictor, samples: Samples, folder: Path) -> str:
    _require("onnx", "onnxscript", "onnxruntime", extra="onnx")
    import onnxruntime

    with _quiet():
        program = torch.onnx.export(
            _program(predictor), dynamo=True, input_names=["images"], output_names=["probabilities"],
            opset_version=OPSET, verbose=False, dynamic_shapes=None,
        )  # fmt: skip
    assert program is not None
    shape = program.model.graph.inputs[0].shape
    assert shape is not None
    free = [axis for axis in shape if not isinstance(axis, int)]
    program.rename_axes(dict(zip(free, ("batch", "height", "width"), strict=True)))
    program.model.metadata_props["csda"] = json.dumps(_describe(run, predictor), ensure_ascii=False)
    program.save(str(folder / "model.onnx"), external_data=False)
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    return _compare(lambda images: session.run(None, {"images": images})[0], samples, "model.onnx")


def _write_torch(run: Run, predictor: Predictor, samples: Samples, folder: Path) -> str:
    with _quiet():
        torch.export.save(
            _program(predictor), folder / "model.pt2", extra_files={"csda.json": json.dumps(_describe(run, predictor))}
        )
        module = torch.export.load(folder / "model.pt2").module()
    return _compare(lambda images: module(torch.from_numpy(images)).detach().numpy(), samples, "model.pt2")


def _write_monai(run: Run, predictor: Predictor, samples: Samples, folder: Path) -> str:
    _require("monai", extra="monai")
    for name in ("configs", "models", "docs"):
        (folder / name).mkdir()
    classifier = Classifier(predictor).eval()
    size, channels = predictor.image_size, predictor.channels
    example = torch.rand(2, channels, size, size, generator=torch.Generator().manual_seed(0))
    with _quiet():
        torch.export.save(_capture(classifier, example, {0: "batch"}), folder / "models/model.pt2")
        module = torch.export.load(folder / "models/model.pt2").module()
        torch.export.save(_squares(predictor), folder / "models/squares.pt2")
        squares = torch.export.load(folder / "models/squares.pt2").module()
    buffer = io.BytesIO()
    torch.save(classifier.state_dict(), buffer)
    write_whole(folder / "models/model.pt", buffer.getvalue())
    write_whole(folder / "configs/metadata.json", _dump(_metadata(run, predictor)))
    write_whole(folder / "configs/inference.json", _dump(_inference(predictor)))

    def answer(images: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        given = torch.from_numpy(images).permute(0, 3, 1, 2).float()
        return np.asarray(module(torch.cat([squares(image[None]) for image in given])).detach())

    return _compare(answer, samples, "models/model.pt2")


def _program(predictor: Predictor) -> torch.export.ExportedProgram:
    """Export the graph for decoded images of any number and any size."""
    size, channels = predictor.image_size, predictor.channels
    module = ImageClassifier(Classifier(predictor), size, channels, predictor.aspect).eval()
    shape = (2, size + 13, size + 7, channels)
    return _capture(module, torch.zeros(shape, dtype=torch.uint8), {0: "batch", 1: "height", 2: "width"})


def _squares(predictor: Predictor) -> torch.export.ExportedProgram:
    """The graph from a decoded image, with channels first, to a square."""
    size, channels = predictor.image_size, predictor.channels
    module = Squares(size, channels, predictor.aspect)
    return _capture(module, torch.zeros(1, channels, size + 13, size + 7), {2: "height", 3: "width"})


def _capture(module: nn.Module, example: Tensor, axes: dict[int, str]) -> torch.export.ExportedProgram:
    """The graph of a module, for any length of the axes that have a name."""
    dims = {
        axis: torch.export.Dim(name, min=1, max=None if name == "batch" else LARGEST) for axis, name in axes.items()
    }
    with torch.no_grad():
        return torch.export.export(module, (example,), dynamic_shapes=(dims,))


def _describe(run: Run, predictor: Predictor) -> dict[str, Any]:
    """Metadata for users of the file: classes, thresholds, limits of sets."""
    fitted = predictor.calibration
    return {
        "classes": list(predictor.classes),
        "multi_label": predictor.multi_label,
        "images": "uint8 [batch, height, width, channels]",
        "channels": predictor.channels,
        "probabilities": "calibrated" if fitted is not None else "not calibrated",
        "thresholds": None if fitted is None else fitted.thresholds,
        "sets": []
        if fitted is None
        else [{"coverage": each.coverage, "limits": each.limits} for each in fitted.levels],
        "run": run.folder.name,
        "csda": version("csda"),
    }


def _samples(run: Run, predictor: Predictor, images: Sequence[Path]) -> Samples:
    files = list(images)[:COMPARED] or list(islice(_test_images(run), COMPARED))
    size, channels = predictor.image_size, predictor.channels
    if files:
        decoded = [_decode(path, channels) for path in files]
        squares = np.stack([read_image(path, size, channels, predictor.aspect) for path in files])
        return Samples(
            decoded,
            squares,
            predictor.predict(decoded),
            predictor.predict(squares),
            predictor.predict(files),
            f"Compared on {len(files)} {'given' if images else 'test'} images.",
        )
    generator = np.random.default_rng(0)
    squares = generator.integers(0, 256, (COMPARED, size, size, channels), dtype=np.uint8)
    shapes = [(size + 11 * number, 2 * size - number, channels) for number in range(COMPARED)]
    decoded = [generator.integers(0, 256, shape, dtype=np.uint8) for shape in shapes]
    return Samples(
        decoded,
        squares,
        predictor.predict(decoded),
        predictor.predict(squares),
        None,
        "The images of the run were not found; compared on noise.",
    )


def _test_images(run: Run) -> Iterator[Path]:
    """Test images of the run whose files are still found, in a plain folder or by file name."""
    folder = Path(run.config["data"])
    if not folder.exists():
        return
    root = folder.parent if folder.is_file() else folder
    tests = [row.id for row in run.split if row.split == "test"]
    wanted = set(tests[:: max(1, len(tests) // COMPARED)])  # of all classes
    for name in walk_images(root):
        if not wanted:
            return
        known = wanted & {name, Path(name).name, Path(name).stem}
        if known and Path(name).suffix.lower() in IMAGE_SUFFIXES:
            wanted -= known
            yield root / name


def _decode(path: Path, channels: int) -> npt.NDArray[np.uint8]:
    """The image in full, which `read_image` may decode smaller."""
    values = np.array(read_picture(path, LARGEST).convert("L" if channels == 1 else "RGB"))
    return values.reshape(*values.shape[:2], channels)


def _compare(answer: Answer, samples: Samples, name: str) -> str:
    """Refuse an exported model with different predictions; return a sentence with the largest difference."""
    squares = float(np.abs(answer(samples.squares) - samples.from_squares).max())
    alone = float(np.abs(answer(samples.squares[:1]) - samples.from_squares[:1]).max())
    found = [answer(image[None])[0] for image in samples.decoded]
    decoded = float(np.abs(np.stack(found) - samples.from_decoded).max())
    for far, allowed, what in (
        (max(squares, alone), FROM_SQUARE, "of the network's size"),
        (decoded, FROM_DECODED, "of any size"),
    ):
        if not far <= allowed:
            raise RunError(
                f"{name}: its probabilities differ by {far:.2g} from csda's for images {what}, more than {allowed:g}; "
                "it is not written"
            )
    text = (
        f"Its probabilities differ by at most {squares:.1g} from those of csda, from any decoded size by {decoded:.1g}"
    )
    if samples.from_files is None:
        return f"{text}."
    files = float(np.abs(np.stack(found) - samples.from_files).max())
    return f"{text}, from files, of which csda decodes large JPEGs smaller, by {files:.1g}."


def _metadata(run: Run, predictor: Predictor) -> dict[str, Any]:
    """configs/metadata.json, by MONAI's schema."""
    import monai

    size, classes = predictor.image_size, list(predictor.classes)
    channels = {"0": "grey"} if predictor.channels == 1 else {"0": "R", "1": "G", "2": "B"}
    result = run.result
    return {
        "schema": SCHEMA,
        "version": "1.0.0",
        "changelog": {"1.0.0": f"exported by csda {version('csda')}"},
        "monai_version": monai.__version__,
        "pytorch_version": torch.__version__.partition("+")[0],
        "numpy_version": np.__version__,
        "required_packages_version": {"pytorch-ignite": _version("pytorch-ignite"), "pillow": version("pillow")},
        "task": f"Classification of images of {Path(run.config['data']).name} into {len(classes)} classes",
        "description": f"Trained by csda with the method {run.config['method']}; see docs/README.md",
        "authors": "made with csda",
        "copyright": "that of the images and labels it was trained on",
        "intended_use": "Research. Not a medical device, and not for decisions about patients.",
        "data_type": "image files",
        "image_classes": "RGB image in [0, 1]" if predictor.channels == 3 else "grey image in [0, 1]",
        "pred_classes": ", ".join(classes),
        "eval_metrics": {name: result[name] for name in ("auc", "mca") if result.get(name) is not None},
        "network_data_format": {
            "inputs": {
                "image": {
                    "type": "image",
                    "format": "magnitude",
                    "modality": "n/a",
                    "num_channels": predictor.channels,
                    "spatial_shape": [size, size],
                    "dtype": "float32",
                    "value_range": [0, 1],
                    "is_patch_data": False,
                    "channel_def": channels,
                }
            },
            "outputs": {
                "pred": {
                    "type": "probabilities",
                    "format": "classes",
                    "num_channels": len(classes),
                    "spatial_shape": [],
                    "dtype": "float32",
                    "value_range": [0, 1],
                    "is_patch_data": False,
                    "channel_def": {str(position): name for position, name in enumerate(classes)},
                }
            },
        },
    }


def _inference(predictor: Predictor) -> dict[str, Any]:
    """configs/inference.json: predicts a folder of images and writes eval/predictions.csv."""
    mode, channel = ("L", "no_channel") if predictor.channels == 1 else ("RGB", -1)
    suffixes = sorted(IMAGE_SUFFIXES - {".dcm", ".dicom"})
    return {
        "imports": ["$import glob", "$import os", "$import torch", "$import monai"],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/images'",
        "output_dir": "$@bundle_root + '/eval'",
        "suffixes": suffixes,
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "files": (
            "$sorted(path for path in glob.glob(os.path.join(@dataset_dir, '**', '*'), recursive=True) "
            "if os.path.splitext(path)[1].lower() in @suffixes)"
        ),
        "program": "$torch.export.load(@bundle_root + '/models/model.pt2').module().to(@device)",
        # An exported program has no train() and eval(), which MONAI calls.
        "network": (
            "$type('Network', (torch.nn.Module,), {'forward': lambda self, image: @program(image.as_tensor())})()"
        ),
        "squares": "$torch.export.load(@bundle_root + '/models/squares.pt2').module()",
        "preprocessing": {
            "_target_": "Compose",
            "transforms": [
                {
                    "_target_": "LoadImaged",
                    "keys": "image",
                    "reader": (
                        f"$monai.data.PILReader(converter=lambda image: image.convert('{mode}'), "
                        "reverse_indexing=False)"
                    ),
                },
                {"_target_": "EnsureChannelFirstd", "keys": "image", "channel_dim": channel},
                {
                    "_target_": "Lambdad",
                    "keys": "image",
                    "func": (
                        "$lambda image: monai.data.MetaTensor(@squares(image.as_tensor()[None])[0], meta=image.meta)"
                    ),
                },
            ],
        },
        "dataset": {
            "_target_": "Dataset",
            "data": "$[{'image': path} for path in @files]",
            "transform": "@preprocessing",
        },
        "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 16, "num_workers": 0},
        "inferer": {"_target_": "SimpleInferer"},
        "handlers": [
            {
                "_target_": "ClassificationSaver",
                "output_dir": "@output_dir",
                "filename": "predictions.csv",
                "batch_transform": "$lambda batch: [item['image'].meta for item in batch]",
                "output_transform": "$monai.handlers.from_engine(['pred'])",
            }
        ],
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "@device",
            "val_data_loader": "@dataloader",
            "network": "@network",
            "inferer": "@inferer",
            "val_handlers": "@handlers",
        },
        "run": ["$@evaluator.run()"],
    }


def _dump(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError

    try:
        return version(package)
    except PackageNotFoundError:
        return "0.4.11"


def _require(*packages: str, extra: str) -> None:
    for package in packages:
        try:
            import_module(package)
        except ImportError:
            raise ConfigError(
                f"--to {extra} needs {package}, which is not installed: pip install 'csda[{extra}]'"
            ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporters' messages about packages that are not needed."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)
