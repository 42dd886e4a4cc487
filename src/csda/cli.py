"""The command line. Each command imports what it needs when it runs, so that `--help` is fast."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from csda.errors import CsdaError, DataError, is_out_of_memory

app = typer.Typer(
    help="Train medical image classifiers from few labeled and many unlabeled images.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(help="Check data before training on it.", no_args_is_help=True, rich_markup_mode=None)
cache_app = typer.Typer(rich_markup_mode=None)
bench_app = typer.Typer(
    help="Measure speed, as ratios within one run, and memory.", no_args_is_help=True, rich_markup_mode=None
)
weights_app = typer.Typer(rich_markup_mode=None)
labels_app = typer.Typer(help="Labels from the review page.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data")
app.add_typer(labels_app, name="labels")
app.add_typer(weights_app, name="weights", short_help="List or download published weights.")
app.add_typer(cache_app, name="cache", short_help="Show or clear the cache.")
app.add_typer(bench_app, name="bench")

Data = Annotated[str | None, typer.Argument(help="Folder of images.  [default: drawn images, 'synthetic']")]
RunFolder = Annotated[Path, typer.Argument(help="Folder that `csda train` made.")]
Preset = Annotated[
    str | None,
    typer.Option(help="strong (own images on a GPU), features (without one), paper, default or quick."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print plain lines instead of bars, for log files.")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting; see `csda methods`.")
]
Rounds = Annotated[int, typer.Option(min=1, help="Number of measurements of each.")]
Seconds = Annotated[float, typer.Option(help="Start no new measurement after this many seconds.")]
FiguresFile = Annotated[Path | None, typer.Option(help="JSON to write.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"csda {version('csda')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(short_help="Train a classifier and write a run folder.")
def train(
    data: Data = None,
    method: Annotated[
        str | None, typer.Option(help="One of `csda methods`.  [default: csda; self-train with features]")
    ] = None,
    preset: Preset = None,
    labels: Annotated[str | None, typer.Option(help="Labels to keep: 300, 10%, 20/class or 10% of groups.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of data, split and training.  [default: 0]")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder to write.  [default: a new one under runs/]")] = None,
    source: Annotated[str | None, typer.Option(help="Format of DATA.  [default: recognised from its files]")] = None,
    split: Annotated[str | None, typer.Option(help="Split CSV, or the folder with a set's published lists.")] = None,
    labels_from: Annotated[
        Path | None, typer.Option(help="Run or review folder with a labels.csv of new labels.")
    ] = None,
    settings: Assignments = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    quiet: Quiet = False,
) -> None:
    """Train a classifier and write a run folder with model, predictions and report."""
    from csda.config import parse_assignments
    from csda.distributed import is_first
    from csda.progress import choose_reporter
    from csda.report import write_comparison, write_report
    from csda.report.tables import run_table, warn
    from csda.runs import Run
    from csda.training import train as train_run

    chosen = parse_assignments(settings or [])
    chosen |= {key: value for key, value in (("source", source), ("split", split)) if value is not None}
    run = train_run(
        data,
        method=method,
        preset=preset,
        labels=labels,
        seed=seed,
        out=out,
        settings=chosen,
        resume=resume,
        labels_from=labels_from,
        reporter=choose_reporter(quiet),
    )
    if not is_first():
        return
    report = write_report(run.folder)
    for sentence in warn(run):
        print(sentence)
    _print(run_table(run))
    print(f"Report: {report}")
    before = run.settings.labels_from
    if before is not None and (Path(before) / "config.toml").is_file() and Run(before).finished:
        page = write_comparison([Path(before), run.folder], run.folder / "labels.html", "What the new labels changed")
        print(f"What the new labels changed: {page}")


@app.command(short_help="Print the figures of a run, on any labeled images.")
def evaluate(
    run: RunFolder,
    data: Annotated[
        str | None, typer.Argument(help="Folder of labeled images.  [default: the run's test images]")
    ] = None,
    source: Annotated[str | None, typer.Option(help="Format of DATA.  [default: recognised from its files]")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for report, figures and predictions on DATA.")] = None,
    settings: Assignments = None,
    quiet: Quiet = False,
) -> None:
    """Print the figures of a run, finished or not, on its test images or on others, with 95 % intervals."""
    from csda.runs import Run

    if data is None:
        if source or out or settings:
            raise CsdaError("--source, --out and --set need DATA; give a folder of labeled images")
        from csda.report.tables import run_table, warn
        from csda.runs import open_run

        opened = open_run(run)
        for sentence in warn(opened):
            print(sentence)
        _print(run_table(opened))
        return
    from csda.config import parse_assignments
    from csda.external import evaluate_external
    from csda.progress import choose_reporter
    from csda.report.transfer import describe_calibration, external_tables, write_external

    chosen = parse_assignments(settings or []) | ({} if source is None else {"source": source})
    with choose_reporter(quiet) as reporter:
        external = evaluate_external(Run(run), data, chosen, reporter.images)
    for table in external_tables(external):
        _print(table)
    for remark in (describe_calibration(external), *external.remarks):
        print(remark)
    if out is not None:
        print(f"Report: {write_external(external, out)}")


@app.command(short_help="Classify images and write a CSV.")
def predict(
    run: RunFolder,
    images: Annotated[
        list[str], typer.Argument(help="Image files, folders of them, patterns, or lists (.txt, or .csv with `image`).")
    ],
    out: Annotated[Path | None, typer.Option(help="CSV to write.  [default: print it]")] = None,
    tta: Annotated[bool, typer.Option("--tta", help="Average predictions over mirrored copies of each image.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the table in --out.")] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Decoding threads, or Ray workers.  [default: one per core or GPU]")
    ] = None,
    launcher: Annotated[
        Literal["threads", "ray"], typer.Option(help="Threads on this machine, or Ray workers on several.")
    ] = "threads",
    coverage: Annotated[
        float | None,
        typer.Option(help="Share of images with their class in the set: 0.8, 0.9 or 0.95.  [default: 0.9]"),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Classify images and write a CSV with a row for each image and a column for each class.

    Each image has a set of classes that holds its class with the probability `--coverage`; it is unsure if the set has
    more than one. If an image cannot be used, the last column says why, and the exit code is 1.
    """
    from csda.inference import predict_table
    from csda.progress import choose_reporter
    from csda.runs import Run

    if resume and out is None:
        raise CsdaError("--resume needs --out, the table to continue")
    remark = None
    if not Run(run).finished:
        remark = "not finished; this is its best model so far"
    elif (fitted := Run(run).calibration) is None or fitted.remarks:
        remark = "; ".join(fitted.remarks) if fitted else "not calibrated; no image is marked as unsure"
    with choose_reporter(quiet) as reporter:
        done = predict_table(
            run,
            images,
            out,
            tta=tta,
            resume=resume,
            jobs=jobs,
            launcher=launcher,
            coverage=coverage,
            echo=sys.stdout.write,
            progress=reporter.images,
        )
    if remark is not None:
        print(_printable(f"csda: {run}: {remark}"), file=sys.stderr)
    if out is not None:
        print(_printable(f"{done.files - done.unusable} predictions in {out}"))
    if done.unusable:
        print(f"csda: {done.unusable} of {done.files} files could not be used; see the column error", file=sys.stderr)
        raise typer.Exit(1)


