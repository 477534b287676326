"""All that a GPU has to show, in at most ten minutes: python -m bench.gpu OUT.json [--cpu] [--only abc]

Stage by stage, OUT.json written after each; bench/gpu.md says how to read it. Nothing outside this checkout
is read: BERT-base gets random weights and a tokenizer made of the quick start's sentences, which are joined
to the lengths of Wikipedia's. --cpu tries every stage at a tiny size.

  a machine     b attention against a float64 loop     c a whole step against float64 on the CPU
  d waits, launches, busy share     e ours and others, taking turns     f stop, resume, what saving costs
  g an epoch of a million sentences     h two GPUs     i the hub
"""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from transformers import BertConfig, BertModel

from bench.measure import machine, quartiles
from bench.peers import Loop, Work, composed, sentence_transformers, settings, silence, simcse, trained
from whitenedcse.app.train import built
from whitenedcse.data.datamodule import Batch
from whitenedcse.data.sources import MNLI, SIMCSE, SNLI
from whitenedcse.distributed import end_with_parent
from whitenedcse.evaluation.tasks import task
from whitenedcse.model import checkpoint
from whitenedcse.model.attention import Settings, attention, bounds, planned, scale, unpadded_attention
from whitenedcse.model.scratch import wordpiece
from whitenedcse.ragged import ragged, taken
from whitenedcse.training.checkpoints import Checkpoints, Safekeeping
from whitenedcse.training.loss import ContrastiveLoss
from whitenedcse.training.monitor import BASELINES, DevSet
from whitenedcse.training.trainer import SYNCED

ROOT = Path(__file__).parents[1]
SPARE = 7  # processes of `f_resume` and `h_two`
EPOCH, EVALUATIONS = 1_000_000, 125  # sentences and evaluations of the main job
WARM, TURN = 3, 6  # steps that come first, and of a turn: one whose host time is taken, and the others
UNSHUFFLED = ("head=group", "loss.temperature=0.5")  # a device draws other permutations than the CPU
LENGTHS, HEADS, CHANNELS = [*range(1, 65)], 12, 64  # of `b_attention`


class Size(NamedTuple):
    """How large everything is; small: the batch that is compared with float64."""

    shape: dict[str, int]
    sentences: int
    small: int
    batches: tuple[int, ...]
    rounds: int
    steps: int


BASE = Size({}, 20_000, 16, (64, 512), 5, 300)
SHAPE = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
TINY = Size(SHAPE, 300, 8, (8,), 1, 24)


class Spare:
    """Processes that were forked when all was imported, but neither threads nor CUDA had been started."""

    def __init__(self) -> None:
        self.pipes = [mp.Pipe() for _ in range(SPARE)]
        kind = mp.get_context("fork")
        self.free = [kind.Process(target=self.wait, args=(pipe[1],), daemon=True) for pipe in self.pipes]
        for process in self.free:
            process.start()

    def wait(self, pipe: Any) -> None:
        """In the new process: call what comes first."""
        end_with_parent()
        function, arguments = pipe.recv()
        function(*arguments)

    def call(self, function: Callable[..., None], *arguments: Any) -> Any:
        """The process that calls this function."""
        self.pipes.pop()[0].send((function, arguments))
        return self.free.pop()


