"""mfopt cache: what mfopt keeps on this machine beside the files that users name."""

from __future__ import annotations

import click

from mfopt._runtime._types import JsonObject
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
    folders: list[JsonObject] = []
    rows: display.Rows = []
    for content, folder, patterns, most_bytes in (
        ("compiled programs", compile_cache.base(), ("*/*-cache", "*/*-atime"), most_compiled),
        ("finished cells", cache.default_folder(), (cache.FILES,), cache.MOST_BYTES),
        ("notes of proofs", _notes.folder(), ("?" * 64 + ".json", "key"), _notes.MOST_BYTES),
    ):
        files = [path for pattern in patterns for path in folder.glob(pattern)]
        if clear and (proofs or content != "notes of proofs"):
            for path in files:  # only what mfopt names so: the folder may be one of the user's
                path.unlink(missing_ok=True)
            files = []
        size = sum(path.stat().st_size for path in files)
        facts = {"what": content, "path": str(folder), "files": len(files), "bytes": size}
        folders.append({**facts, "most_bytes": most_bytes})
        mib = f"{size / 2**20:.1f} MiB of at most {most_bytes / 2**20:.0f}"
        rows.append((content, f"{len(files)} files, {mib}, in {folder}"))
    if as_json:
        display.json_object({"cleared": clear, "folders": folders})
        return
    display.table("cleared" if clear else "kept on this machine", rows)
