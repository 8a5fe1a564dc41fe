"""Fine-tune a RoBERTa on a task of GLUE, or on one's own.

    python train/finetune.py --task rte --task-data glue/RTE --weights roberta-base/
    python train/finetune.py --task cola --task-data glue/CoLA --weights roberta-base/
        --method exact,compact,galore --rank 4 --checkpoint int4
    python train/finetune.py --task classify --task-data mine.tsv --text-columns a,b
        --label-column kind --weights hf:FacebookAI/roberta-base --epochs 3
    python train/finetune.py --task tag --task-data goemotions/ --weights roberta-base/
        --batch-size 128 --memory-budget 8GiB
    python train/finetune.py --help

The defaults are those of the papers' tables of GLUE. Scores of the held-out examples
are taken after every epoch; those of the last one count. Without trained weights,
pretrain.py --model roberta-tiny --export makes some.

A run writes runs/TASK/METHOD/, as pretrain.py does, and resumes and exits like it.
"""

import functools
import math
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import finetune_options
import sharding
import summary
from checkpoint import Checkpoints
from examples import Encoded, encode
from finetune_options import Config
from folders import (
    begin_folder,
    compared,
    crc,
    find_start,
    require_free,
    shape_bytes,
)
from hosts import Interrupt
from huggingface import folder_of
from metrics import Log, NotFinite
from options import require_steps
from planning import Planner, Plans
from readers import DataError
from roberta import Examples
from roberta_weights import load_roberta, read_config, save_roberta
from runs import LESS, compile_step, end_step, in_turn, look_again
from scores import SCORES
from tasks import Splits, read_task
from tokenizer import Tokenizer, load_tokenizer, special_ids
from training import State, Training


