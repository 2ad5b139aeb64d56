"""A checkpoint behind an OpenAI-compatible address on loopback, answered by OnPTQ's own prompts and greedy decoding."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import torch

from onptq.checkpoint.load import load_model
from onptq.checkpoint.source import find_source
from onptq.data.prompts import Media, Prompt
from onptq.models.processing import PromptProcessor


@contextmanager
def serving(model: str) -> Iterator[str]:
    """The address up to /v1, while the server runs."""
    answer = Answerer(model)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply = {"choices": [{"message": {"role": "assistant", "content": answer(body)}}]}
            data = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Answerer:
    """Greedy answers to chat requests."""

    def __init__(self, model: str) -> None:
        source = find_source(model)
        self.processor = PromptProcessor.from_folder(source.folder, source.family, source.config)
        self.model = load_model(source, torch.float32, torch.device("cpu"))
        self.eos = list(source.eos())

    @torch.inference_mode()
    def __call__(self, body: Mapping[str, Any]) -> str:
        greedy = body["temperature"] == 0 and body["repetition_penalty"] == 1
        if not greedy:
            raise ValueError(f"expected a request for greedy decoding without a penalty, got {body}")
        inputs = self.processor(_prompt(body["messages"])).tensors
        tokens = self.model.generate(
            **inputs,
            max_new_tokens=body["max_tokens"],
            do_sample=False,
            eos_token_id=self.eos,
            pad_token_id=self.eos[0],
        )
        new = tokens[0, inputs["input_ids"].shape[1] :]
        return str(self.processor.tokenizer.decode(new, skip_special_tokens=True))


def _prompt(messages: list[dict[str, Any]]) -> Prompt:
    media: dict[str, list[Media]] = {"image": [], "audio": []}
    for message in messages:
        for number, part in enumerate(message["content"]):
            if part["type"] == "image_url":
                kind, text = "image", part["image_url"]["url"].partition(",")[2]
            elif part["type"] == "input_audio":
                kind, text = "audio", part["input_audio"]["data"]
            else:
                continue
            data = base64.b64decode(text)
            media[kind].append(Media(None, hashlib.sha256(data).hexdigest(), data))
            message["content"][number] = {"type": kind}
    return Prompt(0, "", messages, tuple(media["image"]), tuple(media["audio"]))
