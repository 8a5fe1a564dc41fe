"""Compiles programs for cards that are not here. Needs no driver and no card."""

import functools
import importlib.metadata
import importlib.util
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import topologies

from jaxcompact.memory.cards import Device
from jaxcompact.memory.functions import require_function
from jaxcompact.memory.quiet import without

INSTALL = 'pip install "jaxcompact[memory]"'
# That no card is there.
_NOISE = (b"cuInit", b"GPU interconnect", b"ptxas", b"TPU", b"InitGoogle", b"libtpu")
_NOISE += (b"Source Location Trace",)
# Without a card nothing can be timed: XLA would compile every way to do each product,
# and take the first after all. That is half of the time of a compile. LLVM's
# optimizations and the assembler's, half of what is left, come after all buffers are
# assigned.
_OPTIONS = {
    "cuda": {
        "xla_gpu_autotune_level": 0,
        "xla_backend_optimization_level": 0,
        "xla_gpu_disable_gpuasm_optimizations": True,
    }
}

LEAST_CONSTANT = 1024  # bytes: smaller ones are numbers in the code
_CONSTANT = re.compile(r"^allocation \d+: size (\d+),.* constant:$", re.M)

_LEAST_OF_CUDA_13 = 7.5  # compute capability


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
        stats: its `memory_analysis`, of one device.
        text: the optimized program.
        assignment: XLA's assignment of buffers.
        live: XLA's list of what lives from when to when.
    """

    stats: Any
    text: str
    assignment: str
    live: str

    @property
    def peak_bytes(self) -> int:
        """Of one device; what is donated is overwritten by outputs."""
        stats = self.stats
        outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
        given = stats.argument_size_in_bytes + self.constant_bytes
        return given + outputs + stats.temp_size_in_bytes

    @property
    def constant_bytes(self) -> int:
        """What the program holds itself: arrays that the step closes over."""
        sizes = map(int, _CONSTANT.findall(self.assignment))
        return sum(size for size in sizes if size >= LEAST_CONSTANT)


def lower(
    step: Callable,
    args: Sequence[Any],
    device: Device,
    devices: int | None,
    donate: int | Sequence[int] | None,
) -> Any:
    """The step, traced and lowered for that many cards."""
    _require_compiler(device)
    require_function("step", step)
    jitted = hasattr(step, "trace")
    if jitted and donate is not None:
        raise ValueError("donate must be said to jax.jit if the step is jitted")
    if not jitted:
        numbers = () if donate is None else donate
        step = _with_changes(step, numbers) if modules(args) else step
        step = jax.jit(step, donate_argnums=numbers)
    mesh, args = _placed(args, device, devices)
    try:
        with _set(mesh):
            return step.trace(*args).lower(lowering_platforms=(device.platform,))
    except RuntimeError as error:
        if "cuDNN not found" in str(error) or "cuDNN is not detected" in str(error):
            message = f"the step calls cuDNN, which is not installed: {INSTALL}"
            raise ImportError(message) from None
        if "Unknown backend" in str(error):
            raise NotImplementedError(
                "the step must call nothing on the host to be compiled for a card that "
                "is not here: jax.debug.print, jax.debug.callback, jax.pure_callback "
                "and jax.experimental.io_callback do"
            ) from None
        raise


def modules(args: Any) -> list[tuple[Any, nnx.Pytree]]:
    """NNX modules and optimizers among arguments, with their paths."""
    found = jax.tree.leaves_with_path(args, is_leaf=lambda x: isinstance(x, nnx.Pytree))
    return [(path, node) for path, node in found if isinstance(node, nnx.Pytree)]


def _with_changes(step: Callable, donated: int | Sequence[int]) -> Callable:
    """A step that also returns what it makes of its modules in place.

    And all of those whose place it may take: they are used on.
    """
    numbers = [donated] if isinstance(donated, int) else donated

    @functools.wraps(step)
    def run(*args):
        given = set(map(id, jax.tree.leaves(args)))
        outs = step(*args)
        kept = [
            x
            for i, arg in enumerate(args)
            for x in jax.tree.leaves([module for _, module in modules(arg)])
            if i in numbers or id(x) not in given
        ]
        return outs, kept

    return run


def _set(mesh: jax.sharding.Mesh) -> AbstractContextManager:
    """Also in the place of the devices that the caller's `jax.set_mesh` names."""
    if jax.sharding.get_mesh().empty:
        return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
    return jax.set_mesh(mesh)


