"""MkDocs hook: generated tables become pages, links to other files of the repository become their names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?:\.\./)+([^)#]+)(#[^)]*)?\)")
_TABLES = "tables"


def on_files(files: Files, config: Any) -> Files:
    """Return the documentation's files and the Markdown tables of results/."""
    for table in sorted((Path(config.config_file_path).parent / "results").glob("*.md")):
        files.append(File.generated(config, f"{_TABLES}/{table.name}", content=table.read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Return the page with links that lead out of docs/ replaced, where the file exists."""
    root = Path(config.config_file_path).parent
    here = Path(page.file.src_uri)

    def replaced(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        if files.get_file_from_path((here.parent / target).as_posix()) or not (root / target).exists():
            return link[0]
        if re.fullmatch(r"results/[^/]+\.md", target):
            up = "../" * (len(here.parts) - 1)
            return f"[{text}]({up}{_TABLES}/{Path(target).name}{anchor})"
        return f'<span title="{target}">{text}</span>'

    return _LINK.sub(replaced, markdown)
