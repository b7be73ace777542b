"""mfopt noise: memory and time of a file's noise on this machine."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

from mfopt import words
from mfopt_cli import display, options
from mfopt_cli.options import COUNT, MOST_POINTS, Count, option

# method of a stream, where it says more than whether buffers are kept
_METHODS = {
    "rows": "past draws, regenerated from the key",
    "modal": "exponentially decaying buffers",
}


@options.command("noise")
@options.file_argument
@option("--params", COUNT, "Parameters, as 10000000, 1e7 or 10M.", required=True)
@option(
    "--past",
    ("auto", "store", "regenerate", "dense"),
    "Past draws, for strategies that need all of them (toeplitz, dense, sqrt): store them, or "
    "regenerate them from the key. dense: multiply by rows of C⁻¹, for any strategy.",
)
@option(
    "--buffer-dtype",
    ("float32", "bfloat16", "float16"),
    "Data type of the buffers; 16-bit types round the noise.",
)
@option(
    "--secure",
    bool,
    "Measure secure noise: discrete, from a stream cipher, in float64, with its cost in time "
    "and ε.",
)
@option("--repeats", Count(MOST_POINTS), "Number of timed steps.", default=5)
@options.json_flag
def command(arguments: SimpleNamespace) -> None:
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

    factorization = load(arguments.path)
    wide = arguments.secure and arguments.buffer_dtype == "float32"
    narrow = None if wide else jax.numpy.dtype(arguments.buffer_dtype)
    with _float64.scope(arguments.secure):
        stream = from_factorization(  # measured only
            factorization,
            clip_norm=1.0,
            allow_uncertified=True,
            past=arguments.past,
            buffer_dtype=narrow,
            secure=arguments.secure,
        )
        cost = measure(stream, arguments.params, repeats=arguments.repeats)
    about = stream.describe()
    price = {}
    if arguments.secure:  # the ε and δ that hold with it
        stated = factorization.guarantee.epsilon, factorization.guarantee.delta
        secure_statement = stream.secure_cost(arguments.params).total(*stated)
        price = dict(zip(("secure_epsilon", "secure_delta"), secure_statement, strict=True))
    if arguments.as_json:
        display.json_object(
            {**dataclasses.asdict(cost), **about, **price, "path": str(arguments.path)}
        )
        return
    stored = "stored outputs or draws" if about["buffers"] else "independent draws"
    guess = "  (extrapolated)" if cost.extrapolated else ""
    step = words.duration(cost.first_seconds)
    if cost.last_seconds != cost.first_seconds:
        last_step = words.duration(cost.last_seconds)
        step = f"{step} at the first step, {last_step} at the last{guess}"
    run, compiling = words.duration(cost.run_seconds), words.duration(cost.compile_seconds)
    rows = {
        "strategy": words.described(about["strategy"]),
        "method": _METHODS.get(about["method"], stored),
        "buffers": f"{about['buffers']} of {about['buffer_dtype']}",
        "parameters": f"{arguments.params:,}",
        **{name.replace("_", " "): f"{value:.10g}" for name, value in price.items()},
        "device": cost.device,
        "memory kept": f"{words.size(cost.buffer_bytes)}  (buffers, between steps)",
        "memory in a step": f"{words.size(cost.peak_bytes)}  (buffers, noise, temporary arrays)",
        "time per step": step,
        "time of the run": f"{run} for {about['iterations']} steps{guess}, and {compiling} to "
        "compile",
    }
    display.table(str(arguments.path), rows.items())
