"""Runs of several processes end as those of one: the same states, critical sets and, but for the order of sums, theta."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from onptq.bank import States, read_trajectories
from onptq.checkpoint.parts import own_layers
from onptq.checkpoint.source import find_source
from onptq.cli import app
from onptq.errors import OnPTQError
from onptq.files import read_json
from onptq.quantizer.theta import Theta
from onptq.ranks import ALONE, Ranks, own_gpu, pack, unpack
from onptq.schemes import Scheme
from onptq.zoo.random import write_random

RECIPE: dict[str, Any] = {
    "init": "search",
    "seed": 3,
    "data.prompts": 7,
    "data.holdout": 3,
    "follow.max_tokens": 6,
    "calibrate.epochs": 1,
    "calibrate.batch": 4,
    "calibrate.micro_batch": 1,
    "compute.batch_tokens": 60,  # five batches of calibration prompts, or about that
}
ORDER = 1e-6  # by which the order of float32 sums may move theta
FILES = ("trajectories.parquet", "bank.parquet", "holdout_trajectories.parquet", "holdout.parquet")


class Fault(NamedTuple):
    """What befalls one process at a step of the cycle: a signal or an error."""

    rank: int
    step: str
    what: int | str


@dataclass
class Server:
    """A process that has imported everything, and forks the processes of a job as torchrun starts them."""

    process: subprocess.Popen[str]

    def __call__(
        self,
        model: Path,
        out: Path,
        size: int,
        *,
        fault: Fault | None = None,
        together: int | None = None,
        limit: float | None = None,
        shard_bytes: int | None = None,
        **changes: Any,
    ) -> list[int]:
        """The exit codes of the processes. Tensors with `together` or more elements are summed by themselves. `limit` is for
        how many seconds a process may give no sign of life, `shard_bytes` the size of the checkpoint's files."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        job = {
            "size": size,
            "fault": fault,
            "together": together,
            "limit": limit,
            "shard_bytes": shard_bytes,
            "port": free_port(),
            "out": str(out),
            "words": words(model, out, changes),
        }
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        codes: list[int] = json.loads(self.process.stdout.readline())
        return codes

    def finish(self, model: Path, out: Path, size: int, **changes: Any) -> Path:
        codes = self(model, out, size, **changes)
        assert codes == [0] * size, [printed(out, rank) for rank in range(size)]
        return out


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    command, environment = [sys.executable, __file__], os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield Server(process)
        assert process.stdin is not None
        process.stdin.close()


def serve() -> None:
    """The server's side: a line for every job, a line with the exit codes back."""
    from PIL import Image

    from onptq import heartbeat, ranks
    from onptq.checkpoint import parts

    for module in (
        "onptq.pipeline",
        "onptq.evaluate.baselines",
        "scipy.stats",
        "compressed_tensors",
        "torch.distributed.fsdp",
    ):
        import_module(module)  # before the forks, so that none has to
    for family in ("llama", "qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni"):
        import_module(f"transformers.models.{family}.modeling_{family}")
    Image.init()

    def act(job: dict[str, Any], rank: int) -> None:
        size = str(job["size"])
        os.environ |= {"TORCHELASTIC_RUN_ID": "test", "RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_WORLD_SIZE": "1"}
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"])}
        file = os.open(f"{job['out']}-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        ranks.TOGETHER = job["together"] or ranks.TOGETHER
        if job["limit"] is not None:
            heartbeat.INTERVAL, heartbeat.LIMIT = job["limit"] / 10, job["limit"]
        if job["shard_bytes"] is not None:
            parts.MAX_SHARD_BYTES = job["shard_bytes"]
        if job["fault"] is not None and job["fault"][0] == rank:
            module, _, name = job["fault"][1].rpartition(".")
            module = module or "onptq.cycle.rounds"
            setattr(import_module(module), name, lambda *_, **__: suffer(job["fault"][2]))
        app(job["words"])

    def suffer(what: int | str) -> None:
        if isinstance(what, str):
            raise OnPTQError(what)
        os.kill(os.getpid(), what)

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        job, children = json.loads(line), []
        for rank in range(job["size"]):
            if (child := os.fork()) == 0:
                signal.alarm(300)
                code = 70
                try:
                    act(job, rank)
                except SystemExit as end:
                    code = end.code if isinstance(end.code, int) else 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            children.append(child)
        states = [os.waitpid(child, os.WUNTRACED)[1] for child in children]
        for rank, (child, state) in enumerate(zip(children, states, strict=True)):
            if os.WIFSTOPPED(state):  # torchrun ends what is left
                os.kill(child, signal.SIGKILL)
                states[rank] = os.waitpid(child, 0)[1]
        print(json.dumps([os.waitstatus_to_exitcode(state) for state in states]), flush=True)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def words(model: Path, out: Path, changes: dict[str, Any]) -> list[str]:
    """The arguments of `onptq`."""
    settings = RECIPE | {name.replace("__", "."): value for name, value in changes.items()}
    return [
        *("quantize", str(model), "--out", str(out), "--calibration", str(model / "prompts.jsonl")),
        *("--scheme", "W4A8", "--device", "cpu", "--no-verify"),
        *(word for name, value in settings.items() for word in ("--set", f"{name}={value}")),
    ]


def printed(out: Path, rank: int) -> str:
    return Path(f"{out}-{rank}.txt").read_text()


def home(out: Path) -> Path:
    return out.with_name(f"{out.name}-run")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`model("llama")`: a small checkpoint of that family with ten prompts."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = write_random(
                family, folder, prompts=10, hidden=64, heads=2, kv_heads=1, ffn=128, vocab=512, image_size=56
            )
        return made[family]

    return get


