"""DP-FedAvg and DP-FedSGD on next-word prediction: McMahan, Ramage, Talwar, Zhang 2018."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np

from mfopt import _check
from mfopt.experiments import families
from mfopt.experiments.cache import Result, Task
from mfopt.experiments.families import Comparison
from mfopt.experiments.mechanisms import strategy_of
from mfopt.experiments.studies.base import Outcome, Study, check_number, check_several, flag
from mfopt.experiments.studies.image_cells import interval, mechanism_task
from mfopt.experiments.studies.images import ends
from mfopt.experiments.studies.rates import ChosenRate, choose

if TYPE_CHECKING:
    from mfopt.experiments.plots import Panel

INDEPENDENT = "dpsgd+poisson"
HEADS, GUESSES = (10, 50, 100), 10


class Variant(NamedTuple):
    """One way to train.

    Attributes:
      label: what a reader sees.
      local: FedAvg's local epochs; False is FedSGD.
      layers: "flat" or "per-layer" clipping.
      estimator: "fixed" or "clipped" denominator.
      falling: S, and the noise with it, falls half way.
      factorized: correlated noise with balls-in-bins, in place of independent noise with Poisson.
      private: else neither clipped nor noised.
    """

    label: str
    local: bool = True
    layers: Literal["flat", "per-layer"] = "flat"
    estimator: Literal["fixed", "clipped"] = "fixed"
    falling: bool = False
    factorized: bool = False
    private: bool = True


VARIANTS = {
    "fedavg-plain": Variant("FedAvg, not private", private=False),
    "fedsgd-plain": Variant("FedSGD, not private", local=False, private=False),
    "fedavg": Variant("DP-FedAvg"),
    "fedavg-per-layer": Variant("DP-FedAvg, per-layer clipping", layers="per-layer"),
    "fedavg-clipped": Variant("DP-FedAvg, clipped denominator", estimator="clipped"),
    "fedavg-falling": Variant("DP-FedAvg, S and σ fall", falling=True),
    "fedavg-factorized": Variant("DP-FedAvg, factorization", factorized=True),
    "fedsgd": Variant("DP-FedSGD", local=False),
    "fedsgd-factorized": Variant("DP-FedSGD, factorization", local=False, factorized=True),
}


SWEPT = "fedsgd"  # whose S is varied: Figure 9


class SweptVariant(NamedTuple):
    """A variant by name, at one S."""

    name: str
    clip: float

    @property
    def variant(self) -> Variant:
        """What is run."""
        return VARIANTS[self.name]


@dataclasses.dataclass(frozen=True)
class NextWordStudy(Study):
    """Accuracy of an LSTM trained on users' words, at one user-level ε."""

    name = "next-word"
    summary = "DP-FedAvg and DP-FedSGD: an LSTM from users' words."
    source = "McMahan et al. 2018, Algorithm 1, Figures 1 to 4 and 9, Tables 2 and 3"
    default_size = "2,048 made users of 40 words, an LSTM of 6 thousand parameters, 64 rounds"
    time = "about 13 CPU-minutes"
    full = {  # noqa: RUF012
        "users": 0,
        "words": 10_000,
        "tokens": 1600,
        "embedding": 96,
        "state": 256,
        "bins": 153,
        "epochs": 33,
        "delta": 1e-9,
        "epsilon": 4.634,
        "clip": 15.0,
        "sgd_clip": 2.0,
        "sgd_clips": (0.1, 0.3, 1.0, 5.0, 10.0),
        "rates": (3.0, 6.0, 12.0),
        "sgd_rates": (3.0, 6.0, 12.0),
        "batch": 8,
        "mean_weight": 1.0,
        "whole": True,
        "chunk": 16,
        "evaluate": 20,
    }
    full_size = "10,000 words, 1.35M parameters, users of 1,600 tokens, 5,049 rounds"
    needs = "users' posts (--posts, lines of JSON) and public text (--public), a GPU"

    posts: Path | None = flag(None, "Users' posts, a line of JSON each; else made.", kind=Path)  # noqa: RUF009
    public: Path | None = flag(  # noqa: RUF009
        None, "Public text for the dictionary.", kind=Path, option="--public-text"
    )
    user_column: str = flag("author", "Name of the user in a line of the posts.")
    text_column: str = flag("body", "Name of the text in a line of the posts.")
    variants: tuple[str, ...] = flag(tuple(VARIANTS), f"Of {', '.join(VARIANTS)}.")
    factorization: str = flag(
        "blt-4-scaled", "Correlated noise, by its name in mfopt compare.", option="--correlated"
    )
    epsilon: float = flag(8.0, "ε of every private variant.", option="--eps")
    delta: float = flag(1e-4, "δ of every statement.")
    users: int = flag(2048, "Users of made data; 0: none are made, posts have to be given.")
    words: int = flag(100, "Words of the dictionary.")
    tokens: int = flag(40, "Most tokens of a user.")
    whole: bool = flag(False, "Leave out users with fewer tokens.")
    embedding: int = flag(16, "Numbers of a word's vector.")
    state: int = flag(24, "Numbers of the state.")
    bins: int = flag(
        16, "Rounds in which a user takes part once on average: q = 1/bins.", option="--iters"
    )
    epochs: int = flag(4, "Times bins are the rounds.")
    rates: tuple[float, ...] = flag((2.5, 5.0, 10.0), "Local rates of FedAvg to choose from.")
    sgd_rates: tuple[float, ...] = flag((2.0, 8.0, 32.0), "Rates of FedSGD to choose from.")
    extend: int = flag(3, "Most rates to add beyond an end that is best.")
    clip: float = flag(3.0, "S of FedAvg.")
    sgd_clip: float = flag(2.0, "S of FedSGD.")
    sgd_clips: tuple[float, ...] = flag((0.5, 8.0), "S that DP-FedSGD is run at besides.")
    falls_to: float = flag(0.5, "Share of S that is left in the second half, where S falls.")
    batch: int = flag(2, "Rows of 10 tokens of a local batch.")
    local_epochs: int = flag(1, "Local epochs E.")
    mean_weight: float = flag(0.85, "Public guess of users' mean weight: W = it times users.")
    least: float = flag(0.8, "W_min over W.")
    seeds: int = flag(3, "Runs at each rate.")
    chunk: int = flag(32, "Users at work at once.")
    evaluate: int = flag(8, "Evaluations of a run.")

    def check(self) -> Self:
        for name in (
            *("words", "tokens", "embedding", "state", "bins", "epochs", "batch"),
            *("local_epochs", "seeds", "chunk", "evaluate"),
        ):
            _check.integer(name, getattr(self, name))
        _check.integer("seeds", self.seeds, at_least=2)
        for name in ("clip", "sgd_clip", "falls_to", "mean_weight", "least"):
            check_number(name, getattr(self, name))
        if self.mean_weight > 1:
            raise _check.reject("mean_weight", self.mean_weight, "weights are at most 1")
        _check.integer("extend", self.extend, at_least=0)
        for name in ("rates", "sgd_rates", "variants"):
            check_several(name, getattr(self, name))
        for name in ("rates", "sgd_rates", "sgd_clips"):
            for value in getattr(self, name):
                check_number(name, value)
        check_several("sgd_clips", (self.sgd_clip, *self.sgd_clips))
        for name in self.variants:
            if name not in VARIANTS:
                raise _check.reject("variants", name, f"must be of {', '.join(VARIANTS)}")
        if (self.posts is None) != (self.public is None):
            rule = "posts and public text are needed together"
            given = (self.posts and str(self.posts), self.public and str(self.public))
            raise _check.reject("posts, public", given, rule, "The dictionary has to be public.")
        if not _check.integer("users", self.users, at_least=0) and self.posts is None:
            rule = "the paper's size is for users' posts, and none are made for it"
            way_out = (
                f"Give `posts` (lines of JSON with {self.user_column} and {self.text_column}) and "
                "`public`, or `users` to make so many."
            )
            raise _check.reject("posts", self.posts, rule, way_out)
        families.find(self.factorization, "factorization")
        self._comparison().check()
        return self

    def _comparison(self) -> Comparison:
        names = (INDEPENDENT, self.factorization)
        return Comparison(self.bins, self.epochs, (float(self.epsilon),), self.delta, names)

    def _rates(self, variant: Variant) -> tuple[float, ...]:
        return self.rates if variant.local else self.sgd_rates

    def _arms(self) -> list[SweptVariant]:
        """Every variant at its S, then DP-FedSGD at the others."""
        own = [
            SweptVariant(name, self.clip if VARIANTS[name].local else self.sgd_clip)
            for name in self.variants
        ]
        more = self.sgd_clips if SWEPT in self.variants else ()
        return [*own, *(SweptVariant(SWEPT, float(clip)) for clip in more)]

    def cells(self) -> Iterable[Task]:
        return [self._cell(arm, rate) for arm in self._arms() for rate in self._rates(arm.variant)]

    def more(self, found: Mapping[Task, Result]) -> Iterable[Task]:
        for arm in self._arms():
            rate = self._chosen(found, arm).missing
            if rate is not None:
                yield self._cell(arm, rate)

    def _chosen(self, found: Mapping[Task, Result], arm: SweptVariant) -> ChosenRate:
        """The arm's rate: the most accuracy on one half of the held-out rows."""

        def loss(rate: float) -> float | None:
            result = found.get(self._cell(arm, rate))
            return None if result is None else -float(result.arrays["validation"][:, -1].mean())

        return choose(self._rates(arm.variant), loss, most=self.extend)

    def _cell(self, arm: SweptVariant, rate: float) -> Task:
        variant = arm.variant
        family = self.factorization if variant.factorized else INDEPENDENT
        names = ("users", "words", "tokens", "whole", "embedding", "state", "batch")
        more = ("local_epochs", "mean_weight", "least", "seeds", "chunk", "evaluate", "falls_to")
        columns = ("user_column", "text_column")
        return Task.of(
            "study-next-word",
            (mechanism_task(family, self._comparison(), float(self.epsilon)),),
            rate=float(rate),
            clip=float(arm.clip),
            posts=None if self.posts is None else str(self.posts),
            public=None if self.public is None else str(self.public),
            variant=variant._asdict(),
            **{name: getattr(self, name) for name in (*names, *more, *columns)},
        )

    def outcome(self, found: Mapping[Task, Result]) -> Outcome:
        rates = {arm: self._chosen(found, arm) for arm in self._arms()}
        chosen = {arm: found[self._cell(arm, at.rate)] for arm, at in rates.items()}
        rows = [self._row(arm, result, rates[arm]) for arm, result in chosen.items()]
        first = next(iter(chosen.values())).record
        return Outcome(
            rows,
            {
                "variant": "variant",
                "accuracy": "AccuracyTop1",
                "accuracy_half95": "±",
                "rate": "rate",
                "clip_norm": "S",
                "noise_multiplier": "z",
                "privacy_unit": "unit",
                "adjacency": "adjacency",
                "sampling": "sampling",
                "epsilon": "ε",
                "epsilon_moments": "ε, moments",
            },
            self._panels(chosen),
            f"Next word: {first['population']} users, {first['parameters']:,} parameters, "
            f"ε = {self.epsilon:g}, δ = {self.delta:g} per user",
            [*self._findings(chosen), *ends(rows)],
        )

    def _row(self, arm: SweptVariant, result: Result, at: ChosenRate) -> dict[str, Any]:
        record, variant = result.record, arm.variant
        accuracy, half = interval(result.arrays["test"][:, -1])
        heads = result.arrays["heads"].sum(axis=0)
        return {
            "variant": variant.label,
            "algorithm": "FedAvg" if variant.local else "FedSGD",
            "accuracy": accuracy,
            "accuracy_half95": half,
            "rate": record["rate"],
            "rate_at_end": at.edge,
            "clip_norm": record["clip_norm"],
            "clipping": variant.layers if variant.private else "none",
            "estimator": variant.estimator,
            "sensitivity": record["sensitivity"],
            "users": record["population"],
            "rounds": record["rounds"],
            "parameters": record["parameters"],
            "seeds": self.seeds,
            **{f"top10_in_head_{n}": " ".join(map(str, heads[i])) for i, n in enumerate(HEADS)},
            **record["privacy"],
        }

    def _panels(self, swept: Mapping[SweptVariant, Result]) -> list[Panel]:
        from mfopt.experiments.plots import Curve, Panel

        curves, heads = [], []
        chosen = self._by_name(swept)
        for name, result in chosen.items():
            at = [interval(values) for values in 100 * result.arrays["test"].T]
            rounds = result.record["evaluated"]
            low, high = [m - h for m, h in at], [m + h for m, h in at]
            label = VARIANTS[name].label
            if self.seeds < 3:  # an interval from two values says nothing
                values = 100 * result.arrays["test"]
                low, high = values.min(axis=0).tolist(), values.max(axis=0).tolist()
            curves.append(Curve(label, rounds, [m for m, _ in at], low, high))
            counts = result.arrays["heads"].sum(axis=0)[0]
            heads.append(Curve(label, range(GUESSES + 1), (100 * counts / counts.sum()).tolist()))
        band = "least to largest" if self.seeds < 3 else "95%"
        panels = [
            Panel(
                curves, f"while training (bands: {band})", "round", "AccuracyTop1 (%)", log_x=False
            ),
            Panel(
                heads,
                f"head words, n = {HEADS[0]}",
                f"of the {GUESSES} best guesses, in the head",
                "share of places (%)",
                log_x=False,
            ),
        ]
        by_clip = self._by_clip(swept)
        if len(by_clip) > 1:
            at = [interval(100 * result.arrays["test"][:, -1]) for result in by_clip.values()]
            low, high = [m - h for m, h in at], [m + h for m, h in at]
            curve = Curve(VARIANTS[SWEPT].label, list(by_clip), [m for m, _ in at], low, high)
            axis = "clip norm S (log scale)"
            panels.append(Panel([curve], "by S, at one ε", axis, "AccuracyTop1 (%)"))
        return panels

    def _by_name(self, swept: Mapping[SweptVariant, Result]) -> dict[str, Result]:
        """The variants at the S of all."""
        return {arm.name: swept[arm] for arm in self._arms()[: len(self.variants)]}

    def _by_clip(self, swept: Mapping[SweptVariant, Result]) -> dict[float, Result]:
        """DP-FedSGD by S, increasing."""
        return {arm.clip: swept[arm] for arm in sorted(swept) if arm.name == SWEPT}

    def _findings(self, swept: Mapping[SweptVariant, Result]) -> list[str]:
        said, chosen = [], self._by_name(swept)
        pairs = (
            ("fedavg", "fedavg-plain"),
            ("fedsgd", "fedsgd-plain"),
            ("fedavg-per-layer", "fedavg"),
            ("fedavg-clipped", "fedavg"),
            ("fedavg-falling", "fedavg"),
            ("fedavg-factorized", "fedavg"),
            ("fedsgd", "fedavg"),
            ("fedsgd-factorized", "fedsgd"),
        )
        for one, other in pairs:
            if one in chosen and other in chosen:
                a, b = (100 * chosen[name].arrays["test"][:, -1] for name in (one, other))
                mean, half = interval(a - b)
                said.append(
                    f"{VARIANTS[one].label} over {VARIANTS[other].label}: {mean:+.2f} ± {half:.2f} "
                    f"points of AccuracyTop1 (95%, paired by seed, {self.seeds} seeds)"
                )
        by_clip = self._by_clip(swept)
        if len(by_clip) > 1:
            at = {c: interval(100 * r.arrays["test"][:, -1]) for c, r in by_clip.items()}
            words = ", ".join(f"S = {c:g}: {m:.2f} ± {h:.2f}" for c, (m, h) in at.items())
            said.append(f"{VARIANTS[SWEPT].label} by S, AccuracyTop1 in %: {words}")
        return said


