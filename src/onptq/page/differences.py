"""The changed answers of a page, worst first: as records, in Markdown, as JSON, and in a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal

from onptq.page.contract import Answer, Candidate, Page, Question, Response
from onptq.page.text import in_markdown, one_line, visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

Changed = Literal["turned wrong", "content", "turned right", "clear", "reworded"]

ORDER: tuple[Changed, ...] = ("turned wrong", "content", "turned right", "clear", "reworded")  # the worst first
CLEAR: tuple[Changed, ...] = ("turned wrong", "content", "turned right", "clear")
WORDS: Mapping[Changed, str] = {"content": "says something else", "clear": "clear change"}
TOP = 10
QUESTION_LENGTH, ANSWER_LENGTH = 120, 140  # characters in a terminal
LEAD = 24  # characters that are shown before two answers part
NARROW = 76  # columns; below, a table has no room
WIDE = 120  # columns of a file


@dataclass(frozen=True)
class Difference:
    """A changed answer. Tokens are those at which both answers part; None where these are not known or an answer ends."""

    id: str
    task: str
    question: str
    dense: str
    quantized: str
    change: Changed
    reference: str | None = None
    fork: int | None = None
    dense_token: str | None = None
    quantized_token: str | None = None
    margin: float | None = None  # logits by which the dense model prefers its own token
    consequence: float | None = None
    risk: float | None = None

    @property
    def weight(self) -> float:
        """Consequence times risk: what clear changes are ordered by."""
        return (self.consequence or 0.0) * (self.risk or 0.0)


@dataclass(frozen=True)
class Differences:
    """The changed answers of one candidate, of how many it gave."""

    name: str
    title: str
    verdict: str
    answers: int
    changed: Sequence[Difference]

    @property
    def clear(self) -> int:
        return sum(one.change in CLEAR for one in self.changed)

    @property
    def clear_percent(self) -> float:
        return 100 * self.clear / self.answers if self.answers else 0.0

    def to_dict(self) -> dict[str, Any]:
        counts = {"answers": self.answers, "changed": len(self.changed), "clear": self.clear}
        own = {"name": self.name, "title": self.title, "verdict": self.verdict}
        return own | counts | {"differences": [asdict(one) for one in self.changed]}


def all_differences(page: Page) -> list[Differences]:
    """The changed answers of every candidate, in the page's order."""
    return [differences(page, candidate) for candidate in page.candidates if not candidate.aside]


def differences(page: Page, candidate: Candidate) -> Differences:
    """The changed answers of a candidate, worst first. A prompt and a graded item of one id are one example."""
    examples: dict[str, Difference | None] = {}
    for question, response in zip(page.prompts, candidate.responses, strict=False):
        if response is not None:
            examples[question.id] = _of_prompt(page, question, response)
    for question, answer in zip(page.items, candidate.answers, strict=False):
        if answer is not None:
            examples[question.id] = _of_item(page, question, answer, examples.get(question.id))
    changed = [one for one in examples.values() if one is not None]
    changed.sort(key=lambda one: (ORDER.index(one.change), -one.weight, -(one.margin or 0.0)))
    return Differences(candidate.name, candidate.title, candidate.verdict, len(examples), changed)


def to_json(page: Page) -> str:
    """All changed answers as a JSON object."""
    content = {
        "title": page.title,
        "dense": page.dense,
        "origin": page.origin,
        "candidates": [one.to_dict() for one in all_differences(page)],
    }
    return json.dumps(content, indent=2, ensure_ascii=True) + "\n"


def to_markdown(page: Page, top: int | None = None) -> str:
    """The changed answers of every candidate, or the worst of them, as sections of a document. The verdict comes first."""
    parts = [f"# {in_markdown(page.title)}"]
    for one in all_differences(page):
        shown = one.changed if top is None else one.changed[:top]
        parts += [f"## {in_markdown(one.title)}", in_markdown(one.verdict)]
        parts += [_section(number, each, one.title) for number, each in enumerate(shown, start=1)]
        if left := len(one.changed) - len(shown):
            parts.append(f"{left} more changed answers are not shown.")
    return "\n\n".join(parts) + "\n"


def print_differences(console: Console, page: Page, top: int = TOP) -> None:
    """Print every candidate's verdict and, as a table or, where that is too narrow, as a list, its worst changes."""
    if not console.is_terminal:
        console.width = max(console.width, WIDE)
    for one in all_differences(page):
        console.print(f"{one_line(one.title)}: {one_line(one.verdict)}", markup=False, highlight=False)
        shown = one.changed[:top]
        for part in _table(shown) if console.width >= NARROW else _list(shown):
            console.print(part)
        if left := len(one.changed) - len(shown):
            console.print(f"{left} more changed answers are on the page.", style="dim", markup=False, highlight=False)
        console.print()


def question_text(page: Page, question: Question) -> str:
    """The last turn of the user, with the names of its media in brackets."""
    turns = [turn for turn in question.turns if turn.role == "user"] or list(question.turns)
    parts = turns[-1].parts if turns else ()
    media = [f"[{page.media[part.media].kind}]" if part.media is not None else part.text for part in parts]
    return " ".join(text for text in media if text)


def parting(text: str, other: str, most: int) -> str:
    """So many characters of the text from shortly before it leaves the other one, in one line."""
    line = one_line(text)
    place = shared(line, one_line(other))
    start = place - LEAD if place > LEAD + most // 4 else 0
    return one_line(("…" if start else "") + line[start:], most)


