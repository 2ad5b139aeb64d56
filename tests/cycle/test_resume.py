"""Killed at any moment, the same command continues and ends with the same bytes; anything but the same command is refused.

Every kill -9 here is of a process of its own, forked from a server that has imported everything once.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml

import onptq
from onptq.files import file_sha256
from onptq.progress import Bar, QuietReporter
from onptq.recipe import Recipe

SEEDS = 16  # that are tried
TINY: dict[str, Any] = {
    "seed": 0,
    "rounds": 2,
    "data.prompts": 4,
    "data.holdout": 2,
    "follow.max_tokens": 8,
    "init": "mbq",
    "calibrate.codes": "free",
    "calibrate.response": 10.0,
    "calibrate.response_over": "visited",
    "calibrate.pair": 0.1,
    "calibrate.epochs": 2,
    "calibrate.batch": 2,
    "calibrate.micro_batch": 2,
    "calibrate.gamma": 0.2,
    "select.budget": 256,
    "calibrate.lr_smoothing": 0.02,
    "calibrate.lr_step": 0.02,
    "compute.batch_tokens": 200,  # several batches
    "compute.device": "cpu",
}
CHECKPOINT = {
    "model.safetensors",
    "config.json",
    "tokenizer.json",
}  # where a kill among the checkpoint's files is tried
AFTERWARDS = CHECKPOINT | {
    "run/rounds/0/theta.safetensors",
    "run/summary.json",
}  # where one after the rename is tried too
REPEATED = "run/final/"  # what rounds/0 has, written by the same lines
SHOWN = {"run/page.html", "run/receipt.json", "run/differences.md", "run/differences.json"}  # made of all the others
VARYING = {"run/log.jsonl", "run/summary.json", "run/SHA256SUMS"} | SHOWN  # times, and how often the run was begun


# --- the server's side ----------------------------------------------------------------------------------------------


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def interrupt() -> NoReturn:
    raise KeyboardInterrupt


class EndingReporter(QuietReporter):
    """Ends the run when a phase has begun, or has advanced so far."""

    def __init__(self, phase: str, after: int, end: Callable[[], NoReturn]) -> None:
        self.target, self.after, self.end = phase, after, end

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Bar]:
        if name == self.target and not self.after:
            self.end()
        yield EndingBar(self.after if name == self.target else None, self.end)


class EndingBar:
    def __init__(self, after: int | None, end: Callable[[], NoReturn]) -> None:
        self.after, self.end, self.done = after, end, 0

    def advance(self, n: int = 1, **info: Any) -> None:
        self.done += n
        if self.after is not None and self.done >= self.after:
            self.end()


def home(out: Path) -> Path:
    return out.with_name(f"{out.name}-run")


def label(out: Path, path: Path) -> str:
    """`run/NAME` of a file of the run, `NAME` of one of the checkpoint."""
    return f"run/{path.relative_to(home(out))}" if path.is_relative_to(home(out)) else str(path.relative_to(out))


def kill_while_writing(out: Path, survived: set[tuple[str, str]]) -> None:
    """From now on the process dies at the first rename, before it or afterwards, that no process before has died at."""
    rename = os.replace

    def replace(source: Any, target: Any, **options: Any) -> None:
        name = label(out, Path(target))
        if name.startswith(REPEATED) or not (name.startswith("run/") or name in CHECKPOINT):
            return rename(source, target, **options)
        if (name, "before") not in survived:
            if Path(source).is_file():
                os.truncate(source, Path(source).stat().st_size // 2)  # the disk may hold only half of it
            if (home(out) / "log.jsonl").exists():
                with (home(out) / "log.jsonl").open("a") as log:
                    log.write('{"time": "20')
            last_words(name, "before")
        rename(source, target, **options)
        if name in AFTERWARDS and (name, "after") not in survived:
            last_words(name, "after")
        return None

    def last_words(name: str, moment: str) -> NoReturn:
        with (out.parent / f"{out.name}.deaths").open("a") as file:
            file.write(json.dumps([name, moment]) + "\n")
        die()

    os.replace = replace  # type: ignore[assignment]


def run_job(job: Mapping[str, Any]) -> int:
    import torch

    from onptq.cycle import rounds
    from onptq.errors import OnPTQError

    torch.set_num_threads(1)  # makes torch replace the pool it lost in the fork, before several threads want it at once
    rounds.SAVE_SECONDS = job["save_seconds"]
    if job["survived"] is not None:
        kill_while_writing(Path(job["out"]), {tuple(death) for death in job["survived"]})
    reporter = EndingReporter(job["kill"][0], job["kill"][1], die) if job["kill"] else None
    try:
        onptq.quantize(
            job["model"],
            job["out"],
            calibration=Path(job["model"]) / "prompts.jsonl",
            recipe=Recipe.preset("risk", job["recipe"]),
            reporter=reporter,
            verify=job["verify"],
        )
    except OnPTQError as error:
        print(error, flush=True)
        return 2
    return 0


def import_everything(model: str) -> None:
    """Much is imported only when it is used, so use it."""
    import onptq.pipeline
    from onptq.checkpoint.load import load_policy
    from onptq.checkpoint.source import find_source
    from onptq.data.manifest import load_manifest
    from onptq.models.encoding import encode
    from onptq.models.processing import PromptProcessor

    source = find_source(model)
    processor = PromptProcessor.from_folder(source.folder, source.family, source.config)
    inputs = processor(load_manifest(source.folder / "prompts.jsonl")[0])
    encode(load_policy(source, "W4A8", device="cpu"), [inputs])
    onptq.pipeline.quantize  # noqa: B018


def serve(model: str) -> None:
    """One job per line of standard input, each in a fork; its exit status, or minus the signal that ended it, as answer."""
    import torch

    torch.set_num_threads(1)  # a fork has only the thread that forked
    import_everything(model)
    gc.freeze()  # a collection in a fork would copy every page
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            said = os.open(job["said"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(said, 1)
            os.dup2(said, 2)
            status = 70
            try:
                status = run_job(job)
            finally:
                if status == 70:
                    sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


# --- the tests' side ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    model: Path
    process: subprocess.Popen[str]
    said: Path
    seed: int
    done: dict[str, Path] = field(default_factory=dict)

    def __call__(
        self,
        out: Path,
        changes: Mapping[str, Any] | None = None,
        *,
        kill: tuple[str, int] | None = None,
        survived: list[Any] | None = None,
        save_seconds: float = 0.0,
        verify: bool = False,
        model: Path | None = None,
    ) -> int:
        """Run the job into `out`, in a process of its own, to its end or to its death."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        job: dict[str, Any] = {
            "recipe": TINY | {"seed": self.seed} | dict(changes or {}),
            "kill": kill,
            "survived": survived,
            "save_seconds": save_seconds,
            "model": str(model or self.model),
            "out": str(out),
            "said": str(self.said),
            "verify": verify,
        }
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def finish(self, out: Path, changes: Mapping[str, Any] | None = None, **options: Any) -> None:
        assert self(out, changes, **options) == 0, self.said.read_text()

    def reference(self, changes: Mapping[str, Any] | None = None) -> Path:
        """The run nobody interrupted."""
        key = json.dumps(changes, sort_keys=True)
        if key not in self.done:
            self.done[key] = Path(tempfile.mkdtemp(prefix="reference-", dir=self.said.parent))
            self.finish(self.done[key], changes)
        return self.done[key]


