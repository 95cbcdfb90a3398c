"""The command line: `geodescent study`, `cell`, `report`, `certify`, `inspect`."""

from __future__ import annotations

import dataclasses
import functools
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import joblib
import typer
from rich.console import Console
from rich.table import Table

from ..analysis import LAYOUTS
from .arms import ARMS, select_arms
from .cells import run_cell
from .certification import certify_all
from .distributed import Processes, torchrun
from .download import download_with_progress
from .grid import SIZES
from .inspection import inspect_checkpoint, print_inspection
from .plan import PlannedStudy
from .progress import show_progress
from .protocol import check_variations
from .readme import update_readme
from .report import report_folder
from .results import ResultsStore
from .runner import BACKENDS, Pool, follow, run_jobs
from .single import cell_from_words, find_stored, print_cell, print_comparison
from .studies import STUDIES
from .study import Study
from .study_charlm import CharlmStudy
from .study_cifar10 import Cifar10Study
from .study_modular import ModularStudy
from .terminal import print_summary

app = typer.Typer(
    help="Geometry-first optimization on manifolds: studies, reports and certificates.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
study_app = typer.Typer(help="Train the same transformer under several optimizers, from paired starts, and report.")
app.add_typer(study_app, name="study", no_args_is_help=True)

Arms = Annotated[
    list[str] | None, typer.Option("--arm", help=f"An arm to run; repeat for several. There are: {', '.join(ARMS)}.")
]
Quick = Annotated[bool, typer.Option("--quick", help="A few minutes: three arms, one learning rate, few seeds.")]
Full = Annotated[bool, typer.Option("--full", help="The whole grid at a larger size: days of a few cores.")]
Seeds = Annotated[int | None, typer.Option(min=1, help="Paired seeds of every arm: 0, 1, …, in place of the grid's.")]
Lr = Annotated[float | None, typer.Option(help="One learning rate for every arm, in place of the sweep.")]
WeightDecay = Annotated[float | None, typer.Option(help="Decoupled decay of matrices, in place of the grid's.")]
Out = Annotated[Path, typer.Option(help="Folder for the results; the same command goes on where it was stopped.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Runs at a time. Default: the number of cores ÷ threads.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads a run.")]
Backend = Annotated[str, typer.Option(help=f"Where runs are run: {', '.join(BACKENDS)}.")]
Address = Annotated[str | None, typer.Option(help="Of the Ray or Dask cluster; without it one is started here.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """The `geodescent` command. What a user can mend is one line on stderr and exit status 2."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="geodescent")
    except (ValueError, OSError) as error:
        sys.stderr.write(f"geodescent: error: {error}\n")
        sys.exit(2)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"geodescent {metadata.version('geodescent')}")
        raise typer.Exit


@study_app.command()
def modular(
    context: typer.Context,
    quick: Quick = False,
    full: Full = False,
    arm: Arms = None,
    seeds: Seeds = None,
    lr: Lr = None,
    weight_decay: WeightDecay = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps at most.")] = None,
    p: Annotated[int | None, typer.Option(help="The modulus.")] = None,
    train_fraction: Annotated[float | None, typer.Option(help="Share of the pairs to train on.")] = None,
    out: Out = Path("runs"),
    jobs: Jobs = None,
    threads: Threads = 1,
    backend: Backend = "local",
    address: Address = None,
) -> None:
    """Modular addition: generated data. The default size takes about an hour of two cores."""
    changes = {"steps": steps, "p": p, "train_fraction": train_fraction}
    asked = _Asked(context, quick, full, arm, seeds, lr, weight_decay, changes)
    _study(asked.plan(ModularStudy), out, _pool(jobs, threads, backend, address))


@study_app.command()
def cifar10(
    context: typer.Context,
    data: Annotated[Path, typer.Option(help="Folder of CIFAR-10's six .bin files, or the folder above it.")],
    download: Annotated[bool, typer.Option("--download", help="Fetch the data into that folder first.")] = False,
    quick: Quick = False,
    full: Full = False,
    arm: Arms = None,
    seeds: Seeds = None,
    lr: Lr = None,
    weight_decay: WeightDecay = None,
    train_images: Annotated[int | None, typer.Option(help="Training images, balanced over the classes.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the training images.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Images a step.")] = None,
    out: Out = Path("runs"),
    jobs: Jobs = None,
    threads: Threads = 1,
    backend: Backend = "local",
    address: Address = None,
) -> None:
    """CIFAR-10 in patches, from the official binary files. The default size takes about an hour of two cores."""
    if download:
        download_with_progress(_console(), data)
    changes = {"data_folder": str(data), "train_images": train_images, "epochs": epochs, "batch_size": batch_size}
    asked = _Asked(context, quick, full, arm, seeds, lr, weight_decay, changes)
    _study(asked.plan(Cifar10Study), out, _pool(jobs, threads, backend, address))


@study_app.command()
def charlm(
    context: typer.Context,
    data: Annotated[Path, typer.Option(help="A text file, UTF-8.")],
    quick: Quick = False,
    full: Full = False,
    arm: Arms = None,
    seeds: Seeds = None,
    lr: Lr = None,
    weight_decay: WeightDecay = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps.")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Width of the model.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the model.")] = None,
    out: Out = Path("runs"),
    jobs: Jobs = None,
    threads: Threads = 1,
    backend: Backend = "local",
    address: Address = None,
) -> None:
    """The next character of a text. The default size takes about an hour of two cores.

    Under torchrun each run is shared by all processes.
    """
    changes = {"text_file": str(data), "steps": steps, "width": width, "layers": layers}
    asked = _Asked(context, quick, full, arm, seeds, lr, weight_decay, changes)
    _study(asked.plan(CharlmStudy), out, _pool(jobs, threads, backend, address))


