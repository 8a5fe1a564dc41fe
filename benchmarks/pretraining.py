"""Validation loss at equal steps: exact AdamW, GaLore and CompAct's variants.

    python benchmarks/pretraining.py run --data ../shared/data/english_novels
    python benchmarks/pretraining.py table

`run` trains the ``tiny`` model on the bytes of the novels and appends a row per run to
``benchmarks/results/pretraining.jsonl``; rows that are there already are not run again.
Every method's learning rate and alpha (the scale of the compressed kernels' updates;
exact training has it too) are searched over the same grid with seed 0; the best pair
is then run with two more seeds. The variants in `LONGER` are searched again with four
times the steps, one seed. `table` prints the tables of ``docs/results.md``.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "train"), str(ROOT / "benchmarks")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from provenance import append, provenance, rows_of  # noqa: E402

import jaxcompact as jc  # noqa: E402
from jaxcompact.subspace import Slot  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "pretraining.jsonl"

# Learning rate and alpha. (3e-3, 0.3) and (1.2e-2, 1.0), tried with the first five
# variants, were never the best and often the worst.
GRID = ((3e-3, 1.0), (6e-3, 0.3), (6e-3, 1.0), (1.2e-2, 0.3))
STEPS, BATCH, SEQ = 400, 8, 128
SEEDS = {STEPS: (0, 1, 2), 4 * STEPS: (0,)}  # that the best pair is run with
LONGER = ("exact AdamW", "CompAct n/4, countsketch")
WARMUP, PERIOD = 0.1, 100

GAUSSIAN = {"name": "compact", "kind": "gaussian"}
# label -> fields of `methods.Method`; "channel" and "seeds" are this file's own.
VARIANTS = {
    "exact AdamW": {"name": "exact"},
    "AdamW, one second moment per output channel": {"name": "channel"},
    "CompAct n/4": GAUSSIAN | {"rank": 0.25},
    "CompAct n/2, z in 4 bits": GAUSSIAN | {"rank": 0.5, "bits": 4},
    "GaLore n/4": {"name": "galore", "rank": 0.25},
    "CompAct n/2": GAUSSIAN | {"rank": 0.5},
    "CompAct n/8": GAUSSIAN | {"rank": 0.125},
    "CompAct n/4, z in 4 bits": GAUSSIAN | {"bits": 4},
    "CompAct n/4, moment kept": GAUSSIAN | {"moment": "keep"},
    "CompAct n/4, moment transferred": GAUSSIAN | {"moment": "transfer"},
    "CompAct n/4, orthonormal": {"name": "compact", "kind": "orthonormal"},
    "CompAct n/4, countsketch": {"name": "compact", "kind": "countsketch"},
    "CompAct n/4, rademacher": {"name": "compact", "kind": "rademacher"},
    "CompAct n/4, sparse": {"name": "compact", "kind": "sparse"},
    "CompAct n/4, one seed for all layers": GAUSSIAN | {"seeds": "one"},
}
# CompAct's Figure 5: updates between new projections, the last of which is never.
PERIODS = (1, 10, 50, PERIOD, 200, STEPS)
SWEPT = ("CompAct n/2", "CompAct n/4", "CompAct n/8", "CompAct n/4, moment kept")


def swept(label: str, period: int) -> str:
    return label if period == PERIOD else f"{label}, every {period}"


VARIANTS_SWEPT = {
    swept(label, period): VARIANTS[label] | {"period": period}
    for label in SWEPT
    for period in PERIODS
}


def scale_by_channel_adam(b1=0.9, b2=0.999, eps=1e-8):
    """Adam whose second moment is one number per output channel of a matrix.

    CompAct's second moment is nearly that (E[V_kj] = |G_:j|^2 / r), so part of what it
    does to training is this, and has nothing to do with projections.
    """
    import methods
    from jaxcompact.paths import map_named

    def second(name, g):
        matrix = methods.re.fullmatch(methods.MATRICES, name)
        return jnp.mean(g**2, axis=-2, keepdims=True) if matrix else g**2

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        nu = map_named(second, zeros)
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), zeros, nu)

    def update(g, state, params=None):
        count = state.count + 1
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, g)
        square = map_named(second, g)
        nu = jax.tree.map(lambda v, s: b2 * v + (1 - b2) * s, state.nu, square)
        t = count.astype(jnp.float32)
        updates = jax.tree.map(
            lambda m, v: m / (1 - b1**t) / (jnp.sqrt(v / (1 - b2**t)) + eps), mu, nu
        )
        return updates, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


class OneKey(Slot):
    def keys(self, key, generation):
        return jnp.broadcast_to(jax.random.fold_in(key, generation), self.stack)


class OneSeed(jc.Subspace):
    """All kernels of one width have one P, as in CompAct's Figure 4."""

    def slots(self, params):
        found = super().slots(params)
        return {name: OneKey(**vars(slot)) for name, slot in found.items()}