def compile_lowered(lowered: Any, device: Device) -> Program:
    with tempfile.TemporaryDirectory() as folder:
        try:
            with without(_NOISE, 2), not_kept():
                options = {"xla_dump_to": folder, **_OPTIONS.get(device.platform, {})}
                compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            if "ptxas too old" in str(error) or "does not support CC" in str(error):
                raise _not_taken(device) from None
            if "No PTX compilation provider" in str(error):
                raise ImportError(f"ptxas is not installed: {INSTALL}") from None
            raise ValueError(
                f"the step does not compile for a {device.name}: "
                f"{str(error).splitlines()[0]}"
            ) from error

        def dumped(end: str) -> str:
            files = Path(folder).glob(f"*{end}")
            return max(files, key=lambda file: file.stat().st_size).read_text()

        return Program(
            compiled.memory_analysis(),
            compiled.as_text(),
            dumped("-buffer-assignment.txt"),
            dumped("-live-range.txt"),
        )


def _require_compiler(device: Device) -> None:
    if device.platform == "cuda":
        capability = float(device.target["capability"].rstrip("a"))
        if cuda() >= 13 and capability < _LEAST_OF_CUDA_13:  # XLA may crash
            raise _not_taken(device)
        return
    # Nobody is asked which TPU this machine has.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    if not _found("libtpu"):
        raise ImportError("libtpu is not installed: pip install libtpu")


def _not_taken(device: Device) -> NotImplementedError:
    return NotImplementedError(
        f"the installed compiler does not take a {device.name} (compute capability "
        f"{device.target['capability']})"
    )


def cuda() -> int:
    """The CUDA that jax's plugin compiles for.

    Raises ImportError if the plugin is missing, or of another version than jax.
    """
    for major in (13, 12):
        try:
            version = importlib.metadata.version(f"jax-cuda{major}-plugin")
        except importlib.metadata.PackageNotFoundError:
            continue
        wanted = importlib.metadata.version("jaxlib")
        if version != wanted:
            raise ImportError(
                f"jax-cuda{major}-plugin is {version}, jaxlib is {wanted}: "
                f'pip install "jax-cuda{major}-plugin=={wanted}" '
                f'"jax-cuda{major}-pjrt=={wanted}"'
            )
        return major
    raise ImportError(f"jax's CUDA plugin is not installed: {INSTALL}")


def _placed(
    args: Sequence[Any], device: Device, devices: int | None
) -> tuple[jax.sharding.Mesh, list[Any]]:
    """A mesh of such cards like the arguments', and the arguments on it."""
    leaves, tree = jax.tree.flatten(list(args))
    names, sizes, types = mesh_of(leaves)
    count = math.prod(sizes)
    if devices is not None and devices != count:
        raise ValueError(
            f"devices must be the size of the arguments' mesh, {count}, got {devices}"
        )
    try:
        with without(_NOISE, 2):
            topology = topologies.get_topology_desc(
                platform=device.platform, **device.topology(count)
            )
    except NotImplementedError:
        raise ImportError(
            "jax's plugin did not start: set JAX_PLATFORMS=cpu, or install all of CUDA"
        ) from None
    cards = np.array(topology.devices).reshape(sizes)
    mesh = jax.sharding.Mesh(cards, names, axis_types=types)

    def place(leaf: Any) -> Any:
        if not hasattr(leaf, "shape"):  # a number, or a static argument
            return leaf
        sharding = getattr(leaf, "sharding", None)
        named = isinstance(sharding, jax.NamedSharding)
        spec = sharding.spec if named else jax.P()
        kind = sharding.memory_kind if named else None
        aval = jax.typeof(leaf)
        return jax.ShapeDtypeStruct(
            aval.shape,
            aval.dtype,
            sharding=jax.NamedSharding(mesh, spec, memory_kind=kind),
            weak_type=getattr(aval, "weak_type", False),
        )

    return mesh, jax.tree.unflatten(tree, map(place, leaves))


def mesh_of(args: Any) -> tuple[tuple[str, ...], tuple[int, ...], Any]:
    """Axes, their sizes and types, of the arguments' mesh, or of `jax.set_mesh`'s.

    Raises ValueError for arguments on several.
    """
    meshes = {
        (sharding.mesh.axis_names, sharding.mesh.axis_sizes, sharding.mesh.axis_types)
        for leaf in jax.tree.leaves(args)
        if isinstance(sharding := getattr(leaf, "sharding", None), jax.NamedSharding)
    }
    if len(meshes) > 1:
        raise ValueError(f"args must be sharded over one mesh, got {list(meshes)}")
    here = jax.sharding.get_abstract_mesh()
    if not meshes and not here.empty:
        return here.axis_names, here.axis_sizes, here.axis_types
    return next(iter(meshes), (("devices",), (1,), None))


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@contextmanager
def not_kept() -> Iterator[None]:
    """Compiles outside of jax's persistent cache.

    What is compiled for a card that is not here cannot be loaded from there: jax would
    write it, fail to read it the next time, warn, and compile again.
    """
    name = "jax_persistent_cache_min_compile_time_secs"
    least = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, least)
