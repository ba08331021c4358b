"""The doctor's visit: look, find what is wrong, try, and say what to mend in which order, or the command to begin with."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from typing import Any

from src.engine.doctor.look import Facts, look, try_strategy
from src.engine.machine.secrets import hide_in

PYTHONS = ((3, 11), (3, 13))
TORCHES = ((2, 11), (2, 14))
# Builds that every one of TORCHES has, by CUDA's major version. A driver for 12.x runs all builds for 12.x, one for 13.x those
# for 13.x too (docs.nvidia.com/deploy/cuda-compatibility, minor version compatibility: from driver 525, and from 580).
WHEELS = {12: "cu126", 13: "cu130"}
INSTALL = "pip install -r requirements.txt"
REINSTALL = "pip install --force-reinstall -r requirements.txt"
GIB = 2**30


@dataclass
class Finding:
    """`remedy` says what to do; `stops` that training cannot start before it is done."""

    name: str
    said: str
    remedy: str | None = None
    stops: bool = False


def examine(as_json: bool) -> int:
    """Print what was found and what to do. Returns 1 when training could not start, else 0."""
    _say("asking torch and timm …")
    facts = look()
    findings = findings_of(facts)
    for strategy, devices in strategies_to_try(facts, findings).items():
        _say(f"trying a step with parallel={strategy} on {devices} device(s) …")
        facts.tries[strategy] = try_strategy(strategy, devices)
    findings += findings_of_tries(facts)
    print(json.dumps(hide_in(as_dict(facts, findings)), indent=2) if as_json else as_text(facts, findings))
    return 1 if any(finding.stops for finding in findings) else 0


def as_dict(facts: Facts, findings: list[Finding]) -> dict[str, Any]:
    can_train = not any(finding.stops for finding in findings)
    return {
        "can_train": can_train,
        "command": advice(facts) if can_train else None,
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "facts": dataclasses.asdict(facts),
    }


def as_text(facts: Facts, findings: list[Finding]) -> str:
    """A line per finding; below them either the command to begin with, or what to mend, in order."""
    width = max(len(finding.name) for finding in findings)
    mark = {True: "✗", False: "!", None: "✓"}
    lines = [f"{mark[f.stops if f.remedy else None]} {f.name:<{width}}  {f.said}" for f in findings]
    mends = [f for f in findings if f.remedy]
    stops = [f for f in mends if f.stops]
    if stops:
        return "\n".join([*lines, "", "Training cannot start. Mend, in this order:", *_numbered(stops)])
    worth = ["", "Worth mending:", *_numbered(mends)] if mends else []
    return "\n".join([*lines, *worth, "", f"Begin with:  {advice(facts)}"])


def _numbered(findings: list[Finding]) -> list[str]:
    return [f"  {number}. {finding.name}: {finding.remedy}" for number, finding in enumerate(findings, 1)]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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
    for name, tried in facts.tries.items():
        if "error" in tried:
            remedy = f"python train.py debug=fast model=tiny data=synthetic parallel={name}   # shows all of it"
            found.append(Finding(name, f"does not run: {tried['error']}", remedy, stops=name == "single"))
        else:
            found.append(
                Finding(name, f"runs on {tried['devices']} device(s), {tried['seconds']} s from command to end")
            )
    return found


def advice(facts: Facts) -> str:
    """The command to begin with, among those that ran."""
    on_all = facts.visible > 1 and "error" not in facts.tries.get("ddp", {"error": "not tried"})
    strategy, devices = ("ddp", facts.visible) if on_all else ("single", 1)
    short_of_shm = facts.shm is not None and facts.shm < GIB
    workers = 0 if short_of_shm else max(1, facts.cores // devices)  # as data.workers=auto does
    return f"python train.py parallel={strategy} parallel.devices={devices} data.workers={workers}"


def _python(facts: Facts) -> Finding:
    said = f"{facts.python} on {facts.system}" + (", in a container" if facts.in_container else "")
    if PYTHONS[0] <= _numbers(facts.python) <= PYTHONS[1]:
        return Finding("Python", said)
    return Finding(
        "Python", said, f"use Python {_span(PYTHONS)}: make PYTHON=python3.12 VENV=.venv312 train", stops=True
    )


def _libraries(facts: Facts) -> Finding:
    missing = sorted(name for name, (here, _) in facts.libraries.items() if here is None)
    if missing:
        return Finding("libraries", f"missing: {', '.join(missing)}", INSTALL, stops=True)
    other = ", ".join(f"{n} {here} (pinned {pin})" for n, (here, pin) in facts.libraries.items() if _plain(here) != pin)
    torch = facts.libraries.get("torch", (None, ""))[0]
    fits = torch is None or TORCHES[0] <= _numbers(torch) <= TORCHES[1]
    remedy = None if fits else f"this project supports torch {_span(TORCHES)}: {INSTALL}"
    return Finding("libraries", f"not as pinned: {other}" if other else "as pinned", remedy)


def _torch(facts: Facts) -> Finding:
    if "error" in facts.torch:
        return Finding("torch", f"cannot be imported: {facts.torch['error']}", REINSTALL, stops=True)
    if "error" in facts.timm:
        remedy = f"torch and torchvision are of different builds: {REINSTALL}"
        return Finding("torch", f"timm cannot be imported: {facts.timm['error']}", remedy, stops=True)
    built = f"built for CUDA {facts.torch['cuda']}" if facts.torch["cuda"] else "built for CPU"
    backends = ", ".join(facts.torch["backends"]) or "none"
    return Finding("torch", f"{facts.torch['version']}, {built}, backends: {backends}")


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
    workers = max(1, facts.cores // max(1, facts.visible))
    found = [Finding("cores", f"{facts.cores}; {workers} loader process(es) per rank for data in files")]
    tight = None if facts.memory > 2 * GIB else "close other programs, or use a smaller batch"
    found.append(Finding("memory", f"{facts.memory / GIB:.1f} GiB free", tight))
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


def _plain(version: str | None) -> str:
    return str(version).partition("+")[0]


def _span(versions: tuple[tuple[int, int], tuple[int, int]]) -> str:
    return " to ".join(f"{major}.{minor}" for major, minor in versions)
