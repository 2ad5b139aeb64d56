"""Run all eight benchmarks offline with lmms-eval itself, and lm-evaluation-harness, on models that come with OnPTQ.

    python clients/benchmarks.py             # about half an hour on two cores, with the environment
    python clients/benchmarks.py --items 8

Makes the environment of `onptq eval`, writes small files in the columns of each benchmark, answers them with the embedded
models, dense and rounded, from folders and from a server, and lets the tools' own functions score the answers. Then it
checks that what `onptq compare --samples` reads in the logs are the tools' own scores. OUT gets everything, and
results.json. Exit code 1 if a check failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some CPUs announce AMX and then refuse bf16 products
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmark_data import TASKS, write_benchmarks, write_text_task
from served import serving

import onptq
from onptq.cli.compare import compare_samples
from onptq.cli.evaluate import find_arm
from onptq.errors import OnPTQError
from onptq.evaluate.sample_logs import Log, read_arm
from onptq.files import cache_folder, to_json
from onptq.harness.benchmarks import Task, find_tasks
from onptq.harness.environment import Environment
from onptq.harness.run import PACKAGES, REQUIREMENTS, Arm, Evaluation, Settings
from onptq.progress import RichReporter
from onptq.recipe import Recipe
from onptq.zoo.random import write_random

HOOK = Path(__file__).with_name("torchvision_on_cpu.py")
SCHEME = "W4A6"  # rounded so coarsely that answers change
VISION = "mmmu,ocrbench,vizwiz,scienceqa,textvqa"
AUDIO = "librispeech,wenetspeech,omnibench"
SERVED = {"vision": "ocrbench,scienceqa", "audio": "librispeech_test_clean"}
AGREE = 0.9  # of the answers of a folder and of a server with the same checkpoint
TEXT = "colours"
# The embedded models know few instructions and not the benchmarks'. Asked in words they know, they must be right mostly, which
# shows that pictures and sound arrive.
CHOICES = "{{question}}\nA. {{LIST[0]}}\nB. {{LIST[1]}}\nC. {{LIST[2]}}\nD. {{LIST[3]}}"
KNOWN = {
    "ocrbench": ("ocrbench", None, 0.6),
    "scienceqa_known": ("scienceqa_img", CHOICES.replace("LIST", "choices"), 0.6),
    "textvqa_known": ("textvqa_val", "{{question}}", 0.6),
    "librispeech_known": ("librispeech_test_clean", "Write down what you hear.", 0.2),
    "omni_bench_known": ("omni_bench", CHOICES.replace("LIST", "options"), 0.6),
}

# What a tool reports for a task, from the points of its items.
REPORTED: Mapping[str, Callable[[float, float], float]] = {
    "ocrbench": lambda points, total: points / 1000,
    "librispeech": lambda points, total: 100 * points / total,
    "wenet_speech": lambda points, total: 100 * points / total,
    "omni_bench": lambda points, total: 100 * points / total,
}


def tasks_of(names: str, data: Path) -> list[Task]:
    """The tasks, and after those that are in KNOWN the same in other words, on the same data or on their own."""
    tasks = find_tasks(names.split(","))
    for name, (origin, words, _) in KNOWN.items():
        task = next((one for one in tasks if one.name == origin), None)
        if task is not None and words is not None:
            tasks.append(replace(task, name=name, functions={**task.functions, "doc_to_text": words}))
            if name not in TASKS:
                shutil.copyfile(data / f"{origin}.parquet", data / f"{name}.parquet")
    return tasks


def rounded(model: str, out: Path) -> Path:
    if not out.exists():
        source, _ = find_arm(model, None)
        onptq.quantize(source.folder, out, recipe=Recipe.preset("light", {"scheme": SCHEME, "method": "rtn"}))
    return out


def check_scores(name: str, results: Mapping[str, Any], logs: Mapping[str, Log], items: int) -> list[str]:
    """The sentences on what differs between the tool's own scores and those of its log."""
    faults = []
    for task, record in results.items():
        samples = logs[task].samples.values()
        if len(samples) != items:
            faults.append(f"{name}, {task}: {len(samples)} answers to {items} items")
        points = sum(one.grade.points for one in samples)
        total = sum(one.grade.total for one in samples)
        reported = next((one for key, one in REPORTED.items() if task.startswith(key)), lambda a, b: a / b)
        metric = "wer" if logs[task].metric == "word_errors" else logs[task].metric
        own = record["results"][task][metric]
        if abs(own - reported(points, total)) > 1e-4:
            faults.append(f"{name}, {task}: {metric} is {own}, and its log says {reported(points, total)}")
    return faults


