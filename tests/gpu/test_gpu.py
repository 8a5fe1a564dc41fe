"""What must hold on a GPU. Needs no pytest: `python tests/gpu/test_gpu.py` runs it all.

Each check has a process, so that one that breaks the device breaks no other; or names
of checks run here, one after the other. Each also runs on a CPU, where it compares the
CPU with itself; cuDNN's attention is checked where there is one.
"""

import os
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "train"), str(HERE)]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from against_xla import (  # noqa: E402
    activation_is_xlas,
    arrays,
    biased_activation_is_xlas,
    channels,
    each,
    norm_is_xlas,
    projection_is_xlas,
    quantization_is_xlas,
    relative,
    rows,
    weight_gradient_is_xlas,
)

import jaxcompact as jc  # noqa: E402

KINDS = ("gaussian", "rademacher", "sparse", "countsketch", "orthonormal")
CPU = jax.local_devices(backend="cpu")[0]


def on_cpu(fun, *args):
    with jax.default_device(CPU):
        return fun(*jax.device_put(args, CPU))


def test_projections_are_the_cpus():
    """The same key gives the same P on any device, to the last ulps of erf and QR."""
    for kind in KINDS:
        projection = jc.Projection(rank=64, kind=kind)
        key = jax.random.key(0)
        here = jax.jit(projection.matrix, static_argnums=1)(key, 256)
        there = on_cpu(lambda k, p=projection: p.matrix(k, 256), key)
        assert relative(here, there) < 1e-5, (kind, relative(here, there))


def test_sketched_gradient_is_the_lifted_exact_one():
    """P^T G from the exact gradient on the CPU; float32 products at full precision."""
    x = jax.random.normal(jax.random.key(0), (8, 32, 256))
    params = {"kernel": jax.random.normal(jax.random.key(1), (256, 128)) / 16}
    for kind in KINDS:
        space = jc.Subspace({"kernel": jc.Projection(64, kind)}, jax.random.key(2))

        def loss(params, x):
            y = jc.linear(x, params["kernel"], precision="highest")
            return jnp.sum(jnp.sin(y))

        with jax.default_matmul_precision("highest"):
            grad = jax.jit(
                lambda p, x, s=space: jc.value_and_grad(loss, s)(p, x, step=0)
            )
            sketch = grad(params, x)[1]["kernel"]
            full = on_cpu(jax.grad(loss), params, x)["kernel"]
        slot = space.slots(params)["kernel"]
        p = slot.projection.matrix(slot.keys(space.key, 0), 256)
        assert relative(sketch, np.asarray(p).T @ np.asarray(full)) < 1e-4, kind


def test_codec_is_the_cpus():
    x = jax.random.normal(jax.random.key(0), (64, 300), jnp.bfloat16)
    for bits in (4, 8):
        codec = jc.Quantized(bits=bits)
        here = jax.jit(lambda x, c=codec: c.decode(c.encode(x)))(x)
        there = on_cpu(lambda x, c=codec: c.decode(c.encode(x)), x)
        # A value within an ulp of the middle between two codes may go either way.
        differ = np.asarray(here, np.float32) != np.asarray(there, np.float32)
        assert differ.mean() < 1e-3, differ.mean()


def test_quantizations_are_xlas():
    """The same bits at full size, tails and noise included."""
    each(quantization_is_xlas, [(codec, x) for x in arrays() for codec in rows()])


def test_quantizations_by_channels_are_xlas():
    each(quantization_is_xlas, [(codec, x) for x in arrays() for codec in channels()])


def test_weight_gradients_are_xlas():
    """To float32's roundings."""
    some = [x for x in arrays() if x.dtype == jnp.bfloat16]
    codecs = [jc.Quantized(bits) for bits in (2, 4, 8)]
    each(weight_gradient_is_xlas, [(codec, x) for x in some for codec in codecs])


def test_projections_are_xlas():
    some = [x for x in arrays() if x.shape[-1] % 64 == 0]
    codecs = [codec for codec in rows() if codec.bound is None]
    cases = [(codec, x, 256) for x in some for codec in codecs]
    # Three groups a block: their scales, of a byte each, take no whole 128 bytes.
    cases += [(jc.Quantized(4, scale_bits=8), x, 192) for x in some]
    each(projection_is_xlas, cases)


def test_activations_are_xlas():
    each(activation_is_xlas, [(x,) for x in arrays()])


def test_biased_activations_are_xlas():
    each(biased_activation_is_xlas, [(x,) for x in arrays()])


def test_norms_are_xlas():
    each(norm_is_xlas, [(x,) for x in arrays()])


def training(method, dtype="float32"):
    from configs import MODELS
    from training import Training

    schedule = optax.constant_schedule(1e-3)
    dtype = jnp.dtype(dtype)
    return Training(MODELS["tiny"], method, schedule, dtype=dtype)


def losses(run, steps=6, batch=4, seq=64):
    step, state, found = jax.jit(run.step), jax.jit(run.init)(), []
    for i in range(steps):
        shape = (1, batch, seq + 1)
        tokens = jax.random.randint(jax.random.key(i), shape, 0, run.cfg.vocab_size)
        state, measured = step(state, tokens)
        found.append(float(measured["loss"]))
    return found


