"""Reading: which snapshot all ranks load, and how what it holds is put into the objects of a run."""

import json
import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline.bare import bare
from paceline.checkpoint import snapshots
from paceline.checkpoint.errors import CheckpointMismatch, Damaged, Skipped
from paceline.checkpoint.manifest import FILE
from paceline.checkpoint.open_snapshot import OpenSnapshot
from paceline.checkpoint.ranks import OptionalGroup, Verify, newest_on_all
from paceline.checkpoint.snapshots import Snapshot
from paceline.checkpoint.state import (
    MODEL,
    STATE,
    TREE,
    check_model,
    kernels_of,
    kind_of,
    lanes_in,
    shapes_of,
    whole_shapes,
)
from paceline.checkpoint.stored_tensor import StoredTensor, StoredTensors, fill
from paceline.kernels import differences
from paceline.stored.packed import unpack
from paceline.stored.value_tree import decode_tree

# States of torch's optimizers that have an entry for every element of their parameter.
SHAPED_LIKE_PARAMS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta", "sum")


# "latest" or "compared", a step, or the path of a snapshot or of a directory of them: see `Checkpointer.load`.
Which = str | os.PathLike[str] | int


class Choice(NamedTuple):
    """What all ranks load, if there is something, from which directory, and the snapshots that were passed over."""

    snapshot: Snapshot | None
    directory: Path
    skipped: tuple[Skipped, ...]


def choose(which: Which, directory: Path, verify: Verify, group: OptionalGroup) -> Choice:
    """The newest snapshot of those that `which` means that is good on all ranks.

    All ranks call it, with a `which` of the same kind.
    """
    directory, found, broken = _candidates(which, directory)
    if which == "compared":
        compared = [one for one in found if one.manifest.compared]
        chosen, skipped = newest_on_all(compared, broken, verify, group)
        if chosen is not None:
            return Choice(chosen, directory, skipped)
    chosen, skipped = newest_on_all(found, broken, verify, group)
    return Choice(chosen, directory, skipped)


def _candidates(which: Which, directory: Path) -> tuple[Path, list[Snapshot], list[Damaged]]:
    """Where this rank looks for `which`, the snapshots there, newest first, and those whose manifests are damaged."""
    if not isinstance(which, int) and which not in ("latest", "compared"):
        path = Path(which)
        if snapshots.NAME.match(path.name) or os.path.lexists(path / FILE):
            try:
                return path.parent, [snapshots.read(path)], []
            except Damaged as error:
                return path.parent, [], [error]
        directory = path
    try:
        found, broken = snapshots.survey(directory)
    except OSError as error:
        return directory, [], [Damaged(directory, f"it cannot be listed: {error.strerror}")]
    if isinstance(which, int):
        found = [one for one in found if one.step == which]
        broken = [one for one in broken if snapshots.step_of(one.path) == which]
    return directory, found, broken


