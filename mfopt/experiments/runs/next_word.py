"""Training an LSTM on users' words by DP-FedAvg or DP-FedSGD, at one rate, with every seed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from mfopt import sampling
from mfopt.accounting.closed_form import moments
from mfopt.experiments.cache import Cell, Result
from mfopt.experiments.mechanisms import ProvenCell, strategy_of
from mfopt.experiments.options import option
from mfopt.experiments.runs import SPECIAL
from mfopt.noise.stream import NoiseStream

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
COMPARED = (
    *(("fedavg", "fedavg-plain"), ("fedsgd", "fedsgd-plain"), ("fedavg-per-layer", "fedavg")),
    *(("fedavg-clipped", "fedavg"), ("fedavg-falling", "fedavg"), ("fedavg-factorized", "fedavg")),
    *(("fedsgd", "fedavg"), ("fedsgd-factorized", "fedsgd")),
)


@dataclasses.dataclass(frozen=True)
class WordTask:
    """Data, model and local steps: options of a study, and settings of its cells."""

    posts: str | Path | None = option(  # noqa: RUF009
        None, "Users' posts, a line of JSON each; else made.", kind=Path
    )
    public: str | Path | None = option(  # noqa: RUF009
        None, "Public text for the dictionary.", kind=Path, name="--public-text"
    )
    user_column: str = option("author", "Name of the user in a line of the posts.")
    text_column: str = option("body", "Name of the text in a line of the posts.")
    users: int = option(2048, "Number of synthetic users; 0: none, posts are required.", least=0)
    words: int = option(100, "Words of the dictionary.")
    tokens: int = option(40, "Most tokens of a user.")
    whole: bool = option(False, "Leave out users with fewer tokens.")
    embedding: int = option(16, "Numbers of a word's vector.")
    state: int = option(24, "Numbers of the state.")
    falls_to: float = option(0.5, "Share of S that is left in the second half, where S falls.")
    batch: int = option(2, "Rows of 10 tokens of a local batch.")
    local_epochs: int = option(1, "Local epochs E.")
    mean_weight: float = option(0.85, "Public guess of users' mean weight: W = it times users.")
    least: float = option(0.8, "W_min over W.")
    seeds: int = option(3, "Runs at each rate.", least=2)
    chunk: int = option(32, "Users at work at once.")
    evaluate: int = option(8, "Evaluations of a run.")

    @property
    def parameters(self) -> int:
        """Trained numbers: the table, four gates, the projection."""
        table, inward = (self.words + SPECIAL) * self.embedding, self.embedding + self.state + 1
        return table + 4 * inward * self.state + (self.state + 1) * self.embedding


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextWordCell(WordTask, Cell):
    """Accuracies on two halves of held-out rows, (seeds, evaluations), and counts of head words.

    ``source`` has C, z and its account, ``rate`` is that of local steps, ``clip`` the S of the
    first round.
    """

    name = "study-next-word"
    source: ProvenCell
    variant: Variant
    rate: float
    clip: float

    def data(self) -> Any:
        """Users' words from the posts, or made."""
        from mfopt.experiments.runs import words

        if self.posts is None or self.public is None:
            return words.make(self.users, words=self.words, tokens=self.tokens)
        names = ("words", "tokens", "whole", "user_column", "text_column")
        asked: dict[str, Any] = {name: getattr(self, name) for name in names}
        return words.load(self.posts, self.public, **asked)

    def run(self, *needed: Result) -> Result:
        import jax

        from mfopt.experiments.runs import federated, lstm
        from mfopt.experiments.runs.functional import size
        from mfopt.training import fedavg

        (source,), given, data = needed, self.variant, self.data()
        population = data.users.population
        scheme = sampling.from_description(source.record["scheme"])
        z, rounds = source.record["guarantee"]["noise_multiplier"], scheme.length
        share = scheme.expected_batch(population) / population
        weight = self.mean_weight * population
        least = weight if given.estimator == "fixed" else self.least * weight
        estimator = moments.Estimator(self.clip, share, least, given.estimator)
        norms = np.full(rounds, self.clip)
        if given.falling:
            norms[rounds // 2 :] *= self.falls_to
        noise = None
        if given.private:
            unit = {"noise_multiplier": z, "clip_norm": 1.0}
            strategy = strategy_of(source)
            noise = NoiseStream(strategy, iterations=rounds, sampling=scheme, **unit)
        # FedSGD takes all of a user's rows, as the paper does (appendix D)
        batch = self.batch if given.local else data.users.mask.shape[1]
        epochs = self.local_epochs if given.local else 0
        update = federated.UserUpdate(self.rate, batch, epochs, given.layers, given.private)
        _, apply = lstm.model(data.words, self.embedding, self.state)
        loss = lstm.NextWord(apply)
        measure = jax.jit(
            lambda params, inputs, targets: lstm.top_one(
                jax.vmap(lambda row: apply(params, row))(inputs), targets, data.words
            )
        )
        halves = [tuple(leaf[i::2].astype(np.int32) for leaf in data.held_out) for i in range(2)]
        every = max(1, rounds // self.evaluate)
        evaluated = [0, *range(every, rounds, every), rounds]
        weights = fedavg.weights(data.users.counts, self.tokens)
        found: dict[str, list[Any]] = {"validation": [], "test": [], "heads": []}
        for seed in range(self.seeds):
            start, _ = lstm.model(data.words, self.embedding, self.state, seed=seed)
            sampler = sampling.UnitSampler(scheme, population, seed=seed)
            how = {"chunk": self.chunk, "seed": seed}
            server = federated.Server(update, loss, estimator, sampler, noise, norms, **how)
            models = [start]
            for done, params in server.run(start, data.users, weights):
                if done in evaluated:
                    models.append(params)
            for name, half in zip(("validation", "test"), halves, strict=True):
                counts = [measure(model, *half) for model in models]
                found[name].append([float(right) / float(counted) for right, counted in counts])
            logits = jax.vmap(lambda row, p=params: apply(p, row))(halves[1][0][:200])
            real = halves[1][1][:200] >= 0
            found["heads"].append(lstm.head_words(np.asarray(logits)[real], HEADS, GUESSES))
        return Result(
            {
                "privacy": self.stated(source.record["guarantee"], scheme, share),
                "rate": self.rate,
                "clip_norm": self.clip if given.private else None,
                "sensitivity": estimator.sensitivity if given.private else None,
                "population": population,
                "rounds": rounds,
                "parameters": size(params),
                "evaluated": evaluated,
            },
            {name: np.array(values) for name, values in found.items()},
        )

    def stated(self, guarantee: dict[str, Any], scheme: Any, share: float) -> dict[str, Any]:
        """Privacy columns of a run, per user; ``share`` is the probability of one in a round."""
        names = ("epsilon", "delta", "noise_multiplier", "epsilon_moments", "status")
        said: dict[str, Any] = {
            "privacy_unit": "user" if self.variant.private else None,
            "adjacency": None,
            "sampling": scheme.words(),
            **dict.fromkeys(names),
        }
        if self.variant.private:
            said |= {name: guarantee[name] for name in names if name in guarantee}
            said["adjacency"] = scheme.executed_adjacency(guarantee["adjacency"])
            if not self.variant.factorized:
                z, delta = guarantee["noise_multiplier"], guarantee["delta"]
                said["epsilon_moments"] = moments.epsilon(z, share, scheme.length, delta)
        return said


def row_of(variant: Variant, result: Result) -> dict[str, Any]:
    """The columns of a variant's result.

    ``top10_in_head_N`` counts places by how many of the ten best guesses are among the N most
    frequent words, from none to all.
    """
    record, heads = result.record, result.arrays["heads"].sum(axis=0)
    names = ("rate", "clip_norm", "sensitivity", "rounds", "parameters")
    return {
        "variant": variant.label,
        "algorithm": "FedAvg" if variant.local else "FedSGD",
        "clipping": variant.layers if variant.private else "none",
        "estimator": variant.estimator,
        "users": record["population"],
        **{name: record[name] for name in names},
        **{f"top10_in_head_{n}": " ".join(map(str, heads[i])) for i, n in enumerate(HEADS)},
        **record["privacy"],
        "_last": 100 * result.arrays["test"][:, -1],
    }