@pytest.fixture(scope="module")
def model(small: Path) -> Path:
    return small


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    command = [sys.executable, __file__, str(model)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "ready\n"
        yield with_a_seed(model, process, tmp_path_factory.mktemp("server") / "said.txt")
        process.stdin.close()


def with_a_seed(model: Path, process: subprocess.Popen[str], said: Path) -> Server:
    """The first whose run is worth comparing with: how long a tiny model gains by its updates depends on the CPU's last bits."""
    for seed in range(SEEDS):
        server = Server(model, process, said, seed)
        if is_worth_comparing_with(server.reference()):
            break
    return server


def is_worth_comparing_with(run: Path) -> bool:
    """Both rounds move theta, and not each time does the last iterate turn out the best."""
    best = [figures["best_step"] for figures in summary(run)["rounds"]]
    return min(best) > 0 and min(best) < 4


def files(run: Path) -> dict[str, bytes]:
    """Everything the run left, but for what tells times."""
    found = {label(run, path): path.read_bytes() for path in everything(run)}
    return {name: content for name, content in found.items() if name not in VARYING}


def everything(run: Path) -> list[Path]:
    return sorted(path for folder in (run, home(run)) for path in folder.rglob("*") if path.is_file())


def copy_of(run: Path, out: Path) -> Path:
    shutil.copytree(home(run), home(out))
    return shutil.copytree(run, out) if run.exists() else out


def summary(run: Path) -> dict[str, Any]:
    values = json.loads((home(run) / "summary.json").read_text())
    return {name: value for name, value in values.items() if name not in ("seconds", "verification")}


def assert_same(run: Path, reference: Path) -> None:
    found, expected = files(run), files(reference)
    assert sorted(found) == sorted(expected)
    assert [name for name in expected if found[name] != expected[name]] == []
    assert summary(run) == summary(reference)


def snapshot(run: Path) -> dict[str, tuple[int, bytes]]:
    return {label(run, path): (path.stat().st_mtime_ns, path.read_bytes()) for path in everything(run)}


# --- the same result ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_and_another_seed_another_theta(server: Server, tmp_path: Path) -> None:
    reference = server.reference()
    assert {"model.safetensors", *(f"run/rounds/{k}/{n}" for k in range(2) for n in ROUND)} <= files(reference).keys()
    server.finish(tmp_path / "again")
    assert_same(tmp_path / "again", reference)
    server.finish(tmp_path / "other", {"seed": server.seed + 1})
    other, same = files(tmp_path / "other"), files(reference)
    assert other["run/prompts.parquet"] != same["run/prompts.parquet"], "the seed draws the prompts too"
    assert other["run/rounds/0/theta.safetensors"] != same["run/rounds/0/theta.safetensors"]


ROUND = ("trajectories.parquet", "bank.parquet", "theta.safetensors", "holdout.parquet", "holdout_trajectories.parquet")


@pytest.mark.slow
def test_the_reference_is_worth_comparing_with(server: Server) -> None:
    """The rounds' thetas and states differ, or a kill could lose them unnoticed."""
    found = files(server.reference())
    thetas = {found[name] for name in found if name.endswith(("init.safetensors", "theta.safetensors"))}
    assert len(thetas) == 3
    assert found["run/rounds/0/bank.parquet"] != found["run/rounds/1/bank.parquet"]
    assert is_worth_comparing_with(server.reference())


COMPUTING = ("Initialize", "Follow", "Compare", "Branch", "Calibrate")


def processes(run: Path) -> list[list[dict[str, Any]]]:
    """The events of each process that worked on the run."""
    parts: list[list[dict[str, Any]]] = []
    for event in map(json.loads, (home(run) / "log.jsonl").read_text().splitlines()):
        if event["event"] == "open":
            parts.append([])
        parts[-1].append(event)
    return parts


def computed(events: list[dict[str, Any]], state: str) -> list[str]:
    """Phases of the cycle that began (`start`) or ended (`end`)."""
    phases = [event["phase"] for event in events if event["event"] == "phase" and event["state"] == state]
    return [phase for phase in phases if phase.split()[0] in COMPUTING]


def in_round(k: int) -> list[tuple[str, int]]:
    """Where a round is killed: at the end of each step, before it is committed, and at both ends and within its update."""
    steps = [(f"{step} {k}", 1) for step in ("Follow", "Compare", "Branch", "Follow held-out", "Compare held-out")]
    return [*steps, (f"Calibrate {k}", 0), (f"Calibrate {k}", 2), (f"Calibrate {k}", 4)]


EVERYWHERE = [
    ("Hash the model", 1),
    ("Load", 1),
    ("Encode", 2),
    ("Initialize (mbq)", 1),
    ("Follow 1", 1),
    ("Branch 1", 1),
    ("Calibrate 1", 2),
    *in_round(2),
    ("Follow held-out at the end", 1),
    ("Compare held-out at the end", 1),
    ("Compare held-out on the init's responses", 1),
    ("Compare the init on held-out", 1),
    ("Follow held-out of D", 1),
    ("Export", 0),
    ("Export", 1),
    ("Verify", 0),
    ("Verify", 2),
]
UPDATE = [("Calibrate 2", 2)]
KILLS: dict[str, tuple[dict[str, Any], list[tuple[str, int]], float]] = {
    "every phase": ({}, EVERYWHERE, 0),
    "updates that saved nothing": ({}, [("Calibrate 1", 3), ("Calibrate 2", 3)], 3600),
    "learned codes": ({"calibrate.codes": "learned"}, UPDATE, 0),
    "settled codes": ({"calibrate.codes": "settled"}, UPDATE, 0),
    "static": ({"method": "static", "calibrate.gamma": 0.0}, UPDATE, 0),
    "no refresh": ({"refresh": False, "calibrate.keep": "last"}, UPDATE, 0),
}


@pytest.mark.parametrize(("changes", "kills", "save_seconds"), KILLS.values(), ids=KILLS)
@pytest.mark.slow
def test_kill_9_in_each_phase_and_the_same_command_ends_the_same(
    changes: dict[str, Any], kills: list[tuple[str, int]], save_seconds: float, server: Server, tmp_path: Path
) -> None:
    """One run, begun again after every kill. What a step commits is never written again, so any damage is there at the end,
    and never computed again."""
    run = tmp_path / "run"
    options: dict[str, Any] = {"save_seconds": save_seconds, "verify": kills is EVERYWHERE}
    for kill in kills:
        assert server(run, changes, kill=kill, **options) == -signal.SIGKILL, (kill, server.said.read_text())
        assert not (home(run) / "summary.json").exists()
        if kill in UPDATE:
            assert (home(run) / "rounds/1/.calibrate.safetensors").exists()
        elif save_seconds:
            assert not list(home(run).rglob(".calibrate.safetensors"))
    server.finish(run, changes, **options)
    assert_same(run, server.reference(changes))
    ended: set[str] = set()
    for events in processes(run):
        assert not ended & set(computed(events, "start"))
        ended |= set(computed(events, "end"))
    assert "Calibrate 2" in ended
    verification = json.loads((home(run) / "summary.json").read_text()).get("verification")
    assert (verification is None) != options["verify"]
    assert verification is None or verification["max_abs_difference"] == 0.0


@pytest.mark.slow
def test_kill_9_within_every_single_write(server: Server, tmp_path: Path) -> None:
    """Each process dies with a half-written file and half a line in the log, or just after some of the whole ones; the
    checkpoint's own files are among them."""
    run, deaths = tmp_path / "run", tmp_path / "run.deaths"
    changes = {"rounds": 1}
    survived: list[Any] = []
    while (status := server(run, changes, survived=survived)) != 0:
        assert status == -signal.SIGKILL, server.said.read_text()
        survived = [json.loads(line) for line in deaths.read_text().splitlines()]
        if (run / "config.json").exists():
            json.loads((run / "config.json").read_text())  # never half a file
    died_at = {name for name, _ in survived}
    assert len(survived) == len(died_at) + len(AFTERWARDS)
    expected = {f"run/{name}" for name in ("recipe.yaml", "prompts.parquet", "init.safetensors", "summary.json")}
    expected |= {f"run/rounds/0/{name}" for name in (*ROUND, ".compared.parquet", ".calibrate.safetensors")}
    assert died_at >= expected | AFTERWARDS
    assert_same(run, server.reference(changes))
    log = [json.loads(line) for line in (home(run) / "log.jsonl").read_text().splitlines()]
    beginnings = [event["resumed"] for event in log if event["event"] == "open"]
    assert sum(beginnings) == len(beginnings) - 1 > len(died_at) / 2


@pytest.mark.slow
def test_a_continued_run_computes_no_committed_step_again(server: Server, tmp_path: Path) -> None:
    """Theta^(0), the whole first round and the steps of the second are on disk, and half of its update."""
    run = tmp_path / "run"
    assert server(run, kill=("Calibrate 2", 3)) == -signal.SIGKILL
    before = snapshot(run)
    server.finish(run)
    first, second = processes(run)
    ended, begun = computed(first, "end"), computed(second, "start")
    assert {"Initialize (mbq)", "Calibrate 1", "Branch 2"} <= set(ended)
    assert begun[0] == "Calibrate 2"
    assert set(begun) & set(ended) == set()
    assert [event["step"] for event in second if event["event"] == "step"] == [3, 4], "the third was not saved yet"
    after = snapshot(run)
    committed = [name for name in before if name.startswith("run/rounds/") or name == "run/init.safetensors"]
    assert {"run/init.safetensors", "run/rounds/0/theta.safetensors", "run/rounds/1/bank.parquet"} <= set(committed)
    written = [name for name in committed if "/." not in name and after[name] != before[name]]
    assert written == [], "not even with the same bytes"
    assert_same(run, server.reference())


# --- only the same command ------------------------------------------------------------------------------------------


MIDDLE = ("Calibrate 1", 3)


@pytest.fixture(scope="module")
def interrupted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("interrupted") / "run"
    recipe = Recipe.preset("risk", TINY)
    with pytest.raises(KeyboardInterrupt):
        onptq.quantize(
            model, run, calibration=model / "prompts.jsonl", recipe=recipe, reporter=EndingReporter(*MIDDLE, interrupt)
        )
    return run


@pytest.fixture
def begun(interrupted: Path, tmp_path: Path) -> Path:
    """A run that ended in the middle; each test has its own copy."""
    return copy_of(interrupted, tmp_path / "run")


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    recipe = Recipe.preset("risk", TINY)
    onptq.quantize(model, run, calibration=model / "prompts.jsonl", recipe=recipe, verify=False)
    return run


@pytest.fixture
def own_model(model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(model, tmp_path / "elsewhere" / model.name)  # the model card names the folder


def call(model: Path, out: Path, changes: Mapping[str, Any] | None = None, *arguments: object) -> Any:
    from typer.testing import CliRunner

    from onptq.cli import app

    options = [part for name, value in (TINY | dict(changes or {})).items() for part in ("--set", f"{name}={value}")]
    line = ["quantize", model, "--preset", "risk", "--out", out, "--calibration", model / "prompts.jsonl", *options]
    line += arguments
    return CliRunner().invoke(app, [str(part) for part in line])


def assert_refused(done: Any, run: Path, before: dict[str, tuple[int, bytes]], *expected: str) -> None:
    assert done.exit_code == 2, done.stderr
    assert "Traceback" not in done.stderr
    for text in (*expected, "another run"):
        assert text in done.stderr
    assert snapshot(run) == before


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"branch.horizon": 2}, "recipe.branch.horizon: 4 -> 2"),
        ({"scheme": "W8A8"}, "recipe.scheme: 'W4A8' -> 'W8A8'"),
        ({"seed": 99}, "seeds.recipe: 0 -> 99"),
        ({"rounds": 3}, "recipe.rounds: 2 -> 3"),
        ({"calibrate.gamma": 0.5}, "recipe.calibrate.gamma: 0.2 -> 0.5"),
        ({"data.prompts": 3}, "prompts.calibration: 4 -> 3"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_changed_recipe_is_refused_with_the_difference(
    changes: dict[str, Any], shown: str, model: Path, begun: Path
) -> None:
    before = snapshot(begun)
    assert_refused(call(model, begun, changes), begun, before, shown)


def flip_weight(model: Path) -> None:
    content = bytearray((model / "model.safetensors").read_bytes())
    content[-100] ^= 1
    (model / "model.safetensors").write_bytes(content)


def edit(name: str, **values: Any) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        path = model / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def reword_template(model: Path) -> None:
    path = model / "chat_template.jinja"
    path.write_text(path.read_text().replace("assistant", "helper"))


@pytest.mark.parametrize(
    "change",
    [
        flip_weight,
        edit("config.json", rms_norm_eps=1e-5),
        edit("generation_config.json", eos_token_id=5),
        edit("preprocessor_config.json", image_mean=[0.1, 0.2, 0.3]),
        reword_template,
    ],
    ids=["a bit of a weight", "config", "end of sequence", "image processor", "chat template"],
)
def test_a_changed_model_is_refused_with_the_difference(
    change: Callable[[Path], None], own_model: Path, begun: Path
) -> None:
    """All of these change what the model sees or says, so continuing would mix two models in one run."""
    before = snapshot(begun)
    change(own_model)
    assert_refused(call(own_model, begun), begun, before, "model.sha256: ")


def first_line(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], None]:
    def apply(model: Path) -> None:
        first, *rest = (model / "prompts.jsonl").read_text().splitlines()
        (model / "prompts.jsonl").write_text("\n".join([json.dumps(change(json.loads(first))), *rest]) + "\n")

    return apply