def shared(text: str, other: str) -> int:
    """The number of characters with which both texts begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False)))


def _of_prompt(page: Page, question: Question, response: Response) -> Difference | None:
    if response.change == "same":
        return None
    difference = Difference(
        question.id,
        question.task,
        question_text(page, question),
        question.dense.text,
        response.answer.text,
        response.change,
        question.reference,
        response.fork,
    )
    place, states = response.fork, response.states
    if place is None:
        return difference
    here = states is not None and place < len(states.reference)
    dense, own = _token(question.dense, place), _token(response.answer, place)
    difference = replace(difference, dense_token=_text(page, dense), quantized_token=_text(page, own))
    if states is None or not here:
        return difference
    return replace(
        difference, margin=states.margin_dense[place], consequence=states.consequence[place], risk=states.risk[place]
    )


def _of_item(page: Page, question: Question, answer: Answer, prompt: Difference | None) -> Difference | None:
    """The change of a graded answer; what is known of its fork comes from the prompt of the same id."""
    was, now = question.dense, answer
    change: Changed
    if was.right is not None and was.right != now.right:
        change = "turned wrong" if was.right else "turned right"
    elif was.score != now.score:
        change = "content"
    elif was.text != now.text:
        change = "reworded"
    else:
        return prompt
    if prompt is None:
        prompt = Difference(
            question.id, question.task, question_text(page, question), was.text, now.text, change, question.reference
        )
    return replace(prompt, change=min(change, prompt.change, key=ORDER.index))


def _token(answer: Answer, place: int) -> int | None:
    tokens = answer.tokens or ()
    return tokens[place] if place < len(tokens) else None


def _text(page: Page, token: int | None) -> str | None:
    return None if token is None else page.tokens.get(token, f"<{token}>")


def _quoted(token: str | None) -> str:
    """A token in quotation marks, with its line breaks and blanks to be seen; dots for the end of an answer."""
    return "(end)" if token is None else visible(json.dumps(token, ensure_ascii=False))


def _facts(one: Difference) -> Iterator[str]:
    """What is known of the place where the answers part."""
    if one.fork is not None:
        yield f"part at token {one.fork + 1}: {_quoted(one.dense_token)} became {_quoted(one.quantized_token)}"
    if one.margin is not None:
        yield f"margin {one.margin:.2f} logits"
    if one.consequence is not None:
        yield f"consequence {one.consequence:.3f}"


def _section(number: int, one: Difference, title: str) -> str:
    task = f" ({in_markdown(one.task)})" if one.task else ""
    lines = [f"### {number}. {in_markdown(one.id)}{task}: {WORDS.get(one.change, one.change)}", ""]
    lines.append(f"- question: {in_markdown(one.question)}")
    if one.reference is not None:
        lines.append(f"- reference: {in_markdown(one.reference)}")
    lines += [f"- dense: {in_markdown(one.dense)}", f"- {in_markdown(title)}: {in_markdown(one.quantized)}"]
    if facts := ", ".join(_facts(one)):
        lines.append(f"- {in_markdown(facts)}")
    return "\n".join(lines)


def _table(shown: Sequence[Difference]) -> Iterator[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    if not shown:
        return
    table = Table(box=None, header_style="bold", padding=(0, 2, 1, 0), pad_edge=False, expand=True)
    for name, ratio in (("example", 3), ("question", 5), ("dense", 6), ("quantized", 6), ("fork", 4)):
        table.add_column(name, ratio=ratio, overflow="fold", min_width=8)
    for one in shown:
        table.add_row(
            Text(f"{one_line(one.id, 40)}\n{WORDS.get(one.change, one.change)}"),
            Text(one_line(one.question, QUESTION_LENGTH)),
            *_parted(one),
            Text("\n".join(_brief(one))),
        )
    yield table


def _parted(one: Difference) -> Iterator[Text]:
    """Both answers around the place where they part, in bold from there."""
    from rich.text import Text

    dense, quantized = (
        parting(one.dense, one.quantized, ANSWER_LENGTH),
        parting(one.quantized, one.dense, ANSWER_LENGTH),
    )
    place = shared(dense, quantized)
    for text in (dense, quantized):
        yield Text.assemble(text[:place], (text[place:], "bold"))


def _list(shown: Sequence[Difference]) -> Iterator[RenderableType]:
    from rich.text import Text

    for one in shown:
        lines = [
            f"{one_line(one.id, 40)}: {WORDS.get(one.change, one.change)}",
            f"  question: {one_line(one.question, QUESTION_LENGTH)}",
            f"  dense: {parting(one.dense, one.quantized, ANSWER_LENGTH)}",
            f"  quantized: {parting(one.quantized, one.dense, ANSWER_LENGTH)}",
            *(f"  {fact}" for fact in _brief(one)),
        ]
        yield Text("\n".join(lines), overflow="fold")


def _brief(one: Difference) -> Iterator[str]:
    if one.fork is not None:
        yield f"{_quoted(one.dense_token)} > {_quoted(one.quantized_token)}"
    if one.margin is not None:
        yield f"margin {one.margin:.2f}"
    if one.consequence is not None:
        yield f"consequence {one.consequence:.3f}"
