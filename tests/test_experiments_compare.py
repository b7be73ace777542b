"""Cache, runner, comparison and its command line."""

import csv
import dataclasses
import io
import itertools
import json
import os
from unittest.mock import Mock

import numpy as np
import pytest
from commands import failure
from mfopt_cli.main import main

import mfopt
from mfopt import FailureError, UsageError
from mfopt._runtime import _sizes
from mfopt.accounting import Mechanism, account
from mfopt.accounting.monte_carlo import dominating_pair
from mfopt.experiments import cache as cache_module
from mfopt.experiments import comparison, families, mechanisms, recommendation, runner
from mfopt.experiments.cache import Cache, Result
from mfopt.experiments.comparison import Comparison, Row
from mfopt.experiments.mechanisms import (
    AmplifiedCell,
    FixedCell,
    Goal,
    SigmaCell,
    UnamplifiedCell,
    strategy_of,
)
from mfopt.experiments.runner import run_all
from mfopt.optimize.optimizers import Trace
from mfopt.sampling import BallsInBins
from mfopt.strategies import SquareRoot
from mfopt.workloads import Momentum

BINS, EPOCHS = 8, 2
FAMILIES = (
    "dpsgd+unamplified",
    "dpsgd+poisson",
    "dpsgd+balls-in-bins",
    "banded+unamplified",
    "banded+poisson",
    "banded+balls-in-bins",
    "sqrt",
)
SETTING = Comparison(BINS, EPOCHS, (1.0, 8.0), 1e-5, FAMILIES, (1, 4), samples=2**13)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return Cache(tmp_path_factory.mktemp("cells"))


@pytest.fixture(scope="module")
def sizes(cache):
    return comparison.every_size(SETTING, cache, jobs=1)


def test_key_depends_on_every_setting_that_is_no_default():
    goal = Goal(BINS, EPOCHS, 1.0, 1e-5)
    a = SigmaCell(FixedCell("sqrt"), goal)
    assert a.key == SigmaCell(FixedCell("sqrt", bands=1), goal).key
    assert "epsilon" in str(a) and a.settings == {
        "goal": {"bins": BINS, "epochs": EPOCHS, "epsilon": 1.0, "delta": 1e-5}
    }
    variants = [
        SigmaCell(FixedCell("sqrt"), Goal(BINS, EPOCHS, 2.0, 1e-5)),
        SigmaCell(FixedCell("sqrt"), goal, samples=64),
        SigmaCell(FixedCell("tree"), goal),
        FixedCell("sqrt"),
    ]
    assert len({a.key, *(cell.key for cell in variants)}) == 5
    # σ that takes no samples is one cell, however many are asked for
    plain = dataclasses.replace(goal, sampling="poisson")
    assert SigmaCell(FixedCell("identity"), plain, 64) == SigmaCell(FixedCell("identity"), plain)


def test_a_sigma_that_no_samples_give_is_that_of_the_account_without_any(monkeypatch):
    monkeypatch.setattr(mechanisms, "calibrate", Mock(side_effect=FailureError))
    cell = SigmaCell(FixedCell("sqrt"), Goal(BINS, EPOCHS, 2.0, 1e-5))
    mechanism = Mechanism(cell.goal.bin_scheme(), SquareRoot())
    stated = account(mechanism, epsilon=2.0, delta=1e-5, certificate="deterministic")
    record = cell.run(cell.source.run()).record
    assert (record["status"], record["noise_multiplier"]) == ("bound", stated.noise_multiplier)


