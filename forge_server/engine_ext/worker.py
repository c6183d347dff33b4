"""vLLM worker extension: reload a checkpoint in place, but only one that fits the model that is loaded.

Runs only in vLLM's environment, once per worker (``--worker-extension-cls
forge_server.engine_ext.worker.ForgeWorkerExtension``), and imports nothing of the rest. vLLM's own
``reload_weights`` leaves the model on meta tensors when a file is missing, and the next request kills the
engine. Therefore every check comes first, as a call of its own that touches no weight and answers in words,
so that of several workers none reloads unless all would.
"""

import hashlib
import json
import os


class ForgeWorkerExtension:
    """Methods reached by ``/collective_rpc``; all names carry ``forge``, because vLLM refuses clashes."""

    def forge_describe(self) -> dict:
        """What is loaded: folder, dtype and number of checkpoint tensors."""
        layout = self._forge_layout()
        return {
            "path": self.model_config.model,
            "dtype": str(self.model_config.dtype).removeprefix("torch."),
            "tensors": len(layout),
        }

    def forge_check_checkpoint(self, weights: str, manifest: str, manifest_sha256: str) -> dict:
        """Whether the folder ``weights`` may be loaded: ``{"fault": ""}``, or the fault in words.

        ``manifest`` is the path of the checkpoint's manifest, empty for weights that have none.
        """
        try:
            return {"fault": self._forge_fault(weights, manifest, manifest_sha256)}
        except (OSError, ValueError, KeyError, TypeError) as error:
            return {"fault": f"cannot be read: {type(error).__name__}: {error}"}

    def forge_load_checkpoint(self, weights: str) -> dict:
        """Reload from the folder ``weights``. Only after the check; an error leaves no usable weights."""
        self._forge_layout()  # remember what fits before vLLM forgets where the model came from
        self.reload_weights(weights_path=weights)
        return {"path": weights}

    def _forge_layout(self) -> dict[str, list[int]]:
        """Name -> shape of the loaded model's checkpoint tensors; read once, from where it came from."""
        layout = getattr(self, "_forge_known_layout", None)
        if layout is None:
            layout = {name: t["shape"] for name, t in read_tensors(self.model_config.model).items()}
            self._forge_known_layout = layout
        return layout

    def _forge_fault(self, weights: str, manifest: str, manifest_sha256: str) -> str:
        found = read_tensors(weights)
        if manifest:
            with open(manifest, "rb") as file:
                raw = file.read()
            if hashlib.sha256(raw).hexdigest() != manifest_sha256:
                return "manifest.json is not the one that was announced"
            stated = json.loads(raw)["tensors"]
            if odd := sorted(stated.keys() ^ found.keys()):
                return f"the manifest and the weight files name different tensors ({_few(odd)})"
            for name, tensor in found.items():
                if tensor != {key: stated[name][key] for key in ("shape", "dtype")}:
                    return f"tensor {name} is {tensor} in the file, {stated[name]} in the manifest"
        expected = self._forge_layout()
        if odd := sorted(expected.keys() ^ found.keys()):
            return f"tensor names differ from the loaded model's ({_few(odd)})"
        for name, tensor in found.items():
            if tensor["shape"] != expected[name]:
                return f"tensor {name} has shape {tensor['shape']}, the loaded model needs {expected[name]}"
        return ""


def read_tensors(folder: str) -> dict[str, dict]:
    """Name -> {shape, dtype} from the headers of every safetensors file that vLLM would read in ``folder``.

    Raises OSError or ValueError, also when the tensors' bytes do not lie within the file.
    """
    index = os.path.join(folder, "model.safetensors.index.json")
    if os.path.exists(index):
        with open(index, "rb") as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    tensors: dict[str, dict] = {}
    for name in names:
        path = os.path.join(folder, name)
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = os.fstat(file.fileno()).st_size
            if not 0 < length <= size - 8:
                raise ValueError(f"{name} has no safetensors header")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for key, tensor in header.items():
            if 8 + length + tensor["data_offsets"][1] > size:
                raise ValueError(f"{name} is cut short")
            tensors[key] = {"shape": tensor["shape"], "dtype": tensor["dtype"]}
    return tensors


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
