"""Plans: policies that can be read, edited and kept as JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from jaxcompact import codecs
from jaxcompact.actions import Action, Derivative, Recompute, Save, written
from jaxcompact.analysis.tensor import Tensor
from jaxcompact.codecs import Chain, Codec
from jaxcompact.memory.cache import write_whole
from jaxcompact.memory.cards import find_device
from jaxcompact.memory.peak import gib

_CODECS = (kind for kind in vars(codecs).values() if isinstance(kind, type))
_ACTIONS = {kind.__name__: kind for kind in (Save, Recompute, Derivative)} | {
    kind.__name__: kind
    for kind in _CODECS
    if issubclass(kind, Codec) and kind is not Codec
}
_BEYOND = 1e18  # which no number of bytes or seconds is
_IN_JSON = {  # what each kind of field is there, and is called
    str: (str, "a string"),
    Mapping[str, Action]: (dict, "an object"),
    int: (int, "a whole number"),
    float: (int | float, "a number"),
    bool: (bool, "true or false"),
}


@dataclass(frozen=True)
class Plan:
    """A policy for `jaxcompact.checkpoint`: an action for each tensor of one block.

    Attributes:
        block: the block's name.
        actions: name -> action, of every tensor.
        device: the card it was made for.
        budget: bytes that the step was to take at most.
        seconds: modelled, beside those of keeping everything, of one layer.
        nbytes: stored between the passes, of one layer.
        error: relative, of the gradient.
        peak_bytes: of the step, compiled for the card.
        measured: whether ``error`` was, under this plan; it is modelled otherwise.
    """

    statistics: ClassVar[bool] = True  # which policies of another kind do not see

    block: str
    actions: Mapping[str, Action] = field(hash=False)
    device: str = field(compare=False)
    budget: int = field(compare=False)
    seconds: float = field(compare=False)
    nbytes: int = field(compare=False)
    error: float = field(compare=False)
    peak_bytes: int = field(compare=False)
    measured: bool = field(default=False, compare=False)

    def decide(self, tensor: Tensor) -> tuple[Action, str]:
        if tensor.name in self.actions:
            return self.actions[tensor.name], "planned"
        if tensor.kind == "function":  # casts of another dtype may be around it
            return Recompute(), "made again"
        known = self._beside(tensor)
        if not known:
            raise ValueError(
                f"plan: it was made for another function: {self.block!r} had no "
                f"{tensor.name!r}, but {', '.join(sorted(self.actions))}"
            )
        again = all(action == Recompute() for action in known)
        return Recompute() if again else Save(), "planned for others of the loop's"

    def _beside(self, tensor: Tensor) -> list[Action]:
        """Of what else is kept of a loop, which is another part of it, and counted
        otherwise, where other inputs are differentiated."""
        loop, named, _ = tensor.name.rpartition(".residual")
        if not named:
            return []
        return [a for n, a in self.actions.items() if n.startswith(loop + named)]

    def unused(self, names: set[str]) -> list[str]:
        stored = {n for n, action in self.actions.items() if action != Recompute()}
        return sorted(stored - names)

    def to_json(self) -> str:
        """As text, to be read, edited and given to `Plan.from_json`."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        found["actions"] = {n: _to_data(a) for n, a in self.actions.items()}
        return json.dumps(found, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Raises ValueError for text that is no plan, naming what is wrong."""
        try:
            found = json.loads(text, parse_constant=_no_number)
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(f"plan: it is none: {error}") from None
        _require_fields(found, {f.name: f.type for f in fields(cls)})
        find_device(found["device"])
        actions = {n: _action(n, a) for n, a in found.pop("actions").items()}
        return cls(actions=actions, **found)

    def save(self, path: str | Path) -> None:
        """Whole or not at all. Raises OSError."""
        write_whole(path, self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        return cls.from_json(Path(path).read_text())

    def __str__(self) -> str:
        known = "measured" if self.measured else "modelled"
        lines = [
            f"{self.block}: {gib(self.peak_bytes)} of {gib(self.budget)} on "
            f"{find_device(self.device).name}, {gib(self.nbytes)} a layer, "
            f"{self.seconds * 1e6:.0f} us a layer, gradient error {self.error:.1%} "
            f"({known})"
        ]
        lines += [
            f"  {name:24}{written(action)}" for name, action in self.actions.items()
        ]
        return "\n".join(lines)


def _no_number(word: str) -> None:
    raise ValueError(f"plan: {word} is no number")


def _to_data(action: Any) -> Any:
    if not isinstance(action, Save | Recompute | Derivative | Codec):
        return list(map(_to_data, action)) if isinstance(action, tuple) else action
    values = {
        f.name: _to_data(getattr(action, f.name))
        for f in fields(action)
        if getattr(action, f.name) != f.default
    }
    return {"action": type(action).__name__, **values}


def _require_fields(found: Any, kinds: Mapping[str, Any]) -> None:
    if not isinstance(found, dict) or found.keys() != kinds.keys():
        *names, last = kinds
        got = ", ".join(found) if isinstance(found, dict) else type(found).__name__
        raise ValueError(
            f"plan: it must have {', '.join(names)} and {last}, got {got or 'nothing'}"
        )
    for name, kind in kinds.items():
        value, (kind, word) = found[name], _IN_JSON[kind]
        if isinstance(value, bool) != (kind is bool) or not isinstance(value, kind):
            raise ValueError(f"plan: {name} must be {word}, got {value!r}")
        if kind not in (str, dict, bool) and not abs(value) < _BEYOND:
            raise ValueError(f"plan: {name} must be below {_BEYOND:.0e}")


def _action(name: str, data: Any) -> Any:
    if not isinstance(data, dict):
        raise ValueError(
            f"plan: the action of {name!r} must be an object such as "
            f'{{"action": "Save"}}, got {data!r}'
        )
    try:
        return _from_data(data)
    except (TypeError, ValueError) as error:
        raise ValueError(f"plan: the action of {name!r}: {error}") from None


def _from_data(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(map(_from_data, data))
    if not isinstance(data, dict):
        return data
    kind = data.get("action")
    if not isinstance(kind, str) or kind not in _ACTIONS:
        raise ValueError(f"it must be one of {', '.join(_ACTIONS)}, got {kind!r}")
    values = {k: _from_data(v) for k, v in data.items() if k != "action"}
    if kind == "Chain":
        return Chain(*values.pop("codecs", ()), **values)
    return _ACTIONS[kind](**values)
