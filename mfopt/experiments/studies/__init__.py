"""The papers' training studies by name; each is imported when it is asked for.

``mfopt experiment NAME`` runs one; :mod:`mfopt.experiments.studies.engine` says what a study is.
"""

from __future__ import annotations

import pkgutil

from mfopt._runtime import _check
from mfopt.experiments.studies.engine import Study

__all__ = ["STUDIES", "find"]

_HERE = "mfopt.experiments.studies"
# name -> the class
STUDIES: dict[str, str] = {
    "mean-estimation": f"{_HERE}.mean_estimation:MeanEstimation",
    "estimate-and-double": f"{_HERE}.configuration:EstimateAndDouble",
    "noise-in-training": f"{_HERE}.noise_in_training:NoiseInTraining",
    "optimizers-in-training": f"{_HERE}.noise_in_training:OptimizersInTraining",
    "sampling-in-training": f"{_HERE}.noise_in_training:SamplingInTraining",
    "fedavg-in-training": f"{_HERE}.noise_in_training:FedAvgInTraining",
    "els-uls-training": f"{_HERE}.budgets:TrainingBudgets",
    "record-selection": f"{_HERE}.selection:RecordSelection",
    "clip-norms": f"{_HERE}.clip_norms:ClipNorms",
    "lora": f"{_HERE}.adapters:Adapters",
    "images": f"{_HERE}.images:Images",
}


def find(name: str) -> type[Study]:
    """The study of a name.

    >>> find("mean-estimation").name
    'mean-estimation'
    """
    if name not in STUDIES:
        way_out = f"Choose from {', '.join(STUDIES)}."
        raise _check.reject("study", name, "is not known", way_out)
    found: type[Study] = pkgutil.resolve_name(STUDIES[name])
    return found
