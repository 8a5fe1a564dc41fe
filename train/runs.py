"""How runs are run: one after another, until one is stopped; what both do in a step.

A job is the `Job` of pretrain or finetune; of its ``config`` the folder, the method and
the output are read here.
"""

import logging
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

import hosts
from checkpoint import CheckpointError, Checkpoints
from folders import fingerprint, told
from metrics import Log, NotFinite
from readers import DataError
from training import State, all_finite

FAULTS = (NotFinite, CheckpointError, DataError, OSError)
LESS = "less memory takes a smaller --batch-size, a larger --accumulate, or "
LESS += "--checkpoint int4"


def out_of_memory(error: Exception) -> bool:
    """On the host, or on a device: XLA has one class for all that goes wrong."""
    runtime = isinstance(error, jax.errors.JaxRuntimeError)
    exhausted = runtime and "RESOURCE_EXHAUSTED" in str(error)
    return exhausted or isinstance(error, MemoryError)


def in_turn(program: str, jobs: Sequence, train: Callable) -> int:
    """``train(job, interrupt)`` of all jobs; the exit code of the first that fails."""
    # Orbax logs each error in each of its threads before it raises it.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    with hosts.Interrupt() as interrupt:
        for job in jobs:
            try:
                code = train(job, interrupt)
            except Exception as error:
                no_memory = out_of_memory(error)
                known = no_memory or isinstance(error, FAULTS)
                if not known and not hosts.several():
                    raise
                if not known:  # a bug, or what tells that another process is gone
                    traceback.print_exc()
                what = told(error, job.config.folder)
                if no_memory:
                    what += "; " + LESS
                print(f"{program}: stopped: {what}", file=sys.stderr)
                return hosts.leave(1)
            if code:
                return code
    return 0


def compile_step(job: Any) -> Callable:
    """The training step, which overwrites the state that it is given."""
    began = time.perf_counter()
    shardings = jax.tree.map(lambda x: x.sharding, job.abstract)
    step = jax.jit(job.training.step, donate_argnums=0, out_shardings=(shardings, None))
    with jax.set_mesh(job.mesh):
        compiled = step.lower(job.abstract, job.tokens_abt).compile()
    weights = sum(x.size for x in jax.tree.leaves(job.abstract.params))
    device = jax.devices()[0]
    sizes = " ".join(f"{axis}={n}" for axis, n in job.mesh.shape.items() if n > 1)
    print(
        f"\n{job.config.method.name}: {weights / 1e6:.2f} M parameters, "
        f"{job.fixed['dtype']} on {job.mesh.size} x {device.device_kind}"
        f"{sizes and f' ({sizes})'}, "
        f"compiled in {time.perf_counter() - began:.1f} s; {job.config.folder}",
        flush=True,
    )
    return compiled


def look_again(
    job: Any, step: Callable, log: Log, done: int, params: Any, microbatch: Any
) -> tuple[Any, Callable]:
    """The job and its step after so many updates, under another plan where it errs."""
    with log.paused(), jax.set_mesh(job.mesh):
        plans, said = job.plans.again(done, params, microbatch)
        log.say(f"step {done}: {said}")
        if plans is job.plans:
            return job, step
        job = replace(job, plans=plans, training=plans.training())
        return job, compile_step(job)


_all_finite = jax.jit(all_finite)


def save(job: Any, checkpoints: Checkpoints, step: int, state: State) -> None:
    """Raises NotFinite for a state that must not be gone on from."""
    if not _all_finite(state):
        raise NotFinite(f"the state of step {step} is not finite")
    checkpoints.save(step, state, run=fingerprint(job.fixed), plan=job.plans.seal())


def end_step(
    job: Any,
    checkpoints: Checkpoints,
    log: Log,
    step: int,
    state: State,
    *,
    last: bool,
    stop: signal.Signals | None,
) -> int:
    """Saves where that is due; the exit code of a run that is to stop, else 0."""
    if step % job.config.output.checkpoint_every == 0 or last or stop:
        with log.paused():  # which knows of the last steps by then
            # Amid skipped steps: it may be the state that broke them.
            if last or stop or not log.skipped:
                save(job, checkpoints, step, state)
    if not stop:
        return 0
    log.say(f"{stop.name}: saving step {step}; --resume goes on from there")
    return 128 + stop
