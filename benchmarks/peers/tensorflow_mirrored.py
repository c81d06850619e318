"""The same model, sizes and optimizer in TensorFlow, under MultiWorkerMirroredStrategy."""

import json
import os
import socket
import time
from typing import Any

import numpy as np

from paceline.bench.contenders import Contender
from paceline.bench.spec import StepSpec
from paceline.bench.tasks import Barrier, Task
from paceline.errors import UsageError
from paceline.memory_plan.measured import Peak


class TensorFlowTask(Task):
    """Trains one rank of TensorFlow."""

    def __init__(self, spec: StepSpec, _: str, rank: int, size: int) -> None:
        if spec.shape.dtype != "float32" or spec.accumulate > 1:
            raise UsageError("the TensorFlow contender knows float32 models and one microbatch per step only")
        self._spec, self._rank, self._size = spec, rank, size
        self._holder = socket.socket()
        self._step: Any
        self._constant: Any
        self._memory: Peak

    def bind(self) -> int:
        # Bound and not listening: the port stays ours until TensorFlow's server listens beside it.
        self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._holder.bind(("127.0.0.1", 0))
        return int(self._holder.getsockname()[1])

    def build(self, ports: list[int]) -> dict[str, Any]:
        import tensorflow as tf

        workers = [f"127.0.0.1:{port}" for port in ports]
        task = {"type": "worker", "index": self._rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
        tf.config.threading.set_intra_op_parallelism_threads(self._spec.threads)
        tf.config.threading.set_inter_op_parallelism_threads(2)
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        self._memory = Peak("cpu")
        tf.keras.utils.set_random_seed(self._spec.seed)
        with strategy.scope():
            model = self._model(tf)
            optimizer = tf.keras.optimizers.AdamW(self._spec.learning_rate, weight_decay=0.01)
            optimizer.build(model.trainable_variables)
        self._constant = tf.constant
        self._step = _make_step(tf, strategy, model, optimizer)
        note = f"TensorFlow {tf.__version__}, {model.count_params() / 1e6:.1f} M parameters, own weights"
        return {"gpu": None, "sent_bytes": None, "notes": [note]}

    def _model(self, tf: Any) -> Any:
        shape, layers = self._spec.shape, tf.keras.layers
        tokens = tf.keras.Input((shape.context,), dtype="int32")
        h = layers.Embedding(shape.vocabulary, shape.width)(tokens)
        h = h + layers.Embedding(shape.context, shape.width)(tf.range(shape.context))
        for _ in range(shape.layers):
            normed = layers.LayerNormalization(epsilon=1e-5)(h)
            attention = layers.MultiHeadAttention(shape.heads, shape.width // shape.heads)
            h = h + attention(normed, normed, use_causal_mask=True)
            normed = layers.LayerNormalization(epsilon=1e-5)(h)
            h = h + layers.Dense(shape.width)(layers.Dense(4 * shape.width, activation="gelu")(normed))
        normed = layers.LayerNormalization(epsilon=1e-5)(h)
        return tf.keras.Model(tokens, layers.Dense(shape.vocabulary, use_bias=False)(normed))

    def run(self, message: dict[str, Any], barrier: Barrier) -> dict[str, Any]:
        if message["what"] == "communicate":
            return {"seconds": None}
        if message["timed"] and message["first"] == self._spec.warmup:
            self._memory.restart()
        steps = []
        for number in range(message["first"], message["until"]):
            x, y = map(self._constant, self._batch(number))
            barrier()
            begin = time.perf_counter()
            loss = float(self._step(x, y))
            steps.append({"seconds": time.perf_counter() - begin, "loss": loss})
        return {"steps": steps, "observed": {}}

    def _batch(self, number: int) -> tuple[Any, Any]:
        shape = self._spec.shape
        source = np.random.default_rng(self._spec.seed * 1_000_003 + number * 1009 + self._rank)
        text = source.integers(shape.vocabulary, size=(self._spec.micro_batch, shape.context + 1)).astype("int32")
        return text[:, :-1], text[:, 1:]

    def finish(self) -> dict[str, Any]:
        return {"peak_bytes": self._memory.nbytes(), "digest": None}

    def close(self) -> None:
        self._holder.close()


def _make_step(tf: Any, strategy: Any, model: Any, optimizer: Any) -> Any:
    def local(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = tf.keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
            loss = tf.reduce_mean(losses)
        grads = tape.gradient(loss, model.trainable_variables)
        grads = tf.distribute.get_replica_context().all_reduce("mean", grads)
        optimizer.apply(grads, model.trainable_variables)
        return loss

    @tf.function
    def step(x: Any, y: Any) -> Any:
        return strategy.reduce("mean", strategy.run(local, (x, y)), axis=None)

    return step


tensorflow = Contender(
    "TensorFlow MultiWorkerMirroredStrategy, own weights",
    task=TensorFlowTask,
    needs=("tensorflow",),
    same_weights=False,
    devices=("cpu",),
)