@app.command()
def cell(
    study: Annotated[str, typer.Argument(help=f"One of {', '.join(STUDIES)}.")],
    arm: Annotated[str, typer.Option(help="The arm.")],
    seed: Annotated[int, typer.Option(min=0, help="The seed.")] = 0,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE, the value in JSON; repeat for several.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Folder or file of the data, for studies that have some.")] = None,
    threads: Threads = 1,
    against: Annotated[
        Path | None, typer.Option(help="Results folder: compare with its line of this cell, to the last bit.")
    ] = None,
) -> None:
    """Run one cell of a study, as every results line says in its "command". Also under torchrun.

    Exit status 1 where the run fails, or differs from the stored one.
    """
    one = cell_from_words(study, arm, seed, settings or [], data)
    with torchrun() as processes:
        record = run_cell(one, threads, processes=processes)
        if processes.rank == 0:
            console = _console()
            print_cell(console, record)
            stored = None if against is None else find_stored(against, one)
            if stored is not None and not print_comparison(console, record, stored):
                raise typer.Exit(1)
        if record["status"] == "failed":
            raise typer.Exit(1)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Results folders of studies, such as runs/modular.")],
    readme: Annotated[
        Path | None, typer.Option(help="A file whose lines between the markers of studies are replaced by the tables.")
    ] = None,
) -> None:
    """Build the reports again from stored results: nothing is trained."""
    console = _console()
    for folder in runs:
        page = report_folder(folder)
        console.print(f"Report: {page}", markup=False, highlight=False, soft_wrap=True)
    if readme is not None:
        update_readme(readme, runs)
        console.print(f"Tables: {readme}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def certify(
    n: Annotated[int, typer.Option(min=1, help="Rows of the frames.")] = 24,
    p: Annotated[int, typer.Option(min=1, help="Columns of the frames, at most n.")] = 6,
    seed: Annotated[int, typer.Option(help="Of the frames and gradients.")] = 0,
) -> None:
    """Check, in float64, what each optimizer claims. Exit status 0 if certificates hold exactly where claimed."""
    if not 1 < p < n:
        raise ValueError(
            f"p must be above 1 and below n, found n = {n} and p = {p}: with one column, or a square frame, rules that "
            "differ in general take the same steps"
        )
    console = _console()
    table = Table(title=f"Certificates in float64 on two frames of {n}×{p}, seed {seed}")
    for name in ("optimizer", "certificate", "measured", "value", "bound", "holds", "claimed"):
        table.add_column(name, justify="right" if name in ("value", "bound") else "left")
    wrong = []
    for report in certify_all((2, n, p), seed):
        for i, row in enumerate(report.rows):
            first = report.optimizer if i == 0 else ""
            text = ("yes" if row.holds else "no", "yes" if row.claimed else "no")
            table.add_row(first, row.name, row.quantity, f"{row.value:.4g}", f"{row.bound:.4g}", *text)
            if not row.consistent:
                wrong.append(f"{report.optimizer}: {row.name} {'holds' if row.holds else 'does not hold'}")
        table.add_section()
    console.print(table)
    if wrong:
        console.print("Not as claimed: " + "; ".join(wrong), markup=False, style="bold red")
        raise typer.Exit(1)
    console.print("Every certificate holds exactly where its optimizer claims it.")


