"""Interrupted at any moment, a collection goes on and ends with the same bits."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import tiny

from layerflow.data import collect as collecting
from layerflow.data import finish as finishing
from layerflow.data.collect import collect
from layerflow.data.corpus import open_corpus
from layerflow.data.documents import Corpus
from layerflow.data.models import LanguageModel, load_model
from layerflow.data.options import CollectOptions
from layerflow.data.partial import Partial
from layerflow.data.reduce import Reduced
from layerflow.errors import InputError

OPTIONS = CollectOptions(max_tokens=40, batch_tokens=80, n_samples=40)
N_BATCHES = 13  # 25 rows of 40 tokens, two at a time


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("resume")
    tiny.save_model(root / "model", "llama")
    tiny.write_lines(root / "corpus.txt", tiny.make_documents(25))
    return root


@pytest.fixture(scope="module")
def model(folder: Path) -> LanguageModel:
    return load_model(str(folder / "model"), device="cpu")


@pytest.fixture(scope="module")
def corpus(folder: Path) -> Corpus:
    return open_corpus(str(folder / "corpus.txt"))


@pytest.fixture(scope="module")
def uninterrupted(folder: Path, model: LanguageModel, corpus: Corpus) -> dict[str, bytes]:
    return contents(collect(model, corpus, OPTIONS, out=folder / "uninterrupted"))


@pytest.fixture(autouse=True)
def _save_whatever_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``save_every=0``, save after every batch."""
    monkeypatch.setattr(collecting, "_SAVE_SHARE", float("inf"))


def contents(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


class Killed(BaseException):
    """Stands for the end of the process: nothing in the collector catches it."""


@pytest.fixture
def at_batch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, Callable[[], None]], None]]:
    """Do something when the model has read the given number of batches in this attempt."""
    original = collecting.reduce_batch

    def arrange(number: int, action: Callable[[], None]) -> None:
        done = [0]

        def reduce(*args: Any) -> Reduced:
            if done[0] == number:
                action()
            done[0] += 1
            return original(*args)

        monkeypatch.setattr(collecting, "reduce_batch", reduce)

    yield arrange
    monkeypatch.undo()


def kill() -> None:
    raise Killed


@pytest.mark.parametrize("number", range(N_BATCHES))
def test_killed_before_any_batch_ends_with_the_same_bits(
    model: LanguageModel,
    corpus: Corpus,
    tmp_path: Path,
    uninterrupted: dict[str, bytes],
    at_batch: Callable[[int, Callable[[], None]], None],
    number: int,
) -> None:
    at_batch(number, kill)
    with pytest.raises(Killed):
        collect(model, corpus, OPTIONS, out=tmp_path / "run", save_every=0.0)
    at_batch(N_BATCHES, kill)  # a second life as long as a whole one
    collect(model, corpus, OPTIONS, out=tmp_path / "run")
    assert contents(tmp_path / "run") == uninterrupted


def test_killed_again_and_again(
    model: LanguageModel,
    corpus: Corpus,
    tmp_path: Path,
    uninterrupted: dict[str, bytes],
    at_batch: Callable[[int, Callable[[], None]], None],
) -> None:
    lives = 1
    while True:
        at_batch(2, kill)
        try:
            # Each life does two batches, the third it dies in.
            collect(model, corpus, OPTIONS, out=tmp_path / "run", save_every=0.0)
            break
        except Killed:
            lives += 1
    assert lives > 5
    assert contents(tmp_path / "run") == uninterrupted


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_signals_save_and_stop(
    model: LanguageModel,
    corpus: Corpus,
    tmp_path: Path,
    uninterrupted: dict[str, bytes],
    at_batch: Callable[[int, Callable[[], None]], None],
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    error: type[BaseException],
) -> None:
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    at_batch(4, lambda: os.kill(os.getpid(), number))
    with pytest.raises(error):
        collect(model, corpus, OPTIONS, out=tmp_path / "run")
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert "stopped; everything so far is saved" in capsys.readouterr().err
    assert Partial.of(tmp_path / "run").loaded().n_batches == 5
    at_batch(N_BATCHES, kill)
    collect(model, corpus, OPTIONS, out=tmp_path / "run")
    assert "going on after 5 batches" in capsys.readouterr().err
    assert contents(tmp_path / "run") == uninterrupted