def main(argv: Sequence[str] | None = None) -> int:
    try:
        configs = finetune_options.parse(argv)
        data = load_data(configs[0])
        print(data.splits, flush=True)
        params = load_params(configs[0], data)
        jobs = [prepare(config, data, params) for config in configs]
        if configs[0].plan.explain_plan:
            print("\n\n".join(f"{j.config.method.name}: {j.plans.plan}" for j in jobs))
            return 0
        for config in configs:
            config.folder.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError, ImportError, NotImplementedError) as error:
        print(f"finetune.py: error: {error}", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"finetune.py: error: {error}; {LESS}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # nothing was begun
        return 128 + signal.SIGINT
    code = in_turn("finetune.py", jobs, lambda job, stop: train(job, data, stop))
    if code:
        return code
    print(f"\n{summary.table(compared(configs[0].folder))}")
    return 0


@dataclass(frozen=True)
class Data:
    """The task as tokens, and the model that they are for."""

    splits: Splits
    train: Encoded
    dev: dict[str, Encoded]
    tokenizer: Tokenizer
    folder: Path  # of the weights


def load_data(config: Config) -> Data:
    """Raises ValueError for a task, weights or tokenizer that cannot be used."""
    folder = folder_of(config.weights.weights)
    cfg = read_config(folder)
    path = config.weights.tokenizer or folder / "tokenizer.json"
    if not Path(path).is_file():
        raise DataError(f"{path}: no such file; --tokenizer names a tokenizer.json")
    tokenizer = load_tokenizer(path)
    ids = special_ids(tokenizer)
    if tokenizer.vocab_size > cfg.vocab_size or ids["pad_id"] != cfg.pad_id:
        raise DataError(
            f"{path} must be of the weights' vocabulary, {cfg.vocab_size} ids with "
            f"padding {cfg.pad_id}, got {tokenizer.vocab_size} with {ids['pad_id']}"
        )
    splits = read_task(config.task.described, config.task.task_data)
    train, *dev = encode(
        [splits.train, *splits.dev.values()],
        tokenizer,
        min(config.task.seq_len, cfg.max_seq),
        splits.task,
    )
    named = dict(zip(splits.dev, dev, strict=True))
    return Data(splits, train, named, tokenizer, folder)


def load_params(config: Config, data: Data) -> tuple[Any, Any]:
    """Shape and parameters that every method starts from: a new head is the seed's."""
    task = data.splits.task
    model = load_roberta(
        data.folder,
        labels=task.labels or 1,
        multi_label=task.multi_label,
        dropout=config.weights.dropout,
        param_dtype=jnp.dtype(config.weights.param_dtype),
        rngs=nnx.Rngs(config.optimizer.seed),
    )
    # On the host: a device has those alone that it trains.
    return model.cfg, jax.device_get(nnx.to_pure_dict(nnx.state(model, nnx.Param)))


@dataclass(frozen=True)
class Job:
    """A run that has been checked: nothing but its numbers can go wrong."""

    config: Config
    training: Training
    plans: Plans
    fixed: dict[str, Any]  # config.json: what a resumed run must have in common
    start: int  # 0, or the step of the checkpoint to continue from
    steps: int
    params: Any  # the first
    abstract: State  # shapes, dtypes and shardings
    tokens_abt: Examples  # of a step, likewise
    mesh: Mesh

    @property
    def shardings(self) -> State:
        return jax.tree.map(lambda x: x.sharding, self.abstract)


def prepare(config: Config, data: Data, loaded: tuple[Any, Any]) -> Job:
    """Finds whatever is wrong before anything is trained. Raises ValueError."""
    if not config.plan.explain_plan:
        require_free(config)
    (cfg, params), opt = loaded, config.optimizer
    devices = jax.device_count()
    if config.batch_size % (config.task.accumulate * devices):
        raise ValueError(
            f"--batch-size must be divisible by --accumulate times the number of "
            f"devices, {config.task.accumulate} * {devices}, got {config.batch_size}"
        )
    steps = opt.epochs * len(data.train) / config.batch_size
    require_steps(steps)
    steps = math.ceil(steps)
    default_dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    dtype = config.weights.dtype or default_dtype
    make_training = functools.partial(
        Training,
        cfg,
        config.method,
        warmup_line(opt.lr, steps, opt.warmup),
        weight_decay=opt.weight_decay,
        clip=opt.clip,
        seed=opt.seed,
        dtype=jnp.dtype(dtype),
        param_dtype=jnp.dtype(config.weights.param_dtype),
    )
    # Parameters and optimizer state on every device, a share of each batch on each.
    mesh, plain = sharding.make_mesh(None), make_training()
    abstract = sharding.placed(plain.abstract, mesh)

    def of_batch(x: np.ndarray) -> jax.ShapeDtypeStruct:
        spec = P(None, sharding.BATCH) if x.ndim > 1 else P()
        place = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    first = read_batch(config, data, 0)
    batch = jax.tree.map(of_batch, first)

    def make_step(policy):
        step = jax.jit(make_training(policy=policy).step, donate_argnums=0)
        return step, (abstract, batch)

    planner = Planner(config.plan, make_training, make_step, cfg.layers)
    resume = config.output.resume is not False
    microbatch = jax.tree.map(lambda x: x[0], first)
    state = functools.partial(jax.jit(plain.init), params)
    with jax.set_mesh(mesh):
        plans = Plans.first(planner, config.folder, resume, state, microbatch)
    everything = [data.train.tokens_nt, data.train.target_n]
    everything += [x for e in data.dev.values() for x in (e.tokens_nt, e.target_n)]
    everything += [*jax.tree.leaves(params), shape_bytes(cfg)]
    fixed = config.fixed() | plans.fixed()
    fixed |= {
        "dtype": dtype,
        "steps": steps,
        "batch_size": config.batch_size,
        "threshold": config.threshold,
        "labels": list(data.splits.task.labels),
        "data_and_weights": f"{crc(everything):08x}",
    }
    start = 0 if config.plan.explain_plan else find_start(config, fixed, abstract)
    plans = plans.at(start)
    with jax.set_mesh(mesh):
        training = plans.training()
    return Job(
        config, training, plans, fixed, start, steps, params, abstract, batch, mesh
    )


def warmup_line(peak: float, steps: int, warmup: float) -> optax.Schedule:
    """A linear rise over the fraction ``warmup`` of the steps, and a line to 0.

    >>> schedule = warmup_line(1.0, 10, 0.2)
    >>> [round(float(schedule(step)), 3) for step in (0, 1, 2, 6, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    rise = min(round(warmup * steps), steps - 1)
    return optax.join_schedules(
        [
            optax.linear_schedule(peak / max(rise, 1), peak, max(rise - 1, 1)),
            optax.linear_schedule(peak, 0.0, steps - rise),
        ],
        [rise],
    )


def train(job: Job, data: Data, interrupt: Interrupt) -> int:
    """Trains to the end, or until interrupted. Returns the exit code.

    Raises NotFinite, also of predictions; what is on disk by then was finite.
    """
    config, plans, start, steps = job.config, job.plans, job.start, job.steps
    training, output = job.training, config.output
    checkpoints = Checkpoints(config.folder / "checkpoints", output.keep)
    if start == steps:
        print(f"{config.folder} is finished: step {start} of {steps}", flush=True)
        if output.export:
            export(job, checkpoints.load(start, job.abstract), data)
        return 0
    if start:
        state = checkpoints.load(start, job.abstract)
        with jax.set_mesh(job.mesh):
            plans.tell_size()
    else:
        state = jax.jit(training.init, out_shardings=job.shardings)(job.params)
    train_step = compile_step(job)
    # Not before: what a folder holds is lost then.
    if not start:
        begin_folder(config.folder, job.fixed)
    checkpoints.drop_after(start)
    summary.forget(config.folder)
    plans.begin(start)
    logits_of = jax.jit(lambda params, tokens_bt: training.model(params)(tokens_bt))
    shardings = jax.tree.map(lambda x: x.sharding, job.tokens_abt)
    examples, tokens = len(data.train), job.tokens_abt.tokens_bt.size
    log = Log(
        config.folder,
        start=start,
        steps=steps,
        every=output.log_every,
        tokens=tokens,
        max_skipped=config.optimizer.max_skipped,
        perplexity=False,
    )
    with checkpoints, log:
        for step in range(start + 1, steps + 1):
            batch = read_batch(config, data, step - 1)
            if job.plans.looks_again(step - 1):
                microbatch = jax.tree.map(lambda x: x[0], batch)
                job, train_step = look_again(
                    job, train_step, log, step - 1, state.params, microbatch
                )
            batch = jax.device_put(batch, shardings)
            state, measured = train_step(state, batch)
            log.train(step, measured)
            if ends_epoch(step, examples, config.batch_size) or step == steps:
                with log.paused():
                    scores = evaluate(logits_of, state, job, data, step)
                    log.scores(step, scores)
            if step == steps:  # before the checkpoint that says that all is done
                microbatch = tokens // config.task.accumulate
                held = summary.held_bytes(training, job.tokens_abt, microbatch)
                whole = {"scores": scores, "tokens_per_second": log.speed} | held
                summary.write(config.folder, whole)
            last, stop = step == steps, interrupt.received
            code = end_step(job, checkpoints, log, step, state, last=last, stop=stop)
            if code:
                return code
    if output.export:
        export(job, state, data)
    return 0


def export(job: Job, state: State, data: Data) -> None:
    """Writes the weights, and the tokenizer, as Hugging Face has them."""
    folder = job.config.folder / "weights"
    model = job.training.model(state.params)
    save_roberta(model, folder, data.splits.task.labels)
    data.tokenizer.save(folder, model.cfg.max_seq)
    print(f"weights: {folder}", flush=True)


def read_batch(config: Config, data: Data, step: int) -> Examples:
    """The examples of the step after ``step`` updates."""
    return data.train.batch(
        step,
        batch_size=config.batch_size,
        accumulate=config.task.accumulate,
        seed=config.optimizer.seed,
    )


def ends_epoch(step: int, examples: int, batch_size: int) -> bool:
    """Whether the update takes the last example of an epoch, or of several.

    >>> [step for step in range(1, 12) if ends_epoch(step, 54, 16)]
    [4, 7, 11]
    """
    return step * batch_size // examples > (step - 1) * batch_size // examples


def evaluate(
    logits_of: Callable, state: State, job: Job, data: Data, step: int
) -> dict[str, float]:
    """The scores of the held-out examples: of all, and of each set if several.

    Raises NotFinite for predictions that are none.
    """
    config, task = job.config, data.splits.task
    size = config.batch_size // config.task.accumulate
    place = NamedSharding(job.mesh, P(sharding.BATCH))
    predicted, target = {}, {}

    def logits(tokens_bt: np.ndarray) -> np.ndarray:
        with jax.set_mesh(job.mesh):
            here = jax.device_put(tokens_bt, place)
            return np.asarray(logits_of(state.params, here))

    for name, encoded in data.dev.items():
        parts = [logits(tokens_bt)[:n] for tokens_bt, n in encoded.in_order(size)]
        logits_nc = np.concatenate(parts)
        if bad := np.count_nonzero(~np.isfinite(logits_nc).all(-1)):
            raise NotFinite(
                f"the predictions of step {step} are not finite: of {bad} of the "
                f"{len(logits_nc)} examples of {name}"
            )
        if task.multi_label:
            threshold = config.threshold
            predicted[name] = logits_nc > math.log(threshold / (1 - threshold))
        else:
            predicted[name] = logits_nc.argmax(-1) if task.labels else logits_nc[:, 0]
        target[name] = encoded.target_n
    sets = {"": list(data.dev)}
    if len(data.dev) > 1:
        sets |= {f" {name}": [name] for name in data.dev}
    return {
        score + suffix: SCORES[score](
            np.concatenate([predicted[name] for name in names]),
            np.concatenate([target[name] for name in names]),
        )
        for suffix, names in sets.items()
        for score in task.scores
    }


if __name__ == "__main__":
    sys.exit(main())
