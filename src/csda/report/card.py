"""The model card: what a model is, how it was trained and chosen, its results, and its limits."""

from __future__ import annotations

from pathlib import Path

from csda.report.tables import Estimate, count_classes, count_images, remark_split, score
from csda.runs import Run

NOT_A_DEVICE = "This model is for research. It is not a medical device, and not for decisions about patients."


def model_card(run: Run, remark: str = "", takes: str = "images as uint8 [batch, height, width, channels]") -> str:
    """The card in Markdown, from the files of a finished run.

    `remark` says how the exported file was compared, and `takes` what it is given.
    """
    scores, counts, images = score(run), count_classes(run), count_images(run)
    config, environment = run.config, run.environment
    fitted = run.calibration
    name = Path(config["data"]).name or "images"
    chosen = (
        f"epoch {run.result['best_epoch']} of {len(run.metrics)}, the best AUC on {images['val']:,} validation images"
        if config["choose"] == "best"
        else f"the last of {len(run.metrics)} epochs"
    )
    lines = [
        f"# {config['method']} on {name}",
        "",
        NOT_A_DEVICE,
        "",
        "## Model",
        "",
        f"- Takes {takes} of any size and gives "
        f"{'the probability of each label' if run.multi_label else 'a probability for each class'}, "
        f"in the order of the tables below; the network sees {config['image_size']}×{config['image_size']} pixels.",
        f"- Network `{config['backbone']}`{_describe_start(run)}, trained by csda {environment.get('csda', '')} with "
        f"the method `{config['method']}` (preset `{config['preset']}`, seed {config['seed']}).",
        f"- Chosen: {chosen}. Test images were not used for the choice.",
        f"- {_describe_calibration(run)}",
        *([f"- {remark}"] if remark else []),
        "",
        "## Data",
        "",
        f"Data set `{environment.get('dataset', name)}`: {images['labeled']:,} labeled and {images['unlabeled']:,} "
        f"unlabeled images for training, {images['val']:,} for validation, {images['test']:,} for testing.",
        "",
        "| class | labeled | validation | test |",
        "|---|---:|---:|---:|",
        *(f"| {_cell(each.name)} | {each.labeled} | {each.val} | {each.test} |" for each in counts),
        "",
        "## Results on the test images",
        "",
        "With 95 % intervals over these images. Another seed or split may matter more.",
        "",
        f"AUC {_text(scores.auc)}, MCA (mean class accuracy) {_text(scores.mca)}.",
        "",
        "| class | recall | precision | AUC |",
        "|---|---|---|---|",
        *(
            f"| {_cell(each.name)} | {_text(recall)} | {_text(precision)} | {_text(auc)} |"
            for each, recall, precision, auc in zip(
                counts, scores.recall, scores.precision, scores.class_auc, strict=True
            )
        ),
        "",
        "## Limits",
        "",
        "- It knows only these classes. An image of anything else is assigned to one of them.",
        "- Figures and coverage hold for images like these: the same kind of device, clinic and patients. "
        "Evaluate it on images of your own first: `csda evaluate RUN DATA`.",
        "- Accuracy and precision change with the class frequencies.",
        *(f"- {remark}." for remark in remark_split(run)),
        *([] if fitted is None else [f"- {each}." for each in fitted.remarks]),
        f"- {NOT_A_DEVICE}",
    ]
    return "\n".join(lines) + "\n"


def _describe_start(run: Run) -> str:
    """The weights that the network began with."""
    settings = run.settings
    if not settings.pretrained and settings.weights is None:
        return ""
    begun = "published weights" if settings.weights is None else f"the weights of {Path(settings.weights).name}"
    return f" with {begun}, frozen except for its head" if settings.frozen else f", begun with {begun}"


def _describe_calibration(run: Run) -> str:
    fitted = run.calibration
    if fitted is None:
        return "Probabilities are not calibrated."
    *first, last = (f"{each:.0%}" for each in fitted.coverages) if fitted.coverages else ("",)
    sets = f"{', '.join(first)} or {last}" if first else last
    return (
        f"Probabilities are calibrated by a temperature of {fitted.temperature:.3f}, fitted to {fitted.images} "
        f"{fitted.fitted_on} images" + (f"; it has limits for sets that cover {sets}." if sets else ".")
    )


def _text(estimate: Estimate) -> str:
    return f"{estimate} {estimate.interval}".strip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
