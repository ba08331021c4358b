"""A model of a training step on n devices, each with b images, that all-reduce S bytes of gradients. Pure numbers.

    compute   C = c0 + c1 b
    ring      A = 2 (n - 1) alpha + 2 (n - 1) / n  S / beta      latency alpha, bandwidth beta; 0 for n = 1
    step      t = max(C + max(0, A - h C), b / data rate)        h C of the ring is hidden behind the backward pass

The ring's cost: Thakur, Rabenseifner, Gropp 2005 (doi:10.1177/1094342005051521) and Patarasuk, Yuan 2009
(doi:10.1016/j.jpdc.2008.09.002), bandwidth-optimal. The overlap: Li et al. 2020, arXiv:2006.15704; h is at most 2/3, the
backward pass's share of forward and backward. A loader that cannot keep up bounds a device at its data rate.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """One run. Seconds and images are of a step; `ring` is the all-reduce's whole time, hidden or not, where recorded."""

    devices: int
    images: int  # global batch
    seconds: float
    gradient_bytes: int
    ring: float | None = None
    waits_for_data: float = 0.0  # share of the step

    @property
    def per_device(self) -> float:
        return self.images / self.devices


@dataclass(frozen=True)
class Link:
    """What joins devices: seconds per message, bytes per second."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Model:
    """The fitted step. `across`: what joins nodes, for what-if questions; then `link` joins the devices of one node."""

    fixed: float  # c0, seconds
    per_image: float  # c1, seconds
    hidden: float  # h
    link: Link
    gradient_bytes: int
    data_rate: float | None = None  # images per second and device; None: the loader was never too slow
    across: Link | None = None
    devices_per_node: int = 1

    def compute(self, per_device: float) -> float:
        return self.fixed + self.per_image * per_device

    def ring(self, devices: int) -> float:
        link = self.link if self.across is None or devices <= self.devices_per_node else self.across
        share = 2 * (devices - 1) / devices
        return 2 * (devices - 1) * link.latency + share * self.gradient_bytes / link.bandwidth

    def seconds(self, devices: int, per_device: float) -> float:
        compute = self.compute(per_device)
        step = compute + max(0.0, self.ring(devices) - self.hidden * compute)
        return step if self.data_rate is None else max(step, per_device / self.data_rate)

    def speed(self, devices: int, per_device: float) -> float:
        """Images per second of all devices."""
        return devices * per_device / self.seconds(devices, per_device)
