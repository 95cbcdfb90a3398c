"""The command line: `geodescent study modular`, `geodescent study cifar10`, `geodescent certify`,
`geodescent inspect`."""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from ..analysis import LAYOUTS
from .arms import ARMS, select_arms
from .certification import certify_all
from .inspection import inspect_checkpoint, print_inspection
from .progress import show_progress
from .report import write_report
from .results import ResultsStore
from .runner import RunReport, plan, run_cells
from .studies import Cifar10Study, ModularStudy, Study
from .summary import Summary, summarize

app = typer.Typer(
    help="Geometry-first optimization on manifolds: studies, reports and certificates.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
study_app = typer.Typer(help="Train the same transformer under several optimizers, from paired starts, and report.")
app.add_typer(study_app, name="study", no_args_is_help=True)

Arms = Annotated[
    list[str] | None, typer.Option("--arm", help=f"An arm to run; repeat for several. All: {', '.join(ARMS)}.")
]
Seeds = Annotated[int, typer.Option(min=1, help="Number of paired starts: seeds 0, 1, ….")]
Lr = Annotated[float, typer.Option(help="Learning rate of every arm.")]
WeightDecay = Annotated[float, typer.Option(help="Decoupled decay of matrices; never of frames, biases, norms.")]
Out = Annotated[Path, typer.Option(help="Folder for the results; the same command goes on where it was stopped.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads torch may use. Default: 1 for modular, all for cifar10.")
]


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
    arm: Arms = None,
    seeds: Seeds = 4,
    steps: Annotated[int, typer.Option(min=1, help="Training steps at most.")] = ModularStudy.steps,
    lr: Lr = ModularStudy.lr,
    weight_decay: WeightDecay = ModularStudy.weight_decay,
    p: Annotated[int, typer.Option(help="The modulus.")] = ModularStudy.p,
    train_fraction: Annotated[float, typer.Option(help="Share of the pairs to train on.")] = (
        ModularStudy.train_fraction
    ),
    out: Out = Path("results"),
    threads: Threads = None,
) -> None:
    """Modular addition: generated data, a few minutes on two cores."""
    study = ModularStudy(lr=lr, weight_decay=weight_decay, p=p, train_fraction=train_fraction, steps=steps)
    _run(context, study, arm, seeds, out, threads)


@study_app.command()
def cifar10(
    context: typer.Context,
    data: Annotated[Path, typer.Option(help="Folder of CIFAR-10's six .bin files, or the folder above it.")],
    arm: Arms = None,
    seeds: Seeds = 3,
    train_images: Annotated[int, typer.Option(help="Training images, balanced over the classes.")] = (
        Cifar10Study.train_images
    ),
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = Cifar10Study.epochs,
    batch_size: Annotated[int, typer.Option(min=1, help="Images a step.")] = Cifar10Study.batch_size,
    lr: Lr = Cifar10Study.lr,
    weight_decay: WeightDecay = Cifar10Study.weight_decay,
    out: Out = Path("results"),
    threads: Threads = None,
) -> None:
    """CIFAR-10 in patches, from the official binary files."""
    study = Cifar10Study(
        lr=lr,
        weight_decay=weight_decay,
        data_folder=str(data),
        train_images=train_images,
        epochs=epochs,
        batch_size=batch_size,
    )
    _run(context, study, arm, seeds, out, threads)


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


def _run(
    context: typer.Context, study: Study, arm: list[str] | None, seeds: int, out: Path, threads: int | None
) -> None:
    console = _console()
    cells = plan(study, select_arms(arm), range(seeds))
    folder = out / study.name
    with ResultsStore(folder) as store:
        try:
            with show_progress(console, cells) as progress:
                run = run_cells(cells, store, progress, threads or study.default_threads or torch.get_num_threads())
        except KeyboardInterrupt:
            console.print("Stopped. Finished runs are kept; the same command goes on from here.")
            raise typer.Exit(130) from None
        page = write_report(folder / "report", study, run.records, _command(context))
    _print_summary(console, study, run, summarize(run.records, study.headline))
    console.print(f"\nResults: {store.path}\nReport:  {page}", markup=False, highlight=False, soft_wrap=True)
    if run.failed:
        raise typer.Exit(1)


def _print_summary(console: Console, study: Study, run: RunReport, summary: Summary) -> None:
    old = len(run.records) - run.fresh
    if old:
        console.print(f"{old} of {len(run.records)} runs were there already and were not repeated.")
    table = Table(title=f"{study.title}, {len(run.records)} runs")
    for i, name in enumerate(summary.header):
        width = max((len(row[i]) for row in summary.rows), default=0)  # heads are broken so that cells need not be
        head = textwrap.fill(name, max(width, 9))
        table.add_column(head, justify="left" if i == 0 else "right", overflow="fold", no_wrap=i == 0)
    for row in summary.rows:
        table.add_row(*row)
    console.print(table)
    for note in summary.notes:
        console.print(note, style="dim", markup=False, highlight=False)
    console.print()
    for sentence in summary.words:
        console.print(f"• {sentence}", markup=False, highlight=False)


def _command(context: typer.Context) -> str:
    """The command as typed: the options that were given, and no others."""
    words = ["geodescent", *context.command_path.split()[1:]]
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[parameter.name or ""]
        for item in value if isinstance(value, (list, tuple)) else [value]:
            words += [parameter.opts[0], str(item)]
    return shlex.join(words)


def _console() -> Console:
    """As wide as the terminal; where the output is a file or a pipe, wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, 150))


if __name__ == "__main__":
    main()