class Bench:
    """What the stages share: a folder with encoders and a corpus, the size, and what was found so far."""

    def __init__(self, folder: Path, gpu: bool, spare: Spare) -> None:
        self.folder, self.gpu, self.size, self.spare = folder, gpu, BASE if gpu else TINY, spare
        self.found, self.failing, self.held = dict[str, Any](), dict[str, Any](), 0
        self.precision = "bf16-mixed" if gpu else "32-true"
        lines = (ROOT / "data/quickstart/sentences.txt").read_text().splitlines()[: self.size.sentences]
        tokenizer, draw = wordpiece(lines, 4000), random.Random(0)
        for name, p in {"bert": 0.1, "still": 0.0}.items():
            torch.manual_seed(0)
            kind = BertConfig(**self.size.shape, hidden_dropout_prob=p, attention_probs_dropout_prob=p)
            kind.initializer_range = 1.5 * kind.hidden_size**-0.5  # else all sentences have one vector
            BertModel(kind, add_pooling_layer=False).save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)
        self.texts = [" ".join(draw.choices(lines, k=1 + (draw.random() < 0.45))) for _ in lines]
        (folder / "corpus.txt").write_text("\n".join(self.texts) + "\n")

    def work(self, batch: int, steps: int, *, views: int = 3, encoder: str = "bert") -> Work:
        """A training job."""
        device, corpus = "cuda" if self.gpu else "cpu", self.folder / "corpus.txt"
        return Work(self.folder / encoder, corpus, batch, views, views, 32, steps, device)

    def now(self) -> float:
        """Seconds, when the device has done all that it was given."""
        if self.gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def peak(self) -> float:
        """MiB at the peak since the last call, beyond what was held then."""
        if not self.gpu:
            return 0.0
        most = torch.cuda.max_memory_allocated() - self.held
        torch.cuda.reset_peak_memory_stats()
        self.held = torch.cuda.memory_allocated()
        return most / 2**20


