"""What mkdocs does here beside its own: pages from outside ``docs/``, links to them, and nothing from other hosts.

Owns which files of the repository are pages of the site. ``mkdocs.yml`` names this file as a hook; ``make docs`` runs
it. How docstrings are read is in ``guide_docstrings.py``.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = "examples"

# file of the repository -> page of the site
PAGES = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "bench/results.md": "results.md",
}
# what pages link to in the repository -> page that shows it
SHOWN = {
    EXAMPLES: "examples.md",
    "offload/config.py": "reference/options.md",
    "offload/initialisation.py": "reference/engine.md",
}
ORIGINS = {uri: path for path, uri in PAGES.items()}

LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
ELSEWHERE = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//|<link\b[^>]*\bhref=["']?(?:https?:)?//"""
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose sources are outside of ``docs/``."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text(encoding="utf-8")))
    files.append(File.generated(config, SHOWN[EXAMPLES], content=examples()))
    return files


def examples() -> str:
    """Return a page with all example scripts."""
    parts = [
        "# Examples",
        "Each script runs as it is, on a tiny model that it makes; `deepspeed_before.py` needs DeepSpeed. Those that "
        "import `common`, and `qlora.py`, take a real model with `--model DIR`.",
    ]
    for script in sorted((ROOT / EXAMPLES).glob("*.py")):
        text = script.read_text(encoding="utf-8")
        first = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        parts += [f"## {script.name}", first, f"```python\n{text}```"]
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files of the repository lead to the pages that show them; of others, keep the text."""
    here = page.file.src_uri
    origin = posixpath.dirname(ORIGINS.get(here, f"docs/{here}"))

    def replaced(match: re.Match[str]) -> str:
        path, mark, anchor = match["target"].partition("#")
        if not path or "://" in path:
            return match[0]
        there = posixpath.normpath(posixpath.join(origin, path))
        uri = page_of(there)
        if uri is None:
            return match["text"] if (ROOT / there).exists() else match[0]  # mkdocs tells of what does not exist
        anchor = posixpath.basename(there).replace(".", "") if posixpath.dirname(there) == EXAMPLES else anchor
        to = posixpath.relpath(uri, posixpath.dirname(here) or ".")
        return f"{match['image']}[{match['text']}]({to}{'#' if anchor else ''}{anchor})"

    return LINK.sub(replaced, markdown)


def page_of(path: str) -> str | None:
    """Return the page, or another file of the site, that shows a file of the repository; None where there is none."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if posixpath.dirname(path) == EXAMPLES:
        return SHOWN[EXAMPLES]
    return PAGES.get(path, SHOWN.get(path))


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that a browser would load something from another host for.

    Raises:
        PluginError: it does.
    """
    found = ELSEWHERE.search(output)
    if found:
        raise PluginError(
            f"{page.file.src_uri}: expected files of the site alone but got {found[0]}; copy them to docs"
        )
    return output


def on_post_template(output_content: str, *, template_name: str, config: MkDocsConfig) -> str:
    """Refuse the same of what is no page."""
    found: Any = ELSEWHERE.search(output_content)
    if found:
        raise PluginError(f"{template_name}: expected files of the site alone but got {found[0]}; copy them to docs")
    return output_content
