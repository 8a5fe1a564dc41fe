"""Pretrain a LLaMA or a GPT-2, or a RoBERTa by masked words.

    python train/pretrain.py                      # tiny: exact and compact, compared
    python train/pretrain.py --method compact --rank 0.5 --bits 4 --data book.txt
    python train/pretrain.py --method compact --resume
    python train/pretrain.py --model 350m --memory-budget 7GiB
    python train/pretrain.py --mesh fsdp=4,tensor=2      # of 8 devices
    python train/pretrain.py --weights gpt2/ --lr 1e-4 --data book.txt    # goes on
    python train/pretrain.py --model roberta-tiny --tokenizer roberta:8192 --export
    python train/pretrain.py --help

A run writes runs/MODEL/METHOD/ with metrics.jsonl, config.json, checkpoints/, with a
budget plan.json, with --export weights/, and for its methods together
runs/MODEL/curves.png. SIGTERM and Ctrl-C finish the step and save.
Exit codes: 0 done, 1 stopped by a fault that is named, as a full disk or losses that
are not finite, 2 a wrong option or unusable data, 128 + n stopped by signal n.
"""

import functools
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import curves
import hosts
import pretrain_options
import pretrained
import sharding
import summary
from checkpoint import Checkpoints
from data import Dataset
from data import prepare as prepare_data
from folders import begin_folder, compared, find_start, require_free
from hosts import Interrupt
from metrics import Log
from planning import Planner, Plans
from pretrain_options import Config
from pretrained import Pretrained
from runs import LESS, compile_step, end_step, in_turn, look_again
from training import State, Training, warmup_cosine


def main(argv: Sequence[str] | None = None) -> int:
    try:
        configs = pretrain_options.parse(argv)
        device = configs[0].device
        if device.coordinator:
            hosts.join(device.coordinator, device.processes, device.process)
        model = configs[0].model
        begin = pretrained.load(model.weights, model.param_dtype)
        dataset = load_data(configs[0], begin)
        print(dataset.report, flush=True)
        jobs = [prepare(config, dataset, begin) for config in configs]
        if configs[0].plan.explain_plan:
            print("\n\n".join(f"{j.config.method.name}: {j.plans.plan}" for j in jobs))
            return 0
        hosts.require_same(
            options_and_data=[job.fixed for job in jobs],
            checkpoints=[job.start for job in jobs],
        )
        for config in configs if hosts.is_first() else ():
            config.folder.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError, ImportError, NotImplementedError) as error:
        print(f"pretrain.py: error: {error}", file=sys.stderr)
        return hosts.leave(2)
    except MemoryError as error:
        print(f"pretrain.py: error: {error}; {LESS}", file=sys.stderr)
        return hosts.leave(2)
    except KeyboardInterrupt:  # nothing was begun
        return hosts.leave(128 + signal.SIGINT)
    code = in_turn("pretrain.py", jobs, lambda job, stop: train(job, dataset, stop))
    if code or not hosts.is_first():
        return code
    runs = compared(configs[0].folder)
    picture = curves.plot(runs)
    print(f"\n{summary.table(runs)}\n" + (f"\n{picture}" if picture else ""))
    return 0


def load_data(config: Config, begin: Pretrained | None = None) -> Dataset:
    data = config.data
    tokenizer = data.tokenizer or (begin.tokenizer if begin else "bytes")
    max_tokens = data.max_tokens
    if max_tokens is None and (data.data or "").startswith("hf:"):
        max_tokens = config.optimizer.steps * data.batch_size * data.seq_len
    return prepare_data(data.data, tokenizer, max_tokens=max_tokens)


@dataclass(frozen=True)
class Job:
    """A run that has been checked: nothing but its numbers can go wrong."""

    config: Config
    training: Training
    plans: Plans
    fixed: dict[str, Any]  # config.json: what a resumed run must have in common
    start: int  # 0, or the step of the checkpoint to continue from
    abstract: State  # shapes, dtypes and shardings
    tokens_abt: jax.ShapeDtypeStruct  # of a step
    mesh: Mesh
    params: Any  # the first, on the host; None for the seed's