def a_machine(bench: Bench) -> Any:
    """Versions and hardware, and what matrix products reach."""
    facts, size, rounds = machine(torch.get_num_threads()), 4096 if bench.gpu else 128, 20
    if bench.gpu:
        facts |= {"cuda": torch.version.cuda, "nccl": torch.cuda.nccl.version()}
        facts["gpus"] = [str(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]
    for kind in (torch.float32, torch.bfloat16):
        a = torch.randn(size, size, device="cuda" if bench.gpu else "cpu").to(kind)
        _, began = a @ a, bench.now()
        for _ in range(rounds):
            a @ a
        facts[f"TFLOP/s of {kind}"] = 2 * size**3 * rounds / (bench.now() - began) / 1e12
    return facts


def b_attention(bench: Bench) -> Any:
    """The largest differences to a loop in float64, of result and gradients, over the largest value.

    With dropout the loop takes the mask that the kernel drew, so that its backward pass must draw the same.
    """
    kinds = [torch.float32, *([torch.bfloat16, torch.float16] if bench.gpu else [])]
    cases = [(kind, first, p) for kind in kinds for first in (False, True) for p in (0.0, 0.1)]
    names = (f"{kind}, {'first' if first else 'all'}, p {p}" for kind, first, p in cases)
    return {name: compared(bench, *case) for name, case in zip(names, cases, strict=True)}


def compared(bench: Bench, kind: torch.dtype, first: bool, p: float) -> dict[str, float]:
    """One case of `b_attention`."""
    torch.manual_seed(1)
    t, d, device = sum(LENGTHS), HEADS * CHANNELS, "cuda" if bench.gpu else "cpu"
    shapes = [(len(LENGTHS) if first else t, d), (t, d), (t, d)]
    q, k, v = (torch.randn(shape).to(device, kind).requires_grad_() for shape in shapes)
    unit = torch.eye(CHANNELS)[torch.cat([torch.arange(n) for n in LENGTHS])].repeat(1, HEADS).to(v)
    with torch.no_grad():  # of values that are unit vectors, attention gives its own probabilities
        kept = (attended(q, k, unit, first, p) != 0).cpu().double()
    out = attended(q, k, v, first, p)
    weight = torch.randn_like(out)
    ours = [out, *torch.autograd.grad(out, (q, k, v), weight)]
    wide = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    factor = 1 / (1 - p) if bench.gpu else scale(p)
    expected = looped(*wide, torch.ones_like(kept) if p == 0 else kept * factor)
    theirs = [expected, *torch.autograd.grad(expected, wide, weight.cpu().double())]
    pairs = zip(("out", "dq", "dk", "dv"), ours, theirs, strict=True)
    errors = {
        name: float((x.detach().cpu() - y).abs().max() / y.detach().abs().max()) for name, x, y in pairs
    }
    places = sum(n * (1 if first else n) for n in LENGTHS) * HEADS
    return errors | {"kept": float(kept.sum() / places)}


def attended(q: Tensor, k: Tensor, v: Tensor, first: bool, p: float) -> Tensor:
    """Attention as `packed.block` calls it, with the dropout of one seed."""
    if q.device.type == "cpu":
        plan = planned(LENGTHS, HEADS, sum(LENGTHS), len(LENGTHS))
        return attention(q, k, v, Settings(plan, first, p, 3))
    torch.manual_seed(3)
    where = bounds(ragged([[0] * length for length in LENGTHS]).to(q.device))
    return unpadded_attention(q, k, v, heads=HEADS, p=p, bounds=where)


def looped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Sentence by sentence; mask: the shape of q, where the channels of a head stand for the keys."""

    def split(x: Tensor) -> list[Tensor]:
        rows = LENGTHS if len(x) == sum(LENGTHS) else [1] * len(LENGTHS)
        return [part.unflatten(-1, (HEADS, CHANNELS)).transpose(0, 1) for part in x.split(rows)]

    out = []
    for a, b, c, m in zip(*map(split, (q, k, v, mask)), strict=True):  # (h, rows, d / h) each
        weights = (a @ b.mT * CHANNELS**-0.5).softmax(-1) * m[..., : b.shape[1]]
        out.append((weights @ c).transpose(0, 1).flatten(1))
    return torch.cat(out)


def c_step(bench: Bench) -> Any:
    """Loss, gradient and vectors of a step without dropout against those of the CPU in float64."""
    work = bench.work(bench.size.small, 2, encoder="still")
    batch = batch_of(work)
    loss, wanted, x = one_step(work, "64-true", batch, "cpu")
    found: dict[str, Any] = {"loss in float64": loss}
    for batches in ("packed", "padded"):
        for precision in ("32-true", "bf16-mixed"):
            ours, grads, y = one_step(work, precision, batch, work.device, f"encoder.batches={batches}")
            found[f"{batches} {precision}"] = {
                "loss": abs(ours - loss),
                "gradient": apart(grads, wanted),
                "encode": float((y - x).abs().max() / x.abs().max()),
                "worst cosine of vectors": float(torch.cosine_similarity(y, x).min()),
            }
    return found


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The norm of the difference of two gradients over that of the second."""
    flat, wide = (torch.cat([each[name].flatten() for name in theirs]) for each in (ours, theirs))
    return float((flat - wide).norm() / wide.norm())


def batch_of(work: Work) -> Batch:
    """The first batch."""
    return next(iter(module_of(work, "32-true")[1].train_dataloader()))


def module_of(work: Work, precision: str, *words: str) -> tuple[Any, Any]:
    """The module and the data of train.py, the module usable without a trainer."""
    torch.manual_seed(0)  # of the head's weights
    module, data = built(composed(settings(work, precision, *UNSHUFFLED, *words)))
    module.log = module.log_dict = lambda *_, **__: None
    return module.to(torch.float64 if precision == "64-true" else torch.float32), data


def gradients(module: Any) -> dict[str, Tensor]:
    """Those of a module by name, as float64 on the CPU."""
    return {name: w.grad.cpu().double() for name, w in module.named_parameters() if w.grad is not None}


def one_step(work: Work, precision: str, batch: Batch, device: str, *words: str) -> tuple[Any, ...]:
    """The loss of a batch, its gradients, and the vectors of some sentences."""
    module, bf16 = module_of(work, precision, *words)[0].to(device), precision == "bf16-mixed"
    with torch.autocast(device, torch.bfloat16, enabled=bf16):
        loss = module.training_step(Batch(batch.positives.to(torch.device(device)), None, batch.n), 0)
    loss.backward()
    x = module.embedder.encode(work.texts[:100], bf16=bf16)
    return float(loss), gradients(module), torch.from_numpy(x).double()


def d_waits(bench: Bench) -> Any:
    """Where the host waits in five steps of train.py between two logged ones; five more are profiled."""
    work, step, stack = bench.work(bench.size.batches[0], WARM + 12), iter(range(100)), ExitStack()
    seen: list[warnings.WarningMessage] = []
    profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.gpu else [])])

    def turn(_: Tensor) -> None:
        number = next(step)
        if number == WARM:
            seen.append(stack.enter_context(warnings.catch_warnings(record=True)))
            warnings.simplefilter("always")
        if number in (WARM, WARM + 5) and bench.gpu:
            torch.cuda.set_sync_debug_mode("warn" if number == WARM else "default")
        if number == WARM + 5:
            stack.close()
            bench.now()
            profiler.start()
        if number == WARM + 10:
            bench.now()
            profiler.stop()

    keep = Safekeeping(bench.folder / "kept", 1e6, SimpleNamespace(every=10**6), "", lambda text: None)
    words = settings(work, bench.precision, "head=shuffled_group", "trainer.log_every_n_steps=1000")
    trained(words, [keep])(turn)
    waits = [f"{said.filename}:{said.lineno}" for said in seen[0] if "synchroniz" in str(said.message)]
    return {"waits in 5 steps": waits, **activity(profiler.events(), 5)}


