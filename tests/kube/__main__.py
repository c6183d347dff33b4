"""A cluster to play with: ``PYTHONPATH=tests python -m kube FOLDER [NODES]`` brings it up and waits for Ctrl-C."""

import signal
import sys
import tempfile
from pathlib import Path

from kube import images
from kube.cluster import Cluster


def main() -> None:
    cluster = Cluster(Path(sys.argv[1]), nodes=int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        try:
            cluster.up([images.pause(Path(folder)), images.busybox(Path(folder))])
            print(
                f"export KUBECONFIG={cluster.admin}\npods see this machine at {cluster.machine}", flush=True
            )
            signal.pause()
        except KeyboardInterrupt:
            pass
        finally:
            cluster.down()


if __name__ == "__main__":
    main()
