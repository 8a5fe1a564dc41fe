"""What encoding the residuals does to the gradient, and to the loss.

    python benchmarks/checkpointing.py gradient --data ../shared/data/english_novels
    python benchmarks/checkpointing.py channels --data ../shared/data/english_novels
    python benchmarks/checkpointing.py precision --data ../shared/data/english_novels
    python benchmarks/checkpointing.py train --data ../shared/data/english_novels
    python benchmarks/checkpointing.py table

`gradient` trains the ``tiny`` model exactly, then takes gradients of further batches
under every policy: their relative error, and its component along the exact gradient
(bias). `channels` does so after four channels of the residual stream have been made far
larger than all others, as those of large trained networks are, and the network has
trained on. `precision` does so over seeds for automatic precision, with bits by
`jaxcompact.sensitivity` of four sequences, beside one codec for all of as many bytes.
`train` trains it from the start under each policy, with the same batches and
learning rate, over seeds, with "flash". Both append rows to
benchmarks/results/checkpointing.jsonl; rows that are there are not made again. `table`
prints the tables of docs/results.md.

Attention is XLA's, which replays softmax from the decoded q and k, or "flash": a
custom_vjp that keeps its output and log-sum-exp, as cuDNN's does on a GPU.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "train"), str(ROOT / "benchmarks")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from provenance import append, provenance, rows_of  # noqa: E402

import jaxcompact as jc  # noqa: E402
from attention import flash  # noqa: E402
from configs import MODELS  # noqa: E402
from data import prepare  # noqa: E402
from jaxcompact.actions import written  # noqa: E402
from jaxcompact.compress import Compress  # noqa: E402
from jaxcompact.planner import measuring  # noqa: E402
from llama import Llama  # noqa: E402
from loss import next_token_loss  # noqa: E402
from planning import looks_again  # noqa: E402
from training import warmup_cosine  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "checkpointing.jsonl"
STEPS, BATCH, SEQ, RATE, BATCHES = 400, 16, 128, 3e-3, 8  # pretrain.py's defaults
FAR = {3: 60.0, 40: -35.0, 77: 20.0, 101: 12.0}  # channels of 128, the others about 1
SEEDS = (0, 1, 2)
MORE = (3, 4, 5)  # seeds of the first policies, whose differences are small

Q = jc.Quantized
POLICIES = {
    "recomputed": jc.Policy(),
    "int8": jc.policies.int8(),
    "int4": jc.policies.int4(),
    "int3": jc.policies.int3(),
    "int4 in groups of 32": jc.policies.compress(Q(4, 32)),
    "int4, asymmetric": jc.policies.compress(Q(4, symmetric=False)),
    "int4, stochastic": jc.policies.compress(Q(4, stochastic=True)),
    "int4, standardized": jc.policies.compress(Q(4, standardized=True)),
    "int4, outlier channels kept": jc.policies.compress(jc.OutlierQuantized(4)),
    "int4, rotated": jc.policies.compress(jc.Chain(jc.Hadamard(64), Q(4))),
    "float8": jc.policies.compress(jc.Float8()),
    "int4, flash run again": dataclasses.replace(
        jc.policies.int4(), attention=jc.Recompute()
    ),
    "int4, v and output of flash too": dataclasses.replace(
        jc.policies.int4(), attention=None
    ),
    "q and k alone, int8, asymmetric": Compress(
        jc.Save(), scores=Q(8, symmetric=False)
    ),
    "q and k alone, int8": Compress(jc.Save(), scores=Q(8)),
    "q and k alone, int4": Compress(jc.Save(), scores=Q(4)),
    "uniform int8": jc.policies.uniform(Q(8)),
    "uniform int4": jc.policies.uniform(Q(4)),
    "uniform int4, stochastic": jc.policies.uniform(Q(4, stochastic=True)),
}
# "recomputed" is exact but for rounding: what it differs by is noise.
TRAINED = (
    "exact",
    "int8",
    "int4",
    "int3",
    "recomputed",
    "uniform int4",
    "int4 in groups of 32",
    "int4, asymmetric",
    "int4, standardized",
)


# Bits by `jaxcompact.sensitivity`, looked at again as `train/planning.py` does.
ADAPTIVE = {
    "bits by sensitivity, as many as uniform int4": lambda found: found.policy(
        found.bits(dict.fromkeys(found.effects, Q(4)))
    ),
    "fewest bits by sensitivity within 15 %": lambda found: fewest(found, 0.15),
    "fewest bits by sensitivity within 8 %": lambda found: fewest(found, 0.08),
}
# The first of these, but that the bits of the first weights stay.
ONCE = f"{next(iter(ADAPTIVE))}, looked at once"
ADAPTIVE[ONCE] = next(iter(ADAPTIVE.values()))


def fewest(found: jc.Sensitivity, error: float) -> jc.Policy:
    """Automatic precision with the fewest bits that keep an error."""
    for tenths in range(25, 90):
        policy = found.policy(tenths / 10)
        if found.error(dict(policy.rules)) <= error:
            return policy
    raise ValueError(f"no bits keep an error of {error}")


class Trainer:
    def __init__(self, policy, seed: int, data, attention="xla"):
        self.policy = policy
        config = dataclasses.replace(MODELS["tiny"], vocab_size=data.vocab_size)
        model = Llama(
            config,
            dtype=jnp.float32,
            attention=attention,
            checkpoint=policy,
            rngs=nnx.Rngs(seed),
        )
        graphdef, self.params = nnx.split(model, nnx.Param)
        self.data, self.seed = data, seed
        self.tx = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(warmup_cosine(RATE, STEPS, 0.1))
        )

        def loss(params, tokens):
            model = nnx.merge(graphdef, params)
            hidden, kernel = model.hidden(tokens[:, :-1]), model.output_kernel()
            return next_token_loss(hidden, kernel, tokens[:, 1:], chunks=1)

        def step(params, state, tokens):
            value, grads = jax.value_and_grad(loss)(params, tokens)
            updates, state = self.tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        self.step, self.loss = jax.jit(step), jax.jit(loss)
        self.gradient = jax.jit(jax.grad(loss))

    def batch(self, step: int) -> jax.Array:
        return self.data.batch(step, batch_size=BATCH, seq_len=SEQ, seed=self.seed)

    def train(self):
        params, state = self.params, self.tx.init(self.params)
        for step in range(STEPS):
            params, state, _ = self.step(params, state, self.batch(step))
        return params

    def held_out(self, params) -> float:
        batches = self.data.eval_batches(batch_size=32, seq_len=SEQ, count=12)
        return statistics.fmean(float(self.loss(params, b)) for b in batches)


def gradient(data) -> None:
    exact = Trainer(None, 0, data)
    params = exact.train()
    batches = [exact.batch(STEPS + i) for i in range(BATCHES)]
    reference = [blocks(exact.gradient(params, b)) for b in batches]
    done = {(r["policy"], r["attention"]) for r in rows("gradient")}
    for attention, implementation in (("xla", "xla"), ("flash", flash)):
        for label, policy in POLICIES.items():
            if (label, attention) in done:
                continue
            trainer = Trainer(policy, 0, data, implementation)
            errors, along = [], []
            for batch, g in zip(batches, reference, strict=True):
                e = blocks(trainer.gradient(params, batch)) - g
                errors.append(float(e @ e / (g @ g)))
                along.append(float(e @ g / (g @ g)))
            write(
                kind="gradient",
                policy=label,
                attention=attention,
                error=statistics.fmean(errors) ** 0.5,
                along=statistics.fmean(along),
            )


# How streams are stored: as they are; as what is no stream; as before either.
GROUPS = {
    "a channel's tokens": {},
    "a token's channels, equalized": {"stream": False},
    "a token's channels": {"stream": False, "uneven": False},
}


@dataclasses.dataclass(frozen=True)
class Seen:
    """A policy that sees tensors with such fields."""

    policy: Compress
    fields: tuple

    def decide(self, tensor):
        return self.policy.decide(dataclasses.replace(tensor, **dict(self.fields)))


def channels(data) -> None:
    exact = Trainer(None, 0, data, flash)
    params = enlarged(exact.train())
    state = exact.tx.init(params)
    for step in range(STEPS):
        params, state, _ = exact.step(params, state, exact.batch(STEPS + step))
    batches = [exact.batch(2 * STEPS + i) for i in range(BATCHES)]
    reference = [blocks(exact.gradient(params, b)) for b in batches]
    for label in ("int8", "int4", "int3"):
        for groups, fields in GROUPS.items():
            policy = Seen(POLICIES[label], tuple(fields.items()))
            gradient = Trainer(policy, 0, data, flash).gradient
            pairs = zip(batches, reference, strict=True)
            off = [blocks(gradient(params, b)) - g for b, g in pairs]
            errors = [
                float(e @ e / (g @ g)) for e, g in zip(off, reference, strict=True)
            ]
            error = statistics.fmean(errors) ** 0.5
            write(kind="channels", policy=label, groups=groups, error=error)


def enlarged(params: nnx.State) -> nnx.State:
    """Norms' scales grow with what they divide by, but for those channels."""
    pure = nnx.to_pure_dict(params)
    far = (
        jnp.zeros_like(pure["norm"]["scale"]).at[jnp.array([*FAR])].set([*FAR.values()])
    )
    pure["embed"]["embedding"] += far
    grown = jnp.where(far == 0, jnp.sqrt(1 + jnp.mean(far**2)), 0.1)
    for norm in (pure["norm"], pure["layers"]["attn_norm"], pure["layers"]["mlp_norm"]):
        norm["scale"] *= grown
    found = jax.tree.map(jnp.copy, params)
    nnx.replace_by_pure_dict(found, pure)
    return found