def activity(events: Any, steps: int) -> dict[str, Any]:
    """What a profile says of a step: launches, the share of time that the device is busy, kernels."""
    kernels = [e for e in events if e.device_type == DeviceType.CUDA]
    spans, busy, end = sorted((e.time_range.start, e.time_range.end) for e in kernels), 0.0, 0.0
    for low, high in spans:
        busy, end = busy + max(0.0, high - max(low, end)), max(end, high)
    by_name: dict[str, float] = {}
    for e in kernels:
        name = e.name[:90]
        by_name[name] = by_name.get(name, 0.0) + e.time_range.elapsed_us() / 1e3 / steps
    return {
        "launches": len(kernels) / steps,
        "busy share": busy / (end - spans[0][0]) if spans else None,
        "ms of the device": busy / 1e3 / steps,
        "ms by kernel": dict(sorted(by_name.items(), key=lambda pair: -pair[1])[:15]),
    }


class Turns:
    """Loops in threads that take turns of TURN steps; one that fails is noted, and the others go on.

    host: seconds until a step was launched, from an empty queue. seconds: of each of the other steps.
    """

    def __init__(self, bench: Bench, makers: dict[str, Callable[[], Loop]]) -> None:
        self.bench, self.main = bench, threading.Semaphore(0)
        self.free = {name: threading.Semaphore(0) for name in makers}
        self.rows: dict[str, dict[str, Any]] = {
            name: {"seconds": [], "host": [], "MiB": []} for name in makers
        }
        for name, make in makers.items():
            threading.Thread(target=self.live, args=(name, make), daemon=True).start()
        while alive := [name for name in makers if not {"error", "done"} & set(self.rows[name])]:
            for name in alive:
                self.free[name].release()
                self.main.acquire()

    def live(self, name: str, make: Callable[[], Loop]) -> None:
        """A thread: a loop from its making to its end."""
        self.free[name].acquire()
        try:
            step, began = iter(range(10**9)), [0.0]
            make()(lambda loss: self.turn(name, next(step), began, loss))
            self.rows[name]["done"] = True
        except BaseException as error:
            self.rows[name]["error"] = f"{type(error).__name__}: {error}"[:2000]
        self.main.release()

    def turn(self, name: str, step: int, began: list[float], loss: Tensor) -> None:
        """The end of a step."""
        row, at = self.rows[name], (step - WARM) % TURN
        if step == 0:
            row["loss of step 1"] = float(loss)
        if step > WARM and at == 1:
            row["host"].append(time.perf_counter() - began[0])
            began[0] = self.bench.now()
        if step > WARM and at == 0:
            row["seconds"].append((self.bench.now() - began[0]) / (TURN - 1))
            row["MiB"].append(self.bench.peak())
        if step >= WARM and at == 0:
            self.main.release()
            self.free[name].acquire()
            self.bench.peak()
            began[0] = self.bench.now()


