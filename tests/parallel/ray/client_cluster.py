"""A cluster of two nodes with a client server, until its standard input ends: python client_cluster.py PORT."""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}

if __name__ == "__main__":
    head = {**NODE, "include_dashboard": False, "ray_client_server_port": int(sys.argv[1])}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(**NODE)
    print("ready", flush=True)
    sys.stdin.read()
    cluster.shutdown()