def precision(data) -> None:
    done = {(r["seed"], r["attention"]) for r in rows("precision")}
    for seed in SEEDS:
        exact = Trainer(None, seed, data)
        params = exact.train()
        for attention, implementation in (("xla", "xla"), ("flash", flash)):
            if (seed, attention) not in done:
                for row in precisions(exact, params, implementation):
                    write(kind="precision", seed=seed, attention=attention, **row)


def precisions(exact: Trainer, params, attention) -> Iterator[dict]:
    batches = [exact.batch(STEPS + i) for i in range(BATCHES)]
    reference = [exact.gradient(params, b) for b in batches]

    def trainer(policy):
        return Trainer(policy, exact.seed, exact.data, attention)

    def error(policy):
        gradient = trainer(policy).gradient
        pairs = zip(batches, reference, strict=True)
        return statistics.fmean(relative(gradient(params, b), g) for b, g in pairs)

    start = time.perf_counter()
    found = jc.sensitivity(
        lambda policy: (trainer(policy).gradient, (params, exact.batch(STEPS)[:4]))
    )
    seconds = round(time.perf_counter() - start, 1)
    for codec in (Q(8), Q(4), Q(3, 32), Q(2, 32)):
        uniform = dict.fromkeys(found.effects, codec)
        bits = found.bits(uniform)
        automatic = found.policy(bits)
        rules = dict(automatic.rules)
        yield {
            "bits": bits,
            "used": found.bits(rules),
            "predicted": found.error(rules),
            "automatic": error(automatic) ** 0.5,
            "uniform_predicted": found.error(uniform),
            "uniform": error(jc.Policy(uniform, default=found.base)) ** 0.5,
            "chosen": {name: written(codec) for name, codec in rules.items()},
            "seconds": seconds,
        }


