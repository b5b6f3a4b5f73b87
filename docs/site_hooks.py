"""Hooks of mkdocs: pages from files outside docs/, and links that work in the repository and on the site.

Links in all pages are relative to their files in the repository. On the site, a link to a file without a page becomes a
link to the repository, if ``repo_url`` in mkdocs.yml is set, and plain text otherwise.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "configs/README.md": "configs.md",
    "examples/README.md": "examples.md",
    "kernels/README.md": "kernels.md",
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")
_FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_ROLE = re.compile(r":(?:class|func|meth|mod|data):<code>~?\.?([^<]*)</code>")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite the links outside code blocks."""
    sources = {site: source for source, site in PAGES.items()}
    folder = posixpath.dirname(sources.get(page.file.src_uri, f"docs/{page.file.src_uri}"))

    def rewritten(link: re.Match[str]) -> str:
        image, text, target, anchor = link[1], link[2], link[3], link[4] or ""
        if not target or "://" in target:
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        site = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if site is not None and files.get_file_from_path(site) is not None and not site.endswith(".py"):
            relative = posixpath.relpath(site, posixpath.dirname(page.file.src_uri) or ".")
            return f"{image}[{text}]({relative}{anchor})"
        if not (ROOT / path).exists():
            return link[0]  # mkdocs reports it
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path})" if config.repo_url else text

    parts = _FENCE.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(rewritten, part) for part in parts)


def on_page_content(html: str, **_: Any) -> str:
    """Show the references of docstrings, such as :func:`name`, as code."""
    return _ROLE.sub(r"<code>\1</code>", html)
