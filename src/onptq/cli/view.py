"""`onptq view`: the page of results in a browser."""

from __future__ import annotations

import functools
import webbrowser
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Annotated, Any

import typer

from onptq.errors import OnPTQError

LOOPBACK = "127.0.0.1"


def view(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of a comparison, of a run (DIR-run) or of its checkpoint.")
    ],
    serve: Annotated[
        bool, typer.Option("--serve", help=f"Serve the page on {LOOPBACK} instead, until interrupted; print its URL.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of --serve.", show_default="any free one")] = 0,
) -> None:
    """Open the page of DIR in the browser; it is built first where there is none."""
    from onptq.page.make import make
    from onptq.page.places import find, page_of

    path = page_of([find(folder)])
    if not path.is_file():
        path = make([folder])
    if serve:
        serve_page(path, port)
        return
    url = path.resolve().as_uri()
    typer.echo(url)
    if not webbrowser.open(url):
        raise OnPTQError(f"no browser could be opened; open {path} in one, or give --serve and follow the URL")


def serve_page(path: Path, port: int) -> None:
    """Serve the one file on the loopback address until interrupted."""
    try:
        server = HTTPServer((LOOPBACK, port), functools.partial(OnePage, path))
    except OSError as error:
        raise OnPTQError(f"cannot serve on {LOOPBACK}:{port}: {error.strerror}; choose another --port") from error
    with server:
        typer.echo(f"http://{LOOPBACK}:{server.server_port}/")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)


class OnePage(SimpleHTTPRequestHandler):
    """Answers with the page at / and with nothing else."""

    def __init__(self, path: Path, *args: Any) -> None:
        self._page = path
        super().__init__(*args)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, with_body: bool) -> None:
        if self.path not in ("/", f"/{self._page.name}"):
            self.send_error(404)
            return
        data = self._page.read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if with_body:
            self.wfile.write(data)