@app.command(short_help="Write the report of a run, or compare several.")
def report(
    runs: Annotated[list[Path], typer.Argument(help="One run folder, or several to compare.")],
    out: Annotated[Path | None, typer.Option(help="Page to write for several runs.")] = None,
    no_images: Annotated[bool, typer.Option("--no-images", help="Put no images into the page.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Write nothing, compare all files of the runs with their checksums.")
    ] = False,
) -> None:
    """Write the report of a run, or a page that compares several runs. Works on unfinished runs."""
    if verify:
        from csda.runs import Run

        for run in runs:
            print(f"{run}: {Run(run).verify()} files match their checksums")
        return
    from csda.report import write_comparison, write_report

    if len(runs) == 1 and out is None:
        print(write_report(runs[0], images=not no_images))
    else:
        print(write_comparison(runs, out or Path("comparison.html"), images=not no_images))


@app.command(short_help="Export a model to ONNX, torch or MONAI.")
def export(
    run: RunFolder,
    to: Annotated[Literal["onnx", "torch", "monai"], typer.Option(help="ONNX, torch.export, or a MONAI bundle.")],
    out: Annotated[Path | None, typer.Option(help="New folder to write.  [default: RUN-onnx and so on]")] = None,
    images: Annotated[
        list[Path] | None,
        typer.Option(help="Image to test the model on; repeatable.  [default: the run's test images]"),
    ] = None,
) -> None:
    """Export the model of a run, with its preprocessing, calibration and model card, for use without csda."""
    from csda.export import export as export_model
    from csda.runs import Run

    print(export_model(Run(run), to, out, images or []))


