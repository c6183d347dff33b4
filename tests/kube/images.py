"""Container images without a builder or a registry: an OCI archive of one layer, written from a folder."""

import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def pack(root: Path, name: str, archive: Path, command: Sequence[str] = ("/bin/sh",)) -> Path:
    """Write the image ``name`` (``localhost/x:1``) whose root is the folder ``root``; owners become root."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.add(root, arcname=".", filter=_plain)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"], "Cmd": list(command)},
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer.getvalue())]},
    }
    blobs = [json.dumps(config).encode(), layer.getvalue()]
    kinds = ["application/vnd.oci.image.config.v1+json", "application/vnd.oci.image.layer.v1.tar"]
    described = [_described(blob, kind) for blob, kind in zip(blobs, kinds, strict=True)]
    manifest = json.dumps(
        {"schemaVersion": 2, "mediaType": _MANIFEST, "config": described[0], "layers": described[1:]}
    ).encode()
    names = {"org.opencontainers.image.ref.name": name, "io.containerd.image.name": name}
    index = {"schemaVersion": 2, "manifests": [{**_described(manifest, _MANIFEST), "annotations": names}]}
    with tarfile.open(archive, "w") as tar:
        _add(tar, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add(tar, "index.json", json.dumps(index).encode())
        for blob in (*blobs, manifest):
            _add(tar, "blobs/sha256/" + _digest(blob).removeprefix("sha256:"), blob)
    return archive


def pause(folder: Path) -> Path:
    """The image that every pod's first container is made of."""
    root = folder / "pause"
    root.mkdir(parents=True)
    subprocess.run(["gcc", "-Os", "-static", "-o", root / "pause", HERE / "pause.c"], check=True)
    return pack(root, "localhost/pause:1", folder / "pause.tar", ["/pause"])


def busybox(folder: Path) -> Path:
    """``localhost/busybox:1``: one static program with its links, nothing else."""
    root = folder / "busybox"
    (root / "bin").mkdir(parents=True)
    for name in ("tmp", "etc", "root"):
        (root / name).mkdir()
    (root / "tmp").chmod(0o1777)
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    program = root / "bin" / "busybox"
    program.write_bytes(Path("/bin/busybox").read_bytes())
    program.chmod(0o755)
    applets = subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout.split()
    for applet in applets:
        if applet != "busybox":
            (root / "bin" / applet).symlink_to("busybox")
    return pack(root, "localhost/busybox:1", folder / "busybox.tar")


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


def _digest(blob: bytes) -> str:
    return "sha256:" + hashlib.sha256(blob).hexdigest()


def _described(blob: bytes, kind: str) -> dict[str, object]:
    return {"mediaType": kind, "digest": _digest(blob), "size": len(blob)}


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
