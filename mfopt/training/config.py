"""Settings of a training run: one flat record, from a TOML file and flags.

The tables of a TOML file group the settings for the reader; their names are those of
``SECTIONS``. Flags override the file. What a run used in the end is written beside its results.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mfopt import sampling
from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject
from mfopt.sampling import Scheme

ALGORITHMS = ("uls", "els", "group", "fedavg", "none")
OPTIMIZERS = ("sgd", "momentum", "adam", "adam-bc")
SECTIONS = (
    *("privacy", "data", "algorithm", "federated", "batch", "clipping"),
    *("optimizer", "model", "pretraining", "run"),
)
SCHEDULES = ("constant", "cooldown", "cosine", "linear")
# How far the noise alone may move a parameter, root mean square over the steps of a run; a weight
# of a language model has the size of 0.02 to 0.1. The second: of a model that has read text of the
# private data's own kind, which is what pretraining on the public part of "stdlib" makes
# (artifacts/bench-rates.json).
NOISE_MOVE = 0.04
NEAR_MOVE = 0.003


def _setting(
    section: str, default: Any, help: str, *, choices: tuple[str, ...] = (), run: bool = False
) -> Any:
    # run: may differ between a run and its resumption, since it changes no number of it (what a
    # path leads to is compared by content)
    return dataclasses.field(
        default=default, metadata={"section": section, "help": help, "choices": choices, "run": run}
    )


_SETTING = [functools.partial(_setting, name, run=name == "run") for name in SECTIONS]
_privacy, _data, _algorithm, _federated, _batch, _clipping = _SETTING[:6]
_optimizer, _model, _pretraining, _run = _SETTING[6:]


def _single_or_0(name: str, value: float) -> None:
    if _check.non_negative(name, value):
        _check.single(name, value)


def _below_1(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise _check.reject(name, value, "must lie in [0, 1)")


def _seed(name: str, value: int) -> None:
    if value != -1:  # a secret of the operating system
        _check.pinned(name, value)


_CHECKS: dict[Callable[[str, Any], object], str] = {
    _check.integer: "records_per_user checkpoint_every evaluate_records local_epochs",
    # larger models are counted too late: their shapes overflow, or take hours to trace
    functools.partial(_check.integer, at_most=2**10): "layers heads",
    functools.partial(_check.integer, at_most=2**16): "width",
    # a record of one token has nothing to predict
    functools.partial(_check.integer, at_least=2): "length",
    functools.partial(_check.integer, at_least=0): "microbatch lora_rank "
    "pretrain_steps steps patience evaluate_every local_batch weight_cap",
    _check.single: "pretrain_rate local_rate clip_norm",
    _single_or_0: "normalizer learning_rate noise_move validation_bound",
    _check.non_negative: "epsilon delta",
    _below_1: "delta momentum",
    _seed: "seed",
}


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Settings of ``mfopt train``; see each field's help text.

    The defaults fit the embedded corpus on two CPU cores.
    """

    factorization: str = _privacy("", "Factorization file (.npz): C, sigma, sampling.", run=True)
    sampling: str = _privacy(
        "", "Sampling in place of a file, such as poisson:probability=0.05,iterations=200."
    )
    strategy: str = _privacy(
        "identity",
        "C of the noise under `sampling`: optimized (in its scheme's usual form, or in one that "
        "`mfopt optimize` knows by name), or identity: independent noise.",
    )
    epsilon: float = _privacy(
        0.0, "Target epsilon, with `sampling`, or to account again for a file's C."
    )
    delta: float = _privacy(0.0, "Target delta, with epsilon.")
    privacy_unit: str = _privacy(
        "user", "Privacy unit of the statement.", choices=("user", "record")
    )
    noise: str = _privacy(
        "float",
        "float: noise in floating point; secure: on a grid, from a cipher, by a proven law, at a "
        "small price in epsilon and delta (one device).",
        choices=("float", "secure"),
    )
    data: str = _data(
        "stdlib",
        "Folder of `mfopt data build`, a JSON Lines file with the fields user and text, or an "
        "embedded corpus: stdlib (code, after code), stdlib-code (code, after docstrings).",
        run=True,
    )
    length: int = _data(64, "Tokens of a row: most that are read of a record at once.")
    long_records: str = _data(
        "chunks",
        "Records of more than `length` tokens: cut into several records, so that all is read, or "
        "cut off behind the first `length` (always so where the privacy unit is a record).",
        choices=("chunks", "cut"),
    )
    skip_bad: bool = _data(
        False, "Skip lines that are no record even if they are more than 1% of the file.", run=True
    )
    algorithm: str = _algorithm(
        "uls",
        "uls: user-level sampling; els, group: example-level sampling with tight or black-box "
        "group accounting; fedavg: user-level sampling of local updates; none: non-private.",
        choices=ALGORITHMS,
    )
    records_per_user: int = _algorithm(
        4,
        "G: records of a user per participation (uls, fedavg), or kept in all (els, group).",
    )
    local_epochs: int = _federated(1, "fedavg: passes of a local update over a user's records.")
    local_batch: int = _federated(1, "fedavg: records of a local step; 0: all of a user's.")
    local_rate: float = _federated(0.1, "fedavg: learning rate of the local steps.")
    weight_cap: int = _federated(
        0, "fedavg: records that give a user weight 1, fewer give less; 0: all users weigh alike."
    )
    microbatch: int = _batch(
        0,
        "Units per gradient call; 0: one for a CPU, up to 64 records for an accelerator, fewer if "
        "memory is short.",
        run=True,
    )
    normalizer: float = _batch(0.0, "Divisor of each sum; 0: units expected in a step.")
    clip_norm: float = _clipping(1.0, "Bound on a unit's gradient or update.")
    normalized: bool = _clipping(True, "Divide clipped gradients by the clip norm.")
    optimizer: str = _optimizer("adam-bc", "Optimizer of noised gradients.", choices=OPTIMIZERS)
    learning_rate: float = _optimizer(
        0.0, "Largest learning rate; 0: fitted to the noise of the mechanism (without noise 0.002)."
    )
    noise_move: float = _optimizer(
        0.0,
        "Automatic learning rate: target RMS displacement of a parameter by the noise alone; 0: "
        f"{NOISE_MOVE}, and {NEAR_MOVE} for stdlib after pretraining.",
    )
    schedule: str = _optimizer(
        "constant",
        "Learning-rate schedule over all covered steps; cooldown falls to 0 in the second half.",
        choices=SCHEDULES,
    )
    momentum: float = _optimizer(0.9, "Momentum coefficient (momentum).")
    model: str = _model(
        "",
        "Local Hugging Face folder of a GPT-2, Llama, Mistral, Qwen, Gemma, Phi 3, OLMo 2, SmolLM "
        "or Pythia, also RUN/model of an earlier run, with which the guarantee is then composed, "
        "or MODULE:FUNCTION that makes a Flax NNX model; empty: a new GPT-2 of the sizes below.",
        run=True,
    )
    width: int = _model(64, "Width of a new model.")
    layers: int = _model(2, "Transformer blocks of a new model.")
    heads: int = _model(4, "Attention heads of a new model.")
    lora_rank: int = _model(0, "Train adapters of this rank; 0: all parameters.")
    lora_layers: str = _model(
        "attn/c_attn",
        "Layers with adapters, comma-separated: attn/c_attn (queries, keys, values), attn/c_proj, "
        "mlp/c_fc, mlp/c_proj, or in a Llama attn/q_proj and so on.",
    )
    compute_dtype: str = _model(
        "float32", "Data type of activations.", choices=("float32", "bfloat16")
    )
    pretrain_steps: int = _pretraining(0, "Steps on the public part first, without privacy.")
    pretrain_rate: float = _pretraining(3e-3, "Learning rate (AdamW, cosine).")
    output: str = _run("run", "Folder of the run.")
    steps: int = _run(0, "Stop after this many steps; 0: all steps that the guarantee covers.")
    checkpoint_every: int = _run(50, "Steps between checkpoints.")
    evaluate_every: int = _run(50, "Steps between evaluations; 0: first and last step only.")
    patience: int = _run(
        0,
        "Stop after so many evaluations without a lower loss, public or of private validation; 0: "
        "never.",
    )
    validation_bound: float = _run(
        0.0,
        "Private validation: bound on a held-out user's loss, nats per token. Losses of held-out "
        "users are shown with noise that the run's epsilon and delta cover; 0: without noise.",
    )
    evaluate_records: int = _run(1000, "Maximum number of held-out records per evaluation.")
    private_metrics: bool = _run(True, "Write metrics such as the loss; these are not private.")
    seed: int = _run(
        -1, "Pin all randomness to a public seed, for tests: no privacy. -1: secret.", run=False
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name = field.name
            value = getattr(self, field.name)
            kind = type(field.default)
            if kind is float and type(value) is int:
                value = float(value)
                object.__setattr__(self, name, value)
            if type(value) is not kind:
                raise _check.reject(name, value, f"must be a {kind.__name__}")
            if choices := field.metadata["choices"]:
                _check.choice(name, value, choices)
        for check, names in _CHECKS.items():
            for name in names.split():
                check(name, getattr(self, name))
        for broken, name, rule, way_out in self._rules():
            if broken:
                raise _check.reject(name, getattr(self, name), rule, way_out)

    def _rules(self) -> Iterator[tuple[object, str, str, str]]:
        """Yield (whether it is broken, setting, rule, way out), for rules about several."""
        chosen = f"algorithm = {self.algorithm!r}"
        private = self.algorithm != "none"
        for field in dataclasses.fields(self):
            if field.metadata["section"] == "federated" and self.algorithm != "fedavg":
                yield (
                    getattr(self, field.name) != field.default,
                    field.name,
                    f"has no effect on {chosen}",
                    "Use algorithm = 'fedavg', or leave it out.",
                )
        for name in ("local_batch", "weight_cap"):
            yield (
                getattr(self, name) > self.records_per_user,
                name,
                f"is more than `records_per_user` = {self.records_per_user}: no user reads so many "
                "in a step",
                "",
            )
        if self.sampling:
            scheme = self.scheme()
            yield (
                not scheme.executable,
                "sampling",
                "is a condition on participations, by which no batch is drawn",
                "Use fresh-bins or another scheme that draws.",
            )
            yield (
                self.optimizes
                and self.strategy != "optimized"
                and scheme.run_adjacency != "add-remove",
                "strategy",
                f"must be 'optimized' or 'identity': under {scheme.kind}, whose runs have "
                f"{scheme.run_adjacency} adjacency, C = I alone has an account",
                "Or use another sampling.",
            )
        yield from (
            (not private and self.noise == "secure", "noise", f"has no effect on {chosen}", ""),
            (
                self.validation_bound and not (private and self.noise == "float"),
                "validation_bound",
                "is for private runs with noise = 'float'",
                "",
            ),
            (
                self.noise_move and self.learning_rate,
                "noise_move",
                "fits the learning rate, and that is given",
                "",
            ),
            (
                not self.model and self.width % self.heads,
                "heads",
                f"must divide `width` = {self.width}",
                "",
            ),
            (
                self.factorization and not private,
                "algorithm",
                "adds no noise, so it needs no factorization",
                "Give its `sampling` instead, for example balls-in-bins:bins=16,epochs=4.",
            ),
            (
                bool(self.factorization) == bool(self.sampling),
                "factorization",
                "give either a factorization file or `sampling`",
                "The file comes from `mfopt optimize`.",
            ),
            (
                bool(self.epsilon) != bool(self.delta),
                "delta" if self.epsilon else "epsilon",
                "must be above 0: a target has both",
                "Give `epsilon` and `delta`; with a file or the settings of a run neither, unless "
                "it is to be solved anew.",
            ),
            (
                self.strategy != "identity" and not self.optimizes,
                "strategy",
                "is for a private run with `sampling` in place of a file",
                "",
            ),
            (
                self.sampling and private and not self.epsilon,
                "epsilon",
                "is needed with `sampling`, and `delta` too",
                "",
            ),
        )

    @property
    def in_chunks(self) -> bool:
        """True if long records are cut into several; one that is the privacy unit stays whole."""
        return self.long_records == "chunks" and self.privacy_unit == "user"

    @property
    def by_user(self) -> bool:
        """True if users are sampled, with noise."""
        return self.algorithm in ("uls", "fedavg")

    @property
    def optimizes(self) -> bool:
        """True if a factorization is made for this run before it starts."""
        return self.algorithm != "none" and self.sampling != "" and self.strategy != "identity"

    @property
    def move(self) -> float:
        """``noise_move``, or what stands for it if it is 0."""
        is_pretrained = self.data == "stdlib" and self.pretrain_steps > 0
        return self.noise_move or (NEAR_MOVE if is_pretrained else NOISE_MOVE)

    @property
    def group_size(self) -> int:
        """Sampled units that one protected user or record accounts for."""
        by_record = self.algorithm in ("els", "group") and self.privacy_unit == "user"
        return self.records_per_user if by_record else 1

    def scheme(self) -> Scheme:
        """The sampling scheme that ``sampling`` describes."""
        return sampling.parse(self.sampling)

    @property
    def fixed(self) -> JsonObject:
        """The settings that change the numbers of a run, and stay when it is resumed."""
        fields = [field for field in dataclasses.fields(self) if not field.metadata["run"]]
        return {field.name: getattr(self, field.name) for field in fields}

    def to_toml(self) -> str:
        """The settings as a TOML file that :func:`load` reads back."""
        lines = []
        fields = dataclasses.fields(self)
        for section, its_fields in itertools.groupby(fields, lambda x: x.metadata["section"]):
            # JSON's strings, numbers and booleans are TOML's as well
            values = [f"{x.name} = {json.dumps(getattr(self, x.name))}" for x in its_fields]
            lines += [f"[{section}]", *values, ""]
        return "\n".join(lines)


def load(path: str | Path | None, overrides: JsonObject | None = None) -> TrainConfig:
    """The settings in a TOML file, with ``overrides`` (flags) on top.

    Refused are a file that is missing or no TOML, and a setting that is unknown, in the wrong
    table, of the wrong type or out of range.
    """
    values = {} if path is None else _read(Path(path))
    values |= {name: value for name, value in (overrides or {}).items() if value is not None}
    return TrainConfig(**values)


def _read(path: Path) -> JsonObject:
    _check.file("config", path)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _check.reject("config", str(path), f"is not TOML: {error}") from None
    section_of = {f.name: f.metadata["section"] for f in dataclasses.fields(TrainConfig)}
    values: JsonObject = {}
    for section, table in tables.items():
        if section not in SECTIONS or not isinstance(table, dict):
            rule = f"is not a table of it (tables: {', '.join(SECTIONS)})"
            raise _check.reject("config", section, rule)
        for name in table:
            if section_of.get(name) != section:
                settings = [n for n, s in section_of.items() if s == section]
                rule = f"is not a setting (of {section}: {settings})"
                way_out = "Leave it out, if an earlier version wrote it."
                raise _check.reject("config", f"{section}.{name}", rule, way_out)
        values |= table
    return values
