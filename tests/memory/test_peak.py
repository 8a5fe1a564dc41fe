"""Peaks of programs that are compiled for cards that are not here."""

import importlib.metadata
import json
import shutil
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import jaxcompact as jc
from jaxcompact.memory import cards, compiler

S = jax.ShapeDtypeStruct
F32, BF16 = jnp.float32, jnp.bfloat16
TX = optax.adam(1e-3)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXCOMPACT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "memory"


@pytest.fixture
def compiles(monkeypatch):
    """How many programs were compiled."""
    done = []
    compile_lowered = compiler.compile_lowered

    def counted(lowered, device):
        done.append(device.name)
        return compile_lowered(lowered, device)

    monkeypatch.setattr(compiler, "compile_lowered", counted)
    return done


def double(x):
    return x + x


def sgd(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)


def train_step(params, opt_state, x):
    def loss(params):
        h = jax.nn.gelu(x @ params["up"]) @ params["down"]
        with jax.named_scope("logits"):
            logits = (h @ params["head"]).astype(F32)
            return jax.nn.logsumexp(logits, axis=-1).mean()

    updates, opt_state = TX.update(jax.grad(loss)(params), opt_state, params)
    return optax.apply_updates(params, updates), opt_state


PARAMS = {
    "up": S((256, 1024), F32),
    "down": S((1024, 256), F32),
    "head": S((256, 8192), F32),
}
ARGS = PARAMS, jax.eval_shape(TX.init, PARAMS), S((2048, 256), F32)


# --- the bytes ---


@pytest.mark.parametrize("device", ["h100", "h200", "b200", "a100", "rtx4090", "l40s"])
def test_by_hand(device):
    """An input of 4 MiB and an output of 4 MiB; nothing else, and nothing shared."""
    found = jc.memory.peak(double, S((1024, 1024), F32), device=device)
    mib = 2**20
    assert found.peak_bytes == 8 * mib
    assert (found.argument_bytes, found.output_bytes) == (4 * mib, 4 * mib)
    assert (found.temporary_bytes, found.host_bytes) == (0, 0)
    assert {kind: n for kind, n in found.breakdown.items() if n} == {
        "inputs": 4 * mib,
        "outputs": 4 * mib,
    }
    assert [b.shape for b in found.buffers] == 2 * ["f32[1024,1024]"]


def test_a_donated_argument_is_overwritten():
    found = jc.memory.peak(double, S((1024, 1024), F32), donate=0)
    assert found.peak_bytes == 4 * 2**20 and found.output_bytes == 0
    jitted = jax.jit(double, donate_argnums=0)
    assert jc.memory.peak(jitted, S((1024, 1024), F32)) == found


def test_residuals_by_hand():
    """tanh of each of four layers waits for the backward pass."""

    def step(params, x):
        def loss(params):
            y = x
            for w in params:
                y = jnp.tanh(y @ w)
            return y.sum()

        return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params))

    found = jc.memory.peak(step, 4 * [S((512, 512), F32)], S((8192, 512), F32))
    assert found.breakdown["residuals"] == 4 * 4 * 8192 * 512


def test_the_kinds_of_a_training_step(optax_promotion):
    found = jc.memory.peak(train_step, *ARGS, donate=(0, 1), device="a100")
    weights = 4 * (2 * 256 * 1024 + 256 * 8192)
    parts = found.breakdown
    assert parts["parameters"] == weights
    assert parts["optimizer state"] == 2 * weights + 4  # Adam's moments and count
    assert parts["inputs"] == 4 * 2048 * 256
    assert parts["logits"] >= 4 * 2048 * 8192
    assert parts["residuals"] >= 4 * 2048 * 1024
    assert sum(parts.values()) == found.peak_bytes
    assert all(b.nbytes >= 0 for b in found.buffers)
    text = str(found)
    assert "NVIDIA A100-SXM4-80GB" in text and "opt_state[0].mu['head']" in text


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(256, 1024, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(1024, 256, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.gelu(self.up(x))))


