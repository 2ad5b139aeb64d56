"""A served model over OpenAI's chat API: greedy, with the settings that a folder is given."""

from __future__ import annotations

import base64
import io
import json
import os
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lmms_eval.api.model import lmms
from PIL import Image
from tqdm import tqdm

from onptq_lmms.requests import RATE, Question, questions

ATTEMPTS = 3
PAUSE = 2.0  # seconds between attempts
PATIENCE = 600.0  # seconds for an answer
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # only the given address is contacted


class Endpoint(lmms):  # type: ignore[misc]
    """`url` is the address up to /v1; the key is in ONPTQ_API_KEY, where the server wants one."""

    is_simple = True

    def __init__(
        self,
        url: str,
        model: str,
        requests_at_a_time: int | str = 8,
        repetition_penalty: float = 1.0,
        batch_size: int | str = 1,
        device: str | None = None,
    ) -> None:
        super().__init__()
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url} is no address of a server; expected http:// or https://")
        self.url = f"{url.rstrip('/')}/chat/completions"
        self.served = model
        self.workers = int(requests_at_a_time)
        self.penalty = float(repetition_penalty)

    def generate_until(self, requests: list[Any]) -> list[str]:
        answers = [""] * len(requests)
        with ThreadPoolExecutor(self.workers) as pool:
            given = list(questions(requests, self.task_dict))
            for one, answer in zip(given, tqdm(pool.map(self._ask, given), total=len(given)), strict=True):
                answers[one.place] = one.cut(answer)
        return answers

    def _ask(self, question: Question) -> str:
        content = [*map(_part, question.media), {"type": "text", "text": question.text}]
        body = {
            "model": self.served,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "top_p": 1,
            "max_tokens": question.max_tokens,
            "repetition_penalty": self.penalty,
        }
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("ONPTQ_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)  # noqa: S310 - checked
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with DIRECT.open(request, timeout=PATIENCE) as reply:
                    return json.load(reply)["choices"][0]["message"]["content"] or ""
            except urllib.error.HTTPError as error:
                if error.code < 500 or attempt == ATTEMPTS:
                    raise RuntimeError(f"{self.url} answered {error.code}: {error.read()[:500]!r}") from None
            except OSError as error:
                if attempt == ATTEMPTS:
                    raise RuntimeError(f"{self.url} does not answer: {error}") from None
            time.sleep(PAUSE)
        raise AssertionError

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        raise NotImplementedError("the benchmarks are answered in words; none asks for likelihoods")

    def generate_until_multi_round(self, requests: list[Any]) -> list[str]:
        raise NotImplementedError("the benchmarks have one turn")


def _part(media: Any) -> dict[str, Any]:
    file = io.BytesIO()
    if isinstance(media, Image.Image):
        media.save(file, "PNG")
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_base64(file)}"}}
    import soundfile

    soundfile.write(file, media, RATE, format="WAV")
    return {"type": "input_audio", "input_audio": {"data": _base64(file), "format": "wav"}}


def _base64(file: io.BytesIO) -> str:
    return base64.b64encode(file.getvalue()).decode()
