"""The models of GACT's and Adacc's papers, at their sizes: peaks and largest batches.

    pip install ".[train,memory]" jax-resnet jraph
    python benchmarks/architectures.py all [MODEL ...]
    python benchmarks/architectures.py peaks [MODEL ...]    # now, beside the table's
    python benchmarks/architectures.py table

Whole training steps of paper_models.py with AdamW, compiled for an H200. GACT's
settings are models.py's; its automatic bits come from `jc.sensitivity` of a narrow
model of the same operations, weighed by the large one's sizes. A plan is
`jc.plan_step`'s in full recomputation's memory. Rows of results/architectures.jsonl
that are there are not made again, but for those of another commit that lack batches.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "train"), str(ROOT / "benchmarks")]
RESULTS = ROOT / "benchmarks/results/architectures.jsonl"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from models import gact  # noqa: E402
from paper_models import LARGER, MODELS, Larger, Model  # noqa: E402
from plans import step_seconds  # noqa: E402
from provenance import provenance, rows_of  # noqa: E402

import jaxcompact as jc  # noqa: E402
from jaxcompact import memory  # noqa: E402
from jaxcompact.planner.block import block_of  # noqa: E402

# Nothing runs here but the narrow models, twice: they take longer to compile.
jax.config.update("jax_disable_most_optimizations", True)
UNIFORM = {bits: jc.policies.uniform(gact(bits)) for bits in (4, 2)}
BUDGETS = ("16 GB", "32 GB", "80 GB")
LARGER_WITH = {"exact": None, "recomputed": "nothing"}
LARGER_WITH |= {f"GACT {bits} bits": policy for bits, policy in UNIFORM.items()}


def automatic(model: Model, bits: int) -> Any:
    """GACT's bits: of a narrow model's sensitivity, at the large one's sizes."""
    base = UNIFORM[4]

    def make_gradient(policy):
        loss, params, rest = model.build(4, policy, True)
        return jax.grad(loss), _random((params, *rest))

    found = jc.sensitivity(
        make_gradient, policy=base, codecs=tuple(map(gact, (8, 4, 2, 1))), probes=2
    )
    traces = block_of(lambda policy: model.step(model.batch, policy), base, "step")
    shapes = {s.tensor.name: s.tensor.shape for s in traces.replay.slots}
    effects = {
        name: replace(effect, shape=shapes[name])
        for name, effect in found.effects.items()
    }
    found = replace(found, effects=effects)
    policy = found.policy(found.bits(dict.fromkeys(effects, gact(bits))))
    alike = set(dict(policy.rules).values()) == {gact(bits)}
    return UNIFORM[bits] if alike else policy