@pytest.mark.parametrize("jit", [None, nnx.jit])
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("make", [lambda made: made(), nnx.eval_shape])
def test_a_step_that_changes_modules_in_place(jit, pair, make, optax_promotion):
    def step(model, optimizer, x):
        grads = nnx.grad(lambda model: jnp.sum(model(x) ** 2))(model)
        optimizer.update(model, grads)

    def of_pair(both, x):
        step(*both, x)

    def made():
        model = Net()
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    (model, optimizer), x = make(made), S((4096, 256), F32)
    fun, donate = (of_pair, 0) if pair else (step, (0, 1))
    args = ((model, optimizer), x) if pair else (model, optimizer, x)
    if jit:
        found = jc.memory.peak(jit(fun, donate_argnums=donate), *args)
    else:
        found = jc.memory.peak(fun, *args, donate=donate)
    weights = 4 * (2 * 256 * 1024 + 256 + 1024)
    assert found.breakdown["parameters"] == weights
    # Adam's moments and count, and the optimizer's
    assert found.breakdown["optimizer state"] in (2 * weights + 4, 2 * weights + 8)
    assert found.breakdown["residuals"] >= 4 * 4096 * 1024
    assert sum(found.breakdown.values()) == found.peak_bytes


@pytest.mark.parametrize("jit", [lambda fun: fun, jax.jit])
def test_a_module_that_is_read_alone(jit):
    """Nothing of it comes out."""
    found = jc.memory.peak(
        jit(lambda net, x: jnp.sum(net(x))), Net(), S((64, 256), F32)
    )
    assert found.output_bytes <= 4 + 4 + 16  # the sum, a count, pointers
    assert found.breakdown["parameters"] == 4 * (2 * 256 * 1024 + 256 + 1024)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: jax.debug.print("{}", x[0, 0]),
        lambda x: jax.pure_callback(lambda x: x, S((512, 512), F32), x),
    ],
)
def test_a_step_that_calls_the_host_is_refused(call):
    def step(x):
        return 2 * x, call(x)

    with pytest.raises(NotImplementedError, match="call nothing on the host"):
        jc.memory.peak(step, S((512, 512), F32))


def test_gradients_of_layers_in_a_scan():
    def step(params, x):
        def loss(params):
            def layer(x, w):
                return jnp.tanh(x @ w), None

            return jax.lax.scan(layer, x, params)[0].sum()

        return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params))

    found = jc.memory.peak(step, S((6, 256, 256), F32), S((4096, 256), F32), donate=0)
    assert found.breakdown["gradients"] >= 4 * 6 * 256 * 256
    # x of every layer, or what tanh made of it, is stacked.
    assert found.breakdown["residuals"] >= 4 * 6 * 4096 * 256
    assert sum(found.breakdown.values()) == found.peak_bytes


def test_what_is_encoded_is_smaller():
    def step(checkpoint):
        block = checkpoint(lambda w, x: jnp.tanh(x @ w) @ w.T)

        def run(w, x):
            def loss(w):
                return block(w, jnp.sin(block(w, x))).sum()

            return w - 0.1 * jax.grad(loss)(w)

        return run

    args = S((512, 2048), BF16), S((8192, 512), BF16)
    small = step(lambda f: jc.checkpoint(f, policy=jc.policies.int4(), params=0))
    plain, encoded = (
        jc.memory.peak(f, *args, donate=0) for f in (step(lambda f: f), small)
    )
    assert encoded.breakdown["residuals"] < 0.5 * plain.breakdown["residuals"]
    assert encoded.peak_bytes < plain.peak_bytes


def test_offloaded_bytes_are_the_hosts():
    block = jc.checkpoint(
        lambda w, x: jnp.tanh(x @ w) @ w.T,
        policy=jc.policies.uniform(jc.Offload()),
        params=0,
    )

    def step(w, x):
        return jax.grad(lambda w: block(w, jnp.sin(block(w, x))).sum())(w)

    found = jc.memory.peak(step, S((512, 512), F32), S((8192, 512), F32))
    assert found.host_bytes >= 4 * 8192 * 512
    assert sum(found.breakdown.values()) == found.peak_bytes