def check_known(logs: Mapping[str, Log]) -> list[str]:
    """Tasks in known words that were answered worse than they must be."""
    faults = []
    for name, (_, _, limit) in KNOWN.items():
        grades = [one.grade for one in logs[name].samples.values()]
        share = sum(one.points for one in grades) / sum(one.total for one in grades)
        if share > limit if logs[name].metric == "word_errors" else share < limit:
            faults.append(f"{name}: {share:.2f}, expected {limit}")
    return faults


def run(args: argparse.Namespace) -> int:
    out = args.out.absolute()
    environment = Environment((args.environment or cache_folder() / "harness").absolute(), REQUIREMENTS, HOOK)
    made = environment.make()
    data = out / "data"
    write_benchmarks(data, args.items)
    texts = out / "text-tasks"
    count = write_text_task(texts, TEXT)
    settings = Settings(device="cpu")
    reporter = RichReporter()
    faults: list[str] = []
    results: dict[str, dict[str, Any]] = {}

    def evaluate(name: str, arm: Arm, tasks: str, text: bool = False) -> Path:
        folder = out / name
        evaluation = Evaluation(folder, environment, arm, settings, reporter)
        if text:
            results[name] = evaluation.text_tasks([tasks], texts)
        else:
            results[name] = evaluation.benchmarks(tasks_of(tasks, data), data)
        faults.extend(check_scores(name, results[name], read_arm(folder), count if text else args.items))
        return folder

    language = out / "models/random-llama"
    if not language.exists():
        write_random("llama", language)
    arms = [("vision", "zoo:qwen2.5-vl", VISION), ("audio", "zoo:qwen2.5-omni", AUDIO), ("text", str(language), TEXT)]
    for kind, model, tasks in arms:
        arm, text = find_arm(model, None)
        dense = evaluate(f"{kind}-dense", arm, tasks, text)
        checkpoint = rounded(model, out / "models" / kind)
        quantized = evaluate(f"{kind}-{SCHEME}", Arm(f"{model} {SCHEME}", checkpoint), tasks, text)
        compare_samples(str(dense), [str(quantized)], None, 0, out / f"{kind}-compared", False, False)
    logs: dict[str, Log] = {}
    same: list[bool] = []
    for kind, model, _ in arms[: len(SERVED)]:
        shutil.rmtree(out / f"{kind}-served", ignore_errors=True)  # of another port
        with serving(model) as url:
            served = read_arm(evaluate(f"{kind}-served", Arm("onptq", endpoint=url), SERVED[kind]))
        logs |= read_arm(out / f"{kind}-dense")
        same += [
            one.text == logs[task].samples[key].text for task, log in served.items() for key, one in log.samples.items()
        ]
    if sum(same) < AGREE * len(same):
        faults.append(f"folders and their servers agree on {sum(same)} of {len(same)} answers")
    faults += check_known(logs)
    record = {
        "versions": environment.versions(PACKAGES),
        "environment_seconds": made,
        "seconds": round(sum(one["seconds"] for each in results.values() for one in each.values()), 1),
        "items": args.items,
        "scheme": SCHEME,
        "same_answers_served": f"{sum(same)} of {len(same)}",
        "results": results,
        "faults": faults,
    }
    (out / "results.json").write_text(to_json(record, indent=2) + "\n", encoding="utf-8")
    for fault in faults:
        print(f"FAILED: {fault}", file=sys.stderr)
    print(f"{len(results)} arms in {record['seconds']:.0f} s, {len(faults)} faults; {out / 'results.json'}")
    return 1 if faults else 0


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=16, help="items of each task")
    parser.add_argument("--out", type=Path, default=Path("benchmarks-out"), help="folder; a killed command continues")
    parser.add_argument("--environment", type=Path, help="folder of the environment; default: in OnPTQ's cache folder")
    return parser.parse_args(arguments)


def main() -> None:
    try:
        code = run(parse_arguments())
    except OnPTQError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)


if __name__ == "__main__":
    main()