@app.command()
def review(
    what: Annotated[Path, typer.Argument(metavar="RUN|FOLDER", help="A finished run, or a folder of images.")],
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port.  [default: the first free one from 8765]")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to serve at; other than this machine's own it needs a token.")
    ] = "127.0.0.1",
    classes: Annotated[str | None, typer.Option(help="Classes of a folder without labels: a,b,c.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the labels of a folder of images.  [default: runs/NAME-review]")
    ] = None,
    source: Annotated[
        str | None, typer.Option(help="Format of a folder.  [default: recognised from its files]")
    ] = None,
    who: Annotated[str | None, typer.Option(help="Name stored with each label.  [default: the user's]")] = None,
    features: Annotated[
        bool,
        typer.Option(help="Compute features, for neighbours, diversity and suspicious labels."),
    ] = True,
) -> None:
    """Serve a page to review and label images. Those that tell most about all others come first."""
    _require_packages("review", "fastapi", "uvicorn")
    from csda.review.advisor import Advisor
    from csda.review.server import serve
    from csda.review.session import open_folder, open_run
    from csda.runs import Run

    if (what / "config.toml").is_file():
        if classes or out or source:
            raise CsdaError("a run knows its classes, data and folder; leave --classes, --out and --source out")
        session = open_run(what, who)
        advisor = Advisor(session, Run(what))
    else:
        folder = out or Path("runs") / f"{what.absolute().name}-review"
        session = open_folder(what, folder, classes.split(",") if classes else (), who, source)
        advisor = Advisor(session)
    if features:
        advisor.begin()
    try:
        serve(session, host, port, advisor=advisor)
    finally:
        session.close()


@app.command("simulate-review", short_help="Compare orders of the review page.")
def simulate_review(
    data: Annotated[str, typer.Argument(help="Folder of labeled images.")],
    first: Annotated[int, typer.Option(min=2, help="Labels to begin with, drawn at random.")] = 200,
    step: Annotated[int, typer.Option(min=1, help="Labels to add at a time.")] = 100,
    most: Annotated[int, typer.Option(min=2, help="Labels at the end.")] = 800,
    seeds: Annotated[int, typer.Option(min=2, help="Number of seeds, each with its own split.")] = 5,
    from_seed: Annotated[int, typer.Option(min=0, help="The first of the seeds.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the table and the figure.")] = Path("results/review"),
) -> None:
    """Simulate a review with known labels, and compare each order of the page with random order."""
    _require_research()
    from csda.progress import LogReporter
    from csda.research.simulate import Plan, simulate, write_simulation

    if not first < most:
        raise CsdaError(f"--most {most} is not more than --first {first}; give a larger --most")
    plan, rows = Plan(first, step, most), []
    for row in simulate(data, plan, range(from_seed, from_seed + seeds), reporter=LogReporter()):
        rows.append(row)
        print(f"seed {row['seed']}  {row['order']}  {row['labels']} labels  MCA {row['mca']:.4f}  AUC {row['auc']:.4f}")
    command = f"csda simulate-review {Path(data).name} --first {first} --step {step} --most {most} --seeds {seeds}"
    command += f" --from-seed {from_seed}" if from_seed else ""
    print(write_simulation(rows, plan, data, command, out))


