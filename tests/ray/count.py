"""Runs in Ray's own environment: how many cards a node counts, and what each worker is given.

Prints both as JSON. The environment is that of a container; `furiosa_smi_py` is a stand-in.
"""

import json
import os

import ray  # type: ignore[import-not-found]


@ray.remote(num_cpus=0, resources={"FURIOSA": 1})
class Worker:
    def devices(self) -> str:
        return os.environ["FURIOSA_DEVICES"]


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    count = int(ray.cluster_resources().get("FURIOSA", 0))
    workers = [Worker.remote() for _ in range(count)]  # type: ignore[attr-defined]
    given = ray.get([worker.devices.remote() for worker in workers], timeout=120)
    print(json.dumps({"count": count, "workers": sorted(given)}))


if __name__ == "__main__":
    main()
