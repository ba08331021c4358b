"""What the facts mean: what prevents training, what to mend in which order, and the command to begin with."""

from __future__ import annotations

from dataclasses import dataclass

from src.engine.doctor.look import Facts

PYTHONS = ((3, 11), (3, 13))
TORCHES = ((2, 11), (2, 14))
# Builds that every one of TORCHES has, by CUDA's major version. A driver for 12.x runs all builds for 12.x, one for 13.x those
# for 13.x too (docs.nvidia.com/deploy/cuda-compatibility, minor version compatibility: from driver 525, and from 580).
WHEELS = {12: "cu126", 13: "cu130"}
GIB = 2**30


@dataclass
class Finding:
    """`remedy` says what to do; `stops` that training cannot start before it is done."""

    name: str
    said: str
    remedy: str | None = None
    stops: bool = False


def findings_of(facts: Facts) -> list[Finding]:
    """In the order in which things are to be mended."""
    return [_python(facts), _libraries(facts), _torch(facts), *_devices(facts), *_machine(facts), _rendezvous(facts)]


def strategies_to_try(facts: Facts, findings: list[Finding]) -> dict[str, int]:
    """Strategy -> devices, for those that could run here; none while something prevents training."""
    if any(finding.stops for finding in findings):
        return {}
    gpus = facts.visible
    several = gpus if gpus > 1 else min(2, facts.cores) if gpus == 0 else 0
    return {"single": 1} | ({"dp": several, "ddp": several} if several > 1 else {})


def findings_of_tries(facts: Facts) -> list[Finding]:
    found = []
    for strategy, tried in facts.tries.items():
        if "error" in tried:
            remedy = f"python train.py debug=fast model=tiny data=synthetic parallel={strategy}   # shows all of it"
            found.append(Finding(strategy, f"does not run: {tried['error']}", remedy, stops=strategy == "single"))
        else:
            found.append(
                Finding(strategy, f"runs on {tried['devices']} device(s), {tried['seconds']} s from command to end")
            )
    return found


def advice(facts: Facts) -> str:
    """The command to begin with, among those that ran."""
    ran = {strategy for strategy, tried in facts.tries.items() if "error" not in tried}
    gpus = facts.visible
    strategy = "ddp" if gpus > 1 and "ddp" in ran else "single"
    devices = gpus if strategy == "ddp" else 1
    workers = workers_per_rank(facts.cores, devices)
    short_of_shm = facts.shm is not None and facts.shm < GIB
    return (
        f"python train.py parallel={strategy} parallel.devices={devices} data.workers={0 if short_of_shm else workers}"
    )