class Restored:
    """The values of one snapshot, with large tensors still in its files. Raises Damaged if its parts do not fit.

    `rank` of `size` loads it, and gets the values of that rank where ranks had different ones. What is put into the
    objects of a run is checked before any of them is changed.
    """

    def __init__(self, opened: OpenSnapshot, rank: int, size: int) -> None:
        self.snapshot = opened.snapshot
        self._rank = rank
        self._size = size
        try:
            tree = json.loads(opened.content(TREE))
            weights, rest = StoredTensors(opened, MODEL), StoredTensors(opened, STATE)
            self.model = decode_tree(tree.get("model"), weights.leaf)
            self._metadata = fill(decode_tree(tree.get("model_metadata"), rest.leaf))
            self.optimizer = decode_tree(tree.get("optimizer"), rest.leaf)
            self.optimizer_kind = tree.get("optimizer_kind")
            self._kernels, self._lanes = tree.get("kernels"), tree.get("lanes")
            self.more: dict[str, Any] = decode_tree(tree["more"], rest.leaf)
            self._per_rank: list[str] = tree["per_rank"]
            for name in self._per_rank:
                self.more[name] = [unpack(blob) for blob in fill(self.more[name])]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Damaged(opened.snapshot.path, f"its parts do not fit together: {error}") from error

    def check(self, model: nn.Module | None, optimizer: torch.optim.Optimizer | None, more: Mapping[str, Any]) -> None:
        """Raise CheckpointMismatch if this cannot be loaded into these objects. Changes nothing."""
        where = self.snapshot.path
        if model is not None:
            if self.model is None:
                raise CheckpointMismatch(f"{where} holds no model: expected one, saved with save(model=…)")
            check_model(shapes_of(bare(model).state_dict()), self.snapshot.manifest.model, str(where))
        if optimizer is not None:
            self._check_optimizer(optimizer)
        for name, value in more.items():
            if name not in self.more:
                raise CheckpointMismatch(
                    f"{where} holds no {name!r}: expected it among {', '.join(map(repr, self.more)) or 'nothing'}"
                )
            if not hasattr(value, "load_state_dict"):
                raise CheckpointMismatch(
                    f"{name} cannot be loaded into a {type(value).__name__}: expected an object with "
                    f"load_state_dict(); plain values are in `.more` of what load() returns"
                )
            if name in self._per_rank and len(self.more[name]) != self._size:
                raise CheckpointMismatch(
                    f"{where} holds {name!r} of {len(self.more[name])} ranks, expected {self._size}; "
                    f"all of them are in `.more` of what load() returns"
                )

    def other_bits(self, model: nn.Module | None, more: Mapping[str, Any]) -> list[str]:
        """Why a run in lanes will not continue with the bits of the one that was saved, as far as that is known."""
        lanes = lanes_in(model, more)
        if not lanes or self._kernels is None:  # saved before this was recorded
            return []
        kernels = differences({"compiled": "False", **self._kernels}, kernels_of(model))
        return [f"lanes: {self._lanes} and {lanes}"] * (self._lanes != lanes) + kernels

    def put(self, model: nn.Module | None, optimizer: torch.optim.Optimizer | None, more: Mapping[str, Any]) -> None:
        """Read into the tensors of the objects; first of those that may refuse their state, as a Loader does.

        Their load_state_dict() gets the tensors that they have already, and so copies nothing. Raises Damaged if the
        files cannot be read any more.
        """
        for name, value in more.items():
            state = self.more[name][self._rank] if name in self._per_rank else self.more[name]
            module = bare(value) if isinstance(value, nn.Module) else None
            (module or value).load_state_dict(fill(state, module and module.state_dict()))
        if model is not None:
            weights = OrderedDict(fill(self.model, bare(model).state_dict()))
            if self._metadata is not None:
                weights._metadata = self._metadata  # type: ignore[attr-defined]
            bare(model).load_state_dict(weights)
        if optimizer is not None:
            optimizer.load_state_dict(self._filled(optimizer))
        self.more = fill(self.more)

    def _filled(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state of the optimizer, read into what it has, or into new tensors where its parameters are."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        places = [place for group in self.optimizer["param_groups"] for place in group["params"]]
        state: dict[Any, Any] = dict(self.optimizer["state"])
        for param, place in zip(params, places, strict=True):
            known = optimizer.state.get(param, {})
            for name, value in state.get(place, {}).items():
                if isinstance(value, StoredTensor) and value.shape == param.shape and name != "step":
                    value.load(known.get(name), param.device)
            if place in state:
                state[place] = fill(state[place], known)
        filled: dict[str, Any] = fill({**self.optimizer, "state": state})
        return filled

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        where, kind = self.snapshot.path, kind_of(optimizer)
        if self.optimizer is None:
            raise CheckpointMismatch(f"{where} holds no optimizer: expected one, saved with save(optimizer=…)")
        if self.optimizer_kind != kind:
            raise CheckpointMismatch(f"{where} holds the state of {self.optimizer_kind}, expected that of {kind}")
        saved = [len(group["params"]) for group in self.optimizer["param_groups"]]
        wanted = [len(group["params"]) for group in optimizer.param_groups]
        if saved != wanted:
            raise CheckpointMismatch(
                f"{where} has an optimizer with {saved} parameters in its groups, expected {wanted}; "
                f"make the parameter groups as they were made for the saved run"
            )
        places = [place for group in self.optimizer["param_groups"] for place in group["params"]]
        for number, (shape, place) in enumerate(zip(whole_shapes(optimizer), places, strict=True)):
            for name, tensor in self.optimizer["state"].get(place, {}).items():
                shaped = name in SHAPED_LIKE_PARAMS and isinstance(tensor, StoredTensor)
                if shaped and tensor.shape != shape:
                    raise CheckpointMismatch(
                        f"{where}: {name!r} of the optimizer's parameter {number} has shape {tuple(tensor.shape)}, "
                        f"expected {tuple(shape)}; pass the parameters in the order of the saved run"
                    )
