"""ELS against ULS in training: the same compute, rates chosen fairly, and the real trainer."""

import dataclasses

import numpy as np
import pytest
from study_oracles import finished, write_parts

from mfopt.accounting import Mechanism, account
from mfopt.errors import UsageError
from mfopt.experiments.cache import Cache
from mfopt.experiments.runs.training import CHOSEN_ON, REPORTED
from mfopt.experiments.studies import engine, output
from mfopt.experiments.studies.budgets import TrainingBudgets
from mfopt.experiments.studies.noise_in_training import NoiseInTraining
from mfopt.sampling import Poisson


def test_rates_are_chosen_on_records_and_losses_reported_on_users():
    study = TrainingBudgets(
        epsilons=(2.0,), budgets=(8,), groups=(1,), rates=(0.1, 0.2), seeds=(0,)
    ).check()
    # the model that the comparison of noises fine-tunes too
    assert study.base in {cell.base for cell in NoiseInTraining().cells()}

    def losses(arm, rate, seed):
        els = arm.algorithm == "ELS"
        return {CHOSEN_ON: 4.0 + rate, REPORTED: 5.0 - rate - 0.1 * els}

    outcome = study.outcome(finished(study, losses))
    els, uls = outcome.rows
    # the smaller rate, though users would have preferred the larger
    assert els["learning_rate"] == uls["learning_rate"] == 0.1
    assert els["loss"] == pytest.approx(4.8) and uls["loss"] == pytest.approx(4.9)
    assert els["sampling"] == "Poisson, records, 0.25" and uls["sampling"].startswith("Poisson, us")
    assert "0.1000 above ELS, G = 4, and 1.1000 below the pretrained" in outcome.findings[0]
    assert outcome.findings[1] == "2 of 2 best rates are an end of those tried"
    assert {curve.label for curve in outcome.panels[0].curves} >= {"ELS", "ULS"}


def test_several_seeds_are_paired_and_a_rate_between_others_is_bracketed():
    study = TrainingBudgets(epsilons=(2.0,), groups=(1,)).check()
    assert len(study.seeds) == 3

    def losses(arm, rate, seed):
        # seeds differ by far more than the algorithms, and alike for both
        uls = 0.01 * (arm.algorithm == "ULS") * (1 + 0.1 * seed)
        return dict.fromkeys((CHOSEN_ON, REPORTED), 5.0 + seed - uls + abs(rate - 0.01))

    outcome = study.outcome(finished(study, losses))
    assert not any(row["rate_at_end"] for row in outcome.rows)
    # 0.010, 0.011, 0.012: their mean, and 4.303 (Student's t) standard errors
    assert "0.0110 ± 0.0025 below ELS, G = 4" in outcome.findings[0]
    assert len(outcome.findings) == 1 and "3 runs each" in outcome.findings[0]


def test_every_g_of_both_is_drawn_and_the_best_of_each_are_compared():
    """G is chosen on records, for ELS as for ULS; with one ε it is the axis, with two ε is."""
    for epsilons, axis, labels in (
        ((2.0,), "G", {"ELS", "ULS"}),
        ((2.0, 8.0), "ε", {"ELS, G = 4", "ELS, G = 16", "ULS, G = 1", "ULS, G = 2"}),
    ):
        study = TrainingBudgets(
            epsilons=epsilons, groups=(1, 2), els_groups=(4, 16), rates=(0.1,), seeds=(0,)
        ).check()

        def losses(arm, rate, seed):
            return {CHOSEN_ON: 4.0 - 0.01 * arm.group, REPORTED: 5.0 + 0.01 * arm.group}

        outcome = study.outcome(finished(study, losses))
        assert len(outcome.rows) == 4 * len(epsilons)
        assert "ULS, G = 2 ends 0.1400 below ELS, G = 16" in outcome.findings[0]
        (panel,) = outcome.panels
        assert axis in panel.x_label
        assert {c.label for c in panel.curves} == labels | {"pretrained, no fine-tuning"}
        if len(epsilons) == 1:
            assert [list(c.x) for c in panel.curves[:2]] == [[4, 16], [1, 2]]


@pytest.mark.release
def test_the_trainer_runs_what_is_accounted(tmp_path):
    folder = write_parts(tmp_path / "data")
    study = TrainingBudgets(
        data=str(folder), epsilons=(4.0,), budgets=(4,), groups=(1,), els_groups=(2,),
        rates=(0.01,), seeds=(0,), steps=3, length=8, width=8, layers=1, pretrain_steps=2,
    )  # fmt: skip
    cache = Cache(tmp_path / "cells")
    outcome, made = engine.run(study, cache, jobs=1)
    els, uls = outcome.rows
    # 4 records a step of 16 users: 2 of each kept, or one drawn of each sampled user
    for row, probability, group in ((els, 4 / 32, 2), (uls, 4 / 16, 1)):
        asked = Mechanism(Poisson(probability, 3), group_size=group, privacy_unit="user")
        sigma = account(asked, epsilon=4.0, delta=1e-5).noise_multiplier
        assert row["noise_multiplier"] == pytest.approx(sigma, rel=1e-6)
        assert row["pretrained"] != row["loss"] and np.isfinite(row["loss"])
    assert els["pretrained"] == uls["pretrained"] and made["seconds"] > 0
    assert len(output.write(tmp_path, study, outcome, made)) == 5
    too_many = dataclasses.replace(study, budgets=(33,))
    with pytest.raises(UsageError, match="units of a step"):
        engine.run(too_many, cache, jobs=1)