@app.command("compare-estimators", short_help="Compare with classifiers of scikit-learn.")
def compare_estimators(
    data: Annotated[list[str], typer.Argument(help="Folders of labeled images.")],
    labels: Annotated[list[int] | None, typer.Option(min=2, help="Labels to keep; repeatable.  [default: 50]")] = None,
    seeds: Annotated[int, typer.Option(min=2, help="Number of seeds, each with its own split.")] = 10,
    image_size: Annotated[
        int, typer.Option(min=16, help="Features are computed from images of this size in pixels.")
    ] = 96,
    out: Annotated[Path, typer.Option(help="Folder for the tables.")] = Path("results/estimators"),
) -> None:
    """Compare CSDAClassifier with the classifiers of scikit-learn, on features of images with few labels."""
    _require_research()
    from csda.progress import LogReporter
    from csda.research.estimators import compare, write_comparison

    budgets, rows = labels or [50], []
    for row in compare(data, budgets, seeds, image_size, LogReporter()):
        rows.append(row)
        place = f"{row['data']}  {row['labels']} labels  seed {row['seed']}"
        print(f"{place}  MCA {row['mca']:.4f}  AUC {row['auc']:.4f}  {row['estimator']}")
    words = [*(Path(each).name for each in data), *(f"--labels {each}" for each in budgets), f"--seeds {seeds}"]
    command = f"csda compare-estimators {' '.join(words)} --image-size {image_size}"
    print(write_comparison(rows, command, image_size, out))


@labels_app.command("export", short_help="Write all labels as a CSV.")
def labels_export(
    what: Annotated[Path, typer.Argument(metavar="RUN|REVIEW", help="A run or review folder.")],
    out: Annotated[Path | None, typer.Option(help="CSV to write.  [default: print it]")] = None,
    prefix: Annotated[
        str, typer.Option(help="Text to put before each image name, such as an address for Label Studio.")
    ] = "",
) -> None:
    """Write all labels, original and new, as a CSV that `csda train` and Label Studio read.

    To train with it, put it into the folder of the images.
    """
    from csda.data.prepared import load_configured
    from csda.data.reviewed import list_decided, read_review
    from csda.files import write_csv
    from csda.runs import Run

    if (what / "config.toml").is_file():
        dataset = load_configured(Run(what).settings)
    else:
        from csda.data import load_dataset
        from csda.data.folder import load_unlabeled

        known = read_review(what)
        data = Path(known["data"])
        dataset = load_unlabeled(data, known["classes"]) if known["classes"] else load_dataset(data, known["source"])
    header = ["image", "label", "split", "group", "who", "when"]
    rows = [[prefix + image, *cells] for image, *cells in list_decided(dataset, what)]
    if out is None:
        csv.writer(sys.stdout, lineterminator="\n").writerows([header, *rows])
    else:
        write_csv(out, header, rows)
        print(f"{sum(bool(label) for _, label, *_ in rows)} of {len(rows)} images have a label in {out}")


@app.command(short_help="List methods, or the settings of one.")
def methods(
    name: Annotated[str | None, typer.Argument(help="Method to show the settings of.")] = None,
    preset: Preset = None,
    settings: Assignments = None,
    every: Annotated[bool, typer.Option("--all", help="Show all settings, also the readings of the paper.")] = False,
) -> None:
    """List the methods, or show the settings of one with the values for your own images on this machine."""
    from csda.methods.catalog import methods_table, settings_table
    from csda.presets import configure

    if name is None:
        _print(methods_table())
        return
    chosen = {"data": "my_images", **_with_preset(settings, preset), "method": name}
    _print(settings_table(configure(chosen), configure({**chosen, "preset": "paper"}), every=every))