def test_other_options_are_refused_with_the_difference_named(
    model: LanguageModel,
    corpus: Corpus,
    tmp_path: Path,
    at_batch: Callable[[int, Callable[[], None]], None],
) -> None:
    at_batch(4, kill)
    with pytest.raises(Killed):
        collect(model, corpus, OPTIONS, out=tmp_path / "run", save_every=0.0)
    before = contents(tmp_path / "run")
    other = CollectOptions(max_tokens=40, batch_tokens=80, n_samples=40, min_count=7)
    with pytest.raises(InputError, match=r"options\.min_count 5, not 7"):
        collect(model, corpus, other, out=tmp_path / "run")
    assert contents(tmp_path / "run") == before


def test_a_changed_corpus_is_refused(
    model: LanguageModel, tmp_path: Path, at_batch: Callable[[int, Callable[[], None]], None]
) -> None:
    path = tiny.write_lines(tmp_path / "corpus.txt", tiny.make_documents(25))
    at_batch(4, kill)
    with pytest.raises(Killed):
        collect(model, open_corpus(str(path)), OPTIONS, out=tmp_path / "run", save_every=0.0)
    tiny.write_lines(path, tiny.make_documents(25, seed=1))
    with pytest.raises(InputError, match=r"corpus\.\w+ .*, not "):
        collect(model, open_corpus(str(path)), OPTIONS, out=tmp_path / "run")


def test_a_finished_collection_is_left_alone(
    folder: Path, model: LanguageModel, corpus: Corpus, uninterrupted: dict[str, bytes]
) -> None:
    collect(model, corpus, OPTIONS, out=folder / "uninterrupted")
    assert contents(folder / "uninterrupted") == uninterrupted


def test_a_full_disk_is_explained_and_nothing_is_lost(
    model: LanguageModel,
    corpus: Corpus,
    tmp_path: Path,
    uninterrupted: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original, saves = Partial.save, [0]

    def save(self: Partial, accumulator: Any) -> None:
        saves[0] += 1
        if saves[0] == 3:
            raise OSError(28, "No space left on device")
        original(self, accumulator)

    monkeypatch.setattr(Partial, "save", save)
    with pytest.raises(InputError, match=r"cannot be written .No space left on device.* goes on from the last save"):
        collect(model, corpus, OPTIONS, out=tmp_path / "run", save_every=0.0)
    collect(model, corpus, OPTIONS, out=tmp_path / "run")
    assert contents(tmp_path / "run") == uninterrupted


@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError(errno.ENOSPC, "No space left on device"), InputError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_a_run_that_could_not_be_written_is_gone_on_from(
    model: LanguageModel,
    corpus: Corpus,
    tmp_path: Path,
    uninterrupted: dict[str, bytes],
    at_batch: Callable[[int, Callable[[], None]], None],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    raised: type[BaseException],
) -> None:
    """Even when the collection was too short to be saved on the way."""

    def write_some(directory: Path, *_: Any) -> Path:
        (directory / "trajectories").mkdir()
        (directory / "trajectories" / "states.safetensors").write_bytes(b"half a file")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(finishing, "write_run", write_some)
        with pytest.raises(raised):
            collect(model, corpus, OPTIONS, out=tmp_path / "run")
    at_batch(0, kill)  # no batch is read again
    collect(model, corpus, OPTIONS, out=tmp_path / "run")
    assert contents(tmp_path / "run") == uninterrupted


def test_a_process_killed_for_real(folder: Path, tmp_path: Path, uninterrupted: dict[str, bytes]) -> None:
    """SIGKILL at whatever moment it hits, then a life without one."""
    program = (
        "import sys; from pathlib import Path; from layerflow.data.collect import collect;"
        "from layerflow.data.corpus import open_corpus; from layerflow.data.models import load_model;"
        "from layerflow.data.options import CollectOptions;"
        "collect(load_model(sys.argv[1], device='cpu'), open_corpus(sys.argv[2]),"
        "CollectOptions(max_tokens=40, batch_tokens=80, n_samples=40), out=Path(sys.argv[3]), save_every=0.0)"
    )
    command = [sys.executable, "-c", program, folder / "model", folder / "corpus.txt", tmp_path / "run"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    sums = tmp_path / "run" / "sums" / "sums.safetensors"
    while not sums.exists() and process.poll() is None:
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "run" / "manifest.json").exists()
    subprocess.run(command, stderr=subprocess.DEVNULL, check=True)
    assert contents(tmp_path / "run") == uninterrupted