def repaint(model: Path) -> None:
    from PIL import Image

    picture = sorted((model / "media").iterdir())[0]
    Image.new("RGB", Image.open(picture).size, "white").save(picture)


def reorder(model: Path) -> None:
    first, second, *rest = (model / "prompts.jsonl").read_text().splitlines()
    (model / "prompts.jsonl").write_text("\n".join([second, first, *rest]) + "\n")


@pytest.mark.parametrize(
    "change",
    [first_line(lambda p: p | {"text": "Why?"}), first_line(lambda p: p | {"id": "other"}), repaint, reorder],
    ids=["text", "id", "picture", "order"],
)
def test_changed_prompts_are_refused_with_the_difference(
    change: Callable[[Path], None], own_model: Path, begun: Path
) -> None:
    before = snapshot(begun)
    change(own_model)
    assert_refused(call(own_model, begun), begun, before, "prompts.sha256: ")


@pytest.mark.slow
def test_the_same_model_and_prompts_from_elsewhere_continue_the_run(
    server: Server, own_model: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert server(run, kill=MIDDLE) == -signal.SIGKILL
    server.finish(run, model=own_model)
    found, expected = files(run), files(server.reference())
    assert [name for name in expected if found[name] != expected[name]] == []
    assert summary(run) == summary(server.reference()) | {"model": str(own_model)}


@pytest.mark.slow
def test_other_versions_only_warn(server: Server, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert server(run, kill=MIDDLE) == -signal.SIGKILL
    record = home(run) / "recipe.yaml"
    identity = yaml.safe_load(record.read_text())
    identity["versions"]["torch"] = "2.12.0"
    record.write_text(yaml.safe_dump(identity, sort_keys=False))
    sums = home(run) / "SHA256SUMS"
    written = [line for line in sums.read_text().splitlines() if not line.endswith("  recipe.yaml")]
    sums.write_text("\n".join([*written, f"{file_sha256(record)}  recipe.yaml", ""]))
    server.finish(run)
    assert "warning: this run was begun with other versions" in server.said.read_text()
    assert "torch: '2.12.0' -> " in server.said.read_text()
    found, expected = files(run), files(server.reference())
    assert [name for name in expected if found[name] != expected[name]] == ["run/recipe.yaml"]


def test_a_finished_run_returns_its_summary_at_once(model: Path, finished: Path, tmp_path: Path) -> None:
    run = copy_of(finished, tmp_path / "run")
    before = snapshot(run)
    done = call(model, run, None, "--no-verify", "--json")
    assert done.exit_code == 0
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["phase"] for line in lines if line["event"] == "phase"} == {"Hash the model"}
    assert any("finished run" in line["text"] for line in lines if line["event"] == "note")
    assert lines[-1]["result"] == json.loads((home(run) / "summary.json").read_text())
    after = snapshot(run)
    assert {name for name in after if after[name] != before.get(name)} - SHOWN == {"run/log.jsonl"}


def test_a_finished_run_of_another_recipe_is_refused(model: Path, finished: Path, tmp_path: Path) -> None:
    run = copy_of(finished, tmp_path / "run")
    assert_refused(call(model, run, {"seed": 99}), run, snapshot(run), "seeds.recipe: 0 -> 99")


def test_two_processes_cannot_continue_the_same_run(model: Path, begun: Path) -> None:
    from onptq.run import Run

    identity = yaml.safe_load((home(begun) / "recipe.yaml").read_text())
    with Run.open(begun, identity, home=home(begun)):
        before = snapshot(begun)
        done = call(model, begun)
        assert done.exit_code == 2
        assert "in use by another process" in done.stderr
        assert snapshot(begun) == before


if __name__ == "__main__":
    serve(sys.argv[1])