def test_a_fusion_comes_from_where_its_parts_do():
    text = """
%fused (p: f32[8]) -> f32[8] {
  %a = f32[8] add(%p, %p), metadata={op_name="jit(step)/jvp()/add"}
}
ENTRY %main (x: f32[8]) -> f32[8] {
  %loop_fusion = f32[8] fusion(%x), kind=kLoop, calls=%fused, metadata={}
}
"""
    paths = sys.modules["jaxcompact.memory.buffers"]._paths(text)
    assert paths["loop_fusion"] == "jit(step)/jvp()/add"


# --- many devices ---


def sharded(count, axis_type=AxisType.Auto):
    mesh = AbstractMesh((count,), ("data",), axis_types=(axis_type,))
    return S(
        (4096, 4096), F32, sharding=NamedSharding(mesh, PartitionSpec("data", None))
    )


@pytest.mark.parametrize("count", [2, 8, 64])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_is_unsharded_divided(count, axis_type):
    whole = jc.memory.peak(double, S((4096, 4096), F32))
    found = jc.memory.peak(double, sharded(count, axis_type), devices=count)
    assert found.devices == count
    assert found.peak_bytes == whole.peak_bytes // count
    assert found.breakdown["inputs"] == whole.breakdown["inputs"] // count


@pytest.mark.parametrize("size", [8, 512])
def test_arrays_that_a_step_closes_over(size):
    """They lie on the card as they would if they were given."""
    x, frozen = S((64, size), F32), jax.random.normal(jax.random.key(0), (size, size))
    given = jc.memory.peak(lambda x, frozen: jnp.sin(x @ frozen), x, frozen)
    found = jc.memory.peak(lambda x: jnp.sin(x @ frozen), x)
    inside = 4 * size**2 if size > 8 else 0  # as numbers in the code
    assert found.constant_bytes == found.breakdown["constants"] == inside
    assert found.peak_bytes == given.peak_bytes - (4 * size**2 - inside)
    assert found.peak_bytes == sum(found.breakdown.values())


def test_fully_sharded_parameters_are_gathered():
    """Each device holds an eighth of w and of x, and all of w while it is used."""
    x = sharded(8)
    found = jc.memory.peak(sgd, x, x, donate=0)
    assert found.breakdown["parameters"] == found.breakdown["inputs"] == 2**26 // 8
    assert found.breakdown["workspace"] >= 2**26
    assert sum(found.breakdown.values()) == found.peak_bytes


def test_tensor_parallel():
    mesh = AbstractMesh((2, 4), ("data", "tensor"))
    w = S((256, 4096), F32, sharding=NamedSharding(mesh, jax.P(None, "tensor")))
    x = S((4096, 256), F32, sharding=NamedSharding(mesh, jax.P("data")))
    found = jc.memory.peak(sgd, w, x, donate=0)
    assert found.breakdown["parameters"] == 4 * 256 * 4096 // 4
    # tanh(x w), of half the rows and a quarter of the columns
    assert "f32[2048,1024]" in {b.shape for b in found.buffers}
    assert max(b.nbytes for b in found.buffers) == 4 * 2048 * 1024


def test_arrays_on_a_mesh_of_this_machine():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, PartitionSpec("data")))
    found = jc.memory.peak(double, x)
    assert (found.devices, found.peak_bytes) == (4, 2 * 4 * 64 * 64 // 4)


def test_while_a_mesh_of_this_machine_is_set():
    """`jax.set_mesh` is left in place; types are the step's own."""
    mesh = jax.make_mesh((4,), ("data",))
    x = jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, PartitionSpec("data")))

    def step(x):
        return jax.sharding.reshard(2 * x, PartitionSpec(None, "data"))

    with jax.set_mesh(mesh):
        found = jc.memory.peak(step, x)
        assert jax.sharding.get_mesh() == mesh
    assert found.devices == 4
    assert (
        found.peak_bytes == jc.memory.peak(step, x).peak_bytes >= 2 * 4 * 64 * 64 // 4
    )