def relative(grads, exact) -> float:
    """Squared, of the whole gradient."""
    g = jnp.concatenate([x.ravel() for x in jax.tree.leaves(exact)])
    e = jnp.concatenate([x.ravel() for x in jax.tree.leaves(grads)]) - g
    return float(e @ e / (g @ g))


def blocks(grads) -> jax.Array:
    """The gradient of all blocks as one vector."""
    return jnp.concatenate([x.ravel() for x in jax.tree.leaves(grads["layers"])])


def train(data, part: str) -> None:
    index, parts = map(int, part.split("/"))
    jobs = [(label, seed) for seed in SEEDS for label in TRAINED]
    jobs += [(label, seed) for seed in MORE for label in TRAINED[:3]]
    jobs += [(label, seed) for seed in SEEDS for label in ADAPTIVE]
    for label, seed in jobs[index - 1 :: parts]:
        if (label, seed) in {(r["policy"], r["seed"]) for r in rows("train")}:
            continue
        start = time.perf_counter()
        if label in ADAPTIVE:
            loss = adapted(ADAPTIVE[label], seed, data, again=label != ONCE)
        else:
            trainer = Trainer(POLICIES.get(label), seed, data, flash)
            loss = trainer.held_out(trainer.train())
        seconds = round(time.perf_counter() - start)
        write(kind="train", policy=label, seed=seed, loss=loss, seconds=seconds)


