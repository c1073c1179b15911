"""scikit-learn estimators of the drift, thin over the pure functions beside them.

``fit(X, y)`` takes states and steps, ``predict`` gives mean steps, and ``law_`` is the self-contained law that
scoring, rollouts and tests use. scikit-learn's conventions are kept in full, ``check_estimator`` included: hence its
names X (the states, Z) and y (the steps, dZ), and a 1-D y, which is one coordinate.
"""

import logging
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from layerflow.errors import InputError
from layerflow.laws.affine import fit_affine
from layerflow.laws.kramers_moyal import KramersMoyalLaw
from layerflow.laws.law import GaussianLaw, Law
from layerflow.laws.polynomial import PolynomialFit
from layerflow.laws.quadratic import fit_quadratic
from layerflow.numerics.r2 import r2

logger = logging.getLogger(__name__)


class _DriftEstimator(MultiOutputMixin, RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """What the three estimators share: validation, prediction, the pooled score."""

    law_: Law
    y_ndim_: int

    def predict(self, X: Any) -> np.ndarray:
        """Mean steps at states ``X`` (n, d): (n, d), or (n,) after a fit on 1-D steps."""
        check_is_fitted(self)
        steps = self.law_.drift(validate_data(self, X, reset=False, dtype=np.float64))
        return steps[:, 0] if self.y_ndim_ == 1 else steps

    def score(self, X: Any, y: Any) -> float:
        """R² = 1 − Σ‖Δ − â‖² / Σ‖Δ − mean(Δ)‖² of the steps Δ ``y`` (n, d) at states ``X`` (n, d).

        Coordinates are pooled, where scikit-learn averages one R² a coordinate. NaN when all steps are equal. SPEC §5.
        """
        predicted = self.predict(X)
        steps = _steps(y)
        if steps.shape != predicted.shape:
            raise InputError(
                f"steps have shape {steps.shape} and predictions {predicted.shape}; they must be one shape"
            )
        return r2(_columns(steps), _columns(predicted))

    def _validated(self, X: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
        """States (n, d) and steps (n, d) in float64, and what scikit-learn wants remembered."""
        floats = {"dtype": np.float64, "ensure_min_samples": 2}
        separately = (floats, {**floats, "ensure_2d": False})
        states, steps = validate_data(self, X, y, validate_separately=separately)
        if len(states) != len(steps):
            raise InputError(
                f"{len(states)} states and {len(steps)} steps were given, and each state must have its step"
            )
        self.y_ndim_ = steps.ndim
        return states, _columns(steps)


class KramersMoyal(_DriftEstimator):
    """Drift as the mean step of the k nearest training states (SPEC §4).

    A training set of fewer than k states is averaged whole: ``k_`` says how many neighbours there were, and a warning
    is logged. ``KramersMoyalLaw`` and the command line refuse such a k; scikit-learn's checks ask an estimator with
    default options to fit ten samples. Cost of ``predict``: one exact search, m n d multiplications.

    Args:
        k: Number of neighbours.
        noise: ``local_diagonal`` or ``local_full`` moments of their steps, the noise of ``law_``.

    Attributes:
        law_: The fitted ``KramersMoyalLaw``.
        k_: Number of neighbours used.
        n_features_in_: Width d of the states.

    """

    # Typed Any: scikit-learn requires a constructor that stores whatever it is given; ``fit`` checks.
    def __init__(self, *, k: Any = 64, noise: Any = "local_diagonal") -> None:
        self.k = k
        self.noise = noise

    def fit(self, X: Any, y: Any) -> "KramersMoyal":
        """Keep the training states ``X`` (n, d) and their steps ``y`` (n, d).

        Raises:
            ValueError: Arrays that do not pair up or are not finite, or an option out of range.

        """
        states, steps = self._validated(X, y)
        self.k_ = min(self.k, len(states))
        if self.k_ < self.k:
            logger.warning("k = %d exceeds the %d training states: all of them are averaged", self.k, len(states))
        self.law_ = KramersMoyalLaw(states, steps, k=self.k_, noise=self.noise)
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        # 64 neighbours out of the 200 rows of scikit-learn's check smooth its signal away, as they should.
        tags.regressor_tags.poor_score = True
        return tags


class _PolynomialEstimator(_DriftEstimator):
    """What the two least-squares estimators share."""

    law_: GaussianLaw

    def __init__(self, *, noise: Any = "diagonal") -> None:
        self.noise = noise

    def _keep(self, fit: PolynomialFit) -> None:
        self.law_, self.rank_, self.condition_ = fit.law, fit.least_squares.rank, fit.least_squares.condition


class Affine(_PolynomialEstimator):
    """Drift by least squares of the step on (1, z) (SPEC §4).

    Args:
        noise: ``diagonal``, ``full`` or ``isotropic`` moments of the training residuals, the noise of ``law_``.

    Attributes:
        law_: The fitted ``GaussianLaw``; its ``drift`` has ``offset`` and ``matrix``.
        rank_: Number of coefficients the rows determine; 1 + d when all are.
        condition_: Condition number of the standardised least-squares problem.
        n_features_in_: Width d of the states.

    """

    def fit(self, X: Any, y: Any) -> "Affine":
        """Fit the steps ``y`` (n, d) at states ``X`` (n, d).

        Raises:
            ValueError: Arrays that do not pair up or are not finite, or another form of noise.

        """
        self._keep(fit_affine(*self._validated(X, y), noise=self.noise))
        return self


class Quadratic(_PolynomialEstimator):
    """Drift by least squares of the step on (1, z, z_i z_j for i ≤ j) (SPEC §4).

    Args:
        noise: ``diagonal``, ``full`` or ``isotropic`` moments of the training residuals, the noise of ``law_``.

    Attributes:
        law_: The fitted ``GaussianLaw``; its ``drift`` has raw ``coefficients``.
        rank_: Number of coefficients the rows determine; (1 + d)(2 + d)/2 when all are.
        condition_: Condition number of the standardised least-squares problem.
        n_features_in_: Width d of the states.

    """

    def fit(self, X: Any, y: Any) -> "Quadratic":
        """Fit the steps ``y`` (n, d) at states ``X`` (n, d).

        Raises:
            ValueError: Arrays that do not pair up or are not finite, or another form of noise.

        """
        self._keep(fit_quadratic(*self._validated(X, y), noise=self.noise))
        return self


def _steps(y: Any) -> np.ndarray:
    steps: np.ndarray = check_array(y, dtype=np.float64, ensure_2d=False, input_name="y")
    return steps


def _columns(steps: np.ndarray) -> np.ndarray:
    return steps[:, None] if steps.ndim == 1 else steps
