"""DP-FedAvg in the trainer: against plain loops, against DP-SGD, its sensitivities, its report."""

import dataclasses
import json

import jax
import numpy as np
import optax
import pytest
from selection import before_release
from test_train_planted import users_weighted_twice
from test_train_run import data, settings_for  # noqa: F401 (fixtures)
from train_fixtures import bigram_model, layered_model, synthetic_store
from train_oracles import norm_of, plus, verified

from mfopt.errors import UsageError
from mfopt.mechanism import Mechanism
from mfopt.sampling import Poisson
from mfopt.sampling.sampler import pad
from mfopt.strategies import Identity
from mfopt.training import mesh as meshes
from mfopt.training.audit import audit
from mfopt.training.clipping import Clipping
from mfopt.training.config import TrainConfig
from mfopt.training.execute import execute
from mfopt.training.fedavg import FedAvg
from mfopt.training.gradients import Totals, microbatch_adder
from mfopt.training.loop import Trainer
from mfopt.training.prepare import prepare
from mfopt.training.privacy import report_text, solved
from mfopt.training.secrets import RunSecret
from mfopt.training.wiring import Wiring

LENGTH, USERS = 8, 9
MARGIN = 1 - 2.0**-18  # every clipping aims so much below its bound
ACCOUNT = solved(Mechanism(Poisson(0.5, 3), Identity(), privacy_unit="user"), 4.0, 1e-6)
SETTINGS = TrainConfig(
    factorization="(an account)",
    algorithm="fedavg",
    length=LENGTH,
    microbatch=2,
    records_per_user=4,
    local_rate=0.5,
    local_batch=3,
    normalized=False,
)


@pytest.fixture(scope="module")
def model():
    return bigram_model()


@pytest.fixture(scope="module")
def store():
    return synthetic_store(USERS, max_records=4, empty_users=(3,))


def trainer_of(model, store, alter=lambda execution: execution, **changes):
    settings = dataclasses.replace(SETTINGS, **changes)
    wired = Wiring(settings, ACCOUNT, RunSecret.pinned(5), meshes.make_mesh())
    execution = alter(wired.execution(wired.units(store)))
    return Trainer(model, execution, optax.sgd(1.0), mesh=wired.mesh, keep_release=True)


def summed(trainer, users):
    """The sum over these users, before noise."""
    batch = pad(np.asarray(users), 2, fill=-1)
    return trainer.sum(trainer.model.params, batch, 0).gradient


def moved(trainer, user, slope):
    """Δ of a user by the pseudocode with the gradient ``slope``, float64."""
    model, clipping = trainer.model, trainer.execution.clipping
    tokens, mask = (rows[0] for rows in trainer.execution.units.fetch(np.array([user]), 0))
    size, theta = clipping.local_batch or len(tokens), model.params
    for _ in range(clipping.local_epochs):
        for begin in range(0, len(tokens), size):
            rows = zip(tokens[begin : begin + size], mask[begin : begin + size], strict=True)
            entry = [slope(theta, model.frozen, *row) for row in rows if row[1].any()]
            for gradient in entry:
                theta = plus(theta, gradient, -clipping.local_rate / len(entry))
            delta = plus(theta, model.params, -1.0)
            factor = MARGIN * min(1.0, clipping.clip_norm / max(norm_of(delta), 1e-30))
            theta = plus(model.params, delta, factor)
    return plus(theta, model.params, -1.0), int(mask.any(axis=-1).sum())


@pytest.mark.ci
@pytest.mark.parametrize(
    "changes",
    before_release(
        [
            {"clip_norm": 1.0, "local_epochs": 2, "weight_cap": 3},
            {"clip_norm": 0.7, "weight_cap": 3},
            {"clip_norm": 50.0, "local_epochs": 3, "local_batch": 1, "normalizer": 20.0},
            {"clip_norm": 0.5, "local_batch": 0, "normalizer": 30.0},
        ],
        0,
    ),
    ids=lambda changes: "-".join(changes),
)
def test_a_step_against_a_plain_loop(model, store, changes):
    trainer = trainer_of(model, store, **changes)
    clipping = trainer.execution.clipping
    total, slope = jax.tree.map(np.zeros_like, model.params), jax.jit(jax.grad(model.loss))
    for user in range(USERS):
        delta, records = moved(trainer, user, slope)
        weight = (
            min(1.0, records / clipping.weight_cap) if clipping.weight_cap else float(records > 0)
        )
        total = plus(total, delta, -weight)
    actual = summed(trainer, np.arange(USERS))
    assert norm_of(plus(actual, total, -1.0)) <= 1e-6 * norm_of(total)


