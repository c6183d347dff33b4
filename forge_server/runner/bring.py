"""Copies a folder's content into another: the init container's program, from the runner's image into the pod.

python bring.py FROM INTO
"""

import shutil
import sys

if __name__ == "__main__":
    shutil.copytree(sys.argv[1], sys.argv[2], symlinks=True, dirs_exist_ok=True)
