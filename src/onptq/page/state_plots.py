"""Pictures of one candidate's states and responses: risk, consequence, forks, KL, and what became of critical states.

Every function returns a Vega-Lite specification with its own data, or None where there is nothing to show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from onptq.page.contract import Candidate, Page, Plot, Response, States
from onptq.page.vega import (
    BLUE,
    GREEN,
    GREY,
    LEAST_KL,
    ORANGE,
    QUIET,
    VERMILION,
    Row,
    coloured,
    drawn_of,
    floor_of,
    logarithmic,
    picture,
    quantity,
    shaped,
    thinned,
    tips,
    values,
    whole,
    wide,
)

KINDS = ("agree", "near miss", "mismatch")
KIND_COLOURS = (GREEN, ORANGE, VERMILION)
NOT_VISITED = "not visited"
SHARES = (50, 95, 99)
RISKIEST = 5  # percent of the states, in the caption
CURVE_POINTS = 400
BINS = 30
AROUND = 32  # tokens on either side of the fork


def risk_concentration(candidate: Candidate) -> Plot | None:
    """The share of all risk that the riskiest states hold, up to a given share of the states."""
    risks = sorted((risk for states in _states(candidate) for risk in states.risk), reverse=True)
    total = sum(risks)
    if not total > 0:
        return None
    held = [0.0, *(100 * sum_ / total for sum_ in accumulate(risks))]
    points = [{"states": 100 * place / len(risks), "risk": share} for place, share in enumerate(held)]
    few = -(-len(risks) * RISKIEST // 100)
    caption = (
        f"The riskiest {RISKIEST}% of {len(risks):,} states hold {held[few]:.0f}% of the risk. The dashed line is risk "
        "that is spread evenly."
    )
    line = {"mark": {"type": "line", "color": BLUE, "strokeWidth": 2.5}, "encoding": _concentration_axes()}
    even = {
        "data": values([{"states": 0, "risk": 0}, {"states": 100, "risk": 100}]),
        "mark": {"type": "line", **QUIET},
        "encoding": _concentration_axes(),
    }
    body = {"data": values(thinned(points, CURVE_POINTS)), "layer": [even, line]}
    return picture("risk-concentration", "Where the risk is", caption, body)


def mismatch_against_consequence(candidate: Candidate, page: Page) -> Plot | None:
    """How far the two models lie apart in a state, against how far the futures of their tokens lie apart."""
    rows: list[Row] = [
        {
            "js": states.js[place],
            "consequence": consequence,
            "kind": KINDS[states.kind[place]],
            "prompt": page.prompts[number].id if number < len(page.prompts) else str(number),
            "token": place + 1,
        }
        for number, response in enumerate(candidate.responses)
        if response is not None and (states := response.states) is not None
        for place, consequence in enumerate(states.consequence)
        if consequence is not None
    ]
    if not rows:
        return None
    shown = thinned(rows)
    js_title, here = "JS of the two models here, nats", [row["js"] for row in shown]
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
    body = {
        "data": values(shown),
        "mark": {"type": "point", "filled": True, "opacity": 0.75, "size": 40},
        "encoding": {
            "x": logarithmic("js", js_title, here) if wide(here) else quantity("js", js_title),
            "y": quantity("consequence", "consequence, nats"),
            "color": coloured("kind", kinds, [KIND_COLOURS[KINDS.index(kind)] for kind in kinds]),
            "shape": shaped("kind", kinds),
            "tooltip": tips(
                ("prompt", "prompt"), ("token", "token"), ("kind", "kind"), ("js", "JS"), ("consequence", "consequence")
            ),
        },
    }
    caption = (
        f"Each point is one of {len(rows):,} decisions whose two futures were followed. At the upper left are decisions "
        f"that barely differ and lead far apart.{drawn_of(len(shown), len(rows), 'decisions')}"
    )
    return picture("mismatch-consequence", "Mismatch against consequence", caption, body)


def first_forks(candidate: Candidate) -> Plot | None:
    """After how many tokens responses leave the dense model's."""
    responses = [response for response in candidate.responses if response is not None]
    forks = [response.fork for response in responses if response.fork is not None]
    if not forks:
        return None
    width = max(1, -(-(max(forks) + 1) // BINS))
    counts = Counter(fork // width for fork in forks)
    rows = [
        {"first": number * width, "end": (number + 1) * width, "responses": counts[number]}
        for number in range(max(counts) + 1)
    ]
    body = {
        "data": values(rows),
        "mark": {"type": "bar", "color": BLUE, "binSpacing": 1},
        "encoding": {
            "x": quantity("first", "tokens that both answers share", bin={"binned": True}, axis=whole(rows[-1]["end"])),
            "x2": {"field": "end"},
            "y": quantity("responses", "responses", axis=whole(max(counts.values()))),
            "tooltip": tips(("first", "shared tokens, from"), ("end", "to below"), ("responses", "responses")),
        },
    }
    unparted, median = len(responses) - len(forks), sorted(forks)[(len(forks) - 1) // 2]
    caption = (
        f"{len(forks):,} of {len(responses):,} responses leave the dense model's answer, half of them after at most "
        f"{median} shared token{'' if median == 1 else 's'}; {unparted:,} never do."
    )
    return picture("first-forks", "Where answers part", caption, body)


def around_the_fork(candidate: Candidate) -> Plot | None:
    """Mean JS of the two models by position relative to the fork, over the responses that have one."""
    sums: dict[int, float] = {}
    counts: Counter[int] = Counter()
    forked: list[Response] = [
        one for one in candidate.responses if one is not None and one.fork is not None and one.states is not None
    ]
    for response in forked:
        assert response.fork is not None
        assert response.states is not None
        for place, js in enumerate(response.states.js):
            if abs(offset := place - response.fork) <= AROUND:
                sums[offset] = sums.get(offset, 0.0) + js
                counts[offset] += 1
    if not sums:
        return None
    rows = [
        {"offset": offset, "js": sums[offset] / counts[offset], "states": counts[offset]} for offset in sorted(sums)
    ]
    x = quantity("offset", "tokens after the fork", axis=whole())
    tip = tips(("offset", "tokens after the fork"), ("js", "mean JS"), ("states", "states"))
    line = {
        "mark": {"type": "line", "point": {"size": 30}, "color": BLUE},
        "encoding": {"x": x, "y": quantity("js", "mean JS, nats"), "tooltip": tip},
    }
    fork = {"data": values([{"offset": 0}]), "mark": {"type": "rule", **QUIET}, "encoding": {"x": x}}
    caption = (
        f"Mean JS of the two models over {len(forked):,} responses with a fork, up to {AROUND} tokens on either side of "
        "it; the dashed line is the fork."
    )
    body = {"data": values(rows), "layer": [fork, line]}
    return picture("around-fork", "Before and after the fork", caption, body)


def kl_distribution(candidate: Candidate) -> Plot | None:
    """The share of states with at most a given KL."""
    kls = sorted(kl for states in _states(candidate) for kl in states.kl)
    if not kls:
        return None
    points = [{"kl": max(kl, LEAST_KL), "share": 100 * place / len(kls)} for place, kl in enumerate(kls, start=1)]
    marks: list[Row] = [
        points[-(-len(kls) * share // 100) - 1] | {"share": share, "name": f"p{share}"} for share in SHARES
    ]
    x = logarithmic("kl", "KL of a state, nats", [point["kl"] for point in points])
    y = quantity("share", "states with at most this KL, %", scale={"domain": [0, 100]})
    line = {
        "data": values(thinned(points, CURVE_POINTS)),
        "mark": {"type": "line", "interpolate": "step-after", "color": BLUE, "strokeWidth": 2.5},
        "encoding": {"x": x, "y": y},
    }
    tip = tips(("name", "percentile"), ("kl", "KL"))
    dots = {
        "data": values(marks),
        "mark": {"type": "point", "filled": True, "size": 70, "color": VERMILION, "opacity": 1},
        "encoding": {"x": x, "y": y, "tooltip": tip},
    }
    words = {
        "data": values(marks),
        "mark": {"type": "text", "align": "right", "dx": -8, "dy": -8},
        "encoding": {"x": x, "y": y, "text": {"field": "name"}},
    }
    listed = ", ".join(f"{mark['name']} {mark['kl']:.3g}" for mark in marks)
    caption = f"How the KL is spread over {len(kls):,} states: {listed} nats.{floor_of(kls)}"
    return picture("kl-distribution", "KL of all states", caption, {"layer": [line, dots, words]})


def migration(candidate: Candidate) -> Plot | None:
    """What the critical states of the first round were in later rounds."""
    rounds: list[Counter[str]] = []
    for states in _states(candidate):
        for place, critical in enumerate(states.critical):
            if critical and states.became is not None:
                later = states.became[place]
                rounds += [Counter() for _ in range(1 + len(later) - len(rounds))]
                for number, kind in enumerate((states.kind[place], *later)):
                    rounds[number][NOT_VISITED if kind is None else KINDS[kind]] += 1
    if len(rounds) < 2:
        return None
    names = (*KINDS, NOT_VISITED)
    rows = [
        {"round": number, "kind": kind, "order": names.index(kind), "states": counts[kind]}
        for number, counts in enumerate(rounds, start=1)
        for kind in names
        if counts[kind]
    ]
    body = {
        "data": values(rows),
        "mark": {"type": "bar"},
        "encoding": {
            "x": {"field": "round", "type": "ordinal", "title": "round", "axis": {"labelAngle": 0}},
            "y": quantity("states", "critical states of round 1", axis=whole(rounds[0].total())),
            "color": coloured("kind", names, (*KIND_COLOURS, GREY)),
            "order": {"field": "order", "type": "quantitative"},
            "tooltip": tips(("round", "round"), ("kind", "kind"), ("states", "states")),
        },
    }
    count = rounds[0].total()
    agreeing = rounds[-1][KINDS[0]]
    caption = (
        f"Of {count:,} critical states of the first round {agreeing:,} agree in round {len(rounds)}. A state is visited "
        "again where the answer still begins with the same tokens."
    )
    return picture("migration", "What became of critical states", caption, body)


def _states(candidate: Candidate) -> Sequence[States]:
    return [one.states for one in candidate.responses if one is not None and one.states is not None]


def _concentration_axes() -> Row:
    percent = {"domain": [0, 100]}
    return {
        "x": quantity("states", "states, the riskiest first, %", scale=percent),
        "y": quantity("risk", "share of all risk, %", scale=percent),
    }