def test_random_keys_are_arguments():
    keys = S((), jax.random.key(0).dtype)
    found = jc.memory.peak(lambda key: jax.random.normal(key, (1024,)), keys)
    assert found.output_bytes == 4096


# --- what was compiled before ---


def test_the_same_program_is_compiled_once(compiles, cache):
    first = jc.memory.peak(sgd, *(S((256, 256), F32),) * 2)
    assert jc.memory.peak(sgd, *(S((256, 256), F32),) * 2) == first
    assert len(compiles) == 1
    jc.memory.peak(sgd, *(S((256, 256), F32),) * 2, device="a100")
    jc.memory.peak(sgd, *(S((256, 256), F32),) * 2, donate=0)
    jc.memory.peak(sgd, *(S((512, 512), F32),) * 2)
    assert len(compiles) == 4
    assert len(list(cache.iterdir())) == 4


def test_a_line_further_down_is_the_same_program(compiles):
    source = "def f(x):\n    return x * 2.0"
    for text in (source, "\n\n" + source):
        space = {}
        exec(compile(text, "moved.py", "exec"), space)
        jc.memory.peak(space["f"], S((8,), F32))
    assert len(compiles) == 1


def test_a_spoiled_cache_is_no_answer(compiles, cache):
    first = jc.memory.peak(double, S((8,), F32))
    (file,) = cache.iterdir()
    file.write_text(file.read_text()[:50])
    assert jc.memory.peak(double, S((8,), F32)) == first
    assert len(compiles) == 2
    assert json.loads(file.read_text())["peak_bytes"] == first.peak_bytes


def test_no_place_for_a_cache(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXCOMPACT_CACHE", str(tmp_path / "file"))
    assert jc.memory.peak(double, S((8,), F32)).peak_bytes


# --- what can't be done ---


def test_a_card_that_nobody_knows():
    with pytest.raises(ValueError, match="device must be one of .*h200.* got 'gtx'"):
        jc.memory.peak(double, S((8,), F32), device="gtx")


def test_the_card_that_is_here_is_the_default(monkeypatch, compiles):
    x = S((8, 8), F32)
    memory = jc.memory
    assert memory.here() == memory.peak(double, x).device == "h200"
    monkeypatch.setattr(cards, "present", memory.devices()["a100"].__eq__)
    assert memory.here() == memory.peak(double, x).device == "a100"
    found = memory.largest_batch(lambda n: (double, (S((n, 8), F32),)), budget="1KiB")
    assert found.peak.device == "a100"
    assert len({*compiles}) == 2


def test_a_card_that_the_compiler_does_not_take(compiles):
    """CUDA 13 has left out the V100: XLA, asked to compile for it, may crash."""
    if compiler.cuda() < 13:
        assert jc.memory.peak(double, S((8,), F32), device="v100").peak_bytes
    else:
        with pytest.raises(NotImplementedError, match="Tesla V100.*capability 7.0"):
            jc.memory.peak(double, S((8,), F32), device="v100")
        assert not compiles


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: jc.memory.peak(3, x), "step must be a function, got 3"),
        (lambda x: jc.memory.peak(jax.jit(double), x, donate=0), "donate must be said"),
        (lambda x: jc.memory.peak(double, x, devices=8), "mesh, 1, got 8"),
        (
            lambda x: jc.memory.peak(jnp.add, sharded(2), sharded(4)),
            "args must be sharded over one mesh",
        ),
        (
            lambda x: jc.memory.peak(double, sharded(12)),
            "must be a multiple of it, got 12",
        ),
    ],
)
def test_arguments_that_are_none(call, message):
    with pytest.raises(ValueError, match=message):
        call(S((8,), F32))


def test_a_step_that_does_not_compile(monkeypatch):
    def huge(x):  # a kernel's argument that no card has
        return jax.ffi.ffi_call("no_such_kernel", S((8,), F32))(x)

    with pytest.raises(
        ValueError, match="does not compile for a NVIDIA H200: .*kernel"
    ):
        jc.memory.peak(huge, S((8,), F32))