def e_speed(bench: Bench) -> Any:
    """A step of each variant, in turns: median, quartiles, the host's time, memory at the peak."""
    tables, steps = {}, WARM + bench.size.rounds * TURN + 1
    for batch in bench.size.batches:
        for views in (2, 3):
            rows = Turns(bench, variants(bench.work(batch, steps, views=views), bench.precision)).rows
            tables[f"batch {batch}, {views} views"] = {
                name: summary(row, batch) for name, row in rows.items()
            }
    return tables


def variants(work: Work, precision: str) -> dict[str, Callable[[], Loop]]:
    """What takes turns: ours with the head of the paper, and with two views those that have no more."""

    def ours(precision: str, *words: str) -> Callable[[], Loop]:
        return lambda: trained(settings(work, precision, "head=shuffled_group", *words))

    made: dict[str, Callable[[], Loop]] = {
        "packed": ours(precision),
        "padded": ours(precision, "encoder.batches=padded"),
        "packed float32": ours("32-true"),
    }
    if work.device == "cuda":  # the block for CPUs draws its dropout by NumPy
        made["packed, compiled"] = ours(precision, "trainer.compile=true")
    if work.views == 2:
        bf16 = precision == "bf16-mixed"
        made |= {"SimCSE": partial(simcse, work, bf16=bf16)}
        made |= {"sentence-transformers": partial(sentence_transformers, work, bf16=bf16)}
    return made


def summary(row: dict[str, Any], batch: int) -> dict[str, Any]:
    """Of a variant's turns."""
    more = {key: row[key] for key in ("loss of step 1", "error") if key in row}
    if not row["seconds"]:
        return more
    low, middle, high = quartiles(row["seconds"])
    return {
        "ms": 1e3 * middle,
        "quartiles": [1e3 * low, 1e3 * high],
        "host ms": 1e3 * statistics.median(row["host"]),
        "sentences a second": batch / middle,
        "MiB at the peak": max(row["MiB"]),
        **more,
    }


def f_resume(bench: Bench) -> Any:
    """train.py whole, and stopped by SIGTERM in its middle and resumed: are the weights equal?

    And what it costs to save and to evaluate.
    """
    whole = started(bench, "whole")
    if bench.gpu:
        whole[0].join()  # on the CPU times mean nothing, and both run beside each other
    job, file = started(bench, "stopped")
    while job.is_alive() and f"step {bench.size.steps // 2}:" not in file.read_text():
        time.sleep(0.02)
    os.kill(job.pid or 0, signal.SIGTERM)
    said = {"whole": ended(whole), "stopped": ended((job, file))}
    said["resumed"] = ended(started(bench, "stopped"))
    one, other = (load_file(bench.folder / name / "best/model.safetensors") for name in ("whole", "stopped"))
    most = max(float((one[name] - other[name]).abs().max()) for name in one)
    return said | {"largest difference of weights": most} | costs(bench)


def started(bench: Bench, name: str, *words: str) -> tuple[Any, Path]:
    """A process of train.py in a folder of this name, and the file of what it says."""
    work, file = bench.work(bench.size.batches[0], bench.size.steps), bench.folder / f"{name}.txt"
    own = [f"monitor.every={bench.size.steps // 2}", "monitor=held_out", "tasks=none"]
    own += [f"hydra.run.dir={bench.folder / name}", *words]
    argv = ["train.py", "+experiment=bert_base", *settings(work, bench.precision, *own)]
    file.write_text("")
    return bench.spare.call(program, argv, file), file


def program(argv: list[str], file: Path) -> None:
    """Be train.py; what it says goes to a file."""
    os.setsid()
    os.chdir(ROOT)
    with file.open("w") as stream:
        for number in (1, 2):
            os.dup2(stream.fileno(), number)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ["PYTHONPATH"], sys.argv = str(ROOT), argv
    runpy.run_path(argv[0], run_name="__main__")