@pytest.mark.release
def test_one_local_step_is_dp_sgd_of_the_users_mean_gradient(model, store):
    """At η the bound of an update is η times that of a gradient; normalized both are the same."""
    sgd = Clipping(0.6, normalized=True)
    ours = FedAvg(0.5 * 0.6, normalized=True, local_batch=0, local_rate=0.5)
    tokens, mask = trainer_of(model, store).execution.units.fetch(np.arange(USERS), 0)
    sums = [
        jax.jit(microbatch_adder(model, options))(
            Totals.zero(model.params), model.params, (), tokens, mask
        )
        for options in (sgd, ours, dataclasses.replace(ours, local_batch=1))
    ]
    size = norm_of(sums[0].gradient)
    assert norm_of(plus(sums[1].gradient, sums[0].gradient, -1.0)) < 1e-6 * size
    for name in ("units", "clipped", "loss", "targets", "tokens"):
        stated = [float(getattr(total.statistics, name)) for total in sums[:2]]
        assert stated[0] == pytest.approx(stated[1], rel=1e-6)
    # the control: several local steps are another thing
    assert norm_of(plus(sums[2].gradient, sums[0].gradient, -1.0)) > 1e-2 * size


def largest_move(trainer):
    """Largest change of a sum by one user, over batches of 1 to all and everyone left out."""
    collected = []
    for count in range(1, USERS + 1):
        whole = summed(trainer, np.arange(count))
        for user in range(count):
            part = summed(trainer, np.delete(np.arange(count), user))
            collected.append(norm_of(plus(whole, part, -1.0)))
    return max(collected)


@pytest.mark.ci
def test_one_user_moves_a_sum_by_at_most_the_sensitivity(model, store, monkeypatch):
    """With updates all at the bound; a sum that is not weighted at most 1 is beyond it."""
    options = {"clip_norm": 0.4, "local_rate": 50.0, "weight_cap": 2}
    trainer = trainer_of(model, store, normalizer=3.0, **options)
    clipping, noise = trainer.execution.clipping, trainer.execution.noise
    assert clipping.sensitivity == 0.4
    assert noise.clip_norm == clipping.sensitivity
    assert 0.4 * clipping.sensitivity < largest_move(trainer) <= clipping.sensitivity
    # control: weights above 1
    users_weighted_twice(monkeypatch)
    assert largest_move(trainer_of(model, store, normalizer=3.0, **options)) > clipping.sensitivity


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("algorithm", "uls", "local_batch.*no effect on algorithm = 'uls'"),
        ("local_epochs", 0, "local_epochs"),
        ("local_rate", 0.0, "local_rate"),
        ("local_batch", 5, "records_per_user"),
        ("weight_cap", 5, "records_per_user"),
    ],
)
def test_settings_that_do_not_fit_are_refused(name, value, match):
    with pytest.raises(UsageError, match=match):
        dataclasses.replace(SETTINGS, **{name: value})


def test_another_number_of_local_epochs_is_another_run():
    local = dataclasses.replace(SETTINGS, local_epochs=2)
    assert local.fixed != SETTINGS.fixed


@pytest.mark.ci
def test_a_report_is_verified_and_a_better_one_is_not(data, tmp_path):  # noqa: F811
    changes = {"algorithm": "fedavg", "local_epochs": 2}
    changes |= {"learning_rate": 0.0, "weight_cap": 2, "records_per_user": 3}
    settings = settings_for(data, tmp_path / "run", **changes)
    done = execute(prepare(settings))
    facts = json.loads((tmp_path / "run" / "privacy-report.json").read_text())
    assert done["privacy"]["guarantee"]["privacy_unit"] == "user"
    verified(facts, [{"clipping": facts["clipping"] | {"sensitivity": 0.5}}])
    assert "local batch 1," in report_text(facts)
    at_zero = facts | {"clipping": facts["clipping"] | {"local_batch": 0, "weight_cap": 0}}
    text = report_text(at_zero)
    assert "local batch all records" in text and "weight cap none, equal weights" in text
    # a run that was stopped goes on, and with other local steps it does not
    variant = dataclasses.replace(settings, local_epochs=1)
    with pytest.raises(UsageError, match="local_epochs = 1"):
        execute(prepare(variant, resume=True))
    prepare(settings, resume=True).close()


@pytest.mark.release
def test_an_audit_of_canaries_has_no_finding():
    changes = {"local_epochs": 2, "weight_cap": 2}
    audited = audit(
        ACCOUNT, SETTINGS, canaries=300, seed=3, model=layered_model(), microbatch=8, **changes
    )
    assert audited.passed, audited.sampling
    assert audited.epsilon_lower < audited.epsilon_claimed
