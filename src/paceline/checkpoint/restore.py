"""Putting a generation back: everything is compared first, then everything is copied."""

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paceline.bare import bare
from paceline.checkpoint.faults import CheckpointMismatch, Damaged
from paceline.checkpoint.generations import Generation, content
from paceline.checkpoint.shapes import check_model, shapes_of
from paceline.checkpoint.snapshot import MODEL, STATE, TREE, device_of, lanes_in, unpack
from paceline.kernels import differences, kernel_settings
from paceline.stored.tensor_file import TensorFile, bytes_of
from paceline.stored.tree import decode

# States of torch's optimizers that have an entry for every element of their parameter.
SHAPED_LIKE_PARAMS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta", "sum")


class Restored:
    """The values of one generation, in memory of their own. Raises Damaged if a byte of it has changed.

    `rank` of `size` is who loads it: whose values it gets where ranks had different ones.
    """

    def __init__(self, generation: Generation, rank: int, size: int) -> None:
        self.generation = generation
        self._rank = rank
        self._size = size
        files = content(generation)
        try:
            tree = json.loads(bytes(bytes_of(files[TREE])))
            weights, rest = TensorFile(files[MODEL]), TensorFile(files[STATE])
            self.model = decode(tree.get("model"), weights.__getitem__)
            self._metadata = decode(tree.get("model_metadata"), rest.__getitem__)
            self.optimizer = decode(tree.get("optimizer"), rest.__getitem__)
            self.optimizer_kind = tree.get("optimizer_kind")
            self._kernels, self._lanes = tree.get("kernels"), tree.get("lanes")
            self.more: dict[str, Any] = decode(tree["more"], rest.__getitem__)
            self._per_rank: list[str] = tree["per_rank"]
            for name in self._per_rank:
                self.more[name] = [unpack(blob) for blob in self.more[name]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Damaged(generation.path, f"its parts do not fit together: {error}") from error

    def check(self, model: nn.Module | None, optimizer: torch.optim.Optimizer | None, more: Mapping[str, Any]) -> None:
        """Raise CheckpointMismatch if this cannot be put into these objects. Changes nothing."""
        where = self.generation.path
        if model is not None:
            if self.model is None:
                raise CheckpointMismatch(f"{where} holds no model: expected one, saved with save(model=…)")
            check_model(shapes_of(bare(model).state_dict()), self.generation.manifest.model, str(where))
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
        """Why a run in lanes will not go on with the bits of the one that was saved, as far as that can be told."""
        lanes = lanes_in(model, more)
        if not lanes or self._kernels is None:  # the second: saved before this was written down
            return []
        kernels = differences(self._kernels, kernel_settings(device_of(model)))
        return [f"lanes: {self._lanes} and {lanes}"] * (self._lanes != lanes) + kernels

    def put(self, model: nn.Module | None, optimizer: torch.optim.Optimizer | None, more: Mapping[str, Any]) -> None:
        """Copy into the objects; first into those that may refuse their state by themselves, as a Loader does."""
        for name, value in more.items():
            state = self.more[name][self._rank] if name in self._per_rank else self.more[name]
            (bare(value) if isinstance(value, nn.Module) else value).load_state_dict(state)
        if model is not None:
            weights = OrderedDict(self.model)
            if self._metadata is not None:
                weights._metadata = self._metadata  # type: ignore[attr-defined]
            bare(model).load_state_dict(weights)
        if optimizer is not None:
            optimizer.load_state_dict(self.optimizer)

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        where, kind = self.generation.path, type(optimizer).__name__
        if self.optimizer is None:
            raise CheckpointMismatch(f"{where} holds no optimizer: expected one, saved with save(optimizer=…)")
        if self.optimizer_kind != kind:
            raise CheckpointMismatch(f"{where} is of an optimizer {self.optimizer_kind}, expected {kind}")
        saved = [len(group["params"]) for group in self.optimizer["param_groups"]]
        wanted = [len(group["params"]) for group in optimizer.param_groups]
        if saved != wanted:
            raise CheckpointMismatch(
                f"{where} has an optimizer with {saved} parameters in its groups, expected {wanted}; "
                f"make the parameter groups as they were made for the saved run"
            )
        params = [param for group in optimizer.param_groups for param in group["params"]]
        places = [place for group in self.optimizer["param_groups"] for place in group["params"]]
        for number, (param, place) in enumerate(zip(params, places, strict=True)):
            for name, tensor in self.optimizer["state"].get(place, {}).items():
                shaped = name in SHAPED_LIKE_PARAMS and isinstance(tensor, torch.Tensor)
                if shaped and tensor.shape != param.shape:
                    raise CheckpointMismatch(
                        f"{where}: {name!r} of the optimizer's parameter {number} has shape {tuple(tensor.shape)}, "
                        f"expected {tuple(param.shape)}; give the parameters in the order of the saved run"
                    )
