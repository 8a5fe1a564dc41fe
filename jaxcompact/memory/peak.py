"""The peak memory of a step on a card that is not here."""

import hashlib
import importlib.metadata
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxcompact.memory import compiler
from jaxcompact.memory.buffers import KINDS, Buffer, buffers, operations
from jaxcompact.memory.cache import cache_folder, write_whole
from jaxcompact.memory.cards import find_device, here

_FORMAT = 7  # of what is cached


@dataclass(frozen=True)
class Peak:
    """The memory that a compiled step takes, on one device.

    Attributes:
        device: short name of the card.
        devices: how many.
        peak_bytes: arguments, constants, outputs and temporaries; an output that takes
            a donated argument's place counts once.
        argument_bytes: of the arguments.
        constant_bytes: of the arrays of 1 KiB and more that the step closes over.
        output_bytes: of the outputs that take no argument's place.
        temporary_bytes: of the block that all temporaries share.
        host_bytes: in the host's memory: what is offloaded.
        operations: matrix products, and cuDNN's attention calls forward and backward,
            in the program, a loop's body once. Who recomputes has more of them.
        buffers: what is in use at the peak, the largest first.
    """

    device: str
    devices: int
    peak_bytes: int
    argument_bytes: int
    constant_bytes: int
    output_bytes: int
    temporary_bytes: int
    host_bytes: int
    operations: dict[str, int]
    buffers: tuple[Buffer, ...]

    @property
    def breakdown(self) -> dict[str, int]:
        """Bytes by kind. They add up to ``peak_bytes``."""
        return {
            kind: sum(b.nbytes for b in self.buffers if b.kind == kind)
            for kind in KINDS
        }

    def __str__(self) -> str:
        card = find_device(self.device)
        several = f", each of {self.devices}" if self.devices > 1 else ""
        share = f"{self.peak_bytes / card.memory:.0%} of {gib(card.memory)}"
        lines = [f"{card.name}{several}: {gib(self.peak_bytes)}, {share}"]
        if self.host_bytes:
            lines.append(f"on the host: {gib(self.host_bytes)}")
        lines += [
            f"  {kind:16}{gib(nbytes):>12}"
            for kind, nbytes in self.breakdown.items()
            if nbytes
        ]
        lines.append("the largest:")
        lines += [
            f"  {gib(b.nbytes):>10}  {b.kind:16}{b.shape:28}{b.source}"
            for b in self.buffers[:20]
        ]
        return "\n".join(lines)


def peak(
    step: Callable,
    *args: Any,
    device: str | None = None,
    devices: int | None = None,
    donate: int | Sequence[int] | None = None,
) -> Peak:
    """The memory that ``step(*args)`` takes on a card, compiled for it and not run.

    ``peak = arguments + constants + outputs + temporaries - donated``, of XLA's buffers
    for that card, to the byte. Constants are arrays that the step closes over. Needs no
    card and no driver, but ``jaxcompact[memory]``: jax's CUDA plugin, and cuDNN if the
    step calls it. Answers are kept in
    ``~/.cache/jaxcompact`` (``JAXCOMPACT_CACHE``), by program.

    Args:
        step: a function, jitted or not. What one that is not does to NNX modules in
            place counts; in `jax.jit` it is lost, in `flax.nnx.jit` it is kept.
        args: its arguments: arrays, or `jax.ShapeDtypeStruct`s. Those with a
            `jax.NamedSharding` lie so on the cards; the mesh may be of other devices,
            as many, or abstract. Those in the host's memory count as the card's:
            XLA forgets where they are when it compiles for a GPU that is not there.
        device: a key of `devices`; by default of the card that is here, or "h200".
        devices: how many; those of the arguments' mesh. To be sure.
        donate: arguments that the step may overwrite, if it is not jitted.

    What a buffer is for is read off the program: arguments by their names and by
    optax's types, the rest by where it is made. Logits are what is made under
    ``jax.named_scope("logits")``.

    Raises ValueError for arguments that are none of these and a step that does not
    compile; NotImplementedError for a card that the compiler does not take, and for a
    step that calls the host, as `jax.debug.print` does; ImportError with the command
    that installs what is missing.

    >>> import jax, jax.numpy as jnp
    >>> from jaxcompact import memory
    >>> def step(w, x):
    ...     return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
    >>> w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    >>> x = jax.ShapeDtypeStruct((1024, 256), jnp.float32)
    >>> found = memory.peak(step, w, x, device="h100", donate=0)
    >>> found.breakdown["parameters"], found.argument_bytes
    (262144, 1310720)
    >>> found.peak_bytes == sum(found.breakdown.values())
    True
    """
    device = here() if device is None else device
    card = find_device(device)
    if devices is not None and type(devices) is not int:
        raise ValueError(f"devices must be an int, got {devices!r}")
    several = isinstance(donate, Sequence) and not isinstance(donate, str | bytes)
    numbers = donate if several else [0 if donate is None else donate]
    if not all(type(n) is int for n in numbers):
        raise ValueError(f"donate must be argument numbers, got {donate!r}")
    lowered = compiler.lower(step, args, card, devices, donate)
    kinds = dict(_arguments(step, args))
    count = math.prod(compiler.mesh_of(args)[1])
    key = _key(lowered, card, kinds, count)
    if (cached := _load(key)) is not None:
        return cached
    program = compiler.compile_lowered(lowered, card)
    stats = program.stats
    temporaries, arguments = stats.temp_size_in_bytes, stats.argument_size_in_bytes
    constants = program.constant_bytes
    found = Peak(
        device=device,
        devices=count,
        peak_bytes=program.peak_bytes,
        argument_bytes=arguments,
        constant_bytes=constants,
        output_bytes=program.peak_bytes - arguments - constants - temporaries,
        temporary_bytes=temporaries,
        host_bytes=stats.host_argument_size_in_bytes
        + stats.host_output_size_in_bytes
        + stats.host_temp_size_in_bytes
        - stats.host_alias_size_in_bytes,
        operations=operations(program.text),
        buffers=buffers(program, kinds),
    )
    _store(key, found)
    return found


