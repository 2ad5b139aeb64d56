"""YAML without aliases and within limits, read and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from onptq.errors import OnPTQError

YAML_LIMIT = 2**20  # characters of a YAML file


class _Tree(yaml.SafeLoader):
    """A loader of YAML without aliases, by which a few lines can become endless."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            where = self.peek_event().start_mark
            raise OnPTQError(f"line {where.line + 1} has a YAML alias (*name); expected what it stands for")
        return super().compose_node(parent, index)


class _Spelt(yaml.SafeDumper):
    """A dumper that writes a value as often as it is there."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def parse_yaml(text: str) -> Any:
    """The content of a YAML text without aliases; an OnPTQError where it has none that can be read."""
    if len(text) > YAML_LIMIT:
        raise OnPTQError(f"it is longer than {YAML_LIMIT:,} characters")
    try:
        return yaml.load(text, _Tree)  # noqa: S506 - a safe loader that takes less
    except OnPTQError:
        raise
    except RecursionError:
        raise OnPTQError("it is nested too deeply") from None
    except Exception as error:  # values of a wrong form raise errors of every kind
        raise OnPTQError(f"it is not valid YAML: {error}") from error


def read_yaml(path: Path, what: str = "") -> Any:
    """The content of a YAML file; an OnPTQError that names it, and `what` it is, where it has none that can be read."""
    named = f"{what} {path}".strip()
    try:
        if path.exists() and not path.is_file():
            raise OnPTQError("it is not a regular file")
        with path.open(encoding="utf-8") as file:
            return parse_yaml(file.read(YAML_LIMIT + 1))
    except OSError as error:
        raise OnPTQError(f"cannot read {named}: {error.strerror or error}") from error
    except (OnPTQError, UnicodeDecodeError) as error:
        raise OnPTQError(f"cannot read {named}: {error}") from error


def to_yaml(value: Any, **options: Any) -> str:
    """YAML in the given order of keys and without aliases."""
    text: str = yaml.dump(value, Dumper=_Spelt, sort_keys=False, **options)
    return text