def ended(started: tuple[Any, Path], seconds: float = 300) -> dict[str, Any]:
    """How a process ended: its status and its last lines; it is killed after so many seconds."""
    job, file = started
    job.join(seconds)
    if job.is_alive():
        os.killpg(job.pid, signal.SIGKILL)
        job.join()
    lines, last = file.read_text().splitlines(), file.stat().st_mtime
    failed = [last - float(line.split()[-1]) for line in lines if line.startswith("rank 1 fails at")]
    said = {"status": job.exitcode, "said": [line for line in lines if line.strip(" \u2500")][-8:]}
    return said | ({"seconds from failure to its last line": failed[0]} if failed else {})


def costs(bench: Bench) -> dict[str, float]:
    """Seconds of a checkpoint, of best/, and of an evaluation of 1,500 pairs, as many as STS-B dev has."""
    module, data = module_of(bench.work(bench.size.batches[0], 4), "32-true")
    embedder, dev = module.embedder.to("cuda" if bench.gpu else "cpu"), DevSet(task("quickstart/dev"))
    copies = [{k: v.clone() for k, v in module.state_dict().items()} for _ in range(3)]  # AdamW has two
    acts: dict[str, Callable[[], Any]] = {
        "checkpoint": lambda: Checkpoints().save_checkpoint(
            {"global_step": 1, "x": copies}, bench.folder / "saved"
        ),
        "best": lambda: checkpoint.save(embedder, bench.folder / "best"),
        "first evaluation": lambda: dev.measured(embedder, data, 0),  # of 750 pairs
        "evaluation": lambda: [dev.measured(embedder, data, 0) for _ in range(2)],
        "baselines": lambda: dev.whitened(embedder, data),
        "encode": lambda: embedder.encode(bench.texts, bf16=bench.gpu),
    }
    seconds = {}
    for name, act in acts.items():
        began = bench.now()
        act()
        seconds[f"seconds of {name}"] = bench.now() - began
    return seconds | {"encode, sentences a second": len(bench.texts) / seconds["seconds of encode"]}


def g_epoch(bench: Bench) -> Any:
    """Minutes of the main job: a million sentences in batches of the first size, from e and f."""
    first, saving = bench.size.batches[0], bench.found["f"]
    rows = bench.found["e"][f"batch {first}, 3 views"]
    made = {name: row["ms"] * EPOCH / first / 60e3 for name, row in rows.items() if "ms" in row}
    seconds = saving["seconds of evaluation"] + saving["seconds of baselines"] / BASELINES
    share = EVALUATIONS * seconds / 60 / made["packed"]
    return {"minutes": made, "minutes of evaluations": EVALUATIONS * seconds / 60, "their share": share}


class Failing:
    """The loss of the paper; at its fifth call in the second rank it raises, or sleeps for ever."""

    def __init__(self, how: str) -> None:
        self.how, self.calls, self.loss = how, 0, ContrastiveLoss()

    def __call__(self, z: Tensor, negatives: Tensor | None = None) -> Tensor:
        """The loss."""
        self.calls += 1
        if self.calls == 5 and os.environ.get("RANK") == "1":
            sys.stderr.write(f"rank 1 fails at {time.time()}\n")
            if self.how == "raises":
                raise RuntimeError("a rank that raises")
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # else it ends 30 s after it is asked to
            time.sleep(1e6)
        return self.loss(z, negatives)


def h_two(bench: Bench) -> Any:
    """The gradient of two ranks against that of one, and how a job of two ends if one raises or is stuck."""
    if bench.gpu and torch.cuda.device_count() < 2:
        return "needs two GPUs"
    work = bench.work(bench.size.small, 2, encoder="still")
    batch = batch_of(work)
    _, wanted, _ = one_step(work, "32-true", batch, work.device)
    for rank in [bench.spare.call(rank_step, rank, work, batch, bench.folder) for rank in range(2)]:
        rank.join()
    found: dict[str, Any] = {"gradient": apart(torch.load(bench.folder / "grads.pt"), wanted)}
    return found | {how: ended(job) for how, job in (bench.failing or failing(bench)).items()}