@app.command(short_help="Train on drawn images, in minutes.")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs and the report.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Of data, split and training.")] = 0,
    settings: Assignments = None,
    quiet: Quiet = False,
) -> None:
    """Train on drawn images, in minutes: a small network, then pretrained features, then with unlabeled images."""
    from csda.config import parse_assignments
    from csda.demo import run_demo
    from csda.progress import choose_reporter

    run_demo(out, seed, choose_reporter(quiet), parse_assignments(settings or []))


@app.command(short_help="Train grids of runs and write their tables.")
def reproduce(
    names: Annotated[list[str], typer.Argument(help="Names of experiments of the package, or TOML files.")],
    data: Annotated[str | None, typer.Option(help="Folder of images, for experiments without drawn images.")] = None,
    runs: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs/reproduce"),
    out: Annotated[Path, typer.Option(help="Folder of the tables.")] = Path("results"),
    launcher: Annotated[
        Literal["processes", "ray"], typer.Option(help="Processes on this machine, or Ray tasks on several.")
    ] = "processes",
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Number of them at a time.  [default: 1, or what Ray has room for]")
    ] = None,
    side_by_side: Annotated[
        int | None,
        typer.Option(min=1, help="Runs at a time per process or GPU of Ray.  [default: 4 on a GPU, else 1]"),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Start no run after this many minutes; call again for the rest.")
    ] = None,
    labels: Annotated[str | None, typer.Option(help="Train only these numbers of labels: 350,800.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Train only the first seeds, this many.")] = None,
    preset: Annotated[str | None, typer.Option(help="Train only the rows of this preset.")] = None,
    settings: Assignments = None,
    only_finished: Annotated[
        bool, typer.Option("--only-finished", help="Train nothing; tabulate the finished runs and say what is missing.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Use only runs of the current commit; train all others again.")
    ] = False,
) -> None:
    """Train the missing runs of experiments, and write their tables and figures beside the paper's values."""
    _require_research()
    from csda.config import parse_assignments
    from csda.progress import LogReporter
    from csda.research.reproduce import reproduce as reproduce_tables

    pages = reproduce_tables(
        names,
        data=data,
        runs=runs,
        out=out,
        launcher=launcher,
        jobs=jobs,
        side_by_side=side_by_side,
        minutes=minutes,
        reporter=LogReporter(),
        overrides=parse_assignments(settings or []),
        labels=labels.split(",") if labels else (),
        seeds=seeds,
        preset=preset,
        only_finished=only_finished,
        fresh=fresh,
    )
    for page in pages:
        print(page)


@data_app.command("check", short_help="Print what would stop a training.")
def data_check(
    data: Annotated[str, typer.Argument(help="Folder of images.")],
    source: Annotated[str | None, typer.Option(help="Format of the folder.  [default: recognised]")] = None,
    html: Annotated[Path | None, typer.Option(help="HTML page to write, with example images of each class.")] = None,
    settings: Assignments = None,
) -> None:
    """Print what is in a folder of images and what would stop a training. The exit code is 1 if something would."""
    from csda.data.check import run_check

    if not settings:
        raise typer.Exit(run_check(data, source, html))
    from csda.config import parse_assignments
    from csda.methods import METHODS
    from csda.presets import configure

    chosen = {"data": data, **parse_assignments(settings)} | ({} if source is None else {"source": source})
    config = configure(chosen)
    needs_unlabeled = "method" in chosen and METHODS[config.method].uses_unlabeled
    raise typer.Exit(run_check(data, source, html, config, needs_unlabeled=needs_unlabeled))


@weights_app.callback(invoke_without_command=True)
def weights(context: typer.Context) -> None:
    """List published weights, which of them are installed, and how to get the others."""
    if context.invoked_subcommand is None:
        from csda.methods.catalog import weights_table

        _print(weights_table())


@weights_app.command("get", short_help="Download the weights of a backbone.")
def weights_get(name: Annotated[str, typer.Argument(help="Backbone, as listed by `csda weights`.")]) -> None:
    """Download the weights of a backbone from their publisher, check their SHA-256 and keep them in the cache."""
    from csda.models.weights import fetch_weights

    print(fetch_weights(name))


