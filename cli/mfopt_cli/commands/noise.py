"""mfopt noise: memory and time of a file's noise on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mfopt import words
from mfopt_cli import display, options

if TYPE_CHECKING:
    from mfopt.guarantee import Guarantee
    from mfopt.noise import NoiseStream


def _method(about: dict[str, Any]) -> str:
    if about["method"] == "rows":
        return f"all past draws, {'stored' if about['buffers'] else 'regenerated from the key'}"
    if about["method"] == "modal":
        return "exponentially decaying buffers"
    return "the last outputs or draws" if about["buffers"] else "independent draws"


def _price(stream: NoiseStream, parameters: int, guarantee: Guarantee) -> dict[str, float]:
    """Privacy cost of secure noise: the ε and δ that hold with it."""
    cost = stream.secure_cost(parameters)
    epsilon, delta = cost.total(guarantee.epsilon, guarantee.delta)
    return {"secure_epsilon": epsilon, "secure_delta": delta}


@click.command(name="noise", cls=options.Command)
@options.file_argument
@options.option(
    "--params", type=options.COUNT, required=True, help="Parameters, as 10000000, 1e7 or 10M."
)
@options.option(
    "--past",
    type=click.Choice(["auto", "store", "regenerate", "dense"]),
    default="auto",
    show_default=True,
    help="Past draws, for strategies that need all of them (toeplitz, dense, sqrt): store them, or "
    "regenerate them from the key. dense: multiply by rows of C⁻¹, for any strategy.",
)
@options.option(
    "--buffer-dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Data type of the buffers; 16-bit types round the noise.",
)
@options.option(
    "--secure",
    is_flag=True,
    help="Measure secure noise: discrete, from a stream cipher, in float64, with its cost in time "
    "and ε.",
)
@options.option(
    "--repeats",
    type=options.Count(options.MOST_POINTS),
    default=5,
    show_default=True,
    help="Number of timed steps.",
)
@options.json_flag
def command(
    path: Path,
    params: int,
    past: str,
    buffer_dtype: str,
    secure: bool,
    repeats: int,
    as_json: bool,
) -> None:
    """Memory and time per step of the noise of FILE, measured on this machine.

    The noise is discarded; its key comes from the operating system. The measurement uses one
    array of that many parameters on one device; sharded over D devices, memory and time per
    device fall by a factor of D.

    \b
    Example:
      mfopt noise mfopt-blt-16x128-eps2.npz --params 10000000
    """
    import jax

    from mfopt._runtime import _float64
    from mfopt.factorization import load
    from mfopt.noise import from_factorization
    from mfopt.noise.measure import measure

    factorization = load(path)
    narrow = None if secure and buffer_dtype == "float32" else jax.numpy.dtype(buffer_dtype)
    with _float64.scope(secure):
        stream = from_factorization(
            factorization, clip_norm=1.0, past=past, buffer_dtype=narrow, secure=secure
        )
        cost = measure(stream, params, repeats=repeats)
    about = stream.describe()
    price = _price(stream, params, factorization.guarantee) if secure else {}
    if as_json:
        display.json_object({**cost.describe(), **about, **price, "path": str(path)})
        return
    guess = "  (extrapolated)" if cost.extrapolated else ""
    per_step = f"{words.duration(cost.first_seconds)}"
    if cost.last_seconds != cost.first_seconds:
        per_step = (
            f"{per_step} at the first step, {words.duration(cost.last_seconds)} at the last{guess}"
        )
    display.table(
        str(path),
        [
            ("strategy", words.described(about["strategy"])),
            ("method", _method(about)),
            ("buffers", f"{about['buffers']} of {about['buffer_dtype']}"),
            ("parameters", f"{params:,}"),
            *((name.replace("_", " "), f"{value:.10g}") for name, value in price.items()),
            ("device", cost.device),
            ("memory kept", f"{words.size(cost.buffer_bytes)}  (buffers, between steps)"),
            (
                "memory in a step",
                f"{words.size(cost.peak_bytes)}  (buffers, noise, temporary arrays)",
            ),
            ("time per step", per_step),
            (
                "time of the run",
                f"{words.duration(cost.run_seconds)} for {about['iterations']} steps"
                f"{guess}, and {words.duration(cost.compile_seconds)} to compile",
            ),
        ],
    )
