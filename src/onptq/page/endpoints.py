"""The page of a dense and of quantized models behind OpenAI-compatible servers, from their answers and log-probabilities.

Up to and including the first fork both models see the same text, and their states are compared. Behind it there is only text.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError
from onptq.evaluate.metrics import BEHAVIOUR, DAMAGE, PROMPTS
from onptq.evaluate.statistics import Measure as Ratio
from onptq.evaluate.statistics import Part, Resampler
from onptq.page.chat_server import TIMEOUT, TOP_LOGPROBS, ChatServer, Reply
from onptq.page.contract import Answer, Candidate, Figure, Measure, Page, Question, Response
from onptq.page.endpoint_states import Tokens, pieces_of, respond, spoken
from onptq.page.media import Album
from onptq.page.state_plots import first_forks
from onptq.page.text import one_line
from onptq.page.vega import thinned
from onptq.page.verdict import verdict
from onptq.page.worst import badness_of_prompt
from onptq.progress import QuietReporter, Reporter
from onptq.serving.client import CHAT, VERSION_PATH
from onptq.version import __version__

SCHEMES = ("http://", "https://")
AT_ONCE = 8  # requests
ASKED_TWICE = 16  # prompts, so that it is known how often a server answers the same one in other words
FIGURES = {"reworded": "%", "first_fork": "tokens", "noise_responses": "%"}
LABELS = {**BEHAVIOUR, **DAMAGE}
BOUNDS = (
    f"The servers give the {TOP_LOGPROBS} likeliest tokens of a state; any other is no likelier than the last of these. "
    "Margins, erosion, JS and KL follow from them up to the first fork: true values are at least as large. Behind it the models "
    "see different texts, and only these can be compared."
)
NOISE = (
    "Noise floor: {count} of the prompts were given to every quantized model a second time. Under load a server may differ from "
    "itself more often."
)
TEXT_ALONE = "gives no log-probabilities: answers are compared as text alone, word by word."


@dataclass(frozen=True)
class Endpoint:
    """A server and its name on the page."""

    name: str
    url: str

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """URL or NAME=URL."""
        name, _, url = ("", "", text) if is_address(text) else text.partition("=")
        place = url.partition("://")[2].rpartition("@")[2]
        return cls(name or place.removesuffix(CHAT).rstrip("/").removesuffix(VERSION_PATH), url)


def is_address(text: str) -> bool:
    return text.lower().startswith(SCHEMES)


def is_endpoint(text: str) -> bool:
    """Whether an argument is URL or NAME=URL."""
    return is_address(text) or is_address(text.partition("=")[2])


def compare_endpoints(
    dense: str,
    quantized: Sequence[str],
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    origin: str = "",
    model: str | None = None,
    key: str | None = None,
    timeout: float = TIMEOUT,
    reporter: Reporter | None = None,
) -> Page:
    """The page of all answers to `prompts`, each at most `max_tokens` long.

    Endpoints are URL or NAME=URL. `model` is what all servers call their model, where one serves several; `key` is sent to all.
    """
    endpoints = endpoints_of(dense, quantized)
    servers = [ChatServer(one.url, model=model, key=key, timeout=timeout) for one in endpoints]
    return page_of_servers(endpoints, servers, prompts, max_tokens, origin, reporter or QuietReporter())


def endpoints_of(dense: str, quantized: Sequence[str]) -> list[Endpoint]:
    """The servers that are named, the dense model's first; two of one name are refused."""
    endpoints = [Endpoint.parse(text) for text in (dense, *quantized)]
    names = [one.name for one in endpoints]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise OnPTQError(f"{', '.join(sorted(repeated))} is given more than once; expected different servers: NAME=URL")
    return endpoints


