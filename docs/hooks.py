"""Hooks of MkDocs: links to files of the tree outside ``docs/`` lead to copies in the site."""

import os
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?\)")


def outside(page):
    """(link, path relative to the tree) of each link of a page that leads outside ``docs/``."""
    home = ROOT / "docs" / Path(page).parent
    for match in LINK.finditer((ROOT / "docs" / page).read_text()):
        target = Path(os.path.normpath(home / match[2]))
        if target.is_file() and ROOT / "docs" not in target.parents:
            yield match[2], target.relative_to(ROOT).as_posix()


def on_files(files, config):
    """Add the files that pages link to."""
    for page in [file.src_uri for file in files.documentation_pages()]:
        for _, path in outside(page):
            # shown as text, whatever they are: their own links are the tree's
            name = path + ".txt" if path.endswith((".md", ".py")) else path
            if files.get_file_from_path(f"tree/{name}") is None:
                content = (ROOT / path).read_bytes()
                files.append(File.generated(config, f"tree/{name}", content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    """Let those links lead there."""
    up = "../" * page.file.src_uri.count("/")
    for link, path in set(outside(page.file.src_uri)):
        name = path + ".txt" if path.endswith((".md", ".py")) else path
        markdown = markdown.replace(f"]({link}", f"]({up}tree/{name}")
    return markdown
