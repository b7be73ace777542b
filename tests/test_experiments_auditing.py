"""Audits of trainers with faults: the faults are real, and found."""

import json

import pytest

from mfopt.experiments import auditing
from mfopt.experiments.auditing import NOISE, NORM, TrainerAudit
from mfopt.experiments.cache import Cache
from mfopt.experiments.runner import run_all


@pytest.mark.release
def test_faults_are_caught_and_a_whole_trainer_passes(tmp_path):
    setting = TrainerAudit(
        bins=2,
        epochs=1,
        epsilon=3.0,
        strategy="identity",
        canaries=1000,
        noise=(0.5, 1.0, 2.0),
        norms=(2.0,),
    )
    found = run_all(setting.cells(), Cache(tmp_path / "cells"), jobs=1)
    rows = auditing.rows(setting, found)
    assert [(row["fault"], row["size"]) for row in rows] == [
        (NOISE, 0.5), (NOISE, 1.0), (NOISE, 2.0), (NORM, 2.0)
    ]  # fmt: skip
    assert [row["passed"] for row in rows] == [False, True, False, False]
    half, whole, double, unclipped = rows
    assert half["epsilon_profile"] > 3.0 > whole["epsilon_profile"] > double["epsilon_profile"]
    assert unclipped["fault"] == NORM and unclipped["epsilon_profile"] > 3.0
    assert 0 < whole["epsilon_lower"] < whole["epsilon_profile"]
    panels = auditing.panels(rows)
    assert [len(panel.curves[0].x) for panel in panels] == [3, 1]
    assert panels[0].x_label == auditing.FAULTS[NOISE]
    written = auditing.write(tmp_path / "audit", setting, found)
    assert [path.suffix for path in written] == [".json", ".png", ".svg"]
    assert json.loads(written[0].read_text())["audits"] == rows
