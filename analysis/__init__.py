"""Measurements on points, steps, layers and training runs. Nothing here knows an optimizer; steps come as tensors."""

from .audit import Audit, AuditReport, AuditRow, audit
from .breakdown import ScoreBreakdown, score_breakdown
from .callbacks import lightning_callback, transformers_callback
from .certificates import (
    ConditioningCertificate,
    StationarityCertificate,
    SteepestDescentCertificate,
    conditioning_certificate,
    stationarity_certificate,
    steepest_descent_certificate,
)
from .certify import CERTIFICATES, CertificateReport, CertificateRow, black_box_step_fn, certify
from .checkpoints import Checkpoint
from .drift import DriftReport, LayerDrift, drift
from .entropy import attention_entropy, weights_entropy
from .geometry import AttentionGeometry, LayerGeometry, attention_geometry
from .hessian import HessianSpectrum, hessian_condition_number, model_hessian
from .invariance import (
    EquivarianceCertificate,
    GaugeCertificate,
    ScaleFreeCertificate,
    WeightDecayCertificate,
    equivariance_certificate,
    gauge_certificate,
    scale_free_certificate,
    weight_decay_certificate,
)
from .layouts import LAYOUTS, AttentionLayout
from .norms import Norm
from .orbits import (
    Orbit,
    key_bias_orbit,
    logit_shift_orbit,
    norm_scale_orbit,
    qk_orbit,
    relu_orbit,
    rescaling_orbit,
    vo_orbit,
)
from .pictures import (
    plot_angles,
    plot_certificates,
    plot_decay,
    plot_drift,
    plot_soft_threshold,
    plot_spectra,
    plot_tracks,
)
from .spectra import condition_number, principal_angles, procrustes_distance, singular_spectrum, subspace_distance
from .symmetry import NoetherResidual, VerticalPart, noether_residual, vertical_part
from .track_file import read_track
from .tracker import GeometryTracker
from .weight_decay import DecayArm, WeightDecayDrift, weight_decay_drift

__all__ = [
    "CERTIFICATES",
    "LAYOUTS",
    "AttentionGeometry",
    "AttentionLayout",
    "Audit",
    "AuditReport",
    "AuditRow",
    "CertificateReport",
    "CertificateRow",
    "Checkpoint",
    "ConditioningCertificate",
    "DecayArm",
    "DriftReport",
    "EquivarianceCertificate",
    "GaugeCertificate",
    "GeometryTracker",
    "HessianSpectrum",
    "LayerDrift",
    "LayerGeometry",
    "NoetherResidual",
    "Norm",
    "Orbit",
    "ScaleFreeCertificate",
    "ScoreBreakdown",
    "StationarityCertificate",
    "SteepestDescentCertificate",
    "VerticalPart",
    "WeightDecayCertificate",
    "WeightDecayDrift",
    "attention_entropy",
    "attention_geometry",
    "audit",
    "black_box_step_fn",
    "certify",
    "condition_number",
    "conditioning_certificate",
    "drift",
    "equivariance_certificate",
    "gauge_certificate",
    "hessian_condition_number",
    "key_bias_orbit",
    "lightning_callback",
    "logit_shift_orbit",
    "model_hessian",
    "noether_residual",
    "norm_scale_orbit",
    "plot_angles",
    "plot_certificates",
    "plot_decay",
    "plot_drift",
    "plot_soft_threshold",
    "plot_spectra",
    "plot_tracks",
    "principal_angles",
    "procrustes_distance",
    "qk_orbit",
    "read_track",
    "relu_orbit",
    "rescaling_orbit",
    "scale_free_certificate",
    "score_breakdown",
    "singular_spectrum",
    "stationarity_certificate",
    "steepest_descent_certificate",
    "subspace_distance",
    "transformers_callback",
    "vertical_part",
    "vo_orbit",
    "weight_decay_certificate",
    "weight_decay_drift",
    "weights_entropy",
]