@pytest.mark.slow
def test_what_cannot_be_timed_is_not_tried(cache, monkeypatch, optax_promotion):
    """XLA's choices among ways to do a product are the same without a card."""
    found = jc.memory.peak(train_step, *ARGS)
    shutil.rmtree(cache)
    monkeypatch.setattr(compiler, "_OPTIONS", {})
    assert jc.memory.peak(train_step, *ARGS) == found


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({}, r"CUDA plugin is not installed: pip install .*\[memory\]"),
        (
            {"jax-cuda13-plugin": "0.1.2"},
            "jax-cuda13-plugin is 0.1.2, jaxlib is .*: pip install .*plugin==.*pjrt==",
        ),
    ],
)
def test_a_missing_or_foreign_plugin(monkeypatch, versions, message):
    version = importlib.metadata.version

    def installed(package):
        if package.startswith("jax-cuda"):
            if package not in versions:
                raise importlib.metadata.PackageNotFoundError(package)
            return versions[package]
        return version(package)

    monkeypatch.setattr(importlib.metadata, "version", installed)
    with pytest.raises(ImportError, match=message):
        jc.memory.peak(double, S((8,), F32))


def test_missing_cudnn():
    """With the error that jax raises; it is jax's own where cuDNN is not installed."""

    def attention(q):
        if compiler._found("nvidia.cudnn"):
            raise RuntimeError("cuDNN not found.")
        return jax.nn.dot_product_attention(q, q, q, implementation="cudnn")

    with pytest.raises(ImportError, match=r"cuDNN, which is not installed: pip"):
        jc.memory.peak(attention, S((2, 128, 4, 64), BF16))


def test_nothing_is_written_to_stderr(capfd):
    jc.memory.peak(sgd, *(S((384, 384), F32),) * 2, device="b200")
    assert capfd.readouterr().err == ""


def test_what_is_measured_needs_a_gpu():
    if jax.default_backend() != "gpu":
        with pytest.raises(NotImplementedError, match="cpu does not count its memory"):
            jc.memory.measure(double, S((8,), F32))


def test_what_is_measured_is_the_allocators_peak(monkeypatch):
    """On a card that has not been used yet, which says 0."""
    used = [0]

    class Card:
        platform = "gpu"

        def memory_stats(self):
            return {"peak_bytes_in_use": used[0]}

    def step(x):
        used[0] = 7  # as it is traced
        return x

    monkeypatch.setattr(jax, "local_devices", lambda: [Card()])
    assert jc.memory.measure(step, S((8,), F32)) == 7


# --- cards ---


def test_every_card_says_where_its_figures_are_from():
    for name, card in jc.memory.devices().items():
        assert card.source and card.memory > 2**30, name
        assert card.platform in ("cuda", "tpu")


@pytest.mark.parametrize(
    ("count", "topology"), [(1, "1x1x1"), (8, "1x1x8"), (64, "1x8x8")]
)
def test_machines_have_eight_gpus(count, topology):
    assert jc.memory.devices()["h100"].topology(count)["topology"] == topology


def test_a_tpu_needs_libtpu(monkeypatch):
    card = jc.memory.devices()["tpu-v5e"]
    assert card.topology(8) == {"topology_name": "v5e:2x4"}
    with pytest.raises(ValueError, match="devices must be one of 1, 4, .* got 3"):
        card.topology(3)
    monkeypatch.setattr(compiler, "_found", lambda module: False)
    with pytest.raises(ImportError, match="libtpu is not installed: pip"):
        jc.memory.peak(double, S((8,), F32), device="tpu-v5e")


def test_on_a_tpu():
    pytest.importorskip("libtpu", reason="484 MB that no other test needs")
    found = jc.memory.peak(sgd, S((1024, 1024), F32), S((8192, 1024), F32), donate=0,
                           device="tpu-v5e")  # fmt: skip
    assert found.breakdown["parameters"] == 2**22
    assert sum(found.breakdown.values()) == found.peak_bytes