def test_training_losses_are_the_cpus():
    """Every method, six steps, a new P among them, in float32 at full precision."""
    from methods import Method

    methods = (
        Method("exact"),
        Method("remat"),
        Method("compact", period=3),
        Method("compact", period=3, kind="countsketch", bits=4),
        Method("galore", period=3),
        Method("exact", checkpoint="int8"),
        Method("exact", checkpoint="int4"),
        Method("exact", checkpoint="offload"),
        Method("compact", period=3, checkpoint="int4"),
    )
    each(training_is_the_cpus, [(method,) for method in methods])


def training_is_the_cpus(method):
    with jax.default_matmul_precision("highest"):
        here = losses(training(method))
        there = on_cpu(lambda: losses(training(method)))
    # Adam's first steps are signs: noise in a tiny gradient moves a weight by lr.
    assert np.allclose(here, there, rtol=1e-3), (here, there)


def test_bfloat16_training_is_float32s_within_its_rounding():
    from methods import Method

    methods = (
        Method("exact"),
        Method("compact"),
        Method("compact", bits=4),
        Method("exact", checkpoint="int4"),  # with cuDNN's attention, in bfloat16
    )
    each(bfloat16_training_is_float32s, [(method,) for method in methods])


def bfloat16_training_is_float32s(method):
    low, high = losses(training(method, "bfloat16")), losses(training(method))
    assert np.allclose(low, high, rtol=2e-2), (low, high)


def test_training_is_deterministic():
    from methods import Method

    method = Method("compact", period=3)
    assert losses(training(method)) == losses(training(method))


def test_checkpoints_come_back_from_the_device():
    """A run's whole state, through orbax and back, on this device."""
    from checkpoint import Checkpoints
    from methods import Method

    run = training(Method("compact"))
    state = jax.jit(run.init)()
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder) / "checkpoints")
        save_and_compare(checkpoints, state)


def save_and_compare(checkpoints, state):
    checkpoints.save(1, state)
    checkpoints.wait()
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    jax.tree.map(np.testing.assert_array_equal, state, checkpoints.load(1, abstract))


def test_compact_saves_memory_in_the_compiled_step():
    """Compiled bytes of compact at n/8 are below exact's."""
    from configs import MODELS
    from methods import Method
    from training import Training

    def compiled(method):
        run = Training(
            MODELS["tiny"],
            method,
            optax.constant_schedule(1e-3),
            dtype=jnp.bfloat16,
        )
        tokens = jnp.zeros((1, 64, 257), jnp.int32)
        step = jax.jit(run.step, donate_argnums=0)
        m = step.lower(jax.eval_shape(run.init), tokens).compile().memory_analysis()
        sizes = m.argument_size_in_bytes + m.output_size_in_bytes
        return sizes + m.temp_size_in_bytes - m.alias_size_in_bytes

    if jax.default_backend() != "gpu":
        print("not checked: the CPU's memory analysis says nothing of a GPU's")
        return
    assert compiled(Method("compact", rank=0.125)) < compiled(Method("exact"))


def test_cudnn_attention_is_xlas():
    if jax.default_backend() != "gpu":
        print("not checked: cuDNN's attention needs a GPU")
        return
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, dy = (
        jax.random.normal(key, (2, 128, 4, 64), jnp.bfloat16) for key in keys
    )

    def attend(implementation):
        def f(q, k, v):
            return jax.nn.dot_product_attention(
                q, k, v, is_causal=True, implementation=implementation
            )

        y, back = jax.vjp(f, q, k, v)
        return y, *back(dy)

    for a, b in zip(attend("cudnn"), attend("xla"), strict=True):
        assert relative(a.astype(jnp.float32), b.astype(jnp.float32)) < 2e-2


CHECKS = {name: f for name, f in list(globals().items()) if name.startswith("test_")}


def main(names: list[str]) -> int:
    """The number that failed."""
    if names:
        return sum(not passed(name) for name in names)
    with ThreadPoolExecutor() as pool:
        pending = [pool.submit(passed_apart, name) for name in CHECKS]
        failed = sum(not done.result() for done in as_completed(pending))
    print(f"{len(CHECKS)} checks, {failed} failed")
    return failed


def passed(name: str) -> bool:
    try:
        CHECKS[name]()
    except Exception:
        print(f"FAILED  {name}\n{traceback.format_exc()}", flush=True)
        return False
    print(f"passed  {name} on {jax.devices()[0].device_kind}", flush=True)
    return True


def passed_apart(name: str) -> bool:
    """In a process of its own, which takes no more of the device than it needs.

    XLA tries no ways to multiply or sum, which would take most of the time.
    """
    settings = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_FLAGS": "--xla_gpu_autotune_level=0",
    }
    done = subprocess.run([sys.executable, __file__, name], env=settings | os.environ)
    if done.returncode < 0:
        print(f"FAILED  {name}: signal {-done.returncode}", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
