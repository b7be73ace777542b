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
from mfopt._runtime._page import facts, section, svg, text, whole
from mfopt._version import __version__
from mfopt.accounting import Mechanism, account
from mfopt.accounting.closed_form import gaussian
from mfopt.accounting.monte_carlo.dominating_pair import covers
from mfopt.experiments import mechanism_plot
from mfopt.factorization import Factorization
from mfopt.noise.choice import choose
from mfopt.sampling import Poisson
from mfopt.strategies import Identity

_STATUS = {
    "exact": "exact up to a discretization that is rounded to the private side",
    "certified": "proven, except with the failure probability below over the accountant's own "
    "random numbers, which is included in δ",
    "bound": "proven with certainty; the true loss may be smaller",
    "estimate": "an estimate: it proves NOTHING. Run `mfopt certify` before training",
}


class Alternative(NamedTuple):
    """Another mechanism at the same (ε, δ); its RMSE is in clip norms, its memory in buffers."""

    name: str
    noise_multiplier: float
    rmse: float
    memory: int


def alternatives(found: Factorization) -> list[Alternative]:
    """Independent noise and the same C without amplification: what takes no search and no samples.

    Only for schemes with bins; with independent noise in the same batches if bins are assigned
    once, where σ takes no time.
    """
    scheme: Any = found.sampling
    if scheme.public_order or not hasattr(scheme, "bins"):
        return []
    n, stated = found.iterations, found.guarantee

    def independent(name: str, sampling: Any) -> Alternative:
        mechanism = Mechanism(sampling, Identity())
        sigma = account(mechanism, epsilon=stated.epsilon, delta=stated.delta).noise_multiplier
        rmse = float(np.asarray(query_error.rmse(found.workload, Identity(), n, sigma)))
        return Alternative(name, sigma, rmse, 0)

    plain = found.loss().sensitivity / gaussian.largest_mu(stated.epsilon, stated.delta)
    same = [independent("independent noise (DP-SGD), same batches", scheme)]
    return [
        *(same if covers(scheme) else []),
        independent("independent noise (DP-SGD), Poisson batches", Poisson(1 / scheme.bins, n)),
        Alternative(
            "this C, fixed order of batches (no amplification)",
            plain,
            found.rmse * plain / found.noise_multiplier,
            choose(found.strategy, n).slots,
        ),
    ]


def page(found: Factorization, name: str = "mechanism.npz") -> str:
    """The page as text."""
    stated, recursion = found.guarantee, choose(found.strategy, found.iterations)
    draws, sigma = recursion.draws(found.iterations), words.round_up(found.noise_multiplier, 6)
    made = "1 white draw" if draws <= 1 else f"{draws:,.0f} white draws"
    cost = f"{recursion.slots} noise buffers (× model size), {made} a step"
    title = (
        f"{words.described(found.strategy.describe())}: ({stated.epsilon:g}, {stated.delta:g})-DP"
    )
    near = [word for word in ("Shuffling", found.sampling.mistaken_for) if word]
    sampling = (
        f"<p>{text(found.sampling.words())}.</p><p>The guarantee is about this sampling and "
        f"no other. {', '.join(near)}, or Poisson sampling have "
        "guarantees of their own. Batches have random sizes: divide by a fixed public "
        f"number. At most {found.iterations:,} steps; every prefix of the run is covered.</p>"
    )
    costs = [
        ("RMSE of the queries", f"{found.rmse:.5g} clip norms, per coordinate"),
        ("largest error of a query", f"{found.max_error:.5g} clip norms"),
        ("workload", words.described(found.workload.describe())),
        ("noise multiplier σ", f"{sigma} × clip norm"),
        ("noise", cost),
    ]
    figures = "".join(f"<figure>{svg(each)}</figure>" for each in mechanism_plot.apart(found))
    parts = {
        "What is guaranteed": _guarantee(found),
        "The sampling you must execute": sampling,
        "Error and cost": f"{facts(costs)}<div class=figures>{figures}</div>",
        "At the same ε and δ": _compared(found, recursion.slots, alternatives(found)),
        "Load it": f"<pre>{text(_CODE.format(repr(name)))}</pre>",
        "Where it comes from": facts(_origin(found)),
    }
    return whole(title, [section(heading, body) for heading, body in parts.items() if body])


def _guarantee(found: Factorization) -> str:
    stated = found.guarantee
    unit = stated.privacy_unit
    if stated.group_size > 1:
        unit = f"group of {stated.group_size} ({stated.privacy_unit})"
    of = f"one {unit}, {stated.adjacency} adjacency"
    if stated.adjacency == "add-remove":
        of = f"adding or removing one {unit}"
    here = "no: the file says so. `mfopt certify` proves it here"
    if found.proved_here:
        here = f"yes (that the unit is one {unit} is its maker's word)"
    return facts(
        [
            ("ε, δ", f"{words.round_up(stated.epsilon, 6)}, {words.delta(stated.delta)}"),
            ("for", of),
            ("status", f"{stated.status}: {_STATUS[stated.status]}"),
            ("method", stated.method),
            ("failure probability", f"{stated.failure_probability:.2g}"),
            ("proved on this machine", here),
        ]
    )


def _compared(found: Factorization, slots: int, others: Sequence[Alternative]) -> str:
    if not others:
        return ""
    here = Alternative("this mechanism", found.noise_multiplier, found.rmse, slots)
    longest = max(option.rmse for option in (here, *others))
    rows = []
    for option in (here, *others):
        change = "" if option is here else f"{100 * (option.rmse / here.rmse - 1):+.0f}%"
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


def _origin(found: Factorization) -> list[tuple[str, str]]:
    facts = {key.replace("_", " "): value for key, value in found.provenance.items()}
    shown = [(k, f"{v:.6g}" if isinstance(v, float) else str(v)) for k, v in facts.items()]
    return [*shown, ("digest", found.digest), ("page made by", f"mfopt {__version__}")]
