"""MkDocs hook: generated tables become pages, links to other files of the repository become their names."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+[^)#]+)(#[^)]*)?\)")
_SOURCE, _TABLES = "results", "tables"  # the folder of the generated tables, and that of their pages


def on_files(files: Files, config: Any) -> Files:
    """Return the documentation's files and the Markdown tables of results/."""
    for table in sorted((Path(config.config_file_path).parent / _SOURCE).glob("*.md")):
        files.append(File.generated(config, f"{_TABLES}/{table.name}", content=table.read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Return the page with links that lead out of its folder resolved: to pages, or to a file's name."""
    root = Path(config.config_file_path).parent
    docs, here = Path(config.docs_dir).name, Path(page.file.src_uri).parent
    folder = _SOURCE if here.name == _TABLES else posixpath.join(docs, here.as_posix())

    def resolved(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        uri = re.sub(rf"^{_SOURCE}/", f"{_TABLES}/", path).removeprefix(f"{docs}/")
        if files.get_file_from_path(uri) is not None:
            return f"[{text}]({posixpath.relpath(uri, here.as_posix())}{anchor})"
        return f'<span title="{path}">{text}</span>' if (root / path).exists() else link[0]

    return _LINK.sub(resolved, markdown)
