"""The device under veRL: picks CPU or CUDA, starts torch.distributed, and gives veRL a CPU platform where
needed.

veRL 0.9 ships platforms for accelerators only. On a machine without one, ``PlatformCPU`` is registered
through veRL's public registry and three functions that assume an accelerator are replaced. With CUDA nothing
is replaced.

``start`` must run before any other module of veRL is imported: veRL resolves its platform once, at import.
"""

import ctypes
import os
import signal
import socket
import types
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Longest silence between ranks: a checkpoint of a large model, or a server that is away.
COLLECTIVE_TIMEOUT = timedelta(hours=2)


def start(choice: str) -> str:
    """Prepare this process for veRL on ``choice`` (cpu, cuda or auto); returns cpu or cuda."""
    if choice not in ("cpu", "cuda", "auto"):
        raise ValueError(f"unknown device {choice!r}: use cpu, cuda or auto")
    device = choice if choice != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    os.environ.setdefault("VERL_LOGGING_LEVEL", "WARN")
    os.environ.setdefault("TQDM_DISABLE", "1")
    _single_process_defaults()
    _die_with_torchrun()
    if device == "cpu":
        os.environ["VERL_PLATFORM"] = "cpu"
        # veRL registers its FSDP engine under this name only.
        os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
        _limit_threads()
        _init_gloo()
        _register_cpu()
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=COLLECTIVE_TIMEOUT)
    return device


def _single_process_defaults() -> None:
    """Without torchrun this is a job of one process."""
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


def _die_with_torchrun() -> None:
    """torchrun starts its workers in sessions of their own, so killing it would leave them running."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _limit_threads() -> None:
    """Share half of the cores between this machine's ranks, unless OMP_NUM_THREADS says otherwise.

    The other half is the engine's and the attempts': OpenMP's threads wait for each other by spinning, and on
    a machine that is full they are slower than one.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // 2 // int(os.environ["LOCAL_WORLD_SIZE"])))


def _init_gloo() -> None:
    # veRL would ask for "cpu:gloo,cpu:gloo", which torch rejects as a duplicate: initialise first.
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo", timeout=COLLECTIVE_TIMEOUT)


def _register_cpu() -> None:
    """Register the CPU platform with veRL and replace what assumes an accelerator."""
    from verl.plugin.platform import PlatformBase, PlatformRegistry

    class PlatformCPU(PlatformBase):  # type: ignore[misc]
        device_name = "cpu"
        vendor_name = "cpu"
        device_module = _device_module()

        def is_available(self) -> bool:
            return True

        def is_platform_available(self, use_smi_check: bool = False) -> bool:
            return True

        def current_device(self) -> str:
            return "cpu"  # veRL uses it as a torch device

        def device_count(self) -> int:
            return 1

        def set_device(self, device_index: int) -> None:
            pass

        def synchronize(self, device_index: int | None = None) -> None:
            pass

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        def manual_seed_all(self, seed: int) -> None:
            torch.manual_seed(seed)

        def set_allocator_settings(self, settings: str) -> None:
            pass

        def empty_cache(self) -> None:
            pass

        def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
            return (None, None)

        def communication_backend_name(self) -> str:
            return "gloo"

        def visible_devices_envvar(self) -> str:
            return "CUDA_VISIBLE_DEVICES"

        @contextmanager
        def nvtx_range(self, msg: str) -> Iterator[None]:
            yield

        def profiler_start(self) -> None:
            pass

        def profiler_stop(self) -> None:
            pass

        def ray_resource_name(self) -> str:
            return "CPU"

        def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
            return {"num_cpus": num_gpus}

        def ray_noset_envvars(self) -> list[str]:
            return []

        def is_ipc_supported(self) -> bool:
            return False

        def cudart(self) -> None:
            return None

    PlatformRegistry.register(platform="cpu")(PlatformCPU)

    import verl.utils.distributed as distributed
    import verl.utils.fsdp_utils as fsdp_utils

    def already_initialised(*_args: Any, **_kwargs: Any) -> tuple[int, int, int]:
        return int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    distributed.initialize_global_process_group = already_initialised
    distributed.initialize_global_process_group_ray = already_initialised
    # The reference engine asks for pinned host memory, which needs an accelerator.
    real = fsdp_utils.CPUOffloadPolicy
    fsdp_utils.CPUOffloadPolicy = lambda pin_memory=True: real(pin_memory=False)


def _device_module() -> types.ModuleType:
    """``torch.cpu`` with the memory and RNG calls that veRL makes on ``torch.cuda``."""
    module = types.ModuleType("forge_torch_cpu")
    for name in dir(torch.cpu):
        if not name.startswith("__"):
            setattr(module, name, getattr(torch.cpu, name))

    def nothing(*_args: Any, **_kwargs: Any) -> None:
        return None

    def zero(*_args: Any, **_kwargs: Any) -> int:
        return 0

    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, zero)
    for name in (
        "empty_cache",
        "ipc_collect",
        "reset_peak_memory_stats",
        "reset_accumulated_memory_stats",
        "manual_seed",
        "manual_seed_all",
        "set_device",
        "set_per_process_memory_fraction",
    ):
        setattr(module, name, nothing)
    module.mem_get_info = lambda *_args: (0, 0)  # type: ignore[attr-defined]
    module.get_device_name = lambda *_args: "CPU"  # type: ignore[attr-defined]
    module.get_rng_state = lambda *_args: torch.get_rng_state()  # type: ignore[attr-defined]
    module.set_rng_state = lambda state, *_args: torch.set_rng_state(state)  # type: ignore[attr-defined]
    return module