class Trainer:
    """A variant under one seed, compiled once for all learning rates and alphas."""

    def __init__(self, variant: dict, seed: int, steps: int, data):
        import methods
        from configs import MODELS
        from llama import Llama
        from loss import next_token_loss

        channel = variant["name"] == "channel"
        fields = variant | ({"name": "exact"} if channel else {})
        one_seed = fields.pop("seeds", None) == "one"
        method = methods.Method(**({"period": PERIOD} | fields))
        subspace = method.subspace(seed)
        if one_seed:
            subspace = OneSeed(subspace.rules, subspace.key, subspace.period)
        config = dataclasses.replace(MODELS["tiny"], vocab_size=data.vocab_size)
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, 1.0, round(WARMUP * steps), steps, 0.1
        )
        tx = methods.optimizer(
            method,
            subspace,
            schedule,
            width=config.width,
            adam=scale_by_channel_adam() if channel else None,
        )
        model = Llama(config, dtype=jnp.float32, rngs=nnx.Rngs(seed))
        graphdef, self.params = nnx.split(model, nnx.Param)
        self.init, self.data, self.seed, self.steps = tx.init, data, seed, steps

        def loss(params, tokens):
            model = nnx.merge(graphdef, params)
            hidden = model.hidden(tokens[:, :-1])
            kernel, targets = model.output_kernel(), tokens[:, 1:]
            return next_token_loss(hidden, kernel, targets, chunks=1)

        @jax.jit
        def step_fn(params, state, tokens, step, lr, alpha):
            gradient = methods.value_and_grad(loss, subspace)
            value, grads = gradient(params, tokens, step=step)
            updates, state = tx.update(grads, state, params)
            updates = methods.scaled(methods.MATRICES, alpha).update(updates, ())[0]
            updates = jax.tree.map(lambda u: lr * u, updates)
            return optax.apply_updates(params, updates), state, value

        self.step_fn, self.evaluate = step_fn, jax.jit(loss)

    def run(self, lr: float, alpha: float) -> dict:
        """Trains from the start; the mean validation loss at the end."""
        start = time.perf_counter()
        params, state = self.params, self.init(self.params)
        for step in range(self.steps):
            tokens = self.data.batch(
                step, batch_size=BATCH, seq_len=SEQ, seed=self.seed
            )
            params, state, _ = self.step_fn(params, state, tokens, step, lr, alpha)
        held_out = self.data.eval_batches(batch_size=32, seq_len=SEQ, count=12)
        loss = statistics.fmean(float(self.evaluate(params, b)) for b in held_out)
        return {"loss": loss, "seconds": round(time.perf_counter() - start, 1)}


def best(done: list[dict], label: str, steps: int) -> tuple[float, float] | None:
    """The pair with the lowest validation loss at seed 0, once the grid is complete."""
    grid = {
        (row["lr"], row["alpha"]): row["loss"]
        for row in done
        if row["label"] == label and row["seed"] == 0 and row["steps"] == steps
    }
    return min(GRID, key=grid.get) if all(pair in grid for pair in GRID) else None


