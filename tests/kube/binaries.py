"""Where Kubernetes' programs come from: the packed one beside the project, else built from Debian's sources, once."""

import fcntl
import lzma
import shutil
import subprocess
from pathlib import Path

from forge_server.environments import cache_folder

HERE = Path(__file__).resolve().parent
PACKED = "k8s-1.20.2-hyper.xz"
COMPONENTS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
NEEDED = (
    "containerd",
    "ctr",
    "runc",
    "etcd",
    "busybox",
    "openssl",
    "ip",
    "unshare",
    "nsenter",
    "patchelf",
    "musl-gcc",
)
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PACKAGES = (
    "containerd runc etcd-server containernetworking-plugins busybox-static iproute2 openssl xz-utils gcc "
    "musl-tools patchelf"
)


def binaries() -> Path:
    """The folder with Kubernetes' programs; a build takes minutes. Raises RuntimeError when a part is missing."""
    missing = [name for name in NEEDED if shutil.which(name, path=PATH) is None]
    if missing or not Path("/usr/lib/cni/bridge").exists():
        raise RuntimeError(f"missing: {' '.join(missing)}; apt-get install {PACKAGES}")
    folder = cache_folder() / "kube" / "1.20.2"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        program = folder / "hyper"
        if not program.exists():
            _make(folder, program)
        for name in COMPONENTS:
            link = folder / name
            if not link.is_symlink():
                link.symlink_to("hyper")
    return folder


def _make(folder: Path, program: Path) -> None:
    fresh = folder / "hyper.new"
    packed = next(
        (p / "shared" / "kube" / PACKED for p in HERE.parents if (p / "shared" / "kube" / PACKED).exists()),
        None,
    )
    if packed is not None:
        with lzma.open(packed) as source, fresh.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    else:
        subprocess.run([HERE / "build.sh", folder / "build"], check=True, timeout=3600)
        shutil.move(folder / "build" / "hyper", fresh)
    fresh.chmod(0o755)
    fresh.rename(program)
