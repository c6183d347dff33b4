"""Makes a dead agent's work folder safe to verify.

A link planted in the work folder could make the verifier read its own solution (``answer.txt ->
/tests/...``) or write where the agent likes; a fifo could make it wait for ever. So before the verifier's
files arrive, links that lead out of the work folder and the read-only system, and everything that is
neither file, folder nor link, are removed. No agent process lives any more, so there is no race.
"""

import os
import stat

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/opt", "/dev/null")


def scrub(root: str, inside: str, also: tuple[str, ...] = ()) -> list[str]:
    """Clean ``root``, which the verifier will see as ``inside``; ``also`` are further folders links may
    lead to.

    Returns the removed paths, relative to ``root``.
    """
    allowed = (inside, *SYSTEM, *also)
    removed = []
    todo = [""]
    while todo:
        folder = todo.pop()
        with os.scandir(os.path.join(root, folder)) as entries:
            for entry in entries:
                name = os.path.join(folder, entry.name)
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    todo.append(name)
                elif stat.S_ISLNK(mode):
                    if not _stays(os.path.join(inside, folder), os.readlink(entry.path), allowed):
                        os.unlink(entry.path)
                        removed.append(name)
                elif not stat.S_ISREG(mode):
                    os.unlink(entry.path)
                    removed.append(name)
    return removed


def _stays(folder: str, target: str, allowed: tuple[str, ...]) -> bool:
    """Whether a link in ``folder`` (a real folder) leads to an allowed place.

    ``..`` after a name is refused, since that name may itself be a link; so the lexical answer is the true
    one.
    """
    parts = [p for p in target.split("/") if p not in ("", ".")]
    climbing = True
    for part in parts:
        if part != "..":
            climbing = False
        elif not climbing or target.startswith("/"):
            return False
    place = os.path.normpath(os.path.join(folder, target))
    return any(place == a or place.startswith(a + "/") for a in allowed)
