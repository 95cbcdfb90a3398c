"""Measurements on points, steps, layers and training runs. Nothing here knows an optimizer; steps come as tensors."""

from .certificates import (
    ConditioningCertificate,
    StationarityCertificate,
    SteepestDescentCertificate,
    conditioning_certificate,
    stationarity_certificate,
    steepest_descent_certificate,
)
from .certify import CERTIFICATES, CertificateReport, CertificateRow, black_box_step_fn, certify
from .drift import DriftReport, LayerDrift, drift
from .geometry import AttentionGeometry, LayerGeometry, attention_geometry
from .invariance import (
    EquivarianceCertificate,
    ScaleFreeCertificate,
    WeightDecayCertificate,
    equivariance_certificate,
    scale_free_certificate,
    weight_decay_certificate,
)
from .spectra import condition_number, principal_angles, procrustes_distance, singular_spectrum, subspace_distance
from .tracker import GeometryTracker

__all__ = [
    "CERTIFICATES",
    "AttentionGeometry",
    "CertificateReport",
    "CertificateRow",
    "ConditioningCertificate",
    "DriftReport",
    "EquivarianceCertificate",
    "GeometryTracker",
    "LayerDrift",
    "LayerGeometry",
    "ScaleFreeCertificate",
    "StationarityCertificate",
    "SteepestDescentCertificate",
    "WeightDecayCertificate",
    "attention_geometry",
    "black_box_step_fn",
    "certify",
    "condition_number",
    "conditioning_certificate",
    "drift",
    "equivariance_certificate",
    "principal_angles",
    "procrustes_distance",
    "scale_free_certificate",
    "singular_spectrum",
    "stationarity_certificate",
    "steepest_descent_certificate",
    "subspace_distance",
    "weight_decay_certificate",
]
