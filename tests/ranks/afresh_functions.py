"""What a rank finds when it begins: everything that an import, a fork or a parent could have set before."""


def begins():
    """Facts by name. Those under "drawn" are to differ from rank to rank and from launch to launch."""
    import ctypes
    import locale
    import logging
    import multiprocessing
    import os
    import random
    import resource
    import signal
    import sys
    import tempfile
    import time
    import uuid
    import warnings

    import numpy
    import sympy.core.random
    import torch

    status = dict(line.split(":\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\t" in line)
    blas = {line.split()[-1] for line in open("/proc/self/maps") if "openblas" in line}
    limits = {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")}
    own = ("D2L_LAUNCH", "D2L_RUN_FOLDER", "PET_LOG_DIR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "PYTHONHASHSEED")
    return {
        "drawn": {
            "torch.initial_seed": torch.initial_seed(),
            "torch.rand": torch.rand(3).tolist(),
            "torch.randperm": torch.randperm(1000)[:6].tolist(),
            "nn.Linear": torch.nn.Linear(3, 3).weight.flatten().tolist(),
            "numpy.random": numpy.random.randint(2**31, size=3).tolist(),
            "numpy.default_rng": numpy.random.default_rng().random(),
            "random": random.random(),
            "sympy": sympy.core.random.rng.random(),
            "uuid": str(uuid.uuid4()),
            "temporary name": next(tempfile._get_candidate_names()),
            "multiprocessing key": bytes(multiprocessing.current_process().authkey).hex(),
        },
        "hash of str": hash("rank"),
        "torch threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "numpy threads": [ctypes.CDLL(file).scipy_openblas_get_num_threads64_() for file in blas],
        "sys.flags": str(sys.flags),
        "sys.path": sys.path,
        "sys.argv": sys.argv[1:],
        "recursion, switch": (sys.getrecursionlimit(), sys.getswitchinterval()),
        "streams": [(s.encoding, s.errors, s.line_buffering, s.isatty()) for s in (sys.stdout, sys.stderr)],
        "signal handlers": {s.name: str(signal.getsignal(s)) for s in signal.Signals},
        "signals": {name: status[name] for name in ("SigBlk", "SigIgn", "SigCgt")},
        "processors": status["Cpus_allowed_list"],
        "umask": status["Umask"],
        "niceness": os.nice(0),
        "leads its session and its process group": (os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()),
        "limits": limits,
        "locale, zone": (locale.setlocale(locale.LC_ALL), time.tzname),
        "warnings": sorted(map(str, warnings.filters)),
        "log level": (logging.getLogger().level, [str(handler) for handler in logging.getLogger().handlers]),
        "multiprocessing": (
            multiprocessing.current_process().name,
            multiprocessing.parent_process() is None,
            multiprocessing.get_start_method(allow_none=True),
            multiprocessing.current_process().daemon,
        ),
        "temporary folder": tempfile.gettempdir(),
        "working folder": os.getcwd(),
        "environment": {name: value for name, value in os.environ.items() if name not in own},
        "__main__": os.path.basename(sys.modules["__main__"].__file__),
        "torch": (
            torch.is_grad_enabled(),
            str(torch.get_default_dtype()),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            str(torch.distributed.get_debug_level()),
            torch.multiprocessing.get_sharing_strategy(),
        ),
        "bad fork": torch._C._cuda_isInBadFork(),
    }


def chooses_a_start_method():
    """A program may choose how its own processes start, once."""
    import multiprocessing

    multiprocessing.set_start_method("spawn")
    return multiprocessing.get_start_method()


def loads(workers):
    """A DataLoader's own processes: they draw by the loader's seed."""
    import torch

    return [x.item() for x in torch.utils.data.DataLoader(range(4), num_workers=workers)]
