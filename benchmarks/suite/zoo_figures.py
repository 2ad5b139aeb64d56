"""Pictures for docs/zoo.md: test items with what a model answers, and the curves of its training.

python -m benchmarks.suite.zoo_figures zoo:qwen2.5-vl docs/zoo
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Sequence
from pathlib import Path

from onptq.checkpoint.load import load_policy
from onptq.checkpoint.source import find_source
from onptq.evaluate.answers import Questions, answer
from onptq.evaluate.items import Item
from onptq.models.processing import PromptProcessor
from onptq.zoo.suite import items, tasks_of

SAMPLES = 2  # of every task
ZOOM = 2


def main() -> None:
    args = _parse()
    args.out.mkdir(parents=True, exist_ok=True)
    source = find_source(args.model)
    family = source.family.name
    chosen = [item for task in tasks_of(family) for item in items(family, task, "test", SAMPLES)]
    policy = load_policy(source, "W16A16")
    processor = PromptProcessor.from_folder(source.folder, source.family, source.config)
    said = [one.text for one in answer(Questions(policy, processor, chosen), "D")]
    print("\n".join(_table(chosen, said, args.out, family)))
    draw_curves(source.folder / "log.jsonl", args.out / f"{family}-training.svg")


def _table(chosen: Sequence[Item], said: Sequence[str], out: Path, family: str) -> list[str]:
    """A Markdown table; the pictures it shows are written on the way."""
    lines = ["| picture | asked | expected | answered |", "|---|---|---|---|"]
    for item, text in zip(chosen, said, strict=True):
        name = f"{family}-{item.id.replace('/', '-').replace(' ', '-')}.png"
        shown = ""
        if item.prompt.images:
            _enlarge(item.prompt.images[0].read(), out / name)
            shown = f"![{item.id}]({out.name}/{name})"
        asked = item.prompt.messages[0]["content"][-1]["text"].replace("\n", "<br>")
        sound = " (spoken)" if item.prompt.audios else ""
        lines.append(f"| {shown} | {asked}{sound} | {item.reference} | {text} |")
    return lines


def _enlarge(picture: bytes, path: Path) -> None:
    from PIL import Image

    with Image.open(io.BytesIO(picture)) as image:
        image.resize((image.width * ZOOM, image.height * ZOOM), Image.Resampling.NEAREST).save(path, optimize=True)


def draw_curves(log: Path, path: Path) -> None:
    """Loss per answer token by kind of lesson, over the steps."""
    import matplotlib.pyplot as plt

    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for kind in sorted({kind for record in records for kind in record["losses"]}):
        points = [(record["step"], record["losses"][kind]) for record in records if kind in record["losses"]]
        axes.plot(*zip(*points, strict=True), label=kind, linewidth=1.2)
    axes.set(xlabel="step", ylabel="loss per answer token", yscale="log")
    axes.legend(frameon=False, ncols=2)
    axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