def run_federated(
    source: Result,
    *,
    variant: dict[str, Any],
    rate: float,
    clip: float,
    posts: str | None,
    public: str | None,
    user_column: str,
    text_column: str,
    users: int,
    words: int,
    tokens: int,
    whole: bool,
    embedding: int,
    state: int,
    batch: int,
    local_epochs: int,
    mean_weight: float,
    least: float,
    falls_to: float,
    seeds: int,
    chunk: int,
    evaluate: int,
) -> Result:
    """Train one variant at one rate with every seed; accuracies on two halves of held-out rows.

    Args:
      source: result that holds C, z and its account.
      variant: fields of :class:`Variant`.
      rate: of local steps.
      clip: S of the first round.
      posts, public, user_column, text_column, users, words, tokens, whole: of the data.
      embedding, state: of the model.
      batch, local_epochs: of a user's update.
      mean_weight: W over the number of users.
      least: W_min over W.
      falls_to: share of S in the second half, where it falls.
      seeds: how many runs.
      chunk: users at work at once.
      evaluate: evaluations of a run.
    """
    import jax

    from mfopt import sampling
    from mfopt.accounting.closed_form import moments
    from mfopt.experiments.studies import federated, lstm
    from mfopt.experiments.studies import words as word_data
    from mfopt.experiments.studies.functional import size
    from mfopt.noise.stream import NoiseStream

    given = Variant(**variant)
    if posts is None or public is None:
        data = word_data.make(users, words=words, tokens=tokens)
    else:
        data = word_data.load(
            posts,
            public,
            words=words,
            tokens=tokens,
            whole=whole,
            user_column=user_column,
            text_column=text_column,
        )
    population = data.users.population
    scheme = sampling.from_description(source.record["scheme"])
    guarantee, rounds = source.record["guarantee"], scheme.length
    z = guarantee["noise_multiplier"]
    share = scheme.expected_batch(population) / population
    total = mean_weight * population
    estimator = moments.Estimator(
        clip, share, total if given.estimator == "fixed" else least * total, given.estimator
    )
    norms = np.full(rounds, clip)
    if given.falling:
        norms[rounds // 2 :] *= falls_to
    noise = None
    if given.private:
        noise = NoiseStream(
            strategy_of(source),
            iterations=rounds,
            noise_multiplier=z,
            clip_norm=1.0,
            sampling=scheme,
        )
    update = federated.UserUpdate(
        rate, batch, local_epochs if given.local else 0, given.layers, given.private
    )
    if not given.local:  # FedSGD takes all of a user's rows, as the paper does (appendix D)
        update = dataclasses.replace(update, batch=data.users.mask.shape[1])
    _, apply = lstm.model(data.words, embedding, state)
    loss = lstm.NextWord(apply)
    measure = jax.jit(
        lambda params, inputs, targets: lstm.top_one(
            jax.vmap(lambda row: apply(params, row))(inputs), targets, data.words
        )
    )
    halves = [tuple(leaf[i::2].astype(np.int32) for leaf in data.held_out) for i in range(2)]
    every = max(1, rounds // evaluate)
    evaluated = [0, *range(every, rounds, every), rounds]
    weight = federated.weights(data.users.counts, tokens)
    found: dict[str, list[Any]] = {"validation": [], "test": [], "heads": []}
    for seed in range(seeds):
        params, _ = lstm.model(data.words, embedding, state, seed=seed)
        count = size(params)
        server = federated.Server(
            update,
            loss,
            estimator,
            sampling.UnitSampler(scheme, population, seed=seed),
            noise,
            norms,
            chunk=chunk,
            seed=seed,
        )
        curves: list[list[float]] = [[], []]

        def note(params: Any, curves: Any = curves) -> None:
            for curve, half in zip(curves, halves, strict=True):
                right, counted = measure(params, *half)
                curve.append(float(right) / float(counted))

        note(params)
        for done, moved in server.run(params, data.users, weight):
            params = moved
            if done in evaluated:
                note(params)
        logits = jax.vmap(lambda row, p=params: apply(p, row))(halves[1][0][:200])
        real = halves[1][1][:200] >= 0
        found["validation"].append(curves[0])
        found["test"].append(curves[1])
        found["heads"].append(lstm.head_words(np.asarray(logits)[real], HEADS, GUESSES))
    return Result(
        {
            "privacy": _privacy(given, guarantee, scheme, share),
            "rate": rate,
            "clip_norm": clip if given.private else None,
            "sensitivity": estimator.sensitivity if given.private else None,
            "population": population,
            "rounds": rounds,
            "parameters": count,
            "evaluated": evaluated,
        },
        {name: np.array(values) for name, values in found.items()},
    )


def _privacy(
    variant: Variant, guarantee: dict[str, Any], scheme: Any, share: float
) -> dict[str, Any]:
    from mfopt.accounting.closed_form import moments

    said: dict[str, Any] = {
        "privacy_unit": "user",
        "adjacency": None,
        "sampling": scheme.words(),
        "epsilon": None,
        "delta": None,
        "noise_multiplier": None,
        "epsilon_moments": None,
        "status": None,
    }
    if not variant.private:
        return said | {"privacy_unit": None}
    z, delta = guarantee["noise_multiplier"], guarantee["delta"]
    said |= {name: guarantee[name] for name in ("epsilon", "delta", "noise_multiplier", "status")}
    said["adjacency"] = scheme.executed_adjacency(guarantee["adjacency"])
    if not variant.factorized:
        said["epsilon_moments"] = moments.epsilon(z, share, scheme.length, delta)
    return said
