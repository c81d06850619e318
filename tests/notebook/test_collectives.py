"""Which collectives are seen in a cell before it runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.notebook.cell.collectives import Call, collectives_in


def names(code: str) -> list[str]:
    return [call.name for call in collectives_in(code)]


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("dist.all_reduce(x)", "all_reduce"),
        ("all_reduce(x)", "all_reduce"),
        ("torch.distributed.all_reduce(x)", "all_reduce"),
        ("import torch.distributed as td\ntd.reduce(x, 0)", "reduce"),
        ("from torch.distributed import reduce\nreduce(x, 0)", "reduce"),
        ("from torch.distributed import all_reduce as ar\nar(x)", "all_reduce"),
        ("from torch import distributed as d\nd.gather(x)", "gather"),
        ("work = dist.all_reduce(x, async_op=True)\nwork.wait()", "all_reduce"),
        ("dist.all_reduce(x, group=None)", "all_reduce"),
        ("dist.all_reduce(x, group=dist.group.WORLD)", "all_reduce"),
        ("dist.barrier()", "barrier"),
        ("barrier()", "barrier"),
        ("dist.broadcast(x, src=0)", "broadcast"),
        ("broadcast(x)", "broadcast"),
        ("dist.broadcast_object_list(xs)", "broadcast_object_list"),
        ("dist.all_gather_into_tensor(o, x)", "all_gather_into_tensor"),
        ("dist.reduce_scatter_tensor(o, x)", "reduce_scatter_tensor"),
        ("dist.scatter(x)", "scatter"),
        ("dist.all_to_all_single(o, x)", "all_to_all_single"),
        ("dist.send(x, 1)", "send"),
        ("dist.irecv(x, 0)", "irecv"),
        ("paceline.all_gather(x)", "all_gather"),
        ("paceline.broadcast(x)", "broadcast"),
        ("from paceline import broadcast as b\nb(x)", "broadcast"),
        ("loss.backward()", "backward"),
        ("(model(x)\n  .sum()\n  .backward())", "backward"),
        ("model.sync_gradients()", "sync_gradients"),
        ("paceline.DistributedDataParallel(net)", "DistributedDataParallel"),
        ("model = DDP(net)", "DistributedDataParallel"),
        ("from torch.nn.parallel import DistributedDataParallel as Wrap\nWrap(net)", "DistributedDataParallel"),
        ("dist.init_process_group('gloo')", "init_process_group"),
        ("g = dist.new_group([0])", "new_group"),
        ("await asyncio.to_thread(lambda: dist.barrier())", "barrier"),
        ("if rank == 0:\n    [dist.all_reduce(p.grad) for p in model.parameters()]", "all_reduce"),
        ("%time dist.barrier()", "barrier"),
        ("%timeit -n 3 -r1 dist.barrier()", "barrier"),
        ("x = %time dist.barrier()", "barrier"),
        ("%%time\ndist.barrier()", "barrier"),
        ("# first\n\n%%capture out\ndist.barrier()", "barrier"),
        ("!echo it's\ndist.barrier()\nfiles = !ls (", "barrier"),
        ("    dist.barrier()\n    x?", "barrier"),
        ("s = '\\d'\ndist.barrier()", "barrier"),
        ("def f():\n    dist.barrier()\nf()", "barrier"),
        ("def f():\n    g()\ndef g():\n    dist.barrier()\nf()", "barrier"),
        ("def f():\n    f()\n    dist.barrier()\nhandle.register_hook(f)", "barrier"),
        ("class A:\n    def __init__(self):\n        dist.broadcast(x, 0)\nA()", "broadcast"),
        ("class A:\n    def step(self):\n        dist.barrier()\na.step()", "barrier"),
        ("def f():\n    loss.backward()\nwith m.no_sync():\n    f()\nf()", "backward"),
        ("with m.no_sync() if more else nullcontext():\n    loss.backward()", "backward"),
        ("with m.no_sync():\n    m(x)\nloss.backward()", "backward"),
    ],
)
def test_seen(code: str, name: str) -> None:
    assert names(code) == [name]


@pytest.mark.parametrize(
    "code",
    [
        "",
        "x = 1",
        "dist.get_rank(); dist.is_initialized()",
        "# dist.barrier()",
        "print('dist.barrier()')",
        "functools.reduce(f, xs); reduce(f, xs)",
        "torch.gather(x, 1, i); x.scatter(1, i, v); y.broadcast_to(z)",
        "from asyncio import gather\nawait gather(a, b)",
        "from mine import broadcast\nbroadcast(x)",
        "np.broadcast(a, b)",
        "sock.send(b''); sock.recv(1)",
        "f = dist.all_reduce",
        "dist.all_reduce(x, group=pair)",
        "def f():\n    dist.barrier()",
        "class A:\n    def __init__(self):\n        dist.broadcast(x, 0)\n    def step(self):\n        dist.barrier()",
        "class A:\n    def __init__(self):\n        dist.barrier()\nclass B(A):\n    x: A",
        "def all_reduce(x):\n    return x\nall_reduce(1)",
        "with model.no_sync():\n    loss.backward()",
        "with timer(), model.no_sync():\n    for b in batches:\n        model(b).backward()",
        "dist.barrier(",
        "def dist.barrier():",
        "\0dist.barrier()",
        "%%bash\ndist.barrier()",
        "%%html\n<b>dist.barrier()</b>",
        "!dist.barrier()",
        "dist.barrier?",
        "%time it's",
        "+" * 100_000 + "1",
    ],
)
def test_not_seen(code: str) -> None:
    assert names(code) == []


def test_lines_are_those_of_the_cell() -> None:
    code = (
        "\n# all of it\n%matplotlib inline\n!ls \\\n  -l\nx = !ls (\n\ndist.all_reduce(\n    x,\n)\n"
        "loss = (model(x)\n    .sum())\n(loss\n    .backward())\r\n%time dist.barrier()\n"
    )
    assert collectives_in(code) == [Call("all_reduce", 8), Call("backward", 14), Call("barrier", 15)]
    assert collectives_in("\n%%time\n\ndist.barrier()") == [Call("barrier", 4)]


def test_the_class_of_the_beginners_guide() -> None:
    code = """
class SimpleDistributedDataParallelism:
    def __init__(self, model: torch.nn.Module):
        self.model = model
        for param in model.parameters():
            rank0_param = param.data.clone()
            dist.broadcast(rank0_param, src=0)

    def sync_gradients(self):
        for param in self.model.parameters():
            dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
"""
    assert collectives_in(code) == []
    assert names(code + "model = SimpleDistributedDataParallelism(net)\n") == ["broadcast"]
    assert names(code + "ddp.sync_gradients()\n") == ["all_reduce", "sync_gradients"]


@given(st.text(alphabet="dist.barrier()\n%!x='\"#:\\ def", max_size=60))
def test_any_text_can_be_read(code: str) -> None:
    assert set(names(code)) <= {"barrier"}
