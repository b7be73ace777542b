"""mfopt noise: memory and time of a file's noise on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mfopt import words
from mfopt_cli import display, options


def _method(about: dict[str, Any]) -> str:
    if about["method"] == "rows":
        return f"all past draws, {'stored' if about['buffers'] else 'made again in each step'}"
    if about["method"] == "modal":
        return "sums of past outputs that decay"
    return "the last outputs or draws" if about["buffers"] else "independent draws"


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
    help="Where all past draws are needed (toeplitz, dense, sqrt): keep them, or make them again. "
    "dense: rows of C⁻¹ for any strategy.",
)
@options.option(
    "--buffer-dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Type of the buffers; narrower ones round the noise.",
)
@options.option("--repeats", type=options.COUNT, default=5, show_default=True, help="Timed steps.")
@options.json_flag
def command(
    path: Path, params: int, past: str, buffer_dtype: str, repeats: int, as_json: bool
) -> None:
    """Memory and time per step of the noise of FILE, measured on this machine.

    The noise that is made here is thrown away; its key comes from the operating system. One
    array of that many parameters on one device is measured: cut over D devices, buffers and
    time go down by D.

    \b
    Example:
      mfopt noise mfopt-blt-16x128-eps2.npz --params 10000000
    """
    import jax.numpy as jnp

    from mfopt.factorization import load
    from mfopt.noise import from_factorization
    from mfopt.noise.measure import measure

    stream = from_factorization(
        load(path), clip_norm=1.0, past=past, buffer_dtype=jnp.dtype(buffer_dtype)
    )
    cost = measure(stream, params, repeats=repeats)
    about = stream.describe()
    if as_json:
        display.json_object({**cost.describe(), **about, "path": str(path)})
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
            ("strategy", str(about["strategy"])),
            ("method", _method(about)),
            ("buffers", f"{about['buffers']} of {about['buffer_dtype']}"),
            ("parameters", f"{params:,}"),
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