def assert_alike(out: Path, reference: Path) -> None:
    """The first round is the same to the last bit, as its Q is. Theta differs by the order of sums."""
    for name in FILES:
        here, there = (home(one) / "rounds/0" / name for one in (out, reference))
        if "trajectories" in name:
            assert read_trajectories(here) == read_trajectories(there)
        else:
            here_states, there_states = States.read(here), States.read(there)
            for column in fields(States):
                ours, theirs = (getattr(states, column.name) for states in (here_states, there_states))
                np.testing.assert_array_equal(ours, theirs, err_msg=f"{name}: {column.name}")
    assert (home(out) / "init.safetensors").read_bytes() == (home(reference) / "init.safetensors").read_bytes()
    init, ours, theirs = (
        Theta.load(home(one) / name, "cpu").tensors()
        for one, name in (
            (reference, "init.safetensors"),
            (out, "rounds/0/theta.safetensors"),
            (reference, "rounds/0/theta.safetensors"),
        )
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor.float(), theirs[name].float(), rtol=0, atol=ORDER, msg=name)
    moved = (
        float((init[name].float() - tensor.float()).abs().max()) for name, tensor in theirs.items() if name in init
    )
    assert max(moved) > 100 * ORDER


def test_prompts_go_to_the_ranks_in_turn_so_many_at_a_time() -> None:
    places = list(range(7))
    assert [Ranks(rank, 3).shares(places, 2) for rank in range(3)] == [[0, 1, 6], [2, 3], [4, 5]]
    assert [Ranks(rank, 4).shares([5], 2) for rank in range(4)] == [[5], [], [], []]
    assert [Ranks(rank, 4).shares(places, 8) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6]]
    assert Ranks(1, 2).shares([], 2) == []
    assert ALONE.shares(places, 2) == places


def test_one_process_works_alone() -> None:
    assert ALONE.is_first
    assert ALONE.gather("value") == ["value"]
    assert ALONE.lead(lambda: 3) == ALONE.after_first(lambda: 3) == 3


def test_messages_are_safetensors_and_json() -> None:
    columns = {"t": np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::2], "none": np.zeros((0, 2), np.float32)}
    value = {"texts": ["ä", None, True], "numbers": [0.1, 2**60, float("inf")], "columns": [columns, {}]}
    got = unpack(pack(value))
    for name, column in columns.items():
        sent = got["columns"][0].pop(name)
        assert (sent.dtype, sent.shape) == (column.dtype, column.shape)
        np.testing.assert_array_equal(sent, column)
    assert got == value | {"columns": [{}, {}]}
    with pytest.raises(TypeError, match="Path is not plain data"):
        pack([Path("a")])


def test_other_commands_refuse_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "test", "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["compare", "zoo:llama"])
    assert result.exit_code == 2
    assert "torchrun started 2 processes, and only `onptq quantize` shares its work among them" in result.stderr
    monkeypatch.setenv("RANK", "1")
    result = CliRunner().invoke(app, ["compare", "zoo:llama"])
    assert (result.exit_code, result.output) == (2, "")


