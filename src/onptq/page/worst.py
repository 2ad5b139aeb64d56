"""Which examples are the worst: these are shown first, and what belongs to them gets room first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onptq.page.contract import Candidate, Question, Response

BADNESS = {"content": 3.0, "clear": 2.0, "reworded": 1.0, "same": 0.0}


def badness_of_prompt(place: int, candidates: Sequence[Candidate]) -> float:
    """How bad the worst of the candidates' answers to a prompt is: by its change, then by its risk."""
    responses = [one.responses[place] for one in candidates if place < len(one.responses)]
    worst = max((BADNESS[one.change] for one in responses if one is not None), default=0.0)
    return worst + math.tanh(max(map(risk_of, responses), default=0.0))


def badness_of_item(item: Question, place: int, candidates: Sequence[Candidate]) -> float:
    """How bad the worst of the candidates' answers to a graded item is: by the points that it lost."""
    answers = [one.answers[place] for one in candidates if one.answers]
    lost = [(item.dense.score or 0.0) - (one.score or 0.0) for one in answers if one is not None]
    reworded = any(one is not None and one.text != item.dense.text for one in answers)
    return 4 * max(lost, default=0.0) + reworded


def risk_of(response: Response | None) -> float:
    """The highest risk of its states."""
    return 0.0 if response is None or response.states is None else max(response.states.risk, default=0.0)


def riskiest(responses: Sequence[Response | None], most: int) -> list[Response | None]:
    """The responses with the riskiest states while they have no more than so many; None for the others."""
    left, chosen = most, set()
    for place in sorted(range(len(responses)), key=lambda place: -risk_of(responses[place])):
        own = responses[place]
        count = len(own.states.kind) if own is not None and own.states is not None else 0
        if count > left:
            break
        left -= count
        chosen.add(place)
    return [one if place in chosen else None for place, one in enumerate(responses)]