@cache_app.callback(invoke_without_command=True)
def cache(context: typer.Context) -> None:
    """Show the contents of the cache (decoded pixels, file hashes, weights) and its size limit."""
    if context.invoked_subcommand is None:
        from csda.data.cache_folders import cache_table
        from csda.folders import default_cache

        _print(cache_table(default_cache()))


@cache_app.command("clear")
def cache_clear() -> None:
    """Delete pixels and file hashes from the cache, but not weights. They are computed again when needed."""
    from csda.data.cache_folders import clear_cache, format_size
    from csda.folders import default_cache

    freed, left = clear_cache(default_cache())
    print(f"{format_size(freed)} freed in {default_cache()}")
    if left:
        raise CsdaError(f"{default_cache()}: {format_size(left)} cannot be deleted, or other programs are writing them")


@bench_app.command("step", short_help="Time a step of each method.")
def bench_step(
    preset: Preset = None,
    settings: Assignments = None,
    parts: Annotated[
        list[str] | None,
        typer.Option(
            "--part",
            help="Measure only this, beside steps of csda and nm: streamed, seeds, methods, start or loader; "
            "repeatable.",
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of images for loader and starts.  [default: drawn]")] = None,
    rounds: Rounds = 15,
    seconds: Seconds = 120.0,
    out: FiguresFile = None,
) -> None:
    """Time a step of each method, and compare it with a bare step, the device's limits and a loader."""
    _require_research()
    from csda.research.bench import bench_step

    chosen = _with_preset(settings, preset)
    _keep_and_show(bench_step(chosen, parts=parts, data=data, rounds=rounds, seconds=seconds), out)


@bench_app.command("scale", short_help="Time a step for more data, classes and slots.")
def bench_scale(
    preset: Preset = None,
    settings: Assignments = None,
    rounds: Rounds = 5,
    seconds: Seconds = 120.0,
    out: FiguresFile = None,
) -> None:
    """Time a step for different numbers of unlabeled images, classes and queue slots."""
    _require_research()
    from csda.research.bench import bench_scale

    _keep_and_show([bench_scale(_with_preset(settings, preset), rounds=rounds, seconds=seconds)], out)


@bench_app.command("recipe", short_help="Time fine-tuning with the preset strong.")
def bench_recipe(
    settings: Assignments = None,
    rounds: Rounds = 10,
    seconds: Seconds = 120.0,
    out: FiguresFile = None,
) -> None:
    """Time 2,000 steps of fine-tuning with the preset strong, and the same steps in plain eager torch."""
    _require_research()
    from csda.research.bench import bench_recipe

    _keep_and_show(bench_recipe(_with_preset(settings, None), rounds=rounds, seconds=seconds), out)


@bench_app.command("data", short_help="Time decoding and a warm start.")
def bench_data(
    data: Annotated[Path, typer.Argument(help="Folder of images.")],
    out: FiguresFile = None,
) -> None:
    """Time decoding and a warm start on a folder of images."""
    _require_research()
    from csda.research.bench import bench_data

    _keep_and_show([bench_data(data)], out)


@bench_app.command("memory", short_help="Measure the memory of trainings.")
def bench_memory(
    data: Annotated[Path | None, typer.Argument(help="Folder of images.  [default: drawn images]")] = None,
    presets: Annotated[
        list[str] | None,
        typer.Option("--preset", help="Preset to measure; repeatable.  [default: features, quick, default and strong]"),
    ] = None,
    rounds: Rounds = 1,
    out: FiguresFile = None,
) -> None:
    """Measure the peak memory of short trainings on the CPU, with each preset."""
    _require_research()
    from csda.research.bench import bench_memory

    _keep_and_show(bench_memory(data, presets or ("features", "quick", "default", "strong"), rounds), out)


@bench_app.command("predict", short_help="Time predictions of image files.")
def bench_predict(
    data: Annotated[Path | None, typer.Argument(help="Folder of images.  [default: drawn images]")] = None,
    preset: Preset = None,
    settings: Assignments = None,
    images: Annotated[int, typer.Option(min=1, help="Number of images to predict in each measurement.")] = 2048,
    rounds: Rounds = 5,
    out: FiguresFile = None,
) -> None:
    """Time predictions of image files, and compare with the bare network and with decoding alone."""
    _require_research()
    from csda.research.bench import bench_predict

    chosen = _with_preset(settings, preset)
    _keep_and_show([bench_predict(chosen, data=data, images=images, rounds=rounds)], out)


@bench_app.command("features", short_help="Time the features of a frozen network.")
def bench_features(
    data: Annotated[Path | None, typer.Argument(help="Folder of images.  [default: drawn images]")] = None,
    settings: Assignments = None,
    rounds: Rounds = 3,
    out: FiguresFile = None,
) -> None:
    """Time the features of a frozen network, and compare with the bare network and a training on them."""
    _require_research()
    from csda.config import parse_assignments
    from csda.research.bench import bench_features

    _keep_and_show([bench_features(parse_assignments(settings or []), data, rounds)], out)


@bench_app.command("review", short_help="Time the review page.")
def bench_review(
    images: Annotated[int, typer.Option(min=100, help="Number of images on the page.")] = 100_000,
    labels: Annotated[int, typer.Option(min=10, help="Number of labels to send.")] = 200,
    out: FiguresFile = None,
) -> None:
    """Time the review page: start, first paint, pages, searches and labels."""
    _require_research()
    _require_packages("review", "fastapi", "uvicorn")
    from csda.research.bench.serving import bench_review

    _keep_and_show([bench_review(images, labels)], out)


def _require_research() -> None:
    if find_spec("csda.research") is None:
        raise CsdaError("this command needs csda.research, which is not installed; install the whole package")


def _require_packages(extra: str, *names: str) -> None:
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise CsdaError(f"this command needs {' and '.join(missing)}: pip install 'csda[{extra}]'")


def _keep_and_show(stages: Iterable[dict[str, Any]], out: Path | None) -> None:
    """Write each figure when it is measured, so that none is lost, and show all at the end."""
    from csda.research.bench import keep, show

    for figures in stages:
        if out is not None:
            keep(figures, out)
    show(figures)


def _with_preset(settings: list[str] | None, preset: str | None) -> dict[str, Any]:
    from csda.config import parse_assignments

    return parse_assignments(settings or []) | ({} if preset is None else {"preset": preset})


def _print(content: object) -> None:
    from rich.console import Console

    Console().print(content)


def _say(text: str) -> None:
    """Print why the command stops. If several processes stop together, only one prints."""
    ranks = sys.modules.get("csda.distributed")
    if ranks is None or ranks.stops_first():
        print(_printable(text), file=sys.stderr)


def _printable(text: str) -> str:
    """The text without bytes that are not UTF-8, which file names may have and a terminal cannot print."""
    return text.encode("utf-8", "backslashreplace").decode()


def _refuse_undecodable(words: list[str]) -> None:
    for word in words:
        if not word.isascii() and any("\ud800" <= letter <= "\udfff" for letter in word):
            raise DataError(f"{word!r}: not UTF-8, so tables cannot hold it; rename the file or folder")


def main() -> None:
    """Run the command line. Exit code 2 is a mistake that the user can fix, 130 is Ctrl-C."""
    try:
        if sys.argv[1:2] != ["predict"]:  # its files may have names that are not UTF-8: each still gets a row
            _refuse_undecodable(sys.argv[1:])
        app()
    except CsdaError as error:
        _say(f"csda: {error}")
        sys.exit(2)
    except (KeyboardInterrupt, SystemExit) as ending:
        if isinstance(ending, SystemExit) and ending.code != 130:  # typer's exit code for Ctrl-C
            raise
        way_on = (
            "continue a training or a table of predictions with --resume and its --out, a grid with the same command"
        )
        _say(f"\ncsda: interrupted; {way_on}")
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _say(
            f"csda: out of memory ({_first_line(error)}); give a smaller batch_size, unlabeled_batch_size or "
            "image_size, or end other programs; continue a training that has begun with --resume"
        )
        sys.exit(2)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
