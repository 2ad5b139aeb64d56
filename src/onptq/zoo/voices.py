"""Voices of eSpeak NG: English accents and variants, with other speakers for training than for all other splits."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from onptq.errors import OnPTQError
from onptq.zoo.splits import check_split

ACCENTS = (
    "en-us",
    "en-us-nyc",
    "en",  # eSpeak's name of British English
    "en-gb-x-rp",
    "en-gb-x-gbclan",
    "en-gb-x-gbcwmd",
    "en-gb-scotland",
    "en-029",
)
# Left out: whispers, robots, echoes, slow ones, and those that use the C library's random numbers (klatt 6).
# Variants derived from one another (f2 and f5; the Klatt synthesizer's) are one speaker and stay on one side.
TRAIN_VARIANTS = (
    *("m2", "m3", "m4", "m5", "m7", "m8", "f1", "f4", "klatt", "klatt2", "klatt3", "iven", "iven2"),
    *("Alex", "Andrea", "Annie", "Denis", "Diogo", "Gene", "Henrique", "Mario", "Michael", "Mike", "Nguyen", "Storm"),
    *("anika", "antonio", "aunty", "belinda", "ed", "edward", "grandma", "gustave", "john", "linda", "max", "miguel"),
    *("paul", "pedro", "quincy", "robert", "steph"),
)
OTHER_VARIANTS = ("m1", "m6", "f2", "f3", "f5", "Jacky", "grandpa", "pablo", "sandro", "victor")
RATES = (140, 210)  # words per minute; the slowest speaker needs at most four seconds for a sentence
PITCHES = (35, 65)  # of eSpeak's 0 to 99, around the variant's own pitch at 50
SPREADS = (30, 70)  # likewise, how far the pitch moves within a sentence


@dataclass(frozen=True)
class Voice:
    """A speaker with rate and pitch."""

    language: str
    variant: str
    rate: int
    pitch: int
    spread: int

    def __post_init__(self) -> None:  # eSpeak itself would silently take another voice
        for value, valid in ((self.language, ACCENTS), (self.variant, (*TRAIN_VARIANTS, *OTHER_VARIANTS))):
            if value not in valid:
                raise OnPTQError(f"unknown voice {self.name!r}: expected for {value!r} one of {', '.join(valid)}")

    @property
    def name(self) -> str:
        """The name by which eSpeak selects it."""
        return f"{self.language}+{self.variant}"


def sample_voice(rng: Random, split: str) -> Voice:
    """A voice for `split`: calibration, held-out and test share their speakers, training has its own."""
    check_split(split)
    variants = TRAIN_VARIANTS if split == "train" else OTHER_VARIANTS
    return Voice(
        rng.choice(ACCENTS), rng.choice(variants), rng.randint(*RATES), rng.randint(*PITCHES), rng.randint(*SPREADS)
    )
