"""The papers' figures: names, data, and the statements their text makes."""

import csv

import pytest
from commands import failure
from mfopt_cli.main import main

from mfopt import UsageError
from mfopt.experiments import artifacts, figures, tables
from mfopt.experiments.cache import Cache
from mfopt.experiments.figures import near_exact
from mfopt.experiments.figures.context import Context
from mfopt.experiments.runner import first_cells


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    return Context(Cache(tmp_path_factory.mktemp("cells")), jobs=1)


def data(drawing, panel: int = 0) -> dict[str, dict[float, float]]:
    curves = drawing.panels[panel].curves
    return {c.label: dict(zip(c.x, c.y, strict=True)) for c in curves}


def test_every_figure_that_was_promised_has_a_name() -> None:
    expected = {f"near-exact-{i}" for i in range(8, 26)}
    expected |= {f"near-exact-{i}" for i in ("2a", "2b", "3a", "3b", "5")}
    expected |= {"group-level-1", "group-level-2", "user-level-1", "user-level-2a"}
    expected |= {"user-level-2b", "user-level-9", "privacy-unit-3", "privacy-unit-7"}
    expected |= {"fedavg-table-1", "fedavg-table-2", "fresh-bins-kept", "fresh-bins-certified"}
    assert set(figures.FIGURES) == expected
    assert figures.FIGURES["near-exact-18"].what.startswith("16 epochs × 128")
    assert figures.expand("all") == list(figures.FIGURES)
    with pytest.raises(UsageError, match="figure"):
        figures.expand("near-exact-99")


def test_the_samples_of_figure_5_end_from_cells_of_the_grid(context: Context) -> None:
    asked = first_cells(lambda: near_exact.samples(context))
    sources = {sigma.source for sigma in asked}
    for epsilon in near_exact.SAMPLE_EPSILONS:
        shared = artifacts.grid_cell("blt-4", *near_exact.MAIN, epsilon).sigmas[0].source
        best = [each for each in sources if shared in each.needs]
        assert [each.samples for each in best] == [near_exact.MOST_SAMPLES]
    assert len(sources) == len(near_exact.SAMPLE_EPSILONS) * (
        len(near_exact.SAMPLES) * len(near_exact.SEEDS) + 1
    )


@pytest.mark.release
def test_user_level_2a_group_size_has_almost_no_effect(context: Context) -> None:
    for curve in data(figures.FIGURES["user-level-2a"].build(context)).values():
        assert max(curve.values()) < 1.15 * min(curve.values())


@pytest.mark.release
def test_user_level_2b_orthogonal_gradients_favour_users(context: Context) -> None:
    drawing = figures.FIGURES["user-level-2b"].build(context)
    for panel in range(len(drawing.panels)):
        found = data(drawing, panel)
        largest = max(found["ELS"])
        assert found["ULS, L_ULS = L_ELS / √G_ULS"][largest] < found["ELS"][largest]
        # conjecture 1 at the largest group
        assert found["ELS"][largest] < found["ULS, L_ULS = L_ELS"][largest]


@pytest.mark.ci
def test_privacy_unit_filter_needs_concentration(context: Context) -> None:
    """Chua et al., section 5.3: less noise with the filter only for τ/C below about 0.1."""
    drawing = figures.FIGURES["privacy-unit-3"].build(context)
    found = data(drawing)
    filtered = found.pop("with filter (all users)")
    for curve in found.values():
        assert filtered[1.0] > curve[1.0]
        assert filtered[0.01] < curve[0.01]


def test_the_models_of_table_2_have_the_printed_epsilon(context: Context) -> None:
    drawing = figures.FIGURES["fedavg-table-2"].build(context)
    rows = list(csv.DictReader(tables.csv_text(*drawing.table).splitlines()))
    assert len(rows) == 6
    for row in rows:
        assert round(float(row["epsilon_moments"]), 3) == float(row["epsilon_printed"])
        assert float(row["epsilon_pld"]) < float(row["epsilon_moments"])


@pytest.mark.ci
def test_black_box_is_finite_where_it_should_be() -> None:
    from mfopt.accounting import Mechanism, analysis
    from mfopt.experiments.accounts import GroupBaselineCell
    from mfopt.sampling import FixedBatch, Poisson

    scheme = Poisson(0.01, 200)
    exact = analysis(Mechanism(scheme, group_size=2)).epsilon(4.0, 1e-6).epsilon

    def baseline(group_size: int, scheme=scheme) -> float | None:
        return GroupBaselineCell(scheme, group_size, 4.0, 1e-6).run().record["epsilon"]

    assert exact < baseline(2) < 3 * exact
    # where loss distributions end, moments go on: exponential, as the lemma is, but a number
    assert 1e6 < baseline(2000) < 1e12
    assert baseline(2000, FixedBatch(500, 50_000, 200)) is None


@pytest.mark.ci
def test_command_lists_and_writes(tmp_path, context: Context, capsys) -> None:
    main(["figures", "--list"])
    assert "near-exact-3b" in capsys.readouterr().out
    words = f"figures user-level-2a --out {tmp_path} --jobs 1 --cache {context.cache.folder}"
    arguments = words.split()
    main(arguments)
    assert "user-level-2a.png" in capsys.readouterr().out
    assert {p.suffix for p in tmp_path.iterdir()} == {".png", ".svg", ".csv"}
    for bad, named in [(arguments, "--force"), (["figures"], "NAME"), (["figures", "x"], "figure")]:
        assert named in failure(capsys, *bad)
