"""Images and audio as the page holds them: small, and within a budget that the worst examples spend first."""

from __future__ import annotations

import base64
from collections.abc import Iterable

from onptq.data.prompts import Media as Source
from onptq.data.prompts import Prompt
from onptq.evaluate.previews import Modality, Preview, Previews, preview
from onptq.page.contract import Media, MessagePart, Turn

BUDGET = 6 * 2**20  # bytes of all media together, as they are in the file
LEFT_OUT = "left out, so that the page stays small"


class Album:
    """The media of all questions, each once. Files are not read where `previews` has them."""

    def __init__(self, previews: Previews | None = None, budget: int = BUDGET) -> None:
        self._previews = previews
        self._left, self._spent = budget, budget // 50  # so little left is hardly enough for one more
        self._places: dict[tuple[Modality, str], int] = {}
        self._sources: list[tuple[Modality, Source]] = []
        self._ranks: list[float] = []

    def turns(self, prompt: Prompt, badness: float = 0.0) -> list[Turn]:
        """The messages, with their media put into the album. The worse a question's answers, the earlier its media get room."""
        files: dict[Modality, Iterable[Source]] = {"image": iter(prompt.images), "audio": iter(prompt.audios)}
        turns = []
        for message in prompt.messages:
            parts = []
            for part in message["content"]:
                kind: Modality | None = part["type"] if part["type"] in files else None
                if kind is None:
                    parts.append(MessagePart(str(part.get("text", ""))))
                else:
                    source = next(iter(files[kind]), None)
                    place = None if source is None else self.place(kind, source, badness)
                    parts.append(MessagePart(media=place) if place is not None else MessagePart(f"[{kind}]"))
            turns.append(Turn(str(message["role"]), parts))
        return turns

    def place(self, kind: Modality, source: Source, badness: float) -> int:
        """The number of the file among the album's media."""
        key = kind, source.sha256
        if key not in self._places:
            self._places[key] = len(self._sources)
            self._sources.append((kind, source))
            self._ranks.append(badness)
        place = self._places[key]
        self._ranks[place] = max(self._ranks[place], badness)
        return place

    def media(self) -> list[Media]:
        """All of them in their order; what the budget does not hold, or nobody can read, has a note instead."""
        media: dict[int, Media] = {}
        for place in sorted(range(len(self._sources)), key=lambda place: (-self._ranks[place], place)):
            media[place] = self._within_budget(*self._sources[place])
        return [media[place] for place in range(len(media))]

    def _within_budget(self, kind: Modality, source: Source) -> Media:
        name = source.path.name if source.path is not None else f"{kind} {source.sha256[:8]}"
        if self._left < self._spent:
            return Media(kind, name, None, LEFT_OUT)
        small = self._preview(kind, source)
        if small.data is None:
            return Media(kind, name, None, small.note)
        url = f"data:{small.media_type};base64,{base64.b64encode(small.data).decode()}"
        if len(url) > self._left:
            return Media(kind, name, None, LEFT_OUT)
        self._left -= len(url)
        return Media(kind, name, url, small.note)

    def _preview(self, kind: Modality, source: Source) -> Preview:
        if source.data is None and self._previews is not None:
            return self._previews.get((kind, source.sha256), Preview())
        return preview(kind, source)
