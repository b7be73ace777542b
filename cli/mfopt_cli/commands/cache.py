"""mfopt cache: what mfopt keeps on this machine beside the files that users name."""

from __future__ import annotations

from typing import Any

import click

from mfopt_cli import compile_cache, display, options
from mfopt_cli.options import option


@click.command(name="cache", cls=options.Command)
@option("--clear", bool, "Remove compiled programs and finished cells.")
@option(
    "--proofs",
    bool,
    "Also remove the records of proofs (with --clear); files are then proved again when used.",
)
@options.json_flag
def command(clear: bool, proofs: bool, as_json: bool) -> None:
    """Show the folders that mfopt keeps on this machine, or clear them.

    \b
    Example:
      mfopt cache
      mfopt cache --clear
    """
    if proofs and not clear:
        raise click.UsageError("--proofs has no effect without --clear")
    from mfopt._runtime import _notes
    from mfopt.experiments import cache

    most_compiled = compile_cache.MOST_BYTES
    found: list[dict[str, Any]] = []
    for what, folder, patterns, most in (
        ("compiled programs", compile_cache.base(), ("*/*-cache", "*/*-atime"), most_compiled),
        ("finished cells", cache.default_folder(), (cache.FILES,), cache.MOST_BYTES),
        ("notes of proofs", _notes.folder(), ("?" * 64 + ".json", "key"), _notes.MOST_BYTES),
    ):
        files = [path for pattern in patterns for path in folder.glob(pattern)]
        if clear and (proofs or what != "notes of proofs"):
            for path in files:  # only what mfopt names so: the folder may be one of the user's
                path.unlink(missing_ok=True)
            files = []
        size = sum(path.stat().st_size for path in files)
        entry = {"what": what, "path": str(folder), "files": len(files), "bytes": size}
        found.append({**entry, "most_bytes": most})
    if as_json:
        display.json_object({"cleared": clear, "folders": found})
        return
    display.table(
        "cleared" if clear else "kept on this machine",
        [
            (
                str(one["what"]),
                f"{one['files']} files, {one['bytes'] / 2**20:.1f} MiB of at most "
                f"{one['most_bytes'] / 2**20:.0f}, in {one['path']}",
            )
            for one in found
        ],
    )