def adapted(policy_of: Callable, seed: int, data, again: bool) -> float:
    """The loss of a run whose policy is chosen by sensitivity, as it begins.

    And ``again`` after 16, 32, 64, ... updates.
    """
    trainer = Trainer(jc.policies.int4(), seed, data, flash)
    params, state = trainer.params, trainer.tx.init(trainer.params)

    def make_gradient(policy):
        return Trainer(policy, seed, data, flash).gradient, (params, few(0))

    def few(step):
        return trainer.batch(step)[:4]

    measure, _ = measuring(make_gradient, probes=2)
    for step in range(STEPS):
        if step == 0 or (again and looks_again(step)):
            policy = policy_of(measure(jax.random.key(0), params, few(step)))
            if policy != trainer.policy:
                trainer = Trainer(policy, seed, data, flash)
                bits = [written(codec) for codec in dict(policy.rules).values()]
                print(step, ", ".join(bits), flush=True)
        params, state, _ = trainer.step(params, state, trainer.batch(step))
    return trainer.held_out(params)


def rows(kind: str) -> list[dict]:
    return [row for row in rows_of(RESULTS) if row["kind"] == kind]


def write(**row) -> None:
    append(RESULTS, row | provenance())
    print(row, flush=True)


def table() -> None:
    print("| gradient | attention | relative error | along |")
    print("|---|---|---|---|")
    for row in rows("gradient"):
        print(
            f"| {row['policy']} | {row['attention']} | {row['error']:.3f} "
            f"| {row['along']:+.3f} |"
        )
    print(f"\n| far channels: groups of | {' | '.join(GROUPS)} |")
    print("|---" * (1 + len(GROUPS)) + "|")
    apart = {(r["policy"], r["groups"]): r["error"] for r in rows("channels")}
    for label in dict.fromkeys(label for label, _ in apart):
        errors = (f"{apart[label, groups]:.3f}" for groups in GROUPS)
        print(f"| {label} | {' | '.join(errors)} |")
    print("\n| attention | bits | by sensitivity | predicted | one codec | predicted |")
    print("|---|---|---|---|---|---|")
    groups: dict[tuple, list[dict]] = {}
    for row in rows("precision"):
        groups.setdefault((row["attention"], round(row["bits"], 2)), []).append(row)
    names = ("automatic", "predicted", "uniform", "uniform_predicted")
    for (attention, bits), each in groups.items():
        cells = (", ".join(f"{row[name]:.3f}" for row in each) for name in names)
        print(f"| {attention} | {bits} | {' | '.join(cells)} |")
    losses = {label: {} for label in (*TRAINED, *ADAPTIVE)}
    for row in rows("train"):
        losses[row["policy"]][row["seed"]] = row["loss"]
    exact = losses["exact"]
    print("\n| training | validation loss | against exact, same seeds | of seeds |")
    print("|---|---|---|---|")
    for label, each in losses.items():
        if not each:
            continue
        mean = statistics.fmean(each.values())
        gaps = [100 * (loss / exact[seed] - 1) for seed, loss in each.items()]
        spread = statistics.stdev(gaps) / len(gaps) ** 0.5
        gap = f"{statistics.fmean(gaps):+.2f} % ± {spread:.2f}"
        print(
            f"| {label} | {mean:.4f} | {gap if label != 'exact' else ''} "
            f"| {', '.join(f'{loss:.4f}' for loss in each.values())} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("gradient", "channels", "precision", "train"):
        command = commands.add_parser(name)
        command.add_argument("--data", required=True, help="folder of english_novels")
        command.add_argument("--part", default="1/1", help="i/n: every n-th run only")
    commands.add_parser("table", help="print the tables")
    arguments = parser.parse_args()
    if arguments.command == "table":
        table()
        return
    data = prepare(arguments.data, "bytes")
    if arguments.command == "gradient":
        gradient(data)
    elif arguments.command == "channels":
        channels(data)
    elif arguments.command == "precision":
        precision(data)
    else:
        train(data, arguments.part)


if __name__ == "__main__":
    main()