def page_of_servers(
    endpoints: Sequence[Endpoint],
    servers: Sequence[ChatServer],
    prompts: Sequence[Prompt],
    max_tokens: int,
    origin: str,
    reporter: Reporter,
) -> Page:
    """The page of the answers of reached servers."""
    names = [one.name for one in endpoints]
    replies = ask(servers, prompts, max_tokens, reporter)
    silent = [
        server.url
        for server, own in zip(servers, replies, strict=True)
        if any(reply.tokens is None and reply.text for reply in own)
    ]
    twice = thinned(range(len(prompts)), ASKED_TWICE)
    second = ask(servers[1:], [prompts[place] for place in twice], max_tokens, reporter, "Ask again")
    tokens, resampler = Tokens(), Resampler()
    read = [[pieces_of(reply, in_words=bool(silent)) for reply in own] for own in replies]
    said = [[spoken(*pair, tokens) for pair in zip(*each, strict=True)] for each in zip(replies, read, strict=True)]
    candidates = []
    for place, endpoint in enumerate(endpoints[1:], start=1):
        rows = zip(said[0], said[place], read[0], read[place], strict=True)
        responses = [respond(*row, tokens) for row in rows]
        differs = [replies[place][at].text != reply.text for at, reply in zip(twice, second[place - 1], strict=True)]
        candidates.append(_candidate(endpoint, servers[place], responses, differs, bool(silent), resampler))
    album = Album()
    questions = [
        _question(prompt, answer, album, badness_of_prompt(place, candidates))
        for place, (prompt, answer) in enumerate(zip(prompts, said[0], strict=True))
    ]
    others = names[1] if len(names) == 2 else f"{len(names) - 1} quantized models"
    return Page(
        title=f"{names[0]} and {others}",
        dense=f"{names[0]} ({servers[0].model})",
        origin=origin,
        candidates=candidates,
        prompts=questions,
        media=album.media(),
        tokens=tokens.texts(),
        measures={
            name: Measure(LABELS[name].name, unit, LABELS[name].less_is_better, LABELS[name].noise)
            for name, unit in FIGURES.items()
        },
        notes=[
            *(f"{url} {TEXT_ALONE}" for url in silent),
            *([] if silent else [BOUNDS]),
            NOISE.format(count=len(twice)),
        ],
        version=__version__,
    )


def ask(
    servers: Sequence[ChatServer],
    prompts: Sequence[Prompt],
    max_tokens: int,
    reporter: Reporter,
    phase: str = "Ask",
) -> list[list[Reply]]:
    """Every server's replies to all prompts. The first error ends it, and no further request is sent."""
    with reporter.phase(phase, total=len(servers) * len(prompts), unit="answers") as bar:
        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            waiting = [
                [pool.submit(server.answer, prompt, max_tokens) for server in servers] for prompt in prompts
            ]  # prompt by prompt, so that all servers work at the same time
            replies: list[list[Reply]] = [[] for _ in servers]
            for of_prompt in waiting:
                for own, reply in zip(replies, of_prompt, strict=True):
                    own.append(reply.result())
                    bar.advance()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for server in servers:
                server.end()
            raise
        pool.shutdown()
    return replies


def _candidate(
    endpoint: Endpoint,
    server: ChatServer,
    responses: Sequence[Response],
    differs: Sequence[bool],
    in_words: bool,
    resampler: Resampler,
) -> Candidate:
    """`differs`: of every prompt that was sent twice, whether the second answer has another text."""
    ones = np.ones(len(responses))
    changed = np.array([one.fork is not None for one in responses], np.float64)
    shared = np.array([len(one.answer.tokens or ()) if one.fork is None else one.fork for one in responses], np.float64)
    measures = {
        "reworded": Ratio((Part(PROMPTS, changed, ones),), 100),
        "noise_responses": Ratio((Part("sent twice", np.array(differs, np.float64), np.ones(len(differs))),), 100),
    }
    if not in_words:
        measures["first_fork"] = Ratio((Part(PROMPTS, shared, ones),))
    figures = {name: resampler.estimate(measure) for name, measure in measures.items()}
    candidate = Candidate(
        endpoint.name,
        endpoint.name,
        f"{one_line(server.model)}, as {endpoint.url} serves it.",
        _verdict_in_words(responses) if in_words else verdict(responses, None, resampler),
        {name: Figure(one.value, one.low, one.high) for name, one in figures.items()},
        responses=responses,
    )
    plot = None if in_words else first_forks(candidate)
    return replace(candidate, plots=() if plot is None else (plot,))


def _verdict_in_words(responses: Sequence[Response]) -> str:
    changed = sum(one.fork is not None for one in responses)
    content = sum(one.change == "content" for one in responses)
    what = f", {content} of them in content" if content else ""
    return (
        f"{changed} of {len(responses)} answers changed{what}, compared as text alone: there are no log-probabilities."
    )


def _question(prompt: Prompt, dense: Answer, album: Album, badness: float) -> Question:
    return Question(prompt.id, prompt.task, prompt.kinds, album.turns(prompt, badness), dense, prompt.reference)