def test_each_process_needs_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"TORCHELASTIC_RUN_ID": "test", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OnPTQError, match="4 processes on a machine with 2 GPUs: expected --nproc-per-node 2 or fewer"):
        own_gpu(2)
    assert own_gpu(4) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes"), [("qwen2.5-omni", (2, 4)), ("qwen3-vl", (4,)), ("qwen2.5-vl", (2,)), ("llama", (2,))]
)
def test_several_processes_find_the_critical_set_and_the_theta_of_one(
    family: str, sizes: tuple[int, ...], server: Server, model: Callable[[str], Path], tmp_path: Path
) -> None:
    one = server.finish(model(family), tmp_path / "1", 1)
    theirs = read_json(home(one) / "summary.json")
    for size in sizes:
        several = server.finish(model(family), tmp_path / str(size), size)
        assert_alike(several, one)
        assert "held-out" in printed(several, 0)
        assert [printed(several, rank) for rank in range(1, size)] == [""] * (size - 1), "only the first prints"
        ours = read_json(home(several) / "summary.json")
        for side in ("rtn", "initial"):
            assert ours["holdout"][side] == theirs["holdout"][side]
        assert ours["checkpoint"]["bytes"] == theirs["checkpoint"]["bytes"]
        assert not (home(several) / ".scratch").exists()


SHORT: dict[str, Any] = {
    "init": "rtn",
    "data__prompts": 5,
    "data__holdout": 2,
    "follow__max_tokens": 4,
    "calibrate__keep": "last",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "size", "shard"),
    [("llama", 4, "always"), ("qwen2.5-vl", 2, "always"), ("llama", 1, "offload"), ("llama", 2, "offload")],
)
def test_a_model_whose_blocks_are_split_over_processes_computes_as_a_whole_one(
    family: str, size: int, shard: str, server: Server, model: Callable[[str], Path], tmp_path: Path
) -> None:
    one = server.finish(model(family), tmp_path / "one", 1, **SHORT)
    several = server.finish(model(family), tmp_path / "several", size, compute__shard=shard, **SHORT)
    assert_alike(several, one)
    ours, theirs = (read_json(home(out) / "summary.json") for out in (several, one))
    assert ours["holdout"]["initial"] == theirs["holdout"]["initial"]
    assert ours["checkpoint"]["bytes"] == theirs["checkpoint"]["bytes"]
    assert "the decoder's blocks are" in printed(several, 0)


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["never", "always"])
def test_processes_write_shards_of_their_own_with_the_bytes_of_one(
    shard: str, server: Server, model: Callable[[str], Path], tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"method": "search", "shard_bytes": 30_000, "compute__shard": shard}
    one, three = (server.finish(model("qwen2.5-vl"), tmp_path / str(n), n, **changes) for n in (1, 3))
    files = sorted(path.name for path in one.iterdir())
    assert len(shards := [name for name in files if name.endswith(".safetensors")]) > 3, shards
    assert sorted(path.name for path in three.iterdir()) == files
    for name in files:
        assert (three / name).read_bytes() == (one / name).read_bytes(), name
    source, scheme = find_source(model("qwen2.5-vl")), Scheme.parse("W4A8")
    layers = [own_layers(source, scheme, Ranks(rank, 2), limit=30_000) for rank in range(2)]
    assert sorted(layers[0] + layers[1]) == [0, 1]
    assert all(layers), "each folds what it writes"


@pytest.mark.slow
def test_a_disk_error_of_one_process_leaves_no_checkpoint(
    server: Server, model: Callable[[str], Path], tmp_path: Path
) -> None:
    fault = Fault(1, "onptq.checkpoint.write._replacement", "the second cannot write")
    changes: dict[str, Any] = {"method": "search", "shard_bytes": 30_000}
    assert server(model("qwen2.5-vl"), tmp_path / "out", 2, fault=fault, **changes) == [2, 2]
    assert "error: the second cannot write" in printed(tmp_path / "out", 1)
    assert "Traceback" not in printed(tmp_path / "out", 0)
    assert not list((tmp_path / "out").glob("*"))
    server.finish(model("qwen2.5-vl"), tmp_path / "out", 2, **changes)


