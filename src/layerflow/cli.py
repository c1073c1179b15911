"""The command line: parse, call, print."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from layerflow.errors import InputError
from layerflow.progress import say

BUILTIN_MODEL = "smollm2-135m"
BUILTIN_CORPUS = "wikipedia-sample"
# All 2,964 paragraphs take longer than the ten minutes a first run should; these leave a margin on two cores.
RUN_DOCUMENTS = 1000
QUICK_DOCUMENTS = 300
QUICK_SAMPLES = 2500


def main() -> None:
    """Run the command line: exit 0 on success, 2 with one line on standard error on bad input."""
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        _fail(error.format_message())
    except (InputError, OSError) as error:
        _fail(str(error))
    except (click.Abort, KeyboardInterrupt):
        say("interrupted")
        sys.exit(130)


def _fail(message: str) -> None:
    # One line, whatever a file name or a library's message holds.
    text = " ".join(message.split())
    click.echo(f"layerflow: {''.join(c if c.isprintable() else repr(c)[1:-1] for c in text)}", err=True)
    sys.exit(2)


class _Numbers(click.ParamType[tuple[int, ...]]):
    """Whole numbers separated by commas."""

    name = "n,n,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers such as 8,16", param, ctx)


def _options(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


_reading = _options(
    click.option("--revision", help="Branch, tag or commit of a Hub model."),
    click.option(
        "--dtype",
        type=click.Choice(["float32", "bfloat16", "float16"]),
        default="float32",
        show_default=True,
        help="Precision the model runs in; sums are kept in float64.",
    ),
    click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, mps."),
    click.option(
        "--trust-remote-code",
        is_flag=True,
        help="Run code that comes with a Hub model. Only for models you trust as you trust a program.",
    ),
    click.option("--text-field", help="Field or column that holds the text; found when there is only one."),
    click.option("--corpus-config", help="Configuration of a Hub dataset."),
    click.option("--corpus-split", help="Split of a Hub dataset."),
    click.option("--corpus-revision", help="Branch, tag or commit of a Hub dataset."),
    click.option("--min-chars", type=int, default=400, show_default=True, help="Use documents longer than this."),
    click.option("--max-tokens", type=int, default=128, show_default=True, help="Tokens in a row."),
    click.option(
        "--long-documents",
        type=click.Choice(["truncate", "split"]),
        default="truncate",
        show_default=True,
        help="Keep a long document's first row, or cut all of it into rows.",
    ),
    click.option("--min-count", type=int, default=5, show_default=True, help="Occurrences a token needs."),
    click.option(
        "--skip-positions",
        type=int,
        default=0,
        show_default=True,
        help="Do not count the first positions of each row. Sinks are kept apart without this.",
    ),
    click.option(
        "--batch-tokens", type=int, default=1024, show_default=True, help="Tokens in a batch, padding included."
    ),
    click.option(
        "--samples",
        "n_samples",
        type=int,
        default=10_000,
        show_default=True,
        help="Single positions to keep, drawn uniformly.",
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="Seed of halves, sample and calibration."),
)

_analysing = _options(
    click.option(
        "--widths",
        type=_Numbers(),
        help="Numbers of components.  [default: those of 8,16,32,64 that the data allow]",
    ),
    click.option(
        "--seeds", type=_Numbers(), default="0,1,2", show_default=True, help="Seeds of the 80/20 splits of the tokens."
    ),
    click.option("--k", type=int, default=64, show_default=True, help="Neighbours of the Kramers–Moyal law."),
    click.option(
        "--budget",
        type=int,
        help="Training tokens of the equal-budget block.  [default: 9,549 or half of them, if that is less]",
    ),
    click.option(
        "--resamples", type=int, default=1000, show_default=True, help="Bootstrap resamples behind an interval."
    ),
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="layerflow")
def cli() -> None:
    """Watch how a transformer carries its whole vocabulary through depth.

    Collect the mean trajectory of every token through a language model's layers, fit the law of their motion, score
    it on held-out tokens, and read the result on one page.
    """


@cli.command()
@click.option("--model", default=BUILTIN_MODEL, show_default=True, help="Built-in name, Hub id, folder or .gguf file.")
@click.option(
    "--corpus", default=BUILTIN_CORPUS, show_default=True, help="Built-in name, Hub dataset, .txt, .jsonl or .parquet."
)
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/first"), show_default=True)
@click.option(
    "--max-documents",
    default=None,
    metavar="N|all",
    help=f"Documents to read.  [default: {RUN_DOCUMENTS:,}, a run of under ten minutes on two cores]",
)
@click.option(
    "--quick", is_flag=True, help=f"A first look in about two minutes: {QUICK_DOCUMENTS} documents, one seed."
)
@_reading
@_analysing
def run(model: str, corpus: str, out: Path, max_documents: str | None, quick: bool, **options: Any) -> None:
    """Collect, analyse and report in one go; the defaults need no Hub.

    The built-in model and corpus come out of Python packages. Run the same command again to go on after an
    interruption.
    """
    default = str(QUICK_DOCUMENTS if quick else RUN_DOCUMENTS)
    if quick:
        options["seeds"] = options["seeds"][:1]
        options["n_samples"] = min(options["n_samples"], QUICK_SAMPLES)
    _study_options(options)  # refused now rather than after the collection
    _collect(model, corpus, out, max_documents or default, options)
    if quick and max_documents is None:
        from layerflow.data.storage import read_manifest, write_manifest

        write_manifest(out, {**read_manifest(out), "quick": True})
    _analyse(out, options)
    _report(out)


@cli.command()
@click.option("--model", required=True, help="Built-in name, Hub id, folder or .gguf file.")
@click.option("--corpus", required=True, help="Built-in name, Hub dataset, .txt, .jsonl or .parquet.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The run directory to write.")
@click.option("--max-documents", default="all", show_default=True, metavar="N|all", help="Documents to read.")
@click.option("--shard", metavar="i/n", help="Collect one of n parts of the rows; `merge` makes a run of all parts.")
@_reading
def collect(model: str, corpus: str, out: Path, max_documents: str, shard: str | None, **options: Any) -> None:
    """Average a model's states into one trajectory a token.

    Run the same command again to go on after an interruption: nothing is lost, and the result is the same.
    """
    _collect(model, corpus, out, max_documents, options, shard=shard)


@cli.command()
@click.argument("shards", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The run directory to write.")
def merge(shards: tuple[Path, ...], out: Path) -> None:
    """Add up the SHARDS of one collection into the run one process would have made."""
    _need_torch()
    from layerflow.data.shards import merge as merge_shards

    click.echo(f"merged {len(shards)} shards into {merge_shards(shards, out)}")


@cli.command()
@click.argument("directory", type=click.Path(path_type=Path))
@_analysing
def analyse(directory: Path, **options: Any) -> None:
    """Fit and score the laws of the run in DIRECTORY, with attention sinks and without.

    Writes results/ and results-without-sinks/, and prints the headline.
    """
    _analyse(directory, options)


@cli.command()
@click.argument("directory", type=click.Path(path_type=Path))
def report(directory: Path) -> None:
    """Draw the figures and the page of the run in DIRECTORY."""
    _report(directory)


@cli.command()
@click.option("--model", default=BUILTIN_MODEL, show_default=True, help="Model to check.")
@click.option("--revision", help="Branch, tag or commit of a Hub model.")
@click.option("--device", default="auto", show_default=True, help="Device to check.")
@click.option("--no-model", is_flag=True, help="Leave the model out: versions, threads, devices and cache only.")
def doctor(model: str, revision: str | None, device: str, no_model: bool) -> None:
    """Say what this machine can run, and check a model's states against Hugging Face's own numbers."""
    from layerflow.doctor import examine

    for line in examine(None if no_model else model, revision=revision, device=device):
        click.echo(line)


def _collect(
    model: str, corpus: str, out: Path, max_documents: str, options: dict[str, Any], *, shard: str | None = None
) -> None:
    _need_torch()
    from layerflow.data.collect import collect as collect_run
    from layerflow.data.corpus import open_corpus
    from layerflow.data.models import load_model, probe
    from layerflow.data.options import CollectOptions, Shard

    names = ("min_chars", "max_tokens", "long_documents", "min_count", "skip_positions", "batch_tokens", "n_samples")
    collect_options = CollectOptions(
        max_documents=_documents(max_documents), seed=options["seed"], **{name: options[name] for name in names}
    )
    part = None if shard is None else Shard.parse(shard)
    opened = open_corpus(
        corpus,
        text_field=options["text_field"],
        config=options["corpus_config"],
        split=options["corpus_split"],
        revision=options["corpus_revision"],
    )
    if options["trust_remote_code"]:
        say(f"warning: code that comes with {model} may run, as asked by --trust-remote-code")
    loaded = load_model(
        model,
        revision=options["revision"],
        dtype=options["dtype"],
        device=options["device"],
        trust_remote_code=options["trust_remote_code"],
    )
    probe(loaded)
    collect_run(loaded, opened, collect_options, out=out, shard=part)


def _study_options(options: dict[str, Any]) -> Any:
    from layerflow.plan import StudyOptions

    return StudyOptions(
        widths=options["widths"],
        seeds=options["seeds"],
        k=options["k"],
        budget=options["budget"],
        n_resamples=options["resamples"],
    )


def _analyse(directory: Path, options: dict[str, Any]) -> None:
    from layerflow.report.terminal import headline
    from layerflow.study import study

    for line in headline(study(directory, _study_options(options))):
        click.echo(line)


def _report(directory: Path) -> None:
    from layerflow.report import write

    click.echo(f"page: {write(directory).page}")


def _documents(text: str) -> int | None:
    if text == "all":
        return None
    try:
        return int(text.replace(",", ""))
    except ValueError:
        raise InputError(f"--max-documents {text!r} is neither a whole number nor 'all'") from None


def _need_torch() -> None:
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"collecting needs {error.name}, which is not installed; run `pip install 'layerflow[collect]'`"
        ) from error
