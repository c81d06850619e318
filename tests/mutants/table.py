"""Faults to put into the core, one at a time: what the suite lets live, it does not test.

A mutant is a piece of text that stands once in a file, and what to write instead.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    file: str  # below src/paceline
    old: str
    new: str


MUTANTS = [
    # ---- reducer
    Mutant(
        "the division by ranks is dropped",
        "reducer/step.py",
        "return 1.0 if division.by_reduction or self.mode is Mode.WEIGHTED else 1.0 / division.divisor",
        "return 1.0",
    ),
    Mutant(
        "weighted sums are not divided by the weight of all ranks",
        "reducer/step.py",
        "return (division.size if division.by_reduction else 1.0) / weight_of_all_ranks",
        "return 1.0 / division.size",
    ),
    Mutant(
        "a bucket is handed back before its reduction is waited for",
        "reducer/buckets.py",
        "        if bucket.flight is not None:\n",
        "        if bucket.flight is not None and index:\n",
    ),
    Mutant(
        "reductions of several collectives overtake each other",
        "reducer/buckets.py",
        "if self.reduction.multi_step and self.busy_after_advancing():",
        "if False:",
    ),
    Mutant(
        "a bucket is launched before one that comes first and is full too",
        "reducer/buckets.py",
        "            bucket = buckets[self._next]\n            if not self._has_memory(self._next):",
        "            bucket = [one for one in buckets if one.state is BucketState.FULL][-1]\n"
        "            if not self._has_memory(self._next):",
    ),
    Mutant(
        "no_sync() reduces",
        "reducer/reducer.py",
        "syncs = (self.sync_on if self.sync_in_join is None else self.sync_in_join) and self.settings.overlap",
        "syncs = self.settings.overlap",
    ),
    Mutant(
        "a parameter without a gradient contributes what was in memory",
        "reducer/single_gradient.py",
        "    elif not slot.held:\n        bucket.zero(slot)\n",
        "",
    ),
    Mutant(
        "a second gradient overwrites the first",
        "reducer/single_gradient.py",
        "        slot.view.add_(grad, alpha=scale)\n",
        "        slot.view.copy_(grad).mul_(scale)\n",
    ),
    Mutant(
        "a view that was given other memory is written to",
        "reducer/bucket.py",
        "                or view.data_ptr() != slot.address\n",
        "",
    ),
    Mutant(
        "a gradient that is the bucket's own memory is copied onto itself",
        "reducer/bucket.py",
        "                or low <= grad.data_ptr() < high  # the bucket's own memory\n",
        "",
    ),
    # Only tests/gpu can kill this one.
    Mutant(
        "streams are not joined",
        "reducer/grad_streams.py",
        "if len(self._streams) > 1 or self._made_elsewhere():",
        "if False:",
    ),
    Mutant(
        "a hook of the user's runs on a gradient that is gone",
        "reducer/autograd.py",
        "if list(shared_params.hook_owners(slot.param))[-1] is self._owner:",
        "if True:",
    ),
    Mutant(
        "a parameter that nobody used gets zeros",
        "reducer/settle.py",
        "uses[slot.index] > 0))",
        "uses[slot.index] >= 0))",
    ),
    Mutant(
        "late gradients are forgotten",
        "reducer/late_gradients.py",
        "            slot.view.add_(extra)\n",
        "            pass\n",
    ),
    Mutant(
        "a failed backward is not told",
        "reducer/report.py",
        "        self.role, self.abort = StepRole.ABORTED, why\n",
        "        self.role, self.abort = StepRole.ABORTED, Abort.NO\n",
    ),
    Mutant(
        "ranks in different steps are not noticed",
        "reducer/report_errors.py",
        "    if len(set(counts)) > 1:\n",
        "    if len(set(counts)) > 9:\n",
    ),
    Mutant(
        "replicas that share parameters in different orders are not noticed",
        "reducer/report_errors.py",
        "    if len({row.owned_elsewhere for row in rows}) > 1:\n",
        "    if len({row.owned_elsewhere for row in rows}) > 9:\n",
    ),
    Mutant(
        "each rank takes up its own plan",
        "reducer/planning.py",
        '        self._group.wait(self._transport.broadcast(agreed, 0), "the bucket plan")\n',
        "",
    ),
    Mutant(
        "unreduced gradients are stepped on",
        "reducer/step.py",
        "            if (slot.dirty or (by_hand and not slot.attached()))\n",
        "            if (by_hand and not slot.attached())\n",
    ),
    Mutant(
        "an update that is under way counts as done",
        "reducer/step.py",
        "        return not self._updating and not self._diverged\n",
        "        return not self._diverged\n",
    ),
    Mutant(
        "thrown away microbatches go on counting",
        "reducer/unreduced.py",
        "    return first_nonzero(left) is None  # somebody has written to them, or they are not ours\n",
        "    return False\n",
    ),
    # ---- replica, agreement
    Mutant(
        "those behind are the source",
        "replica/start_equal.py",
        "source = max(whole, key=lambda rank: (rows[rank][1], -rank)) if whole else 0",
        "source = min(whole, key=lambda rank: (rows[rank][1], rank)) if whole else 0",
    ),
    Mutant(
        "digests of the state are not compared",
        "replica/monitor.py",
        "if len({(row.signature, row.state) for row in rows}) > 1 and self.state.differs(rows):",
        "if len({(row.signature, row.state) for row in rows}) > 9 and self.state.differs(rows):",
    ),
    Mutant(
        "numbers that are not finite are stepped on",
        "agree/finite.py",
        "self._found |= 0 if math.isfinite(low) and math.isfinite(high) else OWN",
        "self._found |= 0",
    ),
    Mutant(
        "sums that overflow are stepped on",
        "agree/finite.py",
        "            self._found |= SUM\n",
        "            pass\n",
    ),
    Mutant(
        "the same part of the state is compared in every step",
        "agree/state_digest.py",
        "self._parts[step % self._every]",
        "self._parts[0]",
    ),
    Mutant(
        "all heal from rank 0",
        "agree/drift.py",
        "sources = [known.index(tensor.majority[0]) if tensor.majority else trust for tensor in drift.tensors]",
        "sources = [0 if tensor.majority else trust for tensor in drift.tensors]",
    ),
    Mutant(
        "a step with a closure is not judged",
        "replica/closures.py",
        "        result = given(*inputs, **named)\n        then()\n",
        "        result = given(*inputs, **named)\n",
    ),
    # ---- transports
    Mutant(
        "shared memory does not divide",
        "collectives/shm/summing.py",
        "        self._divide_by = divide_by if op is Op.MEAN else 1\n",
        "        self._divide_by = 1\n",
    ),
    Mutant(
        "one rank keeps its own copy",
        "collectives/shm/summing.py",
        "            for other in piece[1:]:\n                other.copy_(piece[0])\n",
        "            for other in piece[2:]:\n                other.copy_(piece[0])\n",
    ),
    Mutant(
        "the last elements of a slice are nobody's",
        "collectives/shm/prepare.py",
        "    step = -(-numel // (grain * owners)) * grain\n",
        "    step = max(1, numel // (grain * owners)) * grain\n",
    ),
    Mutant(
        "the mean over gloo is a sum",
        "collectives/torch_routes.py",
        "    return route, options, size if divides else 1\n",
        "    return route, options, 1\n",
    ),
    Mutant(
        "collectives are not counted",
        "collectives/group.py",
        "        self.count += 1\n",
        "",
    ),
    # ---- lanes
    Mutant(
        "lanes are added from left to right",
        "reducer/lanes.py",
        "while sums and sums[-1][0] == (first - width, width) and first % (2 * width):",
        "while sums and sums[-1][0] == (first - width, width):",
    ),
    Mutant(
        "the tree is cut elsewhere",
        "collectives/tree_sum.py",
        "        if first + half < count:\n            yield from _additions(first + half, half, count)\n",
        "        if first + half < count:\n            yield from _additions(first + half, 1, count)\n",
    ),
    # ---- placements
    Mutant(
        "a second reduced backward replaces the first one's shard",
        "reducer/shard.py",
        "            grad.add_(earlier)\n",
        "            pass\n",
    ),
    Mutant(
        "what comes after a bucket was reduced is not late",
        "reducer/unreduced.py",
        "if bucket.state in (BucketState.LAUNCHED, BucketState.REDUCED):",
        "if bucket.state is BucketState.LAUNCHED:",
    ),
    Mutant(
        "a bucket is filled while another one has its memory",
        "reducer/buckets.py",
        "        self._wait_result(before)\n",
        "",
    ),
    Mutant(
        "the sum of a shard is left in the memory of rank 0",
        "collectives/shm/summing.py",
        "            self._sum(piece, self._divide_by, into=ranks[0])\n",
        "            self._sum(piece, self._divide_by)\n",
    ),
    Mutant(
        "a twin gets nothing of what the other has added up",
        "collectives/shm/summing.py",
        "                piece[other].copy_(piece[ranks[0]])\n",
        "                pass\n",
    ),
    Mutant(
        "a shard is not added to that of its twins",
        "strategies/scatter_mean.py",
        "            if total.numel():  # the twins",
        "            if False:  # the twins",
    ),
    Mutant(
        "twins are not compared",
        "replica/monitor.py",
        "compared = state.twins if state.twins is not None and (turn or state.twins.instead) else state",
        "compared = state",
    ),
    Mutant(
        "what no one has set is trained",
        "replica/from_meta.py",
        "        if not lacking():\n",
        "        if True:\n",
    ),
    Mutant(
        "parameters that were fetched ahead outlive an update",
        "replica/unit.py",
        "            gather.discard(group)\n",
        "            pass\n",
    ),
    Mutant(
        "memory that others look at is filled after the step",
        "replica/update_gather.py",
        "            or self._others_look_at_memory()\n",
        "",
    ),
    Mutant(
        "a module runs before its parameters are there",
        "replica/update_gathers.py",
        "self._wait_for(*(gathers if module.training else self._gathers))",
        "pass",
    ),
    Mutant(
        "a backward through parameters from before the update runs",
        "replica/update_gather.py",
        "        torch.autograd.graph.increment_version(self.params)",
        "        _ = (self.params)",
    ),
    Mutant(
        "the norm is that of this rank's shards",
        "replica/owned.py",
        "        work = self._group.transport.all_reduce(total, Op.MAX if highest else Op.SUM)\n",
        "        work = self._group.transport.all_reduce(total.clone(), Op.MAX if highest else Op.SUM)\n",
    ),
    # ---- audits, checksums
    Mutant(
        "a lane is audited by the rank that runs it",
        "agree/audit.py",
        "(owner + 1 + turn % (size - 1)) % size",
        "owner",
    ),
    Mutant(
        "a repeated lane leaves its gradients in those of the step",
        "reducer/repeated_lane.py",
        "                bucket.flat.copy_(flat)\n",
        "                _ = flat\n",
    ),
    Mutant(
        "a repeated lane leaves its buffers to the step",
        "replica/lane_buffers.py",
        "        self._after, self._unfit = after, unfit\n",
        "        self._unfit = unfit\n",
    ),
    Mutant(
        "the rank whose gradients two others have, too, is taken for the odd one",
        "agree/audit.py",
        "    (agree, (odd,)) = groups\n",
        "    (agree, _), odd = groups, audit.owner\n",
    ),
    Mutant(
        "what has come is compared with what has come",
        "strategies/checksums.py",
        "differs = (expected != torch.stack(self._received, dim=1)).any(1)",
        "differs = (expected != expected).any(1)",
    ),
]
