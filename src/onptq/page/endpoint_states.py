"""States from log-probabilities: what two servers' likeliest tokens say of two models, where both saw the same text.

A token that a server does not name among its likeliest is no likelier than the last of these. So erosion, JS, KL and the dense
model's margin are lower bounds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from onptq.bank import Column
from onptq.page.chat_server import TOP_LOGPROBS, Reply, Token
from onptq.page.contract import Answer, Kind, Response, States, Top
from onptq.page.responses import change, differ_in_content, fork
from onptq.recipe import RiskConfig

ALIKE: Kind = 0
NEARLY: Kind = 1
APART: Kind = 2
RISK = RiskConfig()
ROUNDING = 1e-6  # of probabilities that should sum to one
LEAST = 1e-30  # a probability that was rounded to zero
BROKEN = "\ufffd".encode()  # what vLLM writes for every token that is part of a character
END = b""  # the token with which an answer ends
END_SHOWN = "(end)"
WORD = re.compile(r"\s*\S+|\s+")


@dataclass
class Tokens:
    """Numbers for tokens that servers know by their bytes alone; the same bytes have the same number for all of them."""

    numbers: dict[bytes, int] = field(default_factory=dict)

    def number(self, data: bytes) -> int:
        return self.numbers.setdefault(data, len(self.numbers))

    def texts(self) -> dict[int, str]:
        return {number: _shown(data) for data, number in self.numbers.items()}


def respond(
    dense: Answer, own: Answer, dense_tokens: Sequence[Token], own_tokens: Sequence[Token], tokens: Tokens
) -> Response:
    """The response with its states up to the fork; where texts are the same, in whatever tokens, there is no fork."""
    place = fork(dense.tokens or (), own.tokens or ())
    common = len(dense_tokens) if place is None else place + 1
    states = states_of(dense_tokens[:common], own_tokens[:common], tokens)
    same = dense.text == own.text and dense.finished == own.finished
    response = Response(own, "same", None if same else place, states)
    return replace(response, change=change(response, not same and differ_in_content(dense, own)))


def states_of(dense: Sequence[Token], own: Sequence[Token], tokens: Tokens) -> States | None:
    """The states in which both models saw the same text, as far as both gave log-probabilities."""
    both = list(zip(dense, own, strict=False))
    known = next((place for place, pair in enumerate(both) if not (pair[0].top and pair[1].top)), len(both))
    rows = [_state(*pair) for pair in both[:known]]
    if not rows:
        return None
    number, nothing = tokens.number, [0.0] * len(rows)
    return States(
        reference=[number(row.reference) for row in rows],
        competitor=[number(row.competitor) for row in rows],
        quantized=[number(row.quantized) for row in rows],
        margin_dense=[row.margin_dense for row in rows],
        margin_quant=[row.margin_quant for row in rows],
        erosion=[row.erosion for row in rows],
        js=[row.js for row in rows],
        kl=[row.kl for row in rows],
        kind=[row.kind for row in rows],
        consequence=[None] * len(rows),
        risk=[row.risk for row in rows],
        weight=nothing,
        critical=[False] * len(rows),
        top=[Top(_listed(one.top, tokens), _listed(other.top, tokens)) for one, other in both[:known]],
        futures=[None] * len(rows),
    )


@dataclass(frozen=True)
class _State:
    reference: bytes
    competitor: bytes
    quantized: bytes
    margin_dense: float
    margin_quant: float
    js: float
    kl: float

    @property
    def erosion(self) -> float:
        return max(0.0, self.margin_dense - self.margin_quant)

    @property
    def kind(self) -> Kind:
        if self.quantized != self.reference:
            return APART
        return NEARLY if self.erosion > RISK.near_miss_tol else ALIKE

    @property
    def risk(self) -> float:
        return 0.0 if self.kind == ALIKE else RISK.erosion_weight * self.erosion + RISK.divergence_weight * self.js


def _state(dense: Token, own: Token) -> _State:
    reference = dense.data
    competitor = max(
        (token for token in own.top if token != reference), key=lambda token: own.top[token], default=reference
    )
    js, kl = divergences(dense.top, own.top)
    margins = [_above(each.top, reference) - _above(each.top, competitor) for each in (dense, own)]
    return _State(reference, competitor, own.data, margins[0], margins[1], js, kl)


def _above(top: Mapping[bytes, float], token: bytes) -> float:
    """The log-probability of a token; of one that is not named, that of the last that is, which is no smaller."""
    return top.get(token, min(top.values()))


def divergences(dense: Mapping[bytes, float], own: Mapping[bytes, float]) -> tuple[float, float]:
    """JS and KL over the tokens that both name, those that one of them names, and all others: lower bounds of the true ones.

    A token that a model does not name is no likelier than the last one that it names. Where that says nothing, tokens are counted
    among all others. Counting tokens together makes no divergence larger.
    """
    p, q = ({token: math.exp(value) for token, value in each.items() if BROKEN not in token} for each in (dense, own))
    of_dense, of_own = p.keys() - q.keys(), q.keys() - p.keys()
    apart = [
        (sum(p[token] for token in of_dense), _at_most(len(of_dense), own, q)),
        (_at_most(len(of_own), dense, p), sum(q[token] for token in of_own)),
    ]
    cells = [(p[token], q[token]) for token in sorted(p.keys() & q.keys())]
    signs = [1, -1]  # the dense model has more of the first, the other one of the second
    while True:
        rest = [max(ROUNDING, 1.0 - sum(cell[side] for cell in (*cells, *apart))) for side in (0, 1)]
        lasting = [at for at, (one, other) in enumerate(apart) if signs[at] * (one * rest[1] - other * rest[0]) > 0]
        if len(lasting) == len(apart):
            break
        apart, signs = [apart[at] for at in lasting], [signs[at] for at in lasting]
    columns = np.array([*cells, *apart, rest])
    first, second = (columns[:, side] / columns[:, side].sum() for side in (0, 1))
    middle = (first + second) / 2
    return (_kl(first, middle) + _kl(second, middle)) / 2, _kl(first, second)


def _at_most(count: int, top: Mapping[bytes, float], named: Mapping[bytes, float]) -> float:
    """The highest probability that so many tokens together can have of which a model names none."""
    return max(ROUNDING, min(count * math.exp(min(top.values())), 1.0 - sum(named.values()))) if count else 0.0


def _kl(p: Column, q: Column) -> float:
    there = p > 0
    return max(0.0, float((p[there] * np.log(p[there] / np.maximum(q[there], LEAST))).sum()))


def pieces_of(reply: Reply, in_words: bool) -> list[Token]:
    """The answer in tokens, or in words, with END behind it where the model ended it itself."""
    if in_words:
        pieces = [Token(word.encode("utf-8", errors="replace"), {}) for word in WORD.findall(reply.text)]
    else:
        pieces = list(reply.tokens or ())
    if reply.finished:
        last = pieces.pop() if pieces and _is_end(pieces[-1], reply.text) else Token(END, {})
        top = {END if data == last.data else data: value for data, value in last.top.items()}
        pieces.append(Token(END, top))
    return pieces


def _is_end(token: Token, text: str) -> bool:
    """Whether the last token of an answer is the one that ended it, which some servers list and no text has."""
    said = token.data.decode("utf-8", errors="replace").rstrip()
    return token.data == END or not text.rstrip().endswith(said.removeprefix("\ufffd"))


def spoken(reply: Reply, pieces: Sequence[Token], tokens: Tokens) -> Answer:
    return Answer(reply.text, [tokens.number(piece.data) for piece in pieces], reply.finished)


def _listed(top: Mapping[bytes, float], tokens: Tokens) -> list[tuple[int, float]]:
    ranked = sorted(top, key=lambda data: (-top[data], data))[:TOP_LOGPROBS]
    return [(tokens.number(data), min(1.0, math.exp(top[data]))) for data in ranked]


def _shown(data: bytes) -> str:
    """The text of a token; of one that is part of a character, its bytes."""
    if data == END:
        return END_SHOWN
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in data)