def test_cache_round_trip_and_damage(tmp_path):
    store, cell = Cache(tmp_path), FixedCell("sqrt")
    assert store.load(cell) is None
    store.store(cell, Result({"x": 0.1}, {"C/a": np.arange(3.0)}))
    loaded = store.load(cell)
    assert loaded is not None and loaded.record == {"x": 0.1}
    np.testing.assert_array_equal(loaded.arrays["C/a"], np.arange(3.0))
    content = store.path(cell).read_bytes()
    store.path(cell).write_bytes(content[: len(content) // 2])
    assert store.load(cell) is None
    assert [p.name for p in tmp_path.iterdir()] == [store.path(cell).name]
    with pytest.raises(UsageError, match="cache"):
        Cache(store.path(cell) / "below-a-file")


def test_sweep_resumes_and_reports_progress(cache, sizes):
    recorded = []

    def progress(event):
        recorded.append((event.done, event.total))

    comparison.every_size(SETTING, cache, jobs=1, progress=progress)
    assert recorded == [(0, 0)]
    planned = [cell for c in comparison.plan(SETTING).values() for _, cell in c]
    lost = next(cell for cell in planned if cell.goal.sampling == "poisson")
    cache.path(lost).unlink()
    repeated = comparison.every_size(SETTING, cache, jobs=1, progress=progress)
    assert recorded[1:] == [(0, 1), (1, 1)]
    assert repeated == sizes


def test_as_many_processes_as_have_room(tmp_path, monkeypatch):
    setting = Comparison(128, 16, (2.0,), include=("dense", "sqrt"))
    memory_of_one = families.memory(setting)
    assert (
        memory_of_one
        == families.find("dense").memory(setting)
        > families.find("sqrt").memory(setting)
    )
    requests = []
    monkeypatch.setattr(
        comparison, "run_all", lambda *_, jobs, **__: requests.append(jobs) or [][0]
    )
    monkeypatch.setattr(runner.os, "cpu_count", lambda: 64)
    store = Cache(tmp_path)

    def jobs_with(free, jobs=None):
        monkeypatch.setattr(_sizes, "usable_memory", lambda: free * memory_of_one)
        with pytest.raises(IndexError):
            comparison.every_size(setting, store, jobs=jobs)
        return requests[-1]

    assert [jobs_with(free) for free in (1.5, 3.5, 100.0)] == [1, 3, 32]
    assert jobs_with(2.5, jobs=2) == 2
    with pytest.raises(UsageError, match=r"jobs = 2: .* GiB of memory.*Here 1 would fit"):
        jobs_with(1.5, jobs=9)  # there are two cells
    for candidates in comparison.plan(setting).values():
        for _, cell in candidates:
            store.store(cell, Result({}))
    assert jobs_with(1.5, jobs=9) == 9  # nothing is left to compute


def test_a_failing_cell_raises_and_keeps_the_finished(tmp_path):
    store = Cache(tmp_path)
    good = FixedCell("sqrt")
    bad = SigmaCell(good, Goal(BINS, EPOCHS, 1.0, 1e-5, "poisson"))  # not analysed
    with pytest.raises(UsageError, match="strategy"):
        run_all([bad], store, jobs=1)
    assert store.has(good) and not store.has(bad)


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["amplified", "unamplified"])
def test_an_interrupted_cell_is_never_kept(kind, tmp_path, monkeypatch):
    """An optimizer that is stopped early has a C to give; the table must not take it."""
    cell = {
        "amplified": AmplifiedCell(Goal(BINS, EPOCHS, 1.0, 1e-5), "blt", buffers=2),
        "unamplified": UnamplifiedCell("banded", BINS, EPOCHS, 2),
    }[kind]
    record, calls = Trace.record, []

    def interrupt(trace, *arguments):
        record(trace, *arguments)
        calls.append(trace)
        if len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Trace, "record", interrupt)
    store = Cache(tmp_path)
    with pytest.raises(KeyboardInterrupt) as stopped:
        run_all([FixedCell("sqrt"), cell], store, jobs=1)
    assert "1 of 2 cells are kept" in stopped.value.__notes__[0]
    assert not store.has(cell)
    run_all([cell], store, jobs=1)  # no interrupt any more: a control that it would be kept
    assert store.has(cell)


def test_the_address_of_a_result_follows_the_code(monkeypatch):
    cell = FixedCell("sqrt")
    key = cell.key
    monkeypatch.setattr(cache_module, "code_digest", lambda *_: "another")
    assert cell.key != key


def test_balls_in_bins_never_loses_to_unamplified_at_the_same_c(sizes):
    for family, epsilon in itertools.product(("dpsgd", "banded"), SETTING.epsilons):
        plain = sizes[f"{family}+unamplified", epsilon]
        for ours, other in zip(sizes[f"{family}+balls-in-bins", epsilon], plain, strict=True):
            assert ours.size == other.size and ours.rmse < 0.99 * other.rmse