@pytest.mark.slow
def test_a_sharded_run_goes_on_with_another_number_of_processes_and_ends_where_one_dies(
    server: Server, model: Callable[[str], Path], tmp_path: Path
) -> None:
    """With settled codes of a learned init."""
    folder, out = model("qwen3"), tmp_path / "out"
    changes = SHORT | {"compute__shard": "always", "init": "search+signround", "init_steps": 2}
    assert server(folder, out, 2, fault=Fault(1, "compare", signal.SIGKILL), **changes) == [2, -signal.SIGKILL]
    assert "error: another process of this job has ended" in printed(out, 0)
    assert (home(out) / "rounds/0/trajectories.parquet").exists()
    assert server(folder, out, 2, fault=Fault(1, "calibrate", "the second is broken"), **changes) == [2, 2]
    assert "Traceback" not in printed(out, 0)
    server.finish(folder, out, 1, **changes)
    assert_alike(out, server.finish(folder, tmp_path / "one", 1, **changes | {"compute__shard": "never"}))


@pytest.mark.slow
def test_processes_without_prompts_learn_the_same_offsets(
    server: Server, model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Two calibration prompts for three processes. A micro-batch of four is one prompt for each; every offset is summed by
    itself."""
    changes = {"data__prompts": 2, "data__holdout": 1, "calibrate__codes": "learned", "calibrate__keep": "last"}
    one = server.finish(model("llama"), tmp_path / "one", 1, **changes)
    three = server.finish(model("llama"), tmp_path / "three", 3, together=1000, calibrate__micro_batch=4, **changes)
    assert_alike(three, one)


@pytest.mark.slow
def test_a_process_that_dies_ends_the_job_and_any_number_of_them_continues_it(
    server: Server, model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, out = model("qwen2"), tmp_path / "out"
    began = time.monotonic()
    assert server(folder, out, 3, fault=Fault(1, "compare", signal.SIGKILL)) == [2, -signal.SIGKILL, 2]
    assert time.monotonic() - began < 60
    assert "error: another process of this job has ended" in printed(out, 0)
    assert "with any number of processes, continues the run" in printed(out, 0)
    assert printed(out, 2) == ""
    assert (home(out) / "rounds/0/trajectories.parquet").exists()
    assert server(folder, out, 2, fault=Fault(0, "calibrate", signal.SIGKILL)) == [-signal.SIGKILL, 2]
    assert "error: another process of this job has ended" in printed(out, 1)
    assert (home(out) / "rounds/0/bank.parquet").exists()
    server.finish(folder, out, 4)
    assert_alike(out, server.finish(folder, tmp_path / "one", 1))


@pytest.mark.slow
def test_a_process_that_hangs_ends_the_job(server: Server, model: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert server(model("llama"), out, 2, limit=4.0, fault=Fault(1, "compare", signal.SIGSTOP)) == [2, -signal.SIGKILL]
    assert "process 1 of this job has given no sign of life for 4 seconds" in printed(out, 0)


@pytest.mark.slow
def test_an_error_of_one_process_ends_all(server: Server, model: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert server(model("llama"), out, 2, fault=Fault(1, "compare", "the second is broken")) == [2, 2]
    assert printed(out, 1) == "error: the second is broken\n"
    assert "another process of this job has ended" in printed(out, 0)
    assert "Traceback" not in printed(out, 0)
    out = tmp_path / "used"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    assert server(model("llama"), out, 2) == [2, 2]
    assert "is not empty and not a run" in printed(out, 0)
    assert printed(out, 1) == "", "an error of the first is shown once"
    assert server(tmp_path / "nothing", tmp_path / "new", 2) == [2, 2]
    assert "nothing" in printed(tmp_path / "new", 0)
    assert printed(tmp_path / "new", 1) == ""


@pytest.mark.slow
def test_torchrun_starts_the_processes_again_when_one_dies(model: Callable[[str], Path], tmp_path: Path) -> None:
    out, settings = tmp_path / "out", {"follow__max_tokens": 24}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "--max-restarts", "1", "-m", "onptq", *words(model("llama"), out, settings), "--verify"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as agent:
        while agent.poll() is None and not (home(out) / "rounds/0/trajectories.parquet").exists():
            time.sleep(0.01)
        workers = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        (second,) = (pid for pid in workers if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
        os.kill(int(second), signal.SIGKILL)
        printed = agent.communicate(timeout=120)[0]
    assert agent.returncode == 0, printed
    log = [json.loads(line) for line in (home(out) / "log.jsonl").read_text().splitlines()]
    assert [event["resumed"] for event in log if event["event"] == "open"] == [False, True]
    summary = read_json(home(out) / "summary.json")
    assert summary["rounds"][0]["steps"] == 2
    assert summary["verification"]["checks"]
    assert (out / "model.safetensors").exists()


if __name__ == "__main__":
    serve()
