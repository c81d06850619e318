"""The contents of a snapshot, and how they are loaded into the objects of a run."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from paceline.bare import bare
from paceline.checkpoint.checkpoint_errors import CheckpointMismatch, Damaged
from paceline.checkpoint.manifest import stem_of
from paceline.checkpoint.open_snapshot import OpenSnapshot
from paceline.checkpoint.optimizer_parts import check_optimizer_form, filled_state, wanted_of
from paceline.checkpoint.shards import model_state, names_of_params, sharded_parameters
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
from paceline.checkpoint.stored_tensor import StoredTensor, StoredTensors, fill, stored_in
from paceline.errors import Malformed
from paceline.kernels import differences
from paceline.stored.packed import unpack
from paceline.stored.tensor_part import TensorPart
from paceline.stored.value_tree import decode_tree
from paceline.typed_json import UNREADABLE, read_json, shown, typed

_TREE: Any = dict[str, Any]
_TEXT: Any = str | None
_TEXTS: Any = list[str] | None
_KERNELS: Any = dict[str, str] | None
_COUNT: Any = int | None
# The states of torch's optimizers that have one entry per element of the parameter.
SHAPED_LIKE_PARAMS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta", "sum")


class Targets:
    """The objects of a run that a snapshot is loaded into. All ranks create it together."""

    def __init__(
        self, model: nn.Module | None, optimizer: torch.optim.Optimizer | None, more: Mapping[str, Any]
    ) -> None:
        self.model, self.optimizer, self.more = model, optimizer, more
        self.state: dict[str, Any] = {} if model is None else model_state(model)
        self.params = None if optimizer is None else names_of_params(model, optimizer)


class Restored:
    """The values of one snapshot, with tensors still in its files. Raises Damaged if its parts do not fit.

    `rank` of `size` loads it, and gets that rank's values where ranks had different ones. Everything is checked
    before an object of the run is changed.
    """

    def __init__(self, opened: OpenSnapshot, rank: int, size: int) -> None:
        self.snapshot = opened.snapshot
        self._opened = opened
        self._rank = rank
        self._size = size
        files = sorted(opened.snapshot.manifest.files)
        try:
            self.trees = [name for name in files if stem_of(name) == TREE]
            tree = read_json(_TREE, opened.content(self.trees[0]), "the tree of a snapshot")
            weights = StoredTensors(opened, [name for name in files if stem_of(name) == MODEL])
            rest = StoredTensors(opened, [name for name in files if stem_of(name) == STATE])
            self.model = decode_tree(tree.get("model"), weights.leaf)
            self._metadata = fill(decode_tree(tree.get("model_metadata"), rest.leaf))
            self.optimizer = decode_tree(tree.get("optimizer"), rest.leaf)
            self.optimizer_kind = typed(_TEXT, tree.get("optimizer_kind"), "the kind of an optimizer")
            self.optimizer_params = typed(_TEXTS, tree.get("optimizer_params"), "the names of parameters")
            self._kernels = typed(_KERNELS, tree.get("kernels"), "the kernels of a run")
            self._lanes = typed(_COUNT, tree.get("lanes"), "the number of lanes")
            self.more: dict[str, Any] = decode_tree(tree["more"], rest.leaf)
            self._per_rank = typed(list[str], tree["per_rank"], "the values of each rank")
            self._check_form()
        except UNREADABLE as error:
            raise Damaged(opened.snapshot.path, f"its parts do not match: {error}") from error

    def _check_form(self) -> None:
        """Raise Malformed unless the states of model and optimizer are in torch's form."""
        described = self.snapshot.manifest.model
        for name, value in (self.model or {}).items():
            is_tensor = isinstance(value, StoredTensor)
            if name in described and not (is_tensor and tuple(value.shape) == described[name][1]):
                raise Malformed(f"the model's {shown(name)!r} is not the tensor that the manifest describes")
        if self._metadata is not None and not isinstance(self._metadata, dict):
            raise Malformed(f"the model has the metadata {shown(self._metadata)}")
        if missing := described.keys() - (self.model or {}).keys():
            raise Malformed(f"the model has no {shown(min(missing))!r}, which the manifest describes")
        if self.optimizer is not None:
            check_optimizer_form(self.optimizer)
        by_rank = isinstance(self.more, dict) and all(isinstance(self.more.get(name), list) for name in self._per_rank)
        if not by_rank:
            raise Malformed("the values beside model and optimizer have no names, or lack those of some ranks")

    def check_complete(self) -> None:
        """Raise Damaged unless all tensors of model and optimizer are in the files."""
        for stored in stored_in([self.model or {}, self.optimizer or {}]):
            if (hole := stored.missing(0, stored.shape.numel())) is not None:
                raise Damaged(self.snapshot.path, lacking(self.snapshot, stored, hole))

    def wanted(self, targets: Targets) -> Iterator[tuple[StoredTensor, int, int]]:
        """The elements of the tensors that will be read for these objects, even if they turn out not to fit."""
        for name, stored in (self.model or {}).items() if targets.model is not None else ():
            part = targets.state.get(name)
            for one in stored_in(stored):
                span = one.span_of(part.form, part.span) if isinstance(part, TensorPart) else (0, one.shape.numel())
                yield (one, *span)
        if targets.optimizer is not None:
            yield from wanted_of(self.optimizer or {}, targets.optimizer)
        for name, value in self.more.items():
            if isinstance(into := targets.more.get(name), torch.optim.Optimizer):
                try:
                    check_optimizer_form(value)
                except Malformed as error:
                    raise Damaged(self.snapshot.path, f"{name}: {error}") from error
                yield from wanted_of(value, into)
            else:
                yield from ((one, 0, one.shape.numel()) for one in stored_in(value))

    def check(self, targets: Targets) -> None:
        """Raise CheckpointMismatch if this cannot be loaded into these objects. Changes nothing."""
        model, optimizer, more = targets.model, targets.optimizer, targets.more
        where = self.snapshot.path
        if model is not None:
            if self.model is None:
                raise CheckpointMismatch(f"{where} holds no model: expected one, saved with save(model=…)")
            check_model(shapes_of(targets.state), self.snapshot.manifest.model, str(where))
        if optimizer is not None:
            self._check_optimizer(optimizer, targets.params)
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
        """Why a run in lanes may not continue bit-identically, as far as that is known."""
        lanes = lanes_in(model, more)
        if not lanes or self._kernels is None:  # saved before this was recorded
            return []
        kernels = differences({"compiled": "False", **self._kernels}, kernels_of(model))
        return [f"lanes: {self._lanes} and {lanes}"] * (self._lanes != lanes) + kernels

    def put(self, targets: Targets) -> None:
        """Read into the tensors of the objects, starting with those that may refuse their state, as a Loader does.

        Their load_state_dict() gets their own tensors, and so copies nothing. Raises Damaged if the files cannot be
        read any more.
        """
        for name, value in targets.more.items():
            state = self.more[name]
            if name in self._per_rank:
                state = unpack(self._read(fill(state[self._rank])))
            if isinstance(value, torch.optim.Optimizer):
                self._put_optimizer(name, value, self.more.pop(name))
                continue
            module = bare(value) if isinstance(value, nn.Module) else None
            (module or value).load_state_dict(self._read(fill(state, module and module.state_dict())))
        if targets.model is not None:
            self._put_model(targets.model, targets.state)
        if targets.optimizer is not None:
            self._put_optimizer("optimizer", targets.optimizer, self.optimizer)
        self.more = self._read(fill(self.more))
        for name in self._per_rank:
            self.more[name] = [unpack(blob) for blob in self.more[name]]

    def _put_optimizer(self, name: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        filled = self._read(filled_state(saved, optimizer))
        try:
            optimizer.load_state_dict(filled)
        except (TypeError, LookupError, AttributeError) as error:  # torch uses values without checking their types
            why = f"{name}: a {kind_of(optimizer)} rejects its values ({type(error).__name__}: {error})"
            raise Damaged(self.snapshot.path, why) from error

    def _read(self, filled: Any) -> Any:
        """The value, once all of it has been read."""
        self._opened.finish()
        return filled

    def _put_model(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        parts = {name: part for name, part in state.items() if isinstance(part, TensorPart)}
        for name, part in parts.items():
            self.model[name].read_part(part.values, part.begin, part.form)
        rest = {name: value for name, value in self.model.items() if name not in parts}
        weights = OrderedDict(self._read(fill(rest, state)))
        if self._metadata is not None:
            weights._metadata = self._metadata  # type: ignore[attr-defined]
        owned = sharded_parameters(model) if parts else None
        if owned is None:
            bare(model).load_state_dict(weights)
            return
        with owned.units.in_shards():
            told = bare(model).load_state_dict(weights, strict=False)
        owned.units.follow_update()
        strange = [*(name for name in told.missing_keys if name not in parts), *told.unexpected_keys]
        if strange:
            raise CheckpointMismatch(
                f"{self.snapshot.path} does not fit the model's {strange[0]!r}; build it as it was"
            )

    def _check_optimizer(self, optimizer: torch.optim.Optimizer, params: Sequence[str] | None) -> None:
        where, kind = self.snapshot.path, kind_of(optimizer)
        if self.optimizer is None:
            raise CheckpointMismatch(f"{where} holds no optimizer: expected one, saved with save(optimizer=…)")
        if self.optimizer_kind not in (kind, None):  # None: it was imported
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
        for number, (name, wanted_name) in enumerate(zip(self.optimizer_params or (), params or (), strict=False)):
            if name != wanted_name:
                raise CheckpointMismatch(
                    f"{where} has an optimizer whose parameter {number} is {name!r}, expected {wanted_name!r}; pass "
                    f"the parameters in the order of the saved run"
                )


def lacking(snapshot: Snapshot, stored: StoredTensor, hole: tuple[int, int]) -> str:
    """The message for elements of a tensor that are in no file of the directory."""
    listed = ", ".join(map(str, snapshot.manifest.ranks))
    return (
        f"elements {hole[0]} to {hole[1]} of {stored.name!r} are missing: the directory has the files of rank "
        f"{listed} of {snapshot.manifest.world_size}, and a rank that does not share this directory "
        f"wrote these elements to its own; copy all files of that directory's {snapshot.path.name} into this one"
    )
