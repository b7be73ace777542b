"""The accuracy bench: clipping against per-example gradients, sampling, and the grid of rates."""

import csv
import re
from pathlib import Path

import accuracy_all
import accuracy_runs as runs
import accuracy_tasks
import accuracy_text
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mfopt.sampling import FreshBins, Poisson
from mfopt.strategies import Identity


def logits_of(name, parameters, image):
    """Logits of one image by the model's definition, parameters in the bench's order."""
    if name == "softmax":
        return image @ parameters.reshape(65, 10)
    if name == "mlp":
        inner, outer = parameters[: 65 * 32].reshape(65, 32), parameters[65 * 32 :].reshape(33, 10)
        return jnp.append(jnp.tanh(image @ inner), 1.0) @ outer
    kernels, outer = parameters[:160].reshape(10, 16), parameters[160:].reshape(257, 10)
    convolved = jax.lax.conv_general_dilated(
        image[:64].reshape(1, 8, 8, 1),
        kernels[:9].reshape(3, 3, 1, 16),
        window_strides=(2, 2),
        padding=((1, 1), (1, 1)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return jnp.append(jnp.tanh(convolved + kernels[9]).ravel(), 1.0) @ outer


@pytest.mark.release
@pytest.mark.parametrize("name", ["softmax", "mlp", "cnn"])
def test_sums_are_of_clipped_gradients(name):
    task, rng = runs.TASKS[name](), np.random.default_rng(0)
    models = np.stack([task.start(rng) for _ in range(2)])
    models += 0.1 * rng.standard_normal(models.shape).astype(np.float32)
    models[1] *= 20  # gradients of both sides of norm 1
    (images, labels), _ = accuracy_tasks.digits()

    def loss(parameters, image, label):
        return -jax.nn.log_softmax(logits_of(name, parameters, image))[label]

    gradients_of = jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0)))
    gradients = np.stack([gradients_of(model, images[5:65], labels[5:65]) for model in models])
    norms = np.linalg.norm(gradients, axis=2, keepdims=True)
    assert norms.min() < 1 < norms.max()
    expected = (gradients / np.maximum(norms, 1)).sum(axis=1)
    weights = np.append(np.ones(60), 0.0)  # the last is padding
    sums = task.clipped_sum(jnp.asarray(models), np.append(np.arange(5, 65), 80), weights)
    assert np.asarray(sums) == pytest.approx(expected, abs=2e-4)


@pytest.mark.release
def test_sums_of_text_are_of_clipped_gradients_and_no_character_sees_later_ones():
    task, rng = runs.TASKS["text-reference"](), np.random.default_rng(0)
    model = 0.3 * rng.standard_normal(task.parameters).astype(np.float32)
    train, test = accuracy_text.records("reference")
    assert train.shape == test.shape == (2048, 25)
    assert train.min() >= 0 and train.max() < accuracy_text.CHARACTERS
    changed = train[0].copy()
    changed[12] = (changed[12] + 1) % accuracy_text.CHARACTERS
    one, other = (accuracy_text.logits(model, record[:-1]) for record in (train[0], changed))
    assert np.array_equal(one[:12], other[:12])
    assert not np.allclose(one[12:], other[12:])

    def loss(parameters, record):
        scores = jax.nn.log_softmax(accuracy_text.logits(parameters, record[:-1]))
        return -sum(scores[place, record[place + 1]] for place in range(24)) / 24

    gradient_of = jax.jit(jax.grad(loss))
    gradients = np.stack([gradient_of(model, record) for record in train[:6]])
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    assert norms.max() > 1
    expected = (gradients / np.maximum(norms, 1)).sum(axis=0)
    weights = np.append(np.ones(6), 0.0)  # the last is padding
    sums = task.clipped_sum(jnp.asarray(model)[None], np.arange(7), weights)
    assert np.asarray(sums)[0] == pytest.approx(expected, abs=1e-4)


def test_batches_are_those_of_the_scheme():
    scheme = FreshBins(bins=4, epochs=3)
    indices, weights = runs.batches(scheme, population=50, seeds=2)
    for epoch in range(3):
        steps = slice(4 * epoch, 4 * epoch + 4)
        for seed in range(2):
            units = indices[steps, seed][weights[steps, seed] > 0]
            assert sorted(units) == [*range(50)]
    assert not np.array_equal(indices[:4, 0], indices[:4, 1])


def test_the_best_rate_is_inside_the_grid_and_noise_costs_loss():
    scheme = Poisson(1 / 8, 64)
    quiet, noisy = (runs.Mechanism.build("", Identity(), s, scheme) for s in (1e-6, 2.0))
    cell = "linear", "last"
    results = runs.scores(quiet, "least-squares", "sgd", ["linear"], 2, {cell: -9})
    trainer = runs.Trainer(quiet, "least-squares", "sgd", 2)
    best = results[cell]
    beside = trainer.losses([("linear", best.exponent - 1), ("linear", best.exponent + 1)])
    assert best.mean < min(values[0, 0].mean() for values in beside.values())
    assert best.mean < 0.02  # of the optimum's 0, from 1.0 at the start
    assert runs.scores(noisy, "least-squares", "sgd", ["linear"], 2)[cell].mean > best.mean


def test_the_readme_counts_the_cells_of_the_page():
    def counted(name):
        row = re.search(rf"\n\| {name} \| (\d+ of .*) \|\n", accuracy_all.PAGE.read_text())
        cells, against_peers, against_dpsgd = row[1].split(" | ")
        spans = against_peers, against_dpsgd
        return cells, *(re.findall(r"[+−][\d.]+", span) for span in spans)

    readme = " ".join(Path("README.md").read_text().split())
    cells, _, (most, least) = counted("mfopt")
    total = cells.partition(" of ")[2]
    gain = f"by {least.lstrip('−')} to {most.lstrip('−')}%"
    assert f"below DP-SGD's in all {total} cells of the benchmark, {gain}" in readme
    assert most.startswith("−") and least.startswith("−")
    cells, (_, above), _ = counted("mfopt, own schedule")
    peers = f"in {cells} cells and at most {above.removeprefix('+')}% above in the others"
    assert f"below every published mechanism {peers}" in readme


@pytest.mark.parametrize("path", [accuracy_all.PAGE, accuracy_all.TEXTS_PAGE], ids=str)
def test_the_page_has_the_tables_of_the_summary(path):
    with open("artifacts/accuracy/summary.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    page = path.read_text()
    assert accuracy_all.with_tables(page, rows) == page
    # a control: another loss changes the page
    changed = [{**row, "loss": f"{float(row['loss']) + 0.01:.5f}"} for row in rows]
    assert accuracy_all.with_tables(page, changed) != page
