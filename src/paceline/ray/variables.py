"""The variables that say where a rank is, once Ray has said where all of them are."""

from collections.abc import Mapping

from paceline.launch.rank_environment import DEFAULTS
from paceline.rank_report import STORE_HOST_NAME
from paceline.ray.places import Place

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def placed(environment: Mapping[str, str], rank: int, places: Mapping[int, Place]) -> dict[str, str]:
    """A rank's environment with the addresses of the machines where it and the first rank are.

    Ranks listen at the address that their machine has in the cluster, and nowhere else.
    """
    here, first = places[rank], places[0]
    found = {**environment, "MASTER_ADDR": first.address, "MASTER_PORT": str(first.port), STORE_HOST_NAME: here.address}
    for name in INTERFACES:
        if found.get(name) == DEFAULTS[name]:  # the user has not named another
            del found[name]
            found.update({name: here.interface} if here.interface else {})
    return found


def numbered(rank: int, places: Mapping[int, Place]) -> dict[str, str]:
    """torchrun's numbers of machines, and of ranks on a machine, for a job whose ranks stay where they are."""
    nodes = list(dict.fromkeys(places[other].node for other in sorted(places)))
    here = [other for other in sorted(places) if places[other].node == places[rank].node]
    number = str(nodes.index(places[rank].node))
    found = {
        "LOCAL_RANK": str(here.index(rank)),
        "LOCAL_WORLD_SIZE": str(len(here)),
        "NODE_RANK": number,
        "GROUP_RANK": number,
        "GROUP_WORLD_SIZE": str(len(nodes)),
    }
    # As under torchrun a rank sees all devices that the job has on its machine, and LOCAL_RANK says which is its own.
    if gpus := [gpu for other in here for gpu in places[other].gpus]:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(gpus))
    return found
