"""What a page shows, as plain data. It is written into the file as JSON; `page/src/contract.ts` has the same types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

FORMAT = 1

Kind = Literal[0, 1, 2]  # agree, near miss, mismatch: an index into onptq.bank.KINDS
Change = Literal["same", "reworded", "clear", "content"]


@dataclass(frozen=True)
class Figure:
    """An estimate and its interval; None where nothing can be said."""

    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Measure:
    """What a figure is called, in which unit, which direction is good, and which figure is its noise floor."""

    name: str
    unit: str = ""
    less_is_better: bool | None = None
    noise: str = ""  # empty where none is measured
    noise_at_most: bool = False


@dataclass(frozen=True)
class Media:
    """An image or audio clip as a data URL, or the reason why it is left out."""

    kind: Literal["image", "audio"]
    name: str
    src: str | None = None
    note: str = ""


@dataclass(frozen=True)
class MessagePart:
    """A piece of a message: text, or the number of an entry of `Page.media`."""

    text: str = ""
    media: int | None = None


@dataclass(frozen=True)
class Turn:
    role: str
    parts: Sequence[MessagePart]


@dataclass(frozen=True)
class Answer:
    """What a model said, and what it earned where that is known."""

    text: str
    tokens: Sequence[int] | None = None
    finished: bool | None = None
    right: bool | None = None
    score: float | None = None  # points of those possible


@dataclass(frozen=True)
class Question:
    """A prompt or a graded item, with the dense model's answer."""

    id: str
    task: str
    kinds: Sequence[str]  # of text, image, audio
    turns: Sequence[Turn]
    dense: Answer
    reference: str | None = None


@dataclass(frozen=True)
class Top:
    """The ten likeliest next tokens of both models in one state: pairs of a token id and its probability."""

    dense: Sequence[tuple[int, float]]
    quantized: Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Futures:
    """The two continuations behind a decision, forced token first, and how far the dense model sees them apart at each step."""

    reference: Sequence[int]
    competitor: Sequence[int]
    apart: Sequence[float]
    continued_by: Literal["D", "Q"]


@dataclass(frozen=True)
class States:
    """The states of one response, as columns: entry i is the state that predicts token i, from 0. Names are the bank's."""

    reference: Sequence[int]
    competitor: Sequence[int]
    quantized: Sequence[int]
    margin_dense: Sequence[float]
    margin_quant: Sequence[float]
    erosion: Sequence[float]
    js: Sequence[float]
    kl: Sequence[float]
    kind: Sequence[Kind]
    consequence: Sequence[float | None]  # None where nothing was branched
    risk: Sequence[float]
    weight: Sequence[float]
    critical: Sequence[bool]
    top: Sequence[Top | None]
    futures: Sequence[Futures | None]
    became: Sequence[Sequence[Kind | None]] | None = None  # per state, its kind in later rounds; None where not visited


@dataclass(frozen=True)
class Response:
    """A candidate's answer to a prompt. `fork` is the first token, from 0, at which it leaves the dense model's answer."""

    answer: Answer
    change: Change
    fork: int | None = None
    states: States | None = None


@dataclass(frozen=True)
class Cell:
    """One cell of the flips: how many items, their share in percent with its interval, and which ones."""

    count: int
    percent: Figure
    items: Sequence[int]  # numbers of entries of `Page.items`


@dataclass(frozen=True)
class Flips:
    """Graded items by who was right: the dense model first, the candidate second."""

    right_right: Cell
    right_wrong: Cell
    wrong_right: Cell
    wrong_wrong: Cell


@dataclass(frozen=True)
class Served:
    """What a server makes of the checkpoint."""

    server: str
    gpu: str
    computes: str
    command: str = ""
    note: str = ""  # on its kernels


@dataclass(frozen=True)
class Plot:
    """A picture as a Vega-Lite specification that holds its own data."""

    id: str
    title: str
    caption: str  # what it shows, in a sentence; also read to those who do not see it
    spec: Mapping[str, Any]


@dataclass(frozen=True)
class Candidate:
    """One quantized model against the dense one."""

    name: str
    title: str  # as tables have it
    how: str  # what was quantized and how, in a sentence
    verdict: str  # what became of the answers, in a sentence
    figures: Mapping[str, Figure]
    scheme: str | None = None
    size_bytes: int | None = None
    served: Sequence[Served] = ()
    flips: Flips | None = None
    answers: Sequence[Answer | None] = ()  # one for every item
    responses: Sequence[Response | None] = ()  # one for every prompt
    plots: Sequence[Plot] = ()
    aside: bool = False  # a round, which answers other prompts than the other candidates do
    selects: bool = False  # the round's update learns from critical states by their weights, not from every state alike


@dataclass(frozen=True)
class Page:
    """Everything that a page shows."""

    title: str
    dense: str
    origin: str  # where prompts and items come from, in words
    candidates: Sequence[Candidate]
    prompts: Sequence[Question] = ()
    items: Sequence[Question] = ()
    media: Sequence[Media] = ()
    tokens: Mapping[int, str] = field(default_factory=dict)  # the text of every token id that occurs
    measures: Mapping[str, Measure] = field(default_factory=dict)
    plots: Sequence[Plot] = ()
    notes: Sequence[str] = ()
    dense_bytes: int | None = None
    version: str = ""
    format: int = FORMAT

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
