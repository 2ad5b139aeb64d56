"""Written instructions for text models: every topic in every form. A topic decides the split, so no two splits share one."""

from __future__ import annotations

from random import Random

from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError
from onptq.zoo.splits import check_split

EDITION = "onptq-instructions-1"
SYSTEM = (
    "You are a helpful assistant.",
    "You are a patient teacher. Use plain words.",
    "Answer in at most three sentences.",
    "You are a careful editor. Be precise.",
)
FORMS = (
    "Explain {} to a curious child.",
    "Write a short poem about {}.",
    "List three surprising facts about {}.",
    "What are the advantages and disadvantages of {}?",
    "Write the opening paragraph of a story about {}.",
    "Give step-by-step advice to someone who is new to {}.",
    "Summarize the history of {} in a few sentences.",
    "Write a dialogue between two friends who disagree about {}.",
    "What is the most common mistake people make with {}, and how can it be avoided?",
    "Write a polite e-mail that asks an expert a question about {}.",
    "Compare {} today with a hundred years ago.",
    "Name five words that belong to {} and define each of them.",
    "Write three quiz questions about {} with their answers.",
    "Why do people care about {}?",
    "Write a product description for a book about {}.",
    "How would you teach {} in one hour?",
)
# Of every fifty topics, in this order, 40 are for calibration, 2 are held out and 8 are tested.
TOPICS = (
    "bread baking", "lighthouses", "volcanoes", "chess", "beekeeping", "solar power", "old maps", "jazz music",
    "tide pools", "bicycles", "desert plants", "night trains", "libraries", "origami", "earthquakes", "tea",
    "street markets", "telescopes", "rain forests", "sailing", "glass making", "public parks", "coral reefs", "clocks",
    "mountain climbing", "radio", "paper money", "winter", "robots", "marathon running", "vegetable gardens", "bridges",
    "migrating birds", "film photography", "castles", "board games", "rivers", "knitting", "space stations", "cheese",
    "elections", "sleep", "fractions", "dolphins", "violins", "compost", "subways", "dictionaries", "thunderstorms",
    "pottery", "the moon", "vaccines", "recycling", "ballet", "wind turbines", "spiders", "debating", "chocolate",
    "calendars", "swimming", "magnets", "newspapers", "wolves", "probability", "opera", "deserts", "ice skating",
    "electric cars", "proverbs", "mushrooms", "cathedrals", "cloud computing", "first aid", "ants", "perfume",
    "the Silk Road", "juggling", "microscopes", "taxes", "soup", "satellites", "sign language", "whales", "percentages",
    "street art", "hiking", "encryption", "rice", "the printing press", "owls", "gymnastics", "batteries", "folk tales",
    "aquariums", "weather forecasts", "salt", "triangles", "museums", "penguins", "budgeting", "drums", "glaciers",
    "spelling", "trains", "honey", "negotiation", "comets", "carpentry", "insulin", "yoga", "the alphabet", "tigers",
    "search engines", "cotton", "theatre", "prime numbers", "camping", "bats", "concrete", "insurance", "jellyfish",
    "ceramics", "passwords", "tomatoes", "the Roman roads", "basketball", "lasers", "graphs", "horses", "radio telescopes",
    "dance", "vitamins", "harbours", "code review", "eclipses", "apples", "mediation", "gears", "frogs", "sculpture",
    "public speaking", "oil paint", "steam engines", "maps of the stars", "wetlands", "table tennis", "ink", "savings",
    "beavers", "algebra",
)  # fmt: skip
SHARES = {"calibration": (0, 40), "held-out": (40, 42), "test": (42, 50)}  # of every fifty topics


def instructions(split: str, count: int) -> list[Prompt]:
    """`count` prompts of a split in a fixed order; some begin with a system message. Never the same text twice."""
    check_split(split)
    if split not in SHARES:
        raise OnPTQError(f"there are no instructions of the split {split!r}; expected one of {', '.join(SHARES)}")
    first, end = SHARES[split]
    topics = [topic for place, topic in enumerate(TOPICS) if first <= place % 50 < end]
    pairs = [(form, topic) for form in FORMS for topic in topics]
    if count > len(pairs):
        raise OnPTQError(f"{count} instructions of the split {split!r}: expected at most {len(pairs)}")
    rng = Random(f"{EDITION}/{split}")
    rng.shuffle(pairs)
    return [
        Prompt(number, f"instruction/{split}/{number}", _messages(form.format(topic), rng))
        for number, (form, topic) in enumerate(pairs[:count])
    ]


def _messages(text: str, rng: Random) -> list[dict[str, object]]:
    system = rng.choice(SYSTEM) if rng.random() < 0.5 else None
    turns = [("system", system), ("user", text)]
    return [{"role": role, "content": [{"type": "text", "text": said}]} for role, said in turns if said is not None]