def _arguments(step: Callable, args: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Name, as jit gives it, and kind of each leaf."""
    try:
        names = [*inspect.signature(step).parameters.values()]
    except (TypeError, ValueError):
        names = []
    names = [p.name for p in names if p.kind < inspect.Parameter.VAR_POSITIONAL]
    for i, arg in enumerate(args):
        first = names[i] if i < len(names) else f"args[{i}]"
        pairs = jax.tree.leaves_with_path(arg, is_leaf=_is_optimizer_state)
        for path, node in pairs:
            inside = jax.tree.leaves_with_path(node)
            for rest, leaf in inside:
                name = first + jax.tree_util.keystr((*path, *rest))
                if _is_optimizer_state(node) or "opt_state" in name:
                    yield name, "optimizer state"
                elif "param" in name.lower() and _floating(leaf):
                    yield name, "parameters"
                elif not _floating(leaf):
                    yield name, "inputs"
        for path, module in compiler.modules(arg):
            yield from _of_module(first + jax.tree_util.keystr(path), module)


def _of_module(name: str, module: nnx.Pytree) -> Iterator[tuple[str, str]]:
    """Names as jit gives them, and as nnx.jit does, which numbers all variables."""
    for i, (_, variable, leaf) in enumerate(_variables(nnx.state(module))):
        yield f"{name}.states[0][{i}]", _kind(variable, leaf)
    for path, variable, leaf in _variables(module):
        yield name + jax.tree_util.keystr(path), _kind(variable, leaf)


def _variables(tree: Any) -> Iterator[tuple[tuple, Any, Any]]:
    found = jax.tree.leaves_with_path(tree, is_leaf=_is_variable)
    for path, variable in found:
        for rest, leaf in jax.tree.leaves_with_path(variable):
            yield (*path, *rest), variable, leaf


def _kind(variable: Any, leaf: Any) -> str:
    if isinstance(variable, nnx.OptState):
        return "optimizer state"
    trained = isinstance(variable, nnx.Param) and _floating(leaf)
    return "parameters" if trained else "inputs"


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _is_optimizer_state(node: Any) -> bool:
    module = type(node).__module__.split(".")[0]
    return hasattr(node, "_fields") and module in ("optax", "jaxcompact")


def _floating(leaf: Any) -> bool:
    if hasattr(leaf, "dtype"):
        return jnp.issubdtype(leaf.dtype, jnp.floating)
    return isinstance(leaf, float)  # a static argument may be anything


def gib(nbytes: int) -> str:
    if 0 < nbytes < 0.005 * 2**20:
        return f"{nbytes} bytes"
    return (
        f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"
    )


# --- what was compiled before ---


def _key(lowered: Any, card: Any, kinds: dict[str, str], count: int) -> str:
    text = lowered.as_text(debug_info=True)
    # Where a line stands changes nothing.
    text = re.sub(r'loc\("[^"]*":\d+:\d+( to [\d:]*)?\)', "loc()", text)
    versions = [_FORMAT]
    for package in ("jaxlib", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "libtpu"):
        try:
            versions.append(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            versions.append(None)
    topology = card.topology(count)
    parts = text, topology, kinds, count, versions, os.environ.get("XLA_FLAGS")
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _load(key: str) -> Peak | None:
    try:
        fields = json.loads((cache_folder("memory") / f"{key}.json").read_text())
    except (OSError, ValueError):  # not there, or cut off
        return None
    return Peak(**fields | {"buffers": tuple(Buffer(**b) for b in fields["buffers"])})


def _store(key: str, found: Peak) -> None:
    try:
        cache_folder("memory").mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(found))
        write_whole(cache_folder("memory") / f"{key}.json", text)
    except OSError:  # a full or read-only disk costs the next one a compile
        pass
