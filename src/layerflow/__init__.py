"""layerflow: watch how a transformer carries its whole vocabulary through depth."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerflow.data.basis import SharedBasis
    from layerflow.data.trajectories import Trajectories
    from layerflow.errors import InputError
    from layerflow.laws.estimators import Affine, KramersMoyal, Quadratic
    from layerflow.plan import StudyOptions
    from layerflow.study import analyse

__all__ = [
    "Affine",
    "InputError",
    "KramersMoyal",
    "Quadratic",
    "SharedBasis",
    "StudyOptions",
    "Trajectories",
    "analyse",
]

_HOMES = {
    "Affine": "layerflow.laws.estimators",
    "InputError": "layerflow.errors",
    "KramersMoyal": "layerflow.laws.estimators",
    "Quadratic": "layerflow.laws.estimators",
    "SharedBasis": "layerflow.data.basis",
    "StudyOptions": "layerflow.plan",
    "Trajectories": "layerflow.data.trajectories",
    "analyse": "layerflow.study",
}


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that `layerflow --help` answers before scikit-learn has been imported.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'layerflow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