def test_sigmas_follow_their_definitions(sizes, cache):
    """Each σ, put back into an accountant called directly, gives δ."""
    from dp_accounting import dp_event
    from dp_accounting.pld import PLDAccountant

    def epsilon_of(probability, sigma, rounds):
        event = dp_event.PoissonSampledDpEvent(probability, dp_event.GaussianDpEvent(sigma))
        return PLDAccountant().compose(event, rounds).get_epsilon(1e-5)

    sigma = sizes["dpsgd+poisson", 1.0][0].noise_multiplier
    assert epsilon_of(1 / BINS, sigma, BINS * EPOCHS) == pytest.approx(1.0, rel=1e-3)
    assert all(sizes["dpsgd+balls-in-bins", e][0].status == "exact" for e in SETTING.epsilons)

    row = next(r for r in sizes["banded+poisson", 1.0] if r.size == 4)
    planned = dict(comparison.plan(SETTING)["banded+poisson", 1.0])
    optimum = strategy_of(cache.load(planned[4].source))
    norm = np.linalg.norm(np.asarray(optimum.materialize(BINS * EPOCHS)), axis=0).max()
    actual = epsilon_of(4 / BINS, row.noise_multiplier / norm, BINS * EPOCHS // 4)
    assert actual == pytest.approx(1.0, rel=1e-3)
    assert dominating_pair.exact(optimum, BallsInBins(BINS, EPOCHS)).bins == BINS


def test_best_size_and_improvement():
    rows = [
        Row("banded+poisson", 1.0, 4, 1.0, 10.0, 0.0, 3, "exact"),
        Row("blt-4", 1.0, 4, 1.0, 9.0, 0.01, 4, "estimate"),
    ]
    change = comparison.improvements(rows, "banded+poisson")["blt-4", 1.0]
    assert change.percent == pytest.approx(10)
    assert change.low == pytest.approx(10 - 100 * 0.9 * 1.96 * 0.01, abs=1e-3)
    assert change.high > change.percent


def row(family, rmse, memory, *, draws=1.0, epsilon=2.0, size=0):
    sampling = families.find(family).sampling
    return Row(family, epsilon, size, 1.0, rmse, 0.0, memory, "exact", draws, sampling=sampling)


def test_a_recommendation_weighs_error_against_memory_and_time():
    rows = [
        row("dpsgd+poisson", 30.0, 0),
        row("dpsgd+unamplified", 90.0, 0),
        row("banded+poisson", 25.0, 7, size=8),
        row("blt-4-scaled", 22.99, 4),
        row("blt-2-scaled", 23.0, 2),  # as good, and smaller
        row("banded+amplified", 22.0, 127, size=128),
        row("toeplitz-scaled", 20.0, 0, draws=1024.5),
        row("blt-4-scaled", 5.0, 4, epsilon=16.0),
    ]
    two, sixteen = recommendation.recommend(rows)
    assert two.light.family == "blt-2-scaled" and two.best.family == "toeplitz-scaled"
    assert set(two.rivals) == {"poisson", "unamplified"}
    text = two.text()
    assert text.startswith("ε = 2: BLT-2, time-scaled*, RMSE 23.00 at 2 buffers with balls-in-bins")
    assert "8.0% below the best with Poisson sampling" in text  # 1 - 23/25
    assert "74.4% below the best without" in text
    assert (
        "13.0% lower with more: Toeplitz, time-scaled*, RMSE 20.00 at 0 buffers and 1,024" in text
    )
    assert sixteen.text().endswith("nothing here is better") and not sixteen.rivals
    # an error that is above is said to be above
    poorer = [row("blt-2", 11.0, 2), row("banded+poisson", 10.0, 31, size=32)]
    (actual,) = recommendation.recommend(poorer)
    assert "10.0% above the best with Poisson sampling" in actual.text()
    assert actual.text().endswith(
        "banded (32 bands), RMSE 10.00 at 31 buffers with Poisson sampling (cyclic for bands)"
    )


def test_a_recommendation_is_of_any_size_within_the_memory_by_final_model_error():
    def sized(family, rmse, model, memory, draws=1.0):
        plain_row = row(family, rmse, memory, draws=draws, size=memory + 1)
        return plain_row._replace(final_model_error=model)

    rows = [
        sized("dpsgd+poisson", 12.0, 1.0, 0),
        sized("banded+poisson", 7.7, 0.7, 7),
        sized("banded+poisson", 6.9, 0.65, 15),  # the best of its family: beyond the memory
        sized("blt-4", 6.5, 0.9, 4),  # lower in RMSE alone
        sized("toeplitz", 6.0, 0.5, 0, draws=40.0),
    ]
    (eight,) = recommendation.recommend(rows)
    assert eight.light is rows[1] and eight.best is rows[4]
    assert "banded (8 bands), final-model error 0.70 (RMSE 7.70) at 7 buffers" in eight.text()
    assert "28.6% lower with more: Toeplitz" in eight.text()  # 1 - 0.5 / 0.7
    (sixteen,) = recommendation.recommend(rows, memory=15)
    (none,) = recommendation.recommend(rows, memory=0)
    assert sixteen.light is rows[2] and none.light is rows[0]
    # one past draw made again costs no memory and little time
    (drawn,) = recommendation.recommend([*rows, sized("lambda-cgd", 8.0, 0.6, 0, draws=2.0)], 0)
    assert drawn.light.family == "lambda-cgd"


def test_fresh_bins_have_a_search_of_their_own():
    fresh = families.find("banded-toeplitz-scaled+fresh-bins")
    setting = Comparison(32, 4, (1.0,), widths=(1, 8, 16, 64))
    ((size, sigma),) = fresh.candidates(setting, 1.0)
    search = sigma.source
    assert size == search.bands == 16 and search.goal == sigma.goal
    assert search.goal.sampling == "fresh-bins"
    assert search.needs == ()  # it begins by itself


def test_families_expand_and_unknown_ones_are_refused():
    blts = families.expand(["blt"])
    assert {"blt-4", "blt-4-scaled", "blt-4+unamplified"} < set(blts)
    assert all(families.find(name).kind == "blt" for name in blts)
    assert families.expand(["toeplitz-scaled"]) == ("toeplitz-scaled",)
    assert all(len(family.label) <= 34 for family in families.FAMILIES.values())
    assert set(families.expand(["all"])) == set(families.FAMILIES)
    with pytest.raises(UsageError, match="include"):
        families.expand(["bltt"])
    Comparison(4, 1, (2.0,), include=("blt-4",)).check()  # as many iterations as it has buffers


def test_command_writes_table_csv_json_and_plots(tmp_path, cache, sizes, capsys):
    words = f"compare --epochs 2 --iters 8 --eps 1,8 --samples 8192 --bands 1,4 --include {{}} \
        --jobs 1 --cache {cache.folder}"
    arguments = [*words.format(",".join(FAMILIES)).split(), "--out", str(tmp_path / "c.csv")]
    main(arguments)
    text = capsys.readouterr().out
    assert "DP-SGD, Poisson" in text and "ε = 8" in text
    assert max(map(len, text.split("ε = 1: ")[0].splitlines()[1:])) <= 80
    assert text.count("with balls-in-bins") >= 2  # one sentence for each ε
    listed = list(csv.DictReader(io.StringIO((tmp_path / "c.csv").read_text())))
    assert len(listed) == 2 * len(FAMILIES)
    for stem in ("c-rmse", "c-memory"):
        assert (tmp_path / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / f"{stem}.svg").read_text().lstrip().startswith("<?xml")
    for r in listed:  # a lower bound is known where every unit takes part once in each epoch
        by_chance = r["family"].endswith(("poisson", "b-min-sep"))
        assert by_chance == (r["above_floor"] == "")
        assert not r["above_floor"] or float(r["above_floor"]) > 0
    assert "above the floor at epochs' ends" in text
    best = {(r["family"], float(r["epsilon"])): float(r["rmse"]) for r in listed}
    for key, rows in sizes.items():
        assert best[key] == pytest.approx(min(row.rmse for row in rows))

    assert "--force" in failure(capsys, *arguments)
    main([*arguments[:-2], "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["baseline"] == "banded+poisson" and len(printed["rows"]) == 2 * len(FAMILIES)
    main([*arguments[:-2], "--csv", "--quiet"])
    assert capsys.readouterr().out.startswith("family,epsilon")


@pytest.fixture
def own_file(tmp_path):
    """DP-SGD in bins under a name of its own, at ε = 1 and the shape of the comparison."""
    made = mfopt.factorize(
        epochs=EPOCHS, iterations_per_epoch=BINS, epsilon=1.0, delta=1e-5, strategy="identity"
    )
    return str(made.save(tmp_path / "mine.npz"))


def test_a_file_is_a_row_beside_the_families(own_file, tmp_path, cache, sizes, capsys, monkeypatch):
    words = f"compare --epochs 2 --iters 8 --eps 1 --samples 8192 --bands 1,4 --jobs 1 \
        --cache {cache.folder} --include {own_file},{','.join(FAMILIES)}"
    main([*words.split(), "--json", "--out", str(tmp_path / "c")])
    named = json.loads(capsys.readouterr().out)["rows"]
    (mine,) = [entry for entry in named if entry["family"] == own_file]
    (same,) = sizes["dpsgd+balls-in-bins", 1.0]
    # the same mechanism under another name: all numbers agree with those of the family
    for name in ("rmse", "noise_multiplier", "final_model_error", "above_floor"):
        assert mine[name] == pytest.approx(getattr(same, name), rel=1e-4), name
    assert (mine["status"], mine["sampling"], mine["memory"]) == ("certified", "balls-in-bins", 0)
    assert own_file in (tmp_path / "c.csv").read_text()
    assert own_file in (tmp_path / "c-sizes.csv").read_text()
    # what this machine has not proved is the file's word
    monkeypatch.setattr(mfopt.Factorization, "proved_here", False)
    main(words.split())
    table = capsys.readouterr().out
    assert f"…{own_file[-27:]} (as stated)" in table
    assert max(map(len, table.split("ε = 1: ")[0].splitlines()[1:])) <= 80


def test_a_file_for_min_separation_is_compared_with_as_many_epochs_as_a_unit_takes_part(tmp_path):
    options = {"epochs": EPOCHS, "iterations_per_epoch": BINS, "epsilon": 1.0, "delta": 1e-5}
    options |= {"strategy": "sqrt", "privacy_unit": "device"}
    paths = [
        str(mfopt.factorize(**options, sampling=scheme).save(tmp_path / f"{scheme}.npz"))
        for scheme in ("min-separation", "fixed-order")
    ]
    rounds, ordered = [comparison.row_of_file(SETTING, path) for path in paths]
    # an epoch apart at least, of which fixed order is the worst case
    assert rounds.sampling == "min-separation" and rounds.rmse == pytest.approx(ordered.rmse)
    with pytest.raises(UsageError, match="2 × 8, what is compared has 4 × 4"):
        comparison.row_of_file(SETTING._replace(bins=4, epochs=4), paths[0])


@pytest.mark.parametrize(
    ("setting", "changes", "phrase"),
    [
        ({"epochs": 4}, {}, "its epochs × iterations is 2 × 8, what is compared has 4 × 8"),
        ({"epochs": 1, "bins": 16}, {}, "is 2 × 8, what is compared has 1 × 16"),
        ({"epsilons": (2.0, 4.0)}, {}, "its ε is 1.0, what is compared has 2.0 or 4.0"),
        ({"delta": 1e-6}, {}, "its δ is 1e-05, what is compared has 1e-06"),
        (
            {},
            {"workload": Momentum(0.9, np.ones(16))},
            "its workload is momentum, what is compared",
        ),
        (
            {},
            {"group_size": 2, "noise_multiplier": 25.0},
            "its group size is 2, what is compared has 1",
        ),
        (
            {},
            {"adjacency": "zero-out"},
            "its adjacency is zero-out, what is compared has add-remove",
        ),
    ],
)
def test_a_file_of_something_else_is_refused(setting, changes, phrase, own_file, tmp_path):
    read = mfopt.load(own_file)
    if "workload" in changes:
        changed = dataclasses.replace(read, **changes)
    else:
        stated = dataclasses.replace(read.guarantee, **changes)
        sigma = stated.noise_multiplier
        changed = dataclasses.replace(read, noise_multiplier=sigma, guarantee=stated)
    path = changed.save(tmp_path / "other.npz")
    with pytest.raises(UsageError, match=phrase):
        comparison.row_of_file(SETTING._replace(**setting), str(path))
    assert comparison.row_of_file(SETTING, own_file).family == own_file  # a control


@pytest.mark.parametrize(
    ("extra", "phrase"),
    [
        (["--eps", "0"], "eps"),
        (["--eps", "one"], "eps"),
        (["--eps", ""], "eps"),
        (["--include", "nothing"], "include"),
        (["--bands", "1.5"], "bands"),
        (["--baseline", "tree"], "baseline"),
        (["--delta", "2"], "delta"),
        (["--samples", "1"], "samples"),
        (["--csv", "--json"], "--csv has no effect with --json"),
        (["--out", "/nowhere/c"], "folder"),
    ],
)
def test_command_names_bad_arguments(extra, phrase, tmp_path, capsys):
    words = f"compare --epochs 2 --iters 8 --include dpsgd --cache {tmp_path}"
    assert phrase in failure(capsys, *words.split(), *extra)


def test_a_worker_that_is_killed_is_told_of_in_a_line():
    with (
        pytest.raises(FailureError, match=r"killed, .*Finished cells are kept.*`jobs=1`") as raised,
        runner.workers(2) as pool,
    ):
        pool.submit(os._exit, 9).result()
    assert len(str(raised.value).splitlines()) == 1