@app.command()
def inspect(
    checkpoint: Annotated[
        Path, typer.Argument(help="A .safetensors, .pt, .pth, .bin or .ckpt file, an .index.json, or a folder of them.")
    ],
    against: Annotated[Path | None, typer.Option(help="An earlier checkpoint: also print the drift from it.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Heads a layer, where no config.json says.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key-value heads, checked against the widths.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Width of a head, where it is not width/heads.")] = None,
    layout: Annotated[
        str | None, typer.Option(help=f"How the layers are stored, if not found: {', '.join(LAYOUTS)}.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File for every number, of every layer and head.")
    ] = None,
    samples: Annotated[int, typer.Option(min=0, help="Random subspaces that drift is compared with.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the random subspaces.")] = 0,
    rows: Annotated[int, typer.Option(min=1, help="Rows a table; more layers than that share rows.")] = 16,
    worst: Annotated[int, typer.Option(min=0, help="How many of the worst heads to print.")] = 5,
) -> None:
    """The attention geometry of a saved model, and its drift from another. Nothing in the file is run."""
    given = {"num_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "layout": layout}
    inspection = inspect_checkpoint(checkpoint, against, samples, seed, **given)
    print_inspection(_console(), inspection, rows, worst)
    if json_file is not None:
        inspection.write_json(json_file)


@dataclass(frozen=True)
class _Asked:
    """What the options of a study say."""

    context: typer.Context
    quick: bool
    full: bool
    arms: list[str] | None
    seeds: int | None
    lr: float | None
    weight_decay: float | None
    changes: dict[str, Any]

    def plan(self, kind: type[Study]) -> PlannedStudy:
        if self.quick and self.full:
            raise ValueError("--quick and --full exclude each other")
        size = "quick" if self.quick else "full" if self.full else "default"
        settings, grid = SIZES[kind.name][size]
        given = {name: value for name, value in self.changes.items() if value is not None}
        study = kind(**(settings | given))
        arms = select_arms(self.arms or grid.arms)
        if self.lr is not None:  # nothing is swept
            variations = {role: dataclasses.replace(v, lrs=()) for role, v in grid.variations.items()}
            grid = dataclasses.replace(grid, lrs=(self.lr,), qk_scales={}, variations=variations)
        if self.weight_decay is not None:
            grid = dataclasses.replace(grid, decays=(self.weight_decay,))
        if 0.0 in grid.decays:  # there would be nothing to cycle
            kept = {role: v for role, v in grid.variations.items() if "decay_cycles" not in v.changes}
            grid = dataclasses.replace(grid, variations=kept)
        grid = dataclasses.replace(
            grid,
            arms=tuple(arm.name for arm in arms),
            seeds=grid.seeds if self.seeds is None else {},
            other_seeds=grid.other_seeds if self.seeds is None else self.seeds,
        )
        check_variations(study, grid)
        return PlannedStudy(study, arms, grid, size, _command(self.context))


def _pool(jobs: int | None, threads: int, backend: str, address: str | None) -> Pool:
    return Pool(jobs or max(1, joblib.cpu_count() // threads), threads, backend, address)


def _study(planned: PlannedStudy, out: Path, pool: Pool) -> None:
    with torchrun() as processes:
        if processes.rank == 0:
            _lead(planned, out, pool, processes)
        else:
            follow(pool.threads, processes)


def _lead(planned: PlannedStudy, out: Path, pool: Pool, processes: Processes) -> None:
    console, folder = _console(), out / planned.study.name
    with ResultsStore(folder) as store:
        try:
            with show_progress(console, planned.study, pool.threads, pool.workers) as progress:
                write = functools.partial(planned.write, folder)
                run = run_jobs(planned.jobs, store, pool, progress, write, processes)
        except KeyboardInterrupt:
            console.print("Stopped. Finished runs are kept; the same command goes on from here.")
            raise typer.Exit(130) from None
        page = report_folder(folder)
    if old := len(run.jobs) - run.fresh:
        console.print(f"{old} of {len(run.jobs)} runs were there already, or serve twice, and were not repeated.")
    print_summary(console, folder)
    console.print(f"\nResults: {store.path}\nReport:  {page}", markup=False, highlight=False, soft_wrap=True)
    if run.failed:
        raise typer.Exit(1)


def _command(context: typer.Context) -> str:
    """The command as typed: the options that were given, and no others."""
    words = ["geodescent", *context.command_path.split()[1:]]
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[parameter.name or ""]
        for item in value if isinstance(value, (list, tuple)) else [value]:
            words += [parameter.opts[0]] if item is True else [parameter.opts[0], str(item)]
    return shlex.join(words)


def _console() -> Console:
    """As wide as the terminal; where the output is a file or a pipe, wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, 150))


if __name__ == "__main__":
    main()
