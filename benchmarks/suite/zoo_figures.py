"""Figures of docs/zoo.md: test items with the answers of a model, and its training curves.

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
from onptq.evaluate.answers import EncodedItems, answer
from onptq.evaluate.tasks import Item
from onptq.models.processing import PromptProcessor
from onptq.zoo.suite import items, tasks_of

SAMPLES = 2  # of every task
ZOOM = 2
LOGS = Path(__file__).parents[2] / "tools" / "zoo" / "logs"  # of the trainings of the embedded models


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    source = find_source(args.model)
    family = source.family.name
    chosen = [item for task in tasks_of(family) for item in items(family, task, "test", SAMPLES)]
    policy = load_policy(source, "W16A16")
    processor = PromptProcessor.from_folder(source.folder, source.family, source.config)
    answers = [one.text for one in answer(EncodedItems(policy, processor, chosen), "D")]
    print("\n".join(_table(chosen, answers, args.out, family)))
    draw_curves(LOGS / f"{family}.jsonl", args.out / f"{family}-training.svg")


def _table(chosen: Sequence[Item], answers: Sequence[str], out: Path, family: str) -> list[str]:
    """The lines of a Markdown table; writes the images that it shows into `out`."""
    lines = ["| image | question | expected | answer |", "|---|---|---|---|"]
    for item, text in zip(chosen, answers, strict=True):
        name = f"{family}-{item.id.replace('/', '-').replace(' ', '-')}.png"
        shown = ""
        if item.prompt.images:
            _enlarge(item.prompt.images[0].read(), out / name)
            shown = f"![{item.id}]({out.name}/{name})"
        question = item.prompt.messages[0]["content"][-1]["text"].replace("\n", "<br>")
        spoken = " (spoken)" if item.prompt.audios else ""
        lines.append(f"| {shown} | {question}{spoken} | {item.reference} | {text} |")
    return lines


def _enlarge(png: bytes, path: Path) -> None:
    from PIL import Image

    with Image.open(io.BytesIO(png)) as image:
        image.resize((image.width * ZOOM, image.height * ZOOM), Image.Resampling.NEAREST).save(path, optimize=True)


def draw_curves(log: Path, path: Path) -> None:
    """Draw the loss per answer token by kind of lesson, over the steps."""
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


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
