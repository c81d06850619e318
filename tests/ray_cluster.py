"""A Ray cluster of several nodes on this machine, in a process of its own, because Ray keeps threads and files.

Lines of JSON say what there is: the address of the cluster, and then, for each node of one CPU, the process id of its
raylet. A line `add` on standard input adds a node. At the end of input the cluster is shut down.
"""

import json
import os
import sys
from itertools import count
from typing import Any

# Each node has an address of its own. Ray replaces the first one of loopback by that of the network.
HOST = "127.0.0.{}"
SMALL = {"object_store_memory": 80 << 20}


def main(nodes: int) -> None:
    from ray.cluster_utils import Cluster

    hosts = (HOST.format(number) for number in count(2))
    head = {"num_cpus": 0, "include_dashboard": False, "node_ip_address": next(hosts), **SMALL}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    say(cluster.address)
    add: Any = cluster.add_node
    try:
        for _ in range(nodes):
            say(raylet_of(add(num_cpus=1, node_ip_address=next(hosts), **SMALL)))
        for line in sys.stdin:
            if line.strip() == "add":
                say(raylet_of(add(num_cpus=1, node_ip_address=next(hosts), **SMALL)))
    finally:
        cluster.shutdown()


def raylet_of(node: Any) -> int:
    pid: int = node.all_processes["raylet"][0].process.pid
    return pid


def say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    # A node that is killed counts as dead a few seconds sooner. On a busy machine none may seem so that lives.
    checks = {"initial_delay_ms": "10000", "period_ms": "1000", "timeout_ms": "1000", "failure_threshold": "8"}
    os.environ.update({f"RAY_health_check_{name}": value for name, value in checks.items()})
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    main(int(sys.argv[1]))