def failing(bench: Bench) -> dict[str, Any]:
    """Two jobs of two ranks, of which the second raises or sleeps."""
    words = ["trainer.devices=2", "loss._target_=bench.gpu.Failing"]
    times = {"raises": 600, "sleeps": 10}  # seconds that the other rank waits
    return {
        how: started(bench, how, *words, f"+loss.how={how}", f"trainer.timeout={seconds}")
        for how, seconds in times.items()
    }


def rank_step(rank: int, work: Work, batch: Batch, folder: Path) -> None:
    """One of two ranks: half of the batch, and the gradient of both."""
    silence()
    device, kind = (
        (torch.device("cuda", rank), "nccl") if work.device == "cuda" else (torch.device("cpu"), "gloo")
    )
    dist.init_process_group(kind, init_method=f"file://{folder}/met", rank=rank, world_size=2)
    module, _ = module_of(work, "32-true")
    for weight in module.idle():
        weight.requires_grad_(False)
    half = torch.arange(batch.n).chunk(2)[rank]
    rows = torch.cat([half + batch.n * number for number in range(work.passes)])
    module.forward = module.training_step
    both = DistributedDataParallel(module.to(device), gradient_as_bucket_view=True, **{SYNCED: False})
    both(Batch(taken(batch.positives, rows)[0].to(device), None, len(half)), 0).backward()
    if rank == 0:
        torch.save(gradients(module), folder / "grads.pt")
    dist.barrier()
    os._exit(0)  # DDP's reducer, when Python frees it, may wait for gloo's thread, which waits for Python


def i_hub(bench: Bench) -> Any:
    """Revisions and digests of what train.py downloads, as the hub has them now."""
    from huggingface_hub import HfApi

    hub, found = HfApi(endpoint=os.environ.get("HF_ENDPOINT")), dict[str, Any]()
    for name in (SIMCSE, MNLI, SNLI):
        about = hub.dataset_info(name, files_metadata=True, timeout=10)
        files = {file.rfilename: file.lfs.sha256 for file in about.siblings or [] if file.lfs}
        found[name] = {"revision": about.sha, "sha256": files}
    return found | {"bert-base-uncased": hub.model_info("bert-base-uncased", timeout=10).sha}


EVERY = (a_machine, b_attention, c_step, d_waits, e_speed, f_resume, g_epoch, h_two, i_hub)
STAGES = {stage.__name__[0]: stage for stage in EVERY}


def main() -> None:
    """Every stage in turn; what fails is written with its traceback, and the next begins."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the JSON file")
    parser.add_argument("--cpu", action="store_true", help="a try on the CPU, at a tiny size")
    parser.add_argument("--only", default="".join(STAGES), help="some of the stages, such as abc")
    parser.add_argument("--minutes", type=float, default=10, help="after which no stage begins")
    options, spare = parser.parse_args(), Spare()
    if not options.cpu and not torch.cuda.is_available():
        parser.error("there is no GPU here; --cpu tries the stages")
    if options.cpu:
        torch.set_num_threads(1)
    silence()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["WHITENEDCSE_CACHE"] = f"{folder}/cache"
        bench = Bench(Path(folder), not options.cpu, spare)
        # on the CPU times mean nothing, and what waits long begins first
        bench.failing = failing(bench) if options.cpu and "h" in options.only else {}
        for name in options.only:
            since = time.perf_counter()
            if since - began > 60 * options.minutes:
                break
            try:
                bench.found[name] = STAGES[name](bench)
            except Exception:
                bench.found[name] = {"error": traceback.format_exc()[-1500:]}
            seconds = bench.found.setdefault("seconds", {})[name] = time.perf_counter() - since
            options.out.write_text(json.dumps(bench.found, indent=1, default=str) + "\n")
            print(f"{STAGES[name].__name__} {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