def workers_per_rank(cores: int, ranks: int) -> int:
    """What data.workers=auto chooses for data in files."""
    return max(1, cores // ranks)


def _python(facts: Facts) -> Finding:
    low, high = (".".join(map(str, version)) for version in PYTHONS)
    said = f"{facts.python} on {facts.system}" + (", in a container" if facts.in_container else "")
    fits = PYTHONS[0] <= _numbers(facts.python) <= PYTHONS[1]
    return Finding(
        "Python",
        said,
        None if fits else f"use Python {low} to {high}: make PYTHON=python3.12 VENV=.venv312 train",
        not fits,
    )


def _libraries(facts: Facts) -> Finding:
    missing = sorted(name for name, (here, _) in facts.libraries.items() if here is None)
    if missing:
        return Finding("libraries", f"missing: {', '.join(missing)}", "pip install -r requirements.txt", stops=True)
    other = [f"{n} {here} (pinned {pin})" for n, (here, pin) in facts.libraries.items() if _plain(str(here)) != pin]
    torch = _numbers(str(facts.libraries.get("torch", ("0.0", ""))[0]))
    if torch and not TORCHES[0] <= torch <= TORCHES[1]:
        low, high = (".".join(map(str, version)) for version in TORCHES)
        return Finding(
            "libraries",
            ", ".join(other),
            f"this project supports torch {low} to {high}: pip install -r requirements.txt",
        )
    return Finding("libraries", "as pinned" if not other else f"not as pinned: {', '.join(other)}")


def _torch(facts: Facts) -> Finding:
    if "error" in facts.torch:
        return Finding(
            "torch",
            f"cannot be imported: {facts.torch['error']}",
            "pip install --force-reinstall -r requirements.txt",
            stops=True,
        )
    if "error" in facts.timm:
        remedy = "torch and torchvision are of different builds: pip install --force-reinstall -r requirements.txt"
        return Finding("torch", f"timm cannot be imported: {facts.timm['error']}", remedy, stops=True)
    built = f"built for CUDA {facts.torch['cuda']}" if facts.torch["cuda"] else "built for CPU"
    return Finding(
        "torch", f"{facts.torch['version']}, {built}, backends: {', '.join(facts.torch['backends']) or 'none'}"
    )


def _devices(facts: Facts) -> list[Finding]:
    if not facts.devices:
        return [Finding("GPUs", "an Apple GPU" if facts.torch.get("mps") else "none; CPU devices will be used")]
    names = ", ".join(f"{d['name']} ({d['memory'] / GIB:.0f} GiB)" if d["memory"] else d["name"] for d in facts.devices)
    said = f"{len(facts.devices)}: {names}; driver {facts.driver}, which runs CUDA up to {facts.driver_cuda}"
    seen = len(facts.torch.get("devices", []))
    if seen == 0 and "error" not in facts.torch:
        return [Finding("GPUs", f"{said}; torch sees none of them", _remedy_for_blind_torch(facts))]
    found = [Finding("GPUs", said + (f"; {seen} visible" if seen != len(facts.devices) else ""))]
    if facts.torch.get("pairs"):
        peers, pairs = facts.torch["peers"], facts.torch["pairs"]
        how = "all" if peers == pairs else f"{peers} of {pairs} ordered pairs"
        remedy = None if peers else "gradients go through the host's memory; with many GPUs expect less scaling"
        found.append(Finding("peer access", f"{how}; nvidia-smi topo -m shows the links", remedy))
    return found


def _remedy_for_blind_torch(facts: Facts) -> str:
    """A driver too old for torch's CUDA, a torch without CUDA, or devices that are hidden or not handed in."""
    if facts.visible == 0 and facts.torch.get("cuda"):
        return "CUDA_VISIBLE_DEVICES hides them: unset it"
    runs = _numbers(facts.driver_cuda or "0.0")[0]
    needs = _numbers(facts.torch["cuda"])[0] if facts.torch.get("cuda") else None
    if needs is None or runs < needs:
        build = next((WHEELS[major] for major in sorted(WHEELS, reverse=True) if major <= runs), None)
        if build is None:
            return f"update the driver: it runs CUDA up to {facts.driver_cuda}, older than any supported torch needs"
        low, (major, minor) = ".".join(map(str, TORCHES[0])), TORCHES[1]
        # pip takes another build of the version that is here for the same, so that one goes first.
        line = (
            f"pip uninstall -y torch torchvision && pip install 'torch>={low},<{major}.{minor + 1}' torchvision "
            f"--index-url https://download.pytorch.org/whl/{build}"
        )
        return f"{line}   # or update the driver, as Blackwell GPUs need it" if needs else line
    return "in a container start it with --gpus all; else look at nvidia-smi and reboot after a driver update"


def _machine(facts: Facts) -> list[Finding]:
    workers = workers_per_rank(facts.cores, max(1, facts.visible))
    found = [
        Finding("cores", f"{facts.cores}; {workers} loader process(es) per rank for data in files"),
        Finding(
            "memory",
            f"{facts.memory / GIB:.1f} GiB free",
            None if facts.memory > 2 * GIB else "close other programs, or use a smaller batch",
        ),
    ]
    if facts.shm is not None:
        larger = "loader workers hand batches over there: docker run --shm-size 8g, or data.workers=0"
        found.append(Finding("/dev/shm", f"{facts.shm / GIB:.1f} GiB free", None if facts.shm >= GIB else larger))
    if facts.open_files is not None:
        few = facts.open_files < 1024
        found.append(Finding("open files", f"at most {facts.open_files}", "ulimit -n 4096" if few else None))
    if not facts.can_write:
        elsewhere = f"make {facts.outputs} writable, or give another place: paths.output_dir=…"
        found.append(Finding("disk", f"{facts.outputs} cannot be written", elsewhere, stops=True))
    else:
        room = "make room, or give another place: paths.output_dir=…" if facts.disk < 2 * GIB else None
        found.append(Finding("disk", f"{facts.disk / GIB:.0f} GiB free in {facts.outputs}", room))
    if not facts.compiler:
        found.append(Finding("compiler", "none; only model.compile=true needs one (apt install g++)"))
    return found


def _rendezvous(facts: Facts) -> Finding:
    if "error" not in facts.rendezvous:
        return Finding("loopback", "ranks can meet on 127.0.0.1")
    remedy = "ddp needs it: look at firewall and proxy rules for 127.0.0.1, and at `ip addr show lo`"
    return Finding("loopback", f"ranks cannot meet: {facts.rendezvous['error']}", remedy)


def _numbers(version: str) -> tuple[int, int]:
    """`2.14.1+cu130` -> (2, 14)."""
    major, minor, *_ = f"{_plain(version)}.0".split(".")
    return int(major), int("".join(filter(str.isdigit, minor)) or 0)


def _plain(version: str) -> str:
    return version.partition("+")[0]
