"""What this machine can run, and checks that the numbers are right here. Imports torch only to look at a model."""

import importlib.metadata
import importlib.util
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info

from layerflow.data.builtin import cache_directory
from layerflow.errors import InputError
from layerflow.laws.drift import PolynomialDrift
from layerflow.laws.quadratic import fit_quadratic

_PACKAGES = ("layerflow", "numpy", "scipy", "scikit-learn", "pyarrow", "torch", "transformers", "datasets", "gensim")
_COLLECTING = ("torch", "transformers", "accelerate", "gguf", "datasets", "gensim")
_SPEED_ROWS, _SPEED_LENGTH = 8, 128
_LAW_TOLERANCE = 1e-8
_STATE_TOLERANCE = 1e-4


def examine(model: str | None, *, revision: str | None = None, device: str = "auto") -> Iterator[str]:
    """Yield findings, one line each, as they are made.

    Args:
        model: The model to check; None leaves models out.
        revision: Branch, tag or commit of a Hub model.
        device: Device to check it on.

    Raises:
        InputError: A check failed; the line names what differs and by how much.
    """
    yield f"python: {platform.python_version()} on {platform.platform()}"
    yield "packages: " + ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)
    yield f"processors: {os.cpu_count()}; threads: {_threads()}"
    yield f"cache: {_cache(cache_directory())}"
    yield _check_laws()
    missing = [name for name in _COLLECTING if importlib.util.find_spec(name) is None]
    if missing:
        yield f"collecting: not installed ({', '.join(missing)} missing); run `pip install 'layerflow[collect]'`"
        return
    yield from _devices()
    if model is not None:
        yield from _check_model(model, revision, device)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _threads() -> str:
    return ", ".join(
        f"{library.get('internal_api', library['user_api'])} {library['num_threads']}" for library in threadpool_info()
    )


def _cache(directory: Path) -> str:
    files = sorted(path for path in directory.rglob("*") if path.is_file()) if directory.is_dir() else []
    listed = ", ".join(f"{path.relative_to(directory)} {path.stat().st_size / 1e6:,.1f} MB" for path in files)
    return f"{directory} ({listed or 'empty'})"


def _check_laws() -> str:
    """Plant a quadratic law without noise and see whether the fit finds it."""
    rng = np.random.default_rng(0)
    z = rng.standard_normal((2000, 8))
    planted = PolynomialDrift.quadratic(
        rng.standard_normal(8), rng.standard_normal((8, 8)), rng.standard_normal((8, 8, 8))
    )
    found = fit_quadratic(z, planted(z)).law.drift
    error = float(np.abs(found(z) - planted(z)).max() / np.abs(planted(z)).max())
    if error > _LAW_TOLERANCE:
        raise InputError(f"laws: a planted quadratic law is recovered to {error:.1e} only; reinstall NumPy and SciPy")
    return f"laws: a planted quadratic law is recovered to {error:.1e}"


def _devices() -> Iterator[str]:
    import torch

    names = ["cpu"]
    names += [f"cuda:{index} {torch.cuda.get_device_name(index)}" for index in range(torch.cuda.device_count())]
    names += ["mps"] if torch.backends.mps.is_available() else []
    yield f"devices: {', '.join(names)}; torch uses {torch.get_num_threads()} threads"


def _check_model(name: str, revision: str | None, device: str) -> Iterator[str]:
    import torch

    from layerflow.data.models import load_model, probe

    start = time.monotonic()
    model = load_model(name, revision=revision, device=device)
    yield f"model: {name}, {model.n_states} states of width {model.width}, loaded in {time.monotonic() - start:.1f} s"
    measured = probe(model)
    yield (
        f"probe: last state is the backbone's own to {measured.last_state:.1e}, "
        + ("" if measured.head_input is None else f"what the head reads to {measured.head_input:.1e}, ")
        + f"unmoved by padding to {measured.padding:.1e} and by later tokens to {measured.causality:.1e}"
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.vocabulary_size, (_SPEED_ROWS, _SPEED_LENGTH), generator=generator).to(model.device)
    with torch.inference_mode():
        reference = model.causal(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    start = time.monotonic()
    states = model.states(ids)
    speed = ids.numel() / (time.monotonic() - start)
    yield f"states: equal Hugging Face's own to {_largest(states, reference):.1e} of each state's largest entry"
    if model.device.type != "cpu":
        on_cpu = load_model(name, revision=revision, device="cpu")
        difference = _largest([state.cpu() for state in states], on_cpu.states(ids.cpu()))
        yield f"devices agree: {model.device} and cpu to {difference:.1e}"
    yield f"speed: about {speed:,.0f} tokens a second on {model.device}"


def _largest(states: Any, others: Any) -> float:
    difference = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(states, others, strict=True))
    # Not "difference > tolerance": NaN must fail too.
    if not difference <= _STATE_TOLERANCE:
        raise InputError(f"states differ by {difference:.1e}, over {_STATE_TOLERANCE:.0e}; try another torch version")
    return difference
