"""One HTML page about a factorization, whole in itself: no script, no network, no other file.

What it guarantees and how that was proven, the sampling that must be executed, C and its inverse,
the error of each step, what the noise costs, what the alternatives cost at the same (ε, δ), and the
code that loads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mfopt import query_error, words
from mfopt._runtime._page import facts, section, text, whole
from mfopt._version import __version__
from mfopt.accounting import Mechanism, account
from mfopt.accounting.closed_form import gaussian
from mfopt.accounting.monte_carlo.dominating_pair import covers
from mfopt.experiments import mechanism_plot, plots
from mfopt.factorization import Factorization
from mfopt.noise.choice import choose
from mfopt.sampling import Poisson, Scheme
from mfopt.strategies import Identity


class _Alternative(NamedTuple):
    """Another mechanism at the same (ε, δ); its RMSE is in clip norms, its memory in buffers."""

    name: str
    noise_multiplier: float
    rmse: float
    memory: int


def alternatives(factorization: Factorization) -> list[_Alternative]:
    """Independent noise and the same C without amplification: what takes no search and no samples.

    Only for schemes with bins; with independent noise in the same batches if bins are assigned
    once, where σ takes no time.
    """
    scheme: Any = factorization.sampling
    if scheme.public_order or not hasattr(scheme, "bins"):
        return []
    n, stated = factorization.iterations, factorization.guarantee

    def independent(name: str, sampling: Scheme) -> _Alternative:
        mechanism = Mechanism(sampling, Identity())
        sigma = account(mechanism, epsilon=stated.epsilon, delta=stated.delta).noise_multiplier
        rmse = float(np.asarray(query_error.rmse(factorization.workload, Identity(), n, sigma)))
        return _Alternative(name, sigma, rmse, 0)

    plain = factorization.loss().sensitivity / gaussian.largest_mu(stated.epsilon, stated.delta)
    same_batches = [independent("independent noise (DP-SGD), same batches", scheme)]
    return [
        *(same_batches if covers(scheme) else []),
        independent("independent noise (DP-SGD), Poisson batches", Poisson(1 / scheme.bins, n)),
        _Alternative(
            "this C, fixed order of batches (no amplification)",
            plain,
            factorization.rmse * plain / factorization.noise_multiplier,
            choose(factorization.strategy, n).slots,
        ),
    ]


def page(factorization: Factorization, name: str = "mechanism.npz") -> str:
    """The page as text."""
    stated, n = factorization.guarantee, factorization.iterations
    recursion, sigma = choose(factorization.strategy, n), factorization.noise_multiplier
    draws = recursion.draws(n)
    drawn = "1 white draw" if draws <= 1 else f"{draws:,.0f} white draws"
    cost = f"{recursion.slots} noise buffers (× model size), {drawn} a step"
    title = (
        f"{words.described(factorization.strategy.describe())}: "
        f"({stated.epsilon:g}, {stated.delta:g})-DP"
    )
    mistakes = [word for word in ("Shuffling", factorization.sampling.mistaken_for) if word]
    sampling = (
        f"<p>{text(factorization.sampling.words())}.</p><p>The guarantee is about this sampling "
        f"and no other. {', '.join(mistakes)}, or Poisson sampling have "
        "guarantees of their own. Batches have random sizes: divide by a fixed public "
        f"number. At most {n:,} steps; every prefix of the run is covered.</p>"
    )
    costs = [
        ("RMSE of the queries", f"{factorization.rmse:.5g} clip norms, per coordinate"),
        ("largest error of a query", f"{factorization.max_error:.5g} clip norms"),
        ("workload", words.described(factorization.workload.describe())),
        ("noise multiplier σ", f"{words.round_up(sigma)} × clip norm"),
        ("noise", cost),
    ]
    # each panel a figure, readable on a narrow screen
    drawings = [plots.draw([panel]) for panel in mechanism_plot.panels(factorization)]
    images = (plots.rendered(figure, "svg").decode() for figure in drawings)
    figures = "".join(f"<figure>{image[image.index('<svg') :]}</figure>" for image in images)
    parts = {
        "What is guaranteed": _guarantee(factorization),
        "The sampling you must execute": sampling,
        "Error and cost": f"{facts(costs)}<div class=figures>{figures}</div>",
        "At the same ε and δ": _compared(
            factorization, recursion.slots, alternatives(factorization)
        ),
        "Load it": f"<pre>{text(_CODE.format(repr(name)))}</pre>",
        "Where it comes from": facts(_origin(factorization)),
    }
    return whole(title, [section(heading, body) for heading, body in parts.items() if body])


def _guarantee(factorization: Factorization) -> str:
    stated = factorization.guarantee
    unit = stated.privacy_unit
    if stated.group_size > 1:
        unit = f"group of {stated.group_size} ({stated.privacy_unit})"
    protected = f"one {unit}, {stated.adjacency} adjacency"
    if stated.adjacency == "add-remove":
        protected = f"adding or removing one {unit}"
    proof = "no: the file says so. `mfopt certify` proves it here"
    if factorization.proved_here:
        proof = f"yes (that the unit is one {unit} is its maker's word)"
    return facts(
        [
            ("ε, δ", f"{words.round_up(stated.epsilon)}, {words.round_up(stated.delta)}"),
            ("for", protected),
            ("status", f"{stated.status}: {words.STATUS[stated.status]}"),
            ("method", stated.method),
            ("failure probability", f"{stated.failure_probability:.2g}"),
            ("proved on this machine", proof),
        ]
    )


def _compared(
    factorization: Factorization, slots: int, alternatives: Sequence[_Alternative]
) -> str:
    if not alternatives:
        return ""
    current = _Alternative(
        "this mechanism", factorization.noise_multiplier, factorization.rmse, slots
    )
    longest = max(option.rmse for option in (current, *alternatives))
    rows = []
    for option in (current, *alternatives):
        change = "" if option is current else f"{100 * (option.rmse / current.rmse - 1):+.0f}%"
        sigma = words.round_up(option.noise_multiplier, 4)
        width = max(1.0, 100 * option.rmse / longest)
        rows.append(
            f"<tr><td>{text(option.name)}</td><td class=n>{option.rmse:.4g}</td>"
            f"<td class=n>{change}</td><td class='n sigma'>{sigma}</td>"
            f"<td class=n>{option.memory}</td>"
            f"<td class=bar><span style='width:{width:.1f}%'></span></td></tr>"
        )
    return (
        "<div class=wide><table><thead><tr><th>mechanism</th><th class=n>RMSE</th><th class=n>more"
        "</th><th class='n sigma'>σ</th><th class=n>buffers</th><th></th></tr></thead><tbody>"
        f"{''.join(rows)}</tbody></table></div>"
        f"<p>{text('Each at its smallest exact σ. `mfopt compare` has more of them.')}</p>"
    )


_CODE = """import mfopt
from mfopt import noise

factorization = mfopt.load({})
stream = noise.from_factorization(factorization, clip_norm=1.0)
state = stream.init(parameters)  # a secret key from the operating system
step_noise, state = stream.next(state)  # add it to the sum of clipped gradients"""


def _origin(factorization: Factorization) -> list[tuple[str, str]]:
    facts = {key.replace("_", " "): value for key, value in factorization.provenance.items()}
    shown = [(k, f"{v:.6g}" if isinstance(v, float) else str(v)) for k, v in facts.items()]
    return [*shown, ("digest", factorization.digest), ("page made by", f"mfopt {__version__}")]