def _random(shapes: Any) -> Any:
    """Normal weights and images, integers from 2 to 15, and random keys."""
    rng = np.random.default_rng(0)

    def one(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            key = jax.random.key(0)
            return jax.random.split(key, x.shape) if x.shape else key
        if jnp.issubdtype(x.dtype, jnp.integer):
            return jnp.asarray(rng.integers(2, 16, x.shape), x.dtype)
        fan = x.shape[0] if len(x.shape) == 2 else 16
        return jnp.asarray(rng.normal(size=x.shape) / fan**0.5, x.dtype)

    return jax.tree.map(one, shapes)


# --- rows ---


def policies(model: Model, row_of: Callable[[str], dict]) -> Iterator[tuple[str, Any]]:
    yield "exact", None
    yield "recomputed", "nothing"
    yield "int4", jc.policies.int4()
    for bits, policy in UNIFORM.items():
        yield f"GACT {bits} bits", policy
        yield f"GACT automatic {bits}", partial(automatic, model, bits)
    budget = row_of("recomputed")["peak_bytes"]
    yield "plan", partial(planned, model, model.batch, budget)


def planned(model: Model, batch: int, budget: int | str) -> jc.Plan:
    return jc.plan_step(partial(model.step, batch), layers=model.layers, budget=budget)


def make(name: str, search: bool) -> None:
    model, commit = MODELS[name], provenance()["commit"]
    done = {row["method"]: row for row in rows_of(RESULTS) if row["model"] == name}
    for method, policy in policies(model, done.__getitem__):
        blank = {"model": name, "method": method, "batch": model.batch}
        row = done.get(method, blank)
        missing = [b for b in BUDGETS if b not in row] * search
        if "peak_bytes" in row and not missing:
            continue
        if row.get("commit") != commit:  # a row's figures are all of one commit
            row, missing = blank, list(BUDGETS) * search
        if callable(policy) and ("peak_bytes" not in row or method != "plan"):
            policy = policy()
        for bits, uniform in UNIFORM.items():  # automatic bits may be these
            twin = done.get(f"GACT {bits} bits", {})
            if policy is uniform and twin.get("commit") == commit:
                row = {**twin, **row, "method": method}
                missing = [b for b in missing if b not in row]
        if "peak_bytes" not in row:
            step, args = model.step(model.batch, policy)
            row["peak_bytes"] = memory.peak(step, *args).peak_bytes
            if not hasattr(policy, "decide"):
                row["seconds"] = step_seconds(step, args)
            if method == "plan":
                extra = model.layers * policy.seconds
                row |= {"seconds": done["exact"]["seconds"] + extra}
                row |= {"error": policy.error}
        for budget in missing:
            if method == "plan":
                row[budget] = largest_planned(model, budget, done["recomputed"][budget])
            else:
                row[budget] = largest(model, policy, budget)
        done[method] = write(row)


def compare(name: str) -> None:
    """Peaks of this commit and of the rows, whose batches take hours to search for."""
    model = MODELS[name]
    known = {row["method"]: row for row in rows_of(RESULTS) if row["model"] == name}
    for method, policy in policies(model, known.__getitem__):
        step, args = model.step(model.batch, policy() if callable(policy) else policy)
        now, row = memory.peak(step, *args).peak_bytes, known[method]
        before, commit = row["peak_bytes"], row["commit"]
        sizes = f"{now / 2**30:.2f} GiB, {before / 2**30:.2f} at {commit}"
        print(f"{name}, {method}: {sizes} ({now / before - 1:+.1%})", flush=True)


def make_larger(name: str) -> None:
    """Not a batch, but that size of the model, is searched for."""
    larger = LARGER[name]
    known = {row["method"] for row in rows_of(RESULTS) if row["model"] == name}
    for method, policy in LARGER_WITH.items():
        if method not in known:
            row = {"model": name, "method": method, "batch": larger.batch}
            write(row | {"16 GB": largest(larger, policy, "16 GB")})


def largest(model: Model | Larger, policy: Any, budget: str) -> int:
    try:
        return memory.largest_batch(
            lambda size: model.step(size, policy),
            budget=budget,
            multiple=model.multiple,
        ).batch
    except ValueError as error:  # one is too large
        print(error, file=sys.stderr)
        return 0


def largest_planned(model: Model, budget: str, near: int) -> int:
    """Each batch with a plan of its own; within 2 %."""

    def fits(count: int) -> bool:
        try:
            planned(model, count * model.multiple, budget)
        except ValueError as error:
            print(error, file=sys.stderr)
            return False
        return True

    count, good, bad = max(1, near // model.multiple), 0, None
    while bad is None or bad - good > max(1, good // 50):
        if fits(count):
            good = count
        else:
            bad = count
        if bad is None:
            count = good + max(1, good // 4)
        else:
            count = (good + bad) // 2 if good else bad * 4 // 5
    return good * model.multiple


def write(row: dict) -> dict:
    """In its place, where it is there already."""
    row |= provenance() | {"device": "h200"}
    kept = {(each["model"], each["method"]): each for each in (*rows_of(RESULTS), row)}
    RESULTS.write_text("".join(f"{json.dumps(each)}\n" for each in kept.values()))
    print(row, flush=True)
    return row


def table() -> str:
    head = ("model", "method", "GiB", "of exact", "modelled ms", *BUDGETS)
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, model in MODELS.items():
        own = {row["method"]: row for row in rows_of(RESULTS) if row["model"] == name}
        for method, row in own.items():
            size, exact = row["peak_bytes"], own["exact"]["peak_bytes"]
            cells = [
                f"{name}, batch {model.batch}",
                method,
                f"{size / 2**30:.2f}",
                f"{size / exact:.0%}",
                f"{row['seconds'] * 1e3:.1f}" if "seconds" in row else "",
            ]
            for budget in BUDGETS:
                most, first = row.get(budget), own["exact"].get(budget)
                times = f" ({most / first:.1f}x)" if most and first else ""
                cells.append("" if most is None else f"{most}{times}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_larger() -> str:
    lines = [f"| in 16 GB | batch | {' | '.join(LARGER_WITH)} |"]
    lines.append("|---" * (len(LARGER_WITH) + 2) + "|")
    for name, larger in LARGER.items():
        own = (row for row in rows_of(RESULTS) if row["model"] == name)
        most = {row["method"]: row["16 GB"] for row in own}
        found = map(most.get, LARGER_WITH)
        cells = (f"{n} ({n / most['exact']:.1f}x)" if n else "" for n in found)
        lines.append(f"| {name} | {larger.batch} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("all", "peaks", "table"))
    parser.add_argument("models", nargs="*", help="whose names contain one of these")
    arguments = parser.parse_args()
    if arguments.command == "table":
        print(table(), table_of_larger(), sep="\n\n")
        return

    def asked(models: Iterable[str]) -> list[str]:
        words = arguments.models or [""]
        return [name for name in models if any(word in name for word in words)]

    if arguments.command == "peaks":
        for name in asked(MODELS):
            compare(name)
        return
    for search in (False, True):  # peaks first
        for name in asked(MODELS):
            make(name, search)
    for name in asked(LARGER):
        make_larger(name)


if __name__ == "__main__":
    main()
