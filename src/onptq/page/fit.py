"""A page that fits into its size: details of rounds give way first, then those of other states; media take what is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from onptq.page.contract import Candidate, Page, Response, States
from onptq.page.media import LEFT_OUT
from onptq.page.worst import badness_of_item, badness_of_prompt, riskiest

FOR_MEDIA = 2_000_000  # bytes that details do not take from media
ROUND_DETAILS = 512  # critical states of a round whose details stay longest
ROUND_STATES = 2048  # states of a round that stay

Wanted = Callable[[States, int], bool]


def fitted(page: Page, room: int, pack: Callable[[Page], str]) -> str:
    """The page, packed into so many bytes: as it is if it fits, else without details and media, as few as possible.

    States, answers and questions stay, so that a page of very many prompts may be larger."""
    packed = pack(page)
    if len(packed) <= room:
        return packed
    media = sum(len(one.src or "") for one in page.media)
    bare = replace(page, media=[replace(one, src=None) for one in page.media])
    size, thinner = len(packed) - media, _thinner(bare)  # in base64 media hardly grow or shrink
    while size + min(media, FOR_MEDIA) > room and (thinned := next(thinner, None)) is not None:
        bare = thinned
        size = len(pack(bare))
    left = room - size
    while True:
        packed = pack(_with_media(bare, page, left))
        if len(packed) <= room or left <= 0:
            return packed
        left -= max(len(packed) - room, room // 100)


def _thinner(page: Page) -> Iterator[Page]:
    """The page with fewer and fewer details of single states."""
    page = _each(page, True, lambda one: _heaviest(one, ROUND_DETAILS))
    yield page
    page = _each(page, True, lambda one: _only(one, lambda states, at: False))
    yield page
    page = _each(page, True, lambda one: replace(one, responses=riskiest(one.responses, ROUND_STATES)))
    yield page
    page = _each(page, False, lambda one: _only(one, lambda states, at: states.kind[at] > 0))
    yield page
    page = _each(page, False, lambda one: _only(one, lambda states, at: states.kind[at] == 2))
    yield page
    yield _each(page, False, lambda one: _only(one, lambda states, at: False))


def _each(page: Page, aside: bool, change: Callable[[Candidate], Candidate]) -> Page:
    return replace(page, candidates=[change(one) if one.aside == aside else one for one in page.candidates])


def _heaviest(candidate: Candidate, most: int) -> Candidate:
    """The candidate with details of the states that matter most."""
    known = [one.states for one in candidate.responses if one is not None and one.states is not None]
    weights = sorted((weight for one in known for weight in one.weight), reverse=True)
    least = weights[most] if len(weights) > most else -1.0
    return _only(candidate, lambda states, at: states.weight[at] > least)


def _only(candidate: Candidate, wanted: Wanted) -> Candidate:
    """The candidate with details of those states alone."""
    return replace(candidate, responses=[one and _response(one, wanted) for one in candidate.responses])


def _response(response: Response, wanted: Wanted) -> Response:
    states = response.states
    if states is None:
        return response
    chosen = [wanted(states, at) for at in range(len(states.kind))]
    top = [one if detailed else None for one, detailed in zip(states.top, chosen, strict=True)]
    futures = [one if detailed else None for one, detailed in zip(states.futures, chosen, strict=True)]
    return replace(response, states=replace(states, top=top, futures=futures))


def _with_media(bare: Page, page: Page, room: int) -> Page:
    """The page with the media of its worst examples, as many as there is room for."""
    rank = [0.0] * len(page.media)
    questions = [(one, badness_of_prompt(place, page.candidates)) for place, one in enumerate(page.prompts)]
    questions += [(one, badness_of_item(one, place, page.candidates)) for place, one in enumerate(page.items)]
    for question, badness in questions:
        for place in (part.media for turn in question.turns for part in turn.parts if part.media is not None):
            rank[place] = max(rank[place], badness)
    media = list(bare.media)
    for place in sorted(range(len(media)), key=lambda place: (-rank[place], place)):
        src = page.media[place].src
        if src is not None and len(src) <= room:
            room -= len(src)
            media[place] = page.media[place]
        elif src is not None:
            media[place] = replace(media[place], note=LEFT_OUT)
    return replace(bare, media=media)
