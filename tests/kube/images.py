"""Container images without a builder or a registry: an OCI archive of one layer, written from a folder."""

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

from forge_server.runner import tree

HERE = Path(__file__).resolve().parent
CAPITALS = r"""
#include <ctype.h>
#include <stdio.h>
int main(void) { for (int c; (c = getchar()) != EOF;) putchar(toupper(c)); return 0; }
"""
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
    return pack(_busybox(folder / "busybox"), "localhost/busybox:1", folder / "busybox.tar")


def musl(folder: Path) -> Path:
    """``localhost/musl:1``: busybox, and a program ``capitals`` that needs musl's loader and libc; no glibc."""
    root = _busybox(folder / "musl")
    (root / "lib").mkdir()
    shutil.copy2(Path("/lib/ld-musl-x86_64.so.1").resolve(), root / "lib" / "ld-musl-x86_64.so.1")
    source = folder / "capitals.c"
    source.write_text(CAPITALS)
    subprocess.run(["musl-gcc", "-Os", "-o", root / "bin" / "capitals", source], check=True)
    return pack(root, "localhost/musl:1", folder / "musl.tar")


def forge(folder: Path, name: str, environment: Path | None = None) -> Path:
    """The image ``name`` that brings ``/forge`` into pods, with a harness's environment."""
    root = folder / name.replace("/", "-")
    tree.make(root / "forge", environment)
    made = pack(root, name, folder / f"{root.name}.tar", ["/forge/bin/python3"])
    shutil.rmtree(root)
    return made


def _busybox(root: Path) -> Path:
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
    return root


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0  # times stay: Python's byte code is valid by them
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
