"""A candidate's answers to prompts: where each leaves the dense model's, how much that changes, and its states as columns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from onptq.bank import Column, Trajectory
from onptq.bank import States as Bank
from onptq.evaluate.damage import NEAR_TIE
from onptq.evaluate.details import Detail, Future
from onptq.evaluate.token_texts import TokenTexts
from onptq.page.contract import Answer, Change, Futures, Kind, Response, States, Top

SHORT = 3  # words; of an answer this short every word is content
TEXT_COLUMNS = ("reference", "competitor", "quantized")
NUMBER_COLUMNS = ("margin_dense", "margin_quant", "erosion", "js", "kl", "risk", "weight")

Details = Mapping[tuple[int, int], Detail]


def spoken(trajectory: Trajectory, texts: TokenTexts) -> Answer:
    """A rollout as an answer."""
    return Answer(texts.text(trajectory.tokens), trajectory.tokens, trajectory.finished)


def respond(
    dense: Trajectory | None, own: Trajectory, states: Bank | None, details: Details, texts: TokenTexts
) -> Response:
    """The response with its states; without the dense model's it leaves that where the first decision differs."""
    columns = None if states is None else state_columns(states, details)
    where = first_mismatch(columns) if dense is None else fork(dense.tokens, own.tokens)
    response = Response(spoken(own, texts), "same", where, columns)
    texts_differ = dense is not None and differ_in_content(spoken(dense, texts), response.answer)
    return replace(response, change=change(response, texts_differ))


def fork(dense: Sequence[int], own: Sequence[int]) -> int | None:
    """The first token, from 0, at which two answers differ; None where they are the same."""
    for place, (one, other) in enumerate(zip(dense, own, strict=False)):
        if one != other:
            return place
    return None if len(dense) == len(own) else min(len(dense), len(own))


def first_mismatch(states: States | None) -> int | None:
    kinds = [] if states is None else list(states.kind)
    return kinds.index(2) if 2 in kinds else None


def change(response: Response, content: bool) -> Change:
    """How much an answer changed, by the most that can be said of it."""
    if response.fork is None:
        return "same"
    if content:
        return "content"
    return "clear" if parts_clearly(response) else "reworded"


def parts_clearly(response: Response) -> bool:
    """Whether the answers part where the dense model clearly preferred its own token."""
    states, place = response.states, response.fork
    if states is None or place is None or place >= len(states.kind):
        return False
    return states.kind[place] == 2 and states.margin_dense[place] >= NEAR_TIE


def differ_in_content(dense: Answer, own: Answer) -> bool:
    """Whether a short answer says something else. Of longer ones nobody can say that from their texts."""
    was, now = words(dense.text), words(own.text)
    return bool(dense.finished) and 0 < len(was) <= SHORT and was != now


def words(text: str) -> list[str]:
    """The words of a text, without case and punctuation."""
    return re.findall(r"\w+", text.casefold())


def state_columns(states: Bank, details: Details) -> States:
    """The states of one response."""
    keys = list(zip(states.prompt.tolist(), states.t.tolist(), strict=True))
    own = [details.get(key) for key in keys]
    tokens = {name: getattr(states, name).tolist() for name in TEXT_COLUMNS}
    numbers = {name: getattr(states, name).tolist() for name in NUMBER_COLUMNS}
    return States(
        **tokens,
        **numbers,
        kind=kinds(states.kind),
        consequence=_consequences(states, own),
        critical=states.critical.tolist(),
        top=[None if one is None else Top(one.dense, one.quantized) for one in own],
        futures=[_futures(one) for one in own],
    )


def kinds(column: Column) -> list[Kind]:
    known: list[Kind] = column.tolist()
    return known


def _consequences(states: Bank, details: Sequence[Detail | None]) -> list[float | None]:
    """The consequence of the states that were branched: those with a common horizon or a value, and those with a future."""
    rows = zip(states.consequence.tolist(), states.horizon.tolist(), details, strict=True)
    return [value if value or horizon else _apart(one.future if one else None) for value, horizon, one in rows]


def _apart(future: Future | None) -> float | None:
    """The mean divergence between two futures, up to where either has ended."""
    if future is None:
        return None
    common = min(len(future.reference), len(future.competitor))
    ended = common > 0 and future.apart[common - 1] == 0
    return sum(future.apart[:common]) / max(1, common - ended)


def _futures(detail: Detail | None) -> Futures | None:
    if detail is None or detail.future is None:
        return None
    return Futures(*detail.future)
