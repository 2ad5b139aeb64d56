"""Comparisons of OpenAI-compatible servers, as `onptq diff` and `onptq compare` have them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from onptq.cli.drawing import embedded_kind
from onptq.errors import OnPTQError

if TYPE_CHECKING:
    from onptq.page.contract import Page
    from onptq.progress import Reporter
    from onptq.recipe import Recipe


def are_servers(dense: str, quantized: Sequence[str]) -> bool:
    """Whether the models are addresses of servers; some alone are refused."""
    from onptq.page.endpoints import is_endpoint

    addresses = [text for text in (dense, *quantized) if is_endpoint(text)]
    if addresses and len(addresses) <= len(quantized):
        raise OnPTQError(
            f"{addresses[0]} is a server, but not every model here is; expected addresses alone, or checkpoints alone: "
            "serve the others too"
        )
    return bool(addresses)


def refuse_server_options(model: str | None, key_env: str | None) -> None:
    """Refuse what says something of servers where there are none."""
    if model is not None or key_env is not None:
        raise OnPTQError("--model and --key-env are for servers; expected their addresses, e.g. http://localhost:8000")


def compare_servers(
    dense: str,
    quantized: Sequence[str],
    out: Path | None,
    ending: str,
    recipe: Recipe,
    reporter: Reporter,
    *,
    manifest: Path | None,
    prompts: int | None,
    model: str | None,
    key_env: str | None,
    timeout: float,
) -> tuple[Page, Path]:
    """The page of the servers' answers to the prompts of a manifest, and the file it was written into.

    Without `out` that is in a folder named after the dense model's address, with this ending."""
    from onptq.data.manifest import load_manifest
    from onptq.page.chat_server import ChatServer
    from onptq.page.endpoints import endpoints_of, page_of_servers
    from onptq.page.make import deliver
    from onptq.page.places import PAGE
    from onptq.page.receipt import receipt_of_servers
    from onptq.run import HOME

    if manifest is None or embedded_kind(manifest) is not None:
        raise OnPTQError("servers answer your own prompts; expected --manifest PROMPTS, a .jsonl or .parquet file")
    folder = Path(f"{_place_name(dense)}-{ending}") if out is None else out
    if (folder / HOME).exists() or (folder.exists() and not folder.is_dir()):
        raise OnPTQError(f"{folder} holds something else than a comparison of servers: choose another --out")
    key, max_tokens = _key_in(key_env), recipe.follow.max_tokens
    loaded = load_manifest(manifest, limit=prompts, note=reporter.note)
    try:
        endpoints = endpoints_of(dense, quantized)
        servers = [ChatServer(one.url, model=model, key=key, timeout=timeout) for one in endpoints]
        page = page_of_servers(endpoints, servers, loaded, max_tokens, f"prompts of {manifest.name}", reporter)
    except KeyboardInterrupt:
        typer.echo("interrupted: no answer of a server was saved; the same command begins again", err=True)
        raise typer.Exit(130) from None
    models = [server.model for server in servers]
    deliver(page, folder / PAGE, receipt_of_servers(page, endpoints, models, loaded, max_tokens))
    return page, folder / PAGE


def _key_in(variable: str | None) -> str | None:
    """The key in an environment variable."""
    if variable is None:
        return None
    if variable not in os.environ:
        raise OnPTQError(f"--key-env {variable}: there is no such environment variable; expected one with the API key")
    return os.environ[variable]


def _place_name(address: str) -> str:
    """A folder's name from the address of a server."""
    from onptq.evaluate.candidates import folder_name
    from onptq.page.endpoints import Endpoint

    return folder_name(Endpoint.parse(address).name.replace(":", "-").replace("/", "-"))
