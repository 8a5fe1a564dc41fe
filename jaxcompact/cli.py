"""python -m jaxcompact: what a step takes, and what would make it fit."""

import argparse
import dataclasses
import importlib
import inspect
import json
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax

from jaxcompact import memory
from jaxcompact.memory.functions import made_by
from jaxcompact.planner import Front, front, plan, scan_step

PICTURES = (".png", ".pdf", ".svg")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m jaxcompact", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_memory(commands)
    _add_plan(commands)
    arguments = parser.parse_args(argv)
    try:
        arguments.run(arguments)
    except (ValueError, ImportError, NotImplementedError, OSError) as error:
        if _is_users(error):
            traceback.print_exception(error)
        sys.exit(f"{parser.prog} {arguments.command}: {error}")


def _is_users(error: Exception) -> bool:
    """Whether it comes of the user's own code, or of a library that was called there:
    then it is to be told where."""
    ours, paths = os.path.dirname(__file__), sysconfig.get_paths()
    libraries = ours, paths["stdlib"], paths["purelib"], paths["platlib"], "<"
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    users = [i for i, file in enumerate(files) if not file.startswith(libraries)]
    return bool(users) and not any(f.startswith(ours) for f in files[users[-1] :])


def _add_memory(commands: Any) -> None:
    command = commands.add_parser(
        "memory",
        help="peak memory of a step on a GPU that is not here",
        description="Compiles a training step for a card and says what it takes. "
        "Needs no card, but jaxcompact[memory].",
        epilog="example: python -m jaxcompact memory my_module:make_step --device a100",
    )
    command.add_argument(
        "make_step",
        metavar="MODULE:FUNCTION",
        help="make_step() -> (step, args): a jitted function and its arguments, "
        "jax.ShapeDtypeStructs or arrays; with --largest-batch, make_step(batch)",
    )
    cards = ", ".join(memory.devices())
    command.add_argument("--device", help=f"{cards} (default: what is here, or h200)")
    command.add_argument("--batch", type=int, help="calls make_step(batch)")
    command.add_argument(
        "--largest-batch", action="store_true", help="searches the largest that fits"
    )
    command.add_argument(
        "--budget", help='for --largest-batch: "16GiB"; default: the whole card'
    )
    command.add_argument(
        "--multiple",
        type=int,
        help="for --largest-batch: of which batches are multiples; default: 1",
    )
    command.add_argument(
        "--measure",
        action="store_true",
        help="runs the step on the GPU that is here as well, with zeros",
    )
    command.add_argument("--json", action="store_true", help="one JSON object")
    command.set_defaults(run=_memory)


def _memory(arguments: argparse.Namespace) -> None:
    searched, name = arguments.largest_batch, arguments.make_step
    for option in ("batch", "measure") if searched else ("budget", "multiple"):
        value = getattr(arguments, option)
        if value is not None and value is not False:
            word = "without" if searched else "with"
            raise ValueError(f"--{option} goes {word} --largest-batch")
    if not arguments.measure:
        jax.config.update("jax_platforms", "cpu")
    if arguments.batch is not None and arguments.batch < 1:
        raise ValueError(f"--batch must be positive, got {arguments.batch}")
    batch = [arguments.batch] if searched or arguments.batch is not None else []
    make_step = _imported(name, *batch)
    if searched:
        found = memory.largest_batch(
            make_step,
            device=arguments.device,
            budget=arguments.budget,
            multiple=1 if arguments.multiple is None else arguments.multiple,
        )
        _show(found, dataclasses.asdict(found), arguments.json)
        return
    step, args = made_by(make_step, name, "step", *batch)
    found = memory.peak(step, *args, device=arguments.device)
    row = dataclasses.asdict(found) | {"breakdown": found.breakdown}
    text = str(found)
    if arguments.measure:
        row["measured_bytes"] = memory.measure(step, *args)
        text += f"\nmeasured: {row['measured_bytes'] / 2**30:.2f} GiB"
    _show(text, row, arguments.json)


def _add_plan(commands: Any) -> None:
    command = commands.add_parser(
        "plan",
        help="which tensors of a block to keep, encode, move or make again",
        description="Finds the fastest policy with which the gradient of some blocks "
        "in a scan fits in a budget on a card, by modelled times and compiled memory. "
        "Needs no card, but jaxcompact[memory].",
        epilog="example: python -m jaxcompact plan my_module:make_block --layers 24 "
        "--budget 7GiB --save plan.json",
    )
    command.add_argument(
        "make_block",
        metavar="MODULE:FUNCTION",
        help="make_block() -> (block, args): the function that jc.checkpoint is to "
        "wrap, parameters first, and its arguments or their shapes",
    )
    command.add_argument("--layers", type=int, default=1, help="how many blocks")
    command.add_argument("--budget", help='"7GiB"; default: the whole card')
    cards = ", ".join(memory.devices())
    command.add_argument("--device", help=f"{cards} (default: what is here, or h200)")
    command.add_argument(
        "--max-error",
        type=float,
        default=0.2,
        help="of the gradient, as modelled; 0 for an exact one (default: 0.2)",
    )
    command.add_argument("--save", metavar="PLAN.JSON", help="writes it for jc.Plan")
    command.add_argument(
        "--plot",
        metavar="FRONT.PNG",
        help="draws memory against modelled time, beside jax.checkpoint's policies",
    )
    command.add_argument("--json", action="store_true", help="one JSON object")
    command.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> None:
    for option in ("save", "plot"):
        path = getattr(arguments, option)
        if path and not Path(path).parent.is_dir():
            raise ValueError(
                f"--{option} must be in a folder that is there, got {path!r}"
            )
        if path and Path(path).is_dir():
            raise ValueError(f"--{option} must be a file, got the folder {path!r}")
    if arguments.plot and Path(arguments.plot).suffix not in PICTURES:
        raise ValueError(
            f"--plot must end with {', '.join(PICTURES)}, got {arguments.plot!r}"
        )
    jax.config.update("jax_platforms", "cpu")
    name = arguments.make_block
    block, args = made_by(_imported(name), name, "block")
    found = plan(
        block,
        *args,
        layers=arguments.layers,
        budget=arguments.budget,
        device=arguments.device,
        max_error=arguments.max_error,
    )
    print(found.to_json() if arguments.json else found, flush=True)
    if arguments.save:
        found.save(arguments.save)
    if arguments.plot:
        _front(block, args, arguments).plot(arguments.plot)


def _front(block: Callable, args: Sequence[Any], arguments: Any) -> Front:
    return front(
        scan_step(block, args, arguments.layers, params=0),
        layers=arguments.layers,
        device=arguments.device,
        max_error=arguments.max_error,
    )


def _imported(name: str, *args: Any) -> Callable:
    """The function of that name, which takes such arguments."""
    module, _, function = name.partition(":")
    a_path = "/" in module or module.endswith(".py") or module.startswith(".")
    if not module or not function or a_path:
        raise ValueError(
            f"expected MODULE:FUNCTION, as package.module:function, got {name!r}"
        )
    sys.path.insert(0, os.getcwd())
    inside = importlib.import_module(module)
    try:
        found = attrgetter(function)(inside)
    except AttributeError:
        raise ValueError(f"{module} has no {function!r}") from None
    if not callable(found):
        raise ValueError(f"{name} must be a function, got {type(found).__name__}")
    try:
        inspect.signature(found).bind(*args)
    except TypeError as error:
        what = "a batch" if args else "no arguments"
        raise ValueError(f"{name} must take {what}: {error}") from None
    return found


def _show(found: Any, row: dict[str, Any], as_json: bool) -> None:
    print(json.dumps(row) if as_json else found)
