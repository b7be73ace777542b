"""Audits of trainers with faults: the faults are real, and found."""

import json

import pytest

from mfopt.experiments.auditing import FAULTS, NOISE, NORM, TrainerAudit
from mfopt.experiments.cache import Cache
from mfopt.experiments.studies import engine, output


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
    outcome, made = engine.run(setting, Cache(tmp_path / "cells"), jobs=1)
    rows = list(outcome.rows)
    assert [(row["fault"], row["size"]) for row in rows] == [
        (NOISE, 0.5), (NOISE, 1.0), (NOISE, 2.0), (NORM, 2.0)
    ]  # fmt: skip
    assert [row["passed"] for row in rows] == [False, True, False, False]
    half, whole, double, unclipped = rows
    assert half["epsilon_profile"] > 3.0 > whole["epsilon_profile"] > double["epsilon_profile"]
    assert unclipped["fault"] == NORM and unclipped["epsilon_profile"] > 3.0
    assert 0 < whole["epsilon_lower"] < whole["epsilon_profile"]
    assert outcome.findings == ["3 of 3 faulty trainers fail their audit, 1 of 1 correct ones pass"]
    panels = outcome.panels
    assert [len(panel.curves[0].x) for panel in panels] == [3, 1]
    assert panels[0].x_label == FAULTS[NOISE]
    written = output.write(tmp_path, setting, outcome, made, kinds=("json", "svg"))
    assert [path.name for path in written] == ["audit.json", "audit.svg"]
    assert json.loads(written[0].read_text())["rows"] == rows
