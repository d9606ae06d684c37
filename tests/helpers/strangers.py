"""What somebody without the secret may write into the store of a training.

`python strangers.py HOST:PORT` writes, from a network of its own, that the training has ended.
"""

import json
import sys
from dataclasses import asdict
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from distap.errors import MISTAKE
from distap.processes.meeting import RankProcess


def store_of(address: str) -> Store:
    """The keys of a training's first start."""
    host, _, port = address.rpartition(":")
    server = TCPStore(host, int(port), timeout=timedelta(seconds=10), wait_for_workers=False)
    return PrefixStore("distap/1", server)


def written_by_a_stranger():
    """What a stranger may write, by key."""
    beat = {
        "time": 0,
        "begun": 0,
        "doing": "nothing",
        "seconds": 0,
        "left": "finished",
        "status": 2,
    }
    return {
        "verdict": ['["all is well", 0]', '["x"', '["x", 2]', "7", b"\xff\xfe", '["x", 75]'],
        "beat/0": [json.dumps(beat), "{", b"\xff"],
        "beat/1": [json.dumps(beat), "{", b"\xff"],
        "claim": [b"\xff"],
        "members": ["[]", json.dumps([asdict(RankProcess(0))])],
        "here/0": ["x"],
    }


if __name__ == "__main__":
    store_of(sys.argv[1]).set("verdict", json.dumps(["forged", MISTAKE]))