def prepare(config: Config, dataset: Dataset, begin: Pretrained | None = None) -> Job:
    """Finds whatever is wrong before anything is trained. Raises ValueError."""
    if not config.plan.explain_plan:
        require_free(config)
    model, opt, data = config.model, config.optimizer, config.data
    cfg = pretrained.shape_of(model, dataset.tokenizer, begin)
    if data.seq_len > cfg.max_seq:
        raise ValueError(
            f"--seq-len must be at most {cfg.max_seq}, the longest sequence of "
            f"{model.name}, got {data.seq_len}"
        )
    mesh = sharding.make_mesh(config.device.mesh)
    shares = sharding.shares_of_batch(mesh)
    if data.batch_size % (data.accumulate * shares):
        raise ValueError(
            f"--batch-size must be divisible by --accumulate times the devices that "
            f"share a batch, {data.accumulate} * {shares}, got {data.batch_size}"
        )
    if config.plan.memory_budget and hosts.several():
        raise ValueError(
            "--memory-budget needs one process: plan in one, whose plan.json is --plan "
            "for all"
        )
    if config.output.export and hosts.several():
        raise ValueError(
            "--export needs one process: resume the finished run in one, with --export"
        )
    batch = read_batch(config, dataset, 0)[0]  # raises if there is none
    read_validation(config, dataset)

    default_dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    dtype = model.dtype or default_dtype
    make_training = functools.partial(
        Training,
        cfg,
        config.method,
        warmup_cosine(opt.lr, opt.steps, opt.warmup),
        weight_decay=opt.weight_decay,
        clip=opt.clip,
        seed=opt.seed,
        dtype=jnp.dtype(dtype),
        param_dtype=jnp.dtype(model.param_dtype),
    )
    plain = make_training()
    abstract = sharding.placed(plain.abstract, mesh)
    tokens_abt = jax.ShapeDtypeStruct(
        (data.accumulate, data.batch_size // data.accumulate, data.seq_len + 1),
        jnp.int32,
        sharding=NamedSharding(mesh, P(None, sharding.BATCH)),
    )

    def make_step(policy):
        step = jax.jit(make_training(policy=policy).step, donate_argnums=0)
        return step, (abstract, tokens_abt)

    params = begin.params if begin else None
    planner = Planner(config.plan, make_training, make_step, cfg.layers)
    state = functools.partial(jax.jit(plain.init), params)
    resume = config.output.resume is not False
    with jax.set_mesh(mesh):
        plans = Plans.first(planner, config.folder, resume, state, batch)
    fixed = config.fixed() | plans.fixed()
    fixed |= {
        "dtype": dtype,
        "weights": begin.name if begin else None,
        "tokenizer": dataset.tokenizer.name,
        "data": dataset.checksum,
    }
    start = 0 if config.plan.explain_plan else find_start(config, fixed, abstract)
    plans = plans.at(start)
    with jax.set_mesh(mesh):
        training = plans.training()
    return Job(
        config, training, plans, fixed, start, abstract, tokens_abt, mesh, params
    )


def train(job: Job, dataset: Dataset, interrupt: Interrupt) -> int:
    """Trains to the end, or until interrupted. Returns the exit code.

    Raises NotFinite, CheckpointError, DataError and OSError (of a full disk); what is
    on disk by then is good.
    """
    config, plans, start = job.config, job.plans, job.start
    data, steps, output = config.data, config.optimizer.steps, config.output
    if start == steps:
        print(f"{config.folder} is finished: step {start} of {steps}", flush=True)
        if output.export:
            checkpoints = Checkpoints(config.folder / "checkpoints")
            export(job, checkpoints.load(start, job.abstract), dataset)
        return 0
    checkpoints = Checkpoints(config.folder / "checkpoints", output.keep)
    state = checkpoints.load(start, job.abstract) if start else init(job)
    if start:
        with jax.set_mesh(job.mesh):
            plans.tell_size()
    train_step = compile_step(job)
    # Not before: what a folder holds is lost then.
    if hosts.is_first():
        if not start:
            begin_folder(config.folder, job.fixed)
        checkpoints.drop_after(start)
        summary.forget(config.folder)
        plans.begin(start)
    hosts.wait_for_all(f"{config.folder} is ready")
    loss_of = jax.jit(job.training.weighed_loss)
    log = Log(
        config.folder,
        start=start,
        steps=steps,
        every=output.log_every,
        tokens=data.batch_size * data.seq_len,
        max_skipped=config.optimizer.max_skipped,
        writes=hosts.is_first(),
    )
    with checkpoints, log:
        for step in range(start + 1, steps + 1):
            if job.plans.looks_again(step - 1):
                batch = read_batch(config, dataset, step - 1)[0]
                job, train_step = look_again(
                    job, train_step, log, step - 1, state.params, batch
                )
            state, measured = train_step(state, device_batch(job, dataset, step - 1))
            log.train(step, measured)
            if step % output.eval_every == 0 or step == steps:
                with log.paused():
                    loss = evaluate(loss_of, state, job, dataset)
                    log.validation(step, loss)
            # Before the checkpoint that says that all is done.
            if step == steps and hosts.is_first():
                summary.write(config.folder, summarize(job, loss, log.speed))
            last, stop = step == steps, interrupt.agreed()
            code = end_step(job, checkpoints, log, step, state, last=last, stop=stop)
            if code:
                return code
    if output.export:
        export(job, state, dataset)
    return 0


def export(job: Job, state: State, dataset: Dataset) -> None:
    """Writes the weights, and the tokenizer, as Hugging Face has them."""
    folder = job.config.folder / "weights"
    model = job.training.model(state.params)
    pretrained.save(model, dataset.tokenizer, folder)
    print(f"weights: {folder}", flush=True)


def init(job: Job) -> State:
    shardings = jax.tree.map(lambda x: x.sharding, job.abstract)
    params = job.params and jax.device_put(job.params, shardings.params)
    make = jax.jit(job.training.init, donate_argnums=0, out_shardings=shardings)
    return make(params)


def read_batch(
    config: Config, dataset: Dataset, step: int, rows: slice = slice(None)
) -> np.ndarray:
    """The tokens of the step after ``step`` others, (a, b, t + 1) int32.

    Of each microbatch ``rows`` alone.
    """
    data = config.data
    read = functools.partial(
        dataset.batch,
        step,
        batch_size=data.batch_size,
        seq_len=data.seq_len,
        seed=config.optimizer.seed,
    )
    numbers_ab = np.arange(data.batch_size).reshape(data.accumulate, -1)[:, rows]
    return np.stack([read(rows=slice(b[0], b[-1] + 1)) for b in numbers_ab])


def device_batch(job: Job, dataset: Dataset, step: int) -> jax.Array:
    """The same on the devices; a process reads what its own ones hold."""

    def read(start, stop):
        return read_batch(job.config, dataset, step, slice(start, stop))

    return sharding.from_parts(read, job.tokens_abt, axis=1)


def read_validation(config: Config, dataset: Dataset) -> Iterator[np.ndarray]:
    """Always the same batches, cut into microbatches, (b, t + 1) int32."""
    data = config.data
    batches = dataset.eval_batches(
        data.batch_size, data.seq_len, config.output.eval_batches
    )
    return (part for batch in batches for part in np.split(batch, data.accumulate))


def evaluate(loss_of: Callable, state: State, job: Job, dataset: Dataset) -> float:
    """Mean loss of the held-out batches; ``loss_of`` as `Training.weighed_loss`."""
    _, *shape = job.tokens_abt.shape
    place, found = NamedSharding(job.mesh, P(sharding.BATCH)), []
    with jax.set_mesh(job.mesh):
        for batch in read_validation(job.config, dataset):
            tokens_bt = jax.make_array_from_callback(
                tuple(shape), place, batch.__getitem__
            )
            found.append(loss_of(state.params, tokens_bt))
    loss_n, weight_n = np.array(jax.device_get(found)).T
    return float(np.mean(weight_n * loss_n) / (np.mean(weight_n) or 1))


def summarize(job: Job, loss: float, speed: float) -> dict[str, Any]:
    _, sequences, length = job.tokens_abt.shape
    held = summary.held_bytes(job.training, job.tokens_abt, sequences * (length - 1))
    return {"valid_loss": loss, "tokens_per_second": speed} | held


if __name__ == "__main__":
    sys.exit(main())
