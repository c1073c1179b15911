"""Laws of motion: what the next step of a state is likely to be. Estimators fit, laws act."""

from layerflow.laws.affine import fit_affine
from layerflow.laws.drift import ConstantDrift, Drift, PolynomialDrift
from layerflow.laws.estimators import Affine, KramersMoyal, Quadratic
from layerflow.laws.kramers_moyal import KramersMoyalLaw, LocalMoments, LocalNoiseForm, LocalScores
from layerflow.laws.law import GaussianLaw, Law
from layerflow.laws.noise import DiagonalNoise, FullNoise, Noise, NoiseForm, residual_noise
from layerflow.laws.nulls import fit_null_a, fit_null_b, fit_null_c
from layerflow.laws.polynomial import PolynomialFit, polynomial_law
from layerflow.laws.quadratic import fit_quadratic
from layerflow.laws.rotation_stretch import RotationStretchFit, fit_rotation_stretch

__all__ = [
    "Affine",
    "ConstantDrift",
    "DiagonalNoise",
    "Drift",
    "FullNoise",
    "GaussianLaw",
    "KramersMoyal",
    "KramersMoyalLaw",
    "Law",
    "LocalMoments",
    "LocalNoiseForm",
    "LocalScores",
    "Noise",
    "NoiseForm",
    "PolynomialDrift",
    "PolynomialFit",
    "Quadratic",
    "RotationStretchFit",
    "fit_affine",
    "fit_null_a",
    "fit_null_b",
    "fit_null_c",
    "fit_quadratic",
    "fit_rotation_stretch",
    "polynomial_law",
    "residual_noise",
]
