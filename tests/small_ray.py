"""A Ray cluster for one program, which starts in less time."""

from ray.cluster_utils import Cluster


def small_cluster(**head):
    """A cluster with one node, its head, and without what programs do not use.

    The dashboard, the autoscaler's monitor and the reader of logs are Python processes, each of which takes a second of
    processor time to start.

    Args:
        **head: What the node has, such as ``num_cpus``.
    """
    without = {"include_dashboard": False, "no_monitor": True, "include_log_monitor": False}
    return Cluster(initialize_head=True, head_node_args={**head, **without})
