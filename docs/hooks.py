"""Hooks of MkDocs: copies of files of the tree that pages link to, a page of all options, and
their names in one piece."""

import inspect
import os
import re
from pathlib import Path

import click
from mfopt_cli.main import cli
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?\)")


def outside(page):
    """(link, path relative to the tree) of each link of a page that leads outside ``docs/``."""
    home = ROOT / "docs" / Path(page).parent
    path = ROOT / "docs" / page
    for match in LINK.finditer(path.read_text() if path.is_file() else ""):
        target = Path(os.path.normpath(home / match[2]))
        if target.is_file() and ROOT / "docs" not in target.parents:
            yield match[2], target.relative_to(ROOT).as_posix()


def literal(text):
    """Markdown that shows a text as it is."""
    return re.sub(r"[*_<\[\]`]", r"\\\g<0>", text)


def options(command=cli, name="mfopt", parent=None):
    """Markdown of the help of a command and of those below it."""
    context = click.Context(command, info_name=name.rpartition(" ")[2], parent=parent)
    yield f"## {name}" if parent else "# Options of mfopt"
    for paragraph in inspect.cleandoc(command.help).split("\n\n"):
        title, *lines = paragraph.removeprefix("\b\n").split("\n")
        if paragraph.startswith("\b"):  # shown as it is
            yield title
            yield "\n".join(f"    {line}" for line in lines)
        else:
            yield literal(paragraph)
    records = (param.get_help_record(context) for param in command.get_params(context))
    yield "\n".join(f"* `{names}`: {literal(text)}" for names, text in filter(None, records))
    for part in command.list_commands(context) if isinstance(command, click.Group) else ():
        yield from options(command.get_command(context, part), f"{name} {part}", context)


def on_files(files, config):
    """Add the files that pages link to, and ``options.md``."""
    for page in [file.src_uri for file in files.documentation_pages()]:
        for _, path in outside(page):
            # shown as text, whatever they are: their own links are the tree's
            name = path + ".txt" if path.endswith((".md", ".py")) else path
            if files.get_file_from_path(f"tree/{name}") is None:
                content = (ROOT / path).read_bytes()
                files.append(File.generated(config, f"tree/{name}", content=content))
    files.append(File.generated(config, "options.md", content="\n\n".join(options())))
    return files


def on_page_markdown(markdown, page, config, files):
    """Let those links lead there; the search names pages of the API behind the others."""
    if page.file.src_uri.startswith("api/"):
        page.meta["search"] = {"boost": 0.1}
    up = "../" * page.file.src_uri.count("/")
    for link, path in set(outside(page.file.src_uri)):
        name = path + ".txt" if path.endswith((".md", ".py")) else path
        markdown = markdown.replace(f"]({link}", f"]({up}tree/{name}")
    return markdown


def on_page_content(html, page, config, files):
    """Keep names of options whole: a line could end behind their hyphens."""

    def whole(match):
        return re.sub(r"--\w[\w-]*", r'<span class="option">\g<0></span>', match[0])

    return re.sub(r"<code>[^<]+</code>", whole, html)