Job = tuple[str, int, int, tuple[float, float]]  # label, seed, steps, (lr, alpha)


def job_of(row: dict) -> Job:
    return row["label"], row["seed"], row["steps"], (row["lr"], row["alpha"])


def pending(labels: list[str]) -> list[Job]:
    """Runs still to do: the grid at seed 0, then the best pair's other seeds."""
    done = rows_of(RESULTS)
    todo = []
    for label in labels:
        for steps in SEEDS if label in LONGER else (STEPS,):
            pair = best(done, label, steps)
            if pair is None:
                todo += [(label, 0, steps, pair) for pair in GRID]
            else:
                todo += [(label, seed, steps, pair) for seed in SEEDS[steps]]
        if label in SWEPT and (pair := best(done, label, STEPS)):
            todo += [
                (swept(label, period), seed, STEPS, pair)
                for period in PERIODS
                for seed in SEEDS[STEPS]
            ]
    have = set(map(job_of, done))
    return [job for job in todo if job not in have]


def run(source: str, part: str) -> None:
    from data import prepare

    index, parts = map(int, part.split("/"))
    data = prepare(source, "bytes")
    labels = list(VARIANTS)[index - 1 :: parts]
    while jobs := pending(labels):
        label, seed, steps, _ = jobs[0]
        variant = (VARIANTS | VARIANTS_SWEPT)[label]
        trainer = Trainer(variant, seed, steps, data)
        for job in jobs:
            if job[:3] != (label, seed, steps):
                continue
            lr, alpha = job[3]
            row = {"label": label, "lr": lr, "alpha": alpha, "seed": seed}
            row |= {"steps": steps} | trainer.run(lr, alpha)
            append(RESULTS, row | provenance())
            print(row, flush=True)


def table() -> None:
    done = rows_of(RESULTS)
    for steps, labels in ((STEPS, VARIANTS), (4 * STEPS, LONGER)):
        print(f"| method, {steps} steps | lr | alpha | validation loss | of seeds |")
        print("|---|---|---|---|---|")
        for label in labels:
            pair = best(done, label, steps)
            jobs = [(label, seed, steps, pair) for seed in SEEDS[steps]]
            losses = [row["loss"] for row in done if job_of(row) in jobs]
            if not losses:
                print(f"| {label} | not run yet | | | |")
                continue
            each = ", ".join(f"{loss:.4f}" for loss in sorted(losses))
            mean = statistics.fmean(losses)
            print(f"| {label} | {pair[0]:g} | {pair[1]:g} | {mean:.4f} | {each} |")
        print()
    table_of_periods(done)


def table_of_periods(done: list[dict]) -> None:
    cells = [f"{period}" for period in PERIODS[:-1]] + ["never"]
    print(f"| validation loss, a new P every | {' | '.join(cells)} |")
    print("|---" * (1 + len(cells)) + "|")
    for label in SWEPT:
        pair, cells = best(done, label, STEPS), []
        for period in PERIODS:
            jobs = [(swept(label, period), s, STEPS, pair) for s in SEEDS[STEPS]]
            losses = [row["loss"] for row in done if job_of(row) in jobs]
            if len(losses) < 2:
                cells.append("not run yet")
                continue
            error = statistics.stdev(losses) / len(losses) ** 0.5
            cells.append(f"{statistics.fmean(losses):.4f} ± {error:.4f}")
        print(f"| {label} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="train what is not in the results yet")
    running.add_argument("--data", required=True, help="folder of english_novels")
    running.add_argument("--part", default="1/1", help="i/n: every n-th variant only")
    commands.add_parser("table", help="print the table")
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments.data, arguments.part)
    else:
        table()


if __name__ == "__main__":
    main()
